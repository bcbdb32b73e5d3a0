"""One round of speculative decoding, and the device loop of many.

propose -> verify -> accept -> commit -> absorb. Plain decoding is the same round with a tree of one
node. Between rounds every row holds: the cache of all tokens but the last, and the last, the root.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eagle3.decoding.accept import Accepted, Limits, accept
from eagle3.decoding.drafter import Drafter
from eagle3.decoding.sampling import Sampling
from gdn import Cache, HybridLM, commit, tree_from_parents


class Requests(NamedTuple):
    """What the rows of a batch ask for."""

    sampling: Sampling
    limits: Limits


class DecodeState(NamedTuple):
    """A batch between two rounds."""

    cache: Cache  # of the target: every committed token but the root
    draft: Any  # the drafter's own
    root: Int[Array, " B"]  # last committed token
    emitted: Int[Array, " B"]  # tokens of the answer so far
    is_running: Bool[Array, " B"]
    counts: Int[Array, "B V"] | None  # of each token in the answer, if a penalty wants them


class Emitted(NamedTuple):
    """What some rounds brought: the first `count` of N tokens a row."""

    tokens: Int[Array, "B N"]
    is_drafted: Bool[Array, "B N"]
    logprobs: Float[Array, "B N"]
    count: Int[Array, " B"]


def decode_round(
    target: HybridLM, drafter: Drafter, state: DecodeState, requests: Requests
) -> tuple[DecodeState, Accepted]:
    """Run one round; a row that has ended keeps everything as it is."""
    with jax.named_scope("draft"):
        proposal = drafter.propose(state.draft, state.root)
    with jax.named_scope("verify"):
        tree = tree_from_parents(proposal.parents)
        scored = target.verify(proposal.tokens, tree, state.cache, drafter.aux_layers)
    with jax.named_scope("accept"):
        accepted = accept(
            scored.logits, proposal, drafter.depth, requests.sampling, requests.limits,
            state.is_running, state.emitted, state.counts,
        )  # fmt: skip
    with jax.named_scope("commit"):
        cache = commit(state.cache, scored.updates, accepted.path)
    with jax.named_scope("absorb"):
        nodes = jnp.maximum(accepted.path, 0)[:, :, None, None]
        aux_hidden = jnp.take_along_axis(scored.aux_hidden, nodes, axis=1)
        draft = drafter.absorb(state.draft, aux_hidden, accepted.tokens, accepted.count)
    last = jnp.maximum(accepted.count - 1, 0)[:, None]
    newest = jnp.take_along_axis(accepted.tokens, last, axis=1)[:, 0]
    root = jnp.where(accepted.count > 0, newest, state.root)
    emitted = state.emitted + accepted.count
    new = DecodeState(cache, draft, root, emitted, accepted.is_running, accepted.counts)
    return new, accepted


def decode_rounds(
    target: HybridLM,
    drafter: Drafter,
    state: DecodeState,
    requests: Requests,
    rounds: Int[Array, ""] | int,
    most_rounds: int,
) -> tuple[DecodeState, Emitted]:
    """Run `rounds` rounds on the device, fewer if all rows end.

    The cache must have room for rounds * (drafter.depth + 1) more tokens of every running row.

    Args:
      most_rounds: no fewer than `rounds`; decides the size of the result, N, at compile time.
    """
    batch, most = state.root.shape[0], drafter.depth + 1
    shape, rows = (batch, most_rounds * most), jnp.arange(batch)[:, None]

    def more(carry):
        index, state, _ = carry
        return (index < rounds) & jnp.any(state.is_running)

    def step(carry):
        index, state, out = carry
        state, new = decode_round(target, drafter, state, requests)
        place = jnp.arange(most)
        real = place < new.count[:, None]
        at = jnp.where(real, out.count[:, None] + place, shape[1])  # beyond the end: dropped

        def put(buffer, values):
            return buffer.at[rows, at].set(values, mode="drop")

        out = Emitted(
            put(out.tokens, new.tokens),
            put(out.is_drafted, new.is_drafted),
            put(out.logprobs, new.logprobs),
            out.count + new.count,
        )
        return index + 1, state, out

    empty = Emitted(
        jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32),
        jnp.zeros(batch, jnp.int32),
    )  # fmt: skip
    _, state, out = jax.lax.while_loop(more, step, (jnp.int32(0), state, empty))
    return state, out


def prefill(
    target: HybridLM,
    drafter: Drafter,
    cache: Cache,
    draft: Any,
    tokens: Int[Array, "B T"],
    following: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[Cache, Any]:
    """Take in the first `count` of T prompt tokens a row; `following` is the token after each."""
    out = target.prefill(tokens, count, cache, drafter.aux_layers)
    return out.cache, drafter.absorb(draft, out.aux_hidden, following, count)


# The compiled steps. Modules come as (graph, pure dict): cheap to pass at every call.


@partial(jax.jit, static_argnames=("graph", "most_rounds"), donate_argnames=("state",))
def run_rounds(graph, params, state: DecodeState, requests: Requests, rounds, most_rounds: int):
    """Run `decode_rounds`; the state is updated in place."""
    target, drafter = nnx.merge(graph, params)
    return decode_rounds(target, drafter, state, requests, rounds, most_rounds)


@partial(jax.jit, static_argnames=("graph",), donate_argnames=("cache", "draft"))
def run_prefill(graph, params, cache, draft, tokens, following, count):
    """Run `prefill`; cache and drafter state are updated in place."""
    target, drafter = nnx.merge(graph, params)
    return prefill(target, drafter, cache, draft, tokens, following, count)
