"""What a layer needs to know about the tokens it is given, computed once per forward.

There are three ways to run a layer: over packed documents without a cache (training), over prompts
that continue a cache (prefill), and over a tree of candidates (verify).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.config import TargetConfig
from gdn.layers import rope_angles, rope_frequencies
from gdn.ops.reference import document_index, segment_starts
from gdn.ops.tree import Tree


class PackedContext(NamedTuple):
    """T consecutive tokens a row; `segment_ids` number its documents, None: one."""

    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    segment_ids: Int[Array, "B T"] | None


class PrefillContext(NamedTuple):
    """T tokens a row, of which the first `lengths` are real, after `start` committed ones."""

    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    lengths: Int[Array, " B"]
    start: Int[Array, " B"]


class TreeContext(NamedTuple):
    """M candidate nodes a row, over `start` committed tokens."""

    cos: Float[Array, "B M R"]
    sin: Float[Array, "B M R"]
    tree: Tree
    start: Int[Array, " B"]


Context = PackedContext | PrefillContext | TreeContext


def packed_context(
    cfg: TargetConfig, shape: tuple[int, ...], segment_ids: Int[Array, "B T"] | None
) -> PackedContext:
    """Count positions from the start of each document."""
    positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    opens = segment_starts(segment_ids, shape)
    positions = positions - jax.lax.cummax(jnp.where(opens, positions, 0), axis=1)
    if segment_ids is not None:
        segment_ids = document_index(segment_ids, shape)
    return PackedContext(*_angles(cfg, positions), segment_ids)


def prefill_context(
    cfg: TargetConfig, length: int, lengths: Int[Array, " B"], start: Int[Array, " B"]
) -> PrefillContext:
    """Continue each row at its committed length."""
    positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)
    return PrefillContext(*_angles(cfg, positions), lengths, start)


def tree_context(cfg: TargetConfig, tree: Tree, start: Int[Array, " B"]) -> TreeContext:
    """Place each node at the number of committed tokens plus its depth."""
    return TreeContext(*_angles(cfg, start[:, None] + tree.depth), tree, start)


def _angles(cfg: TargetConfig, positions):
    return rope_angles(positions, rope_frequencies(cfg.rotary_dim, cfg.rope_theta))
