"""What the target says about a batch: the streams the draft is fed, and what it is taught.

The target runs without gradient, in a call of its own, so that what it says may as well come from
a file (`feature_cache`). Its logits over the whole vocabulary are needed for one number a position,
the most likely token, and are made a few positions at a time; the distribution that the draft
learns is made from the head's rows of the draft vocabulary alone.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3.decoding.sampling import most_likely
from eagle3.training.data.batches import Batch
from eagle3.training.ttt import Teaching
from gdn import HybridLM
from gdn.layers import linear
from gdn.sharding import on_own_rows


class Features(NamedTuple):
    """What a draft needs of the target at each position; the axes before T are the batch's."""

    aux_hidden: Float[Array, "*batch T A D"]  # the tapped residual streams, low to high
    hidden: Float[Array, "*batch T D"]  # after the final norm: the head's input
    best: Int[Array, "*batch T"]  # the most likely next token, of the whole vocabulary


class FeaturedBatch(NamedTuple):
    """A batch with what the target says about it."""

    batch: Batch
    features: Features


@partial(jax.jit, static_argnames=("graph", "aux_layers"))
def target_features(graph: Any, params: Any, aux_layers: tuple[int, ...], batch: Batch) -> Features:
    """Run a target over pieces of a batch, [A, B, T], one by one.

    Args:
      graph: of the HybridLM; `params` are its weights.
      aux_layers: k taps the residual stream after k layers.
    """

    def run(piece: Batch) -> Features:
        # Bound to its piece, or XLA gathers sharded weights before the loop, all layers at once.
        weights, piece = jax.lax.optimization_barrier((params, piece))
        target = nnx.merge(graph, weights)
        out = target(piece.tokens, piece.segment_ids, aux_layers)
        return Features(out.aux_hidden, out.hidden, most_likely_next(target, out.hidden))

    if batch.tokens.shape[0] == 1:  # a loop of one is not unrolled by the compiler
        return jax.tree.map(lambda x: x[None], run(jax.tree.map(lambda x: x[0], batch)))
    return jax.lax.map(run, batch)


def teach(featured: FeaturedBatch, head_rows: Float[Array, "Vd D"]) -> Teaching:
    """Make what the draft is taught on a batch [B, T].

    Args:
      head_rows: rows of the target's head, those of the draft vocabulary.
    """
    (tokens, loss_mask, segment_ids), (aux_hidden, hidden, best) = featured
    logits = linear(hidden, head_rows, jnp.float32)
    return Teaching(tokens, loss_mask, segment_ids, aux_hidden, logits, best)


def head_rows(target: HybridLM, target_ids: Int[Array, " Vd"]) -> Float[Array, "Vd D"]:
    """Return the rows of the target's head that score the draft vocabulary."""
    head = target.embed_tokens if target.cfg.tie_word_embeddings else target.lm_head
    return head[...][target_ids]


def most_likely_next(
    target: HybridLM, hidden: Float[Array, "B T D"], rows: int = 256
) -> Int[Array, "B T"]:
    """Return the target's most likely token after each position, `rows` positions at a time."""
    head = target.embed_tokens if target.cfg.tie_word_embeddings else target.lm_head

    def of_own(head, hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        count = flat.shape[0]
        size = min(rows, count)
        blocks = jnp.pad(flat, ((0, -count % size), (0, 0))).reshape(-1, size, flat.shape[-1])
        best = jax.lax.map(lambda x: most_likely(linear(x, head, jnp.float32)), blocks)
        return (), best.reshape(-1)[:count].reshape(hidden.shape[:2])

    return on_own_rows(of_own, head[...], hidden)[1]
