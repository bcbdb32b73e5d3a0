"""What a sequence leaves behind, one typed entry per layer, and how an accepted path is added to it.

Attention layers keep keys and values per token (`KVCache`), Gated DeltaNet layers a state of fixed
size (`RecurrentState`). Caches are immutable pytrees: they go in, new ones come out. Rows of a batch
have their own lengths. Slots at or beyond a row's length are never read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.config import TargetConfig
from gdn.ops.conv import advance_window
from gdn.ops.tree import commit_state


class KVCache(NamedTuple):
    """Keys (after RoPE) and values of one attention layer, time before heads."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]


class RecurrentState(NamedTuple):
    """Delta-rule state (float32) and the last W-1 inputs of the convolution, oldest first."""

    state: Float[Array, "B HV DK DV"]
    conv: Float[Array, "B W-1 E"]


class Cache(NamedTuple):
    """One entry per layer and the number of committed tokens of each row."""

    layers: tuple[KVCache | RecurrentState, ...]
    lengths: Int[Array, " B"]


class KVUpdate(NamedTuple):
    """Keys and values of M candidate nodes."""

    k: Float[Array, "B M K H"]
    v: Float[Array, "B M K H"]


class RecurrentUpdate(NamedTuple):
    """What M candidate nodes would write into a state; see `gdn.ops.tree`."""

    k: Float[Array, "B M HK DK"]
    u: Float[Array, "B M HV DV"]
    path_decay: Float[Array, "B M HV"]
    conv: Float[Array, "B M E"]


Updates = tuple[KVUpdate | RecurrentUpdate, ...]


def init_cache(cfg: TargetConfig, batch: int, capacity: int, dtype=jnp.float32) -> Cache:
    """Make an empty cache.

    Args:
      capacity: tokens each row can hold; writes beyond it are dropped, so check lengths on the host.
      dtype: of keys, values and convolution inputs; recurrent states are always float32.
    """
    if batch < 1 or capacity < 1:
        raise ValueError(f"a cache needs batch >= 1 and capacity >= 1, got {batch} and {capacity}")
    kv = (batch, capacity, cfg.num_key_value_heads, cfg.head_dim)
    state = (batch, cfg.linear_num_value_heads, cfg.linear_key_head_dim, cfg.linear_value_head_dim)
    window = (batch, cfg.linear_conv_kernel_dim - 1, cfg.conv_channels)
    layers = tuple(
        KVCache(jnp.zeros(kv, dtype), jnp.zeros(kv, dtype))
        if kind == "full_attention"
        else RecurrentState(jnp.zeros(state, jnp.float32), jnp.zeros(window, dtype))
        for kind in cfg.layer_types
    )
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def grow_cache(cache: Cache, capacity: int) -> Cache:
    """Copy the cache into one that holds `capacity` tokens a row; recurrent entries do not change."""

    def grow(entry):
        if isinstance(entry, RecurrentState):
            return entry
        extra = capacity - entry.k.shape[1]
        if extra < 0:
            raise ValueError(f"the cache already holds {entry.k.shape[1]} tokens, more than {capacity}")
        return KVCache(*(jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) for x in entry))

    return cache._replace(layers=tuple(grow(entry) for entry in cache.layers))


def commit(cache: Cache, updates: Updates, path: Int[Array, "B P"]) -> Cache:
    """Add the accepted path of each row; `updates` come from `HybridLM.verify` on this cache.

    Args:
      path: node indices from a root downwards, padded at the end with -1. A row of -1 (nothing
        accepted, or a finished request) keeps its cache bit for bit.
    """
    count = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
    layers = tuple(
        _commit_kv(entry, update, path, cache.lengths)
        if isinstance(entry, KVCache)
        else _commit_recurrent(entry, update, path, count)
        for entry, update in zip(cache.layers, updates, strict=True)
    )
    return Cache(layers, cache.lengths + count)


def write_rows(
    buffer: Float[Array, "B S K H"],
    rows: Float[Array, "B T K H"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Float[Array, "B S K H"]:
    """Write the first `count` rows of each batch row to consecutive slots from `start` on."""
    step = jnp.arange(rows.shape[1])
    slots = jnp.where(step < count[:, None], start[:, None] + step, buffer.shape[1])
    batch = jnp.arange(rows.shape[0])[:, None]
    # Dropped, not clamped: a clamped slice near the end of the buffer would overwrite older tokens.
    return buffer.at[batch, slots].set(rows.astype(buffer.dtype), mode="drop")


def _take_nodes(x: jax.Array, path: Int[Array, "B P"]) -> jax.Array:
    return x[jnp.arange(path.shape[0])[:, None], jnp.maximum(path, 0)]


def _commit_kv(entry: KVCache, update: KVUpdate, path, lengths) -> KVCache:
    count = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
    return KVCache(
        *(
            write_rows(old, _take_nodes(new, path), lengths, count)
            for old, new in zip(entry, update, strict=True)
        )
    )


def _commit_recurrent(entry: RecurrentState, update: RecurrentUpdate, path, count) -> RecurrentState:
    state = commit_state(entry.state, update.k, update.u, update.path_decay, path)
    return RecurrentState(state, advance_window(entry.conv, _take_nodes(update.conv, path), count))
