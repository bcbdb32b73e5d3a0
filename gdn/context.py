"""What a layer needs to know about the tokens it is given, computed once per forward.

There are two ways to run a layer: over a sequence (training, prefill) and over a tree of candidates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.config import TargetConfig
from gdn.layers import rope_angles
from gdn.ops.tree import Tree


class SequenceContext(NamedTuple):
    """T consecutive tokens a row, right-padded."""

    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    segment_ids: Int[Array, "B T"] | None  # documents of a packed row; training only
    lengths: Int[Array, " B"] | None  # real tokens of each row; None: all
    start: Int[Array, " B"] | None  # tokens committed before; None without a cache


class TreeContext(NamedTuple):
    """M candidate nodes a row, over `start` committed tokens."""

    cos: Float[Array, "B M R"]
    sin: Float[Array, "B M R"]
    tree: Tree
    start: Int[Array, " B"]


def training_context(
    cfg: TargetConfig, shape: tuple[int, int], segment_ids: Int[Array, "B T"] | None
) -> SequenceContext:
    """Positions count from the start of each document."""
    positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segment_ids is not None:
        opens = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        first = jnp.where(opens, positions, 0)
        positions = positions - jax.lax.cummax(first, axis=1)
    return SequenceContext(*_angles(cfg, positions), segment_ids, None, None)


def prefill_context(
    cfg: TargetConfig, length: int, lengths: Int[Array, " B"], start: Int[Array, " B"]
) -> SequenceContext:
    """Continue each row at its committed length."""
    positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)
    return SequenceContext(*_angles(cfg, positions), None, lengths, start)


def tree_context(cfg: TargetConfig, tree: Tree, start: Int[Array, " B"]) -> TreeContext:
    """A node's position is the number of committed tokens plus its depth."""
    return TreeContext(*_angles(cfg, start[:, None] + tree.depth), tree, start)


def _angles(cfg: TargetConfig, positions):
    return rope_angles(positions, cfg.rotary_dim, cfg.rope_theta)
