"""Which of the verified candidates become text: exact for greedy decoding and for sampling.

The token at every place is drawn as plain decoding draws it, from prompt, text so far, parameters,
seed and place, and then looked for among the node's children. What was proposed has no say in it:
the text is that of plain decoding token for token, not just in distribution, also where the draft
looked at the noise of the draw (`Foresight` in `sampling.py`). Greedy decoding is the same with
the most likely token.

For children that do not depend on the draw this is the sequential rule of SpecInfer and EAGLE
(arXiv 2401.15077) with the draft's q a point mass: accept c_1 with probability p(c_1), else take it
out of p, renormalise and go on; what is left of p gives the token if none is accepted.

Nodes are visited one by one down the path, so penalties count the tokens of that very path, and
only visited nodes are sampled from.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3.decoding.sampling import Sampling, choose, peak
from eagle3.decoding.tree import Proposal


class Limits(NamedTuple):
    """What ends a row, beside its tokens being all that was asked for."""

    stop_ids: Int[Array, "B E"]  # padded with -1; the stop token itself is emitted
    max_new_tokens: Int[Array, " B"]


class Accepted(NamedTuple):
    """Up to P tokens of each row, `count` of them real, each after the node it was chosen at.

    The last one is the new root: all before it are in `path`, so committing the path leaves the
    cache as plain decoding would. A row that ends inside a path ends there.
    """

    path: Int[Array, "B P"]  # nodes, -1 at the end
    tokens: Int[Array, "B P"]
    is_drafted: Bool[Array, "B P"]  # the token was among the children, not a correction or a bonus
    logprobs: Float[Array, "B P"]  # natural log of the model's own probability, nothing applied
    count: Int[Array, " B"]
    is_running: Bool[Array, " B"]
    counts: Int[Array, "B V"] | None  # of each token in the answer, with these


def accept(
    logits: Float[Array, "B M V"],
    proposal: Proposal,
    depth: int,
    sampling: Sampling,
    limits: Limits,
    is_running: Bool[Array, " B"],
    emitted: Int[Array, " B"],
    counts: Int[Array, "B V"] | None,
    kernels: bool = False,
) -> Accepted:
    """Walk down each tree as far as the target's own choices go.

    Args:
      logits: of the target after each node.
      depth: drafted tokens on the longest path; P = depth + 1.
      emitted: tokens in each answer so far.
      counts: how often each token is in it; needed if `sampling.counts_tokens`.
      kernels: as in `peak`.
    """
    batch, rows = logits.shape[0], jnp.arange(logits.shape[0])
    shape = (batch, depth + 1)

    def more(walk: _Walk):
        return (walk.step <= depth) & jnp.any(walk.goes_on)

    def visit(walk: _Walk):
        step, going = walk.step, walk.goes_on
        here = logits[rows, walk.node]
        token = choose(here, sampling, walk.counts, emitted + step, kernels)
        chosen = jnp.take_along_axis(here, token[:, None], axis=1)[:, 0]
        logprob = chosen - peak(here, kernels).log_total
        is_child = proposal.parents == walk.node[:, None]
        is_child &= proposal.tokens == token[:, None]
        matched = jnp.any(is_child, axis=1)
        ends = jnp.any(limits.stop_ids == token[:, None], axis=1)
        ends |= emitted + step + 1 >= limits.max_new_tokens

        def put(buffer, values, otherwise):
            return buffer.at[:, step].set(jnp.where(going, values, otherwise))

        counts = walk.counts
        if counts is not None:
            counts = counts.at[rows, token].add(going.astype(jnp.int32))
        return _Walk(
            step + 1,
            jnp.argmax(is_child, axis=1).astype(jnp.int32),
            going & matched & ~ends,
            walk.is_running & ~(going & ends),
            put(walk.path, walk.node, -1),
            put(walk.tokens, token, 0),
            put(walk.is_drafted, matched, False),
            put(walk.logprobs, logprob, 0.0),
            counts,
        )

    start = _Walk(
        jnp.int32(0), jnp.zeros(batch, jnp.int32), is_running, is_running,
        jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool),
        jnp.zeros(shape, jnp.float32), counts,
    )  # fmt: skip
    end = jax.lax.while_loop(more, visit, start)
    count = jnp.sum(end.path >= 0, axis=1, dtype=jnp.int32)
    return Accepted(
        end.path, end.tokens, end.is_drafted, end.logprobs, count, end.is_running, end.counts
    )


class _Walk(NamedTuple):
    """Where the rows are on their way down, and what they have found."""

    step: jax.Array
    node: jax.Array  # to be visited next
    goes_on: jax.Array
    is_running: jax.Array
    path: jax.Array
    tokens: jax.Array
    is_drafted: jax.Array
    logprobs: jax.Array
    counts: jax.Array | None
