"""What a sequence leaves behind, one typed entry per layer, and how an accepted path is added to
it.

Attention layers keep keys and values per token (`KVCache`), Gated DeltaNet layers a state of fixed
size (`RecurrentState`). Caches are immutable pytrees: they go in, new ones come out. Rows of a
batch have their own lengths. Slots at or beyond a row's length hold zeros or old, finite rows, and
get no weight.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.config import TargetConfig
from gdn.ops import native
from gdn.ops.conv import advance_window
from gdn.ops.tree import commit_state
from gdn.sharding import ROWS, TENSOR, on_each_device


class KVCache(NamedTuple):
    """Keys (after RoPE) and values of one attention layer, heads before time."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]


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

    k: Float[Array, "B K M H"]
    v: Float[Array, "B K M H"]


class RecurrentUpdate(NamedTuple):
    """What M candidate nodes would write into a state; see `gdn.ops.tree`."""

    k: Float[Array, "B M HK DK"]
    u: Float[Array, "B M HV DV"]
    g: Float[Array, "B M HV"]
    conv: Float[Array, "B M E"]


class SequentialUpdate(NamedTuple):
    """The same from the native kernels, which take nodes into a state one by one."""

    k: Float[Array, "B M HK DK"]
    u: Float[Array, "B M HV DV"]
    g: Float[Array, "B M HV"]
    conv: Float[Array, "B M E"]


Updates = tuple[KVUpdate | RecurrentUpdate | SequentialUpdate, ...]


def init_cache(cfg: TargetConfig, batch: int, capacity: int, dtype=jnp.float32) -> Cache:
    """Make an empty cache.

    Args:
      capacity: tokens each row can hold; writes beyond it are dropped, so check lengths on the
      host.
      dtype: of keys, values and convolution inputs; recurrent states are always float32.
    """
    if batch < 1 or capacity < 1:
        raise ValueError(f"a cache needs batch >= 1 and capacity >= 1, got {batch} and {capacity}")
    kv = (batch, cfg.num_key_value_heads, capacity, cfg.head_dim)
    layers = tuple(
        KVCache(jnp.zeros(kv, dtype), jnp.zeros(kv, dtype))
        if kind == "full_attention"
        else empty_state(cfg, batch, dtype)
        for kind in cfg.layer_types
    )
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def empty_state(cfg: TargetConfig, batch: int, dtype) -> RecurrentState:
    """Make the state before the first token; `dtype` is that of the convolution inputs."""
    state = (batch, cfg.linear_num_value_heads, cfg.linear_key_head_dim, cfg.linear_value_head_dim)
    window = (batch, cfg.linear_conv_kernel_dim - 1, cfg.conv_channels)
    return RecurrentState(jnp.zeros(state, jnp.float32), jnp.zeros(window, dtype))


def grow_cache(cache: Cache, capacity: int) -> Cache:
    """Copy the cache into one that holds `capacity` tokens a row; recurrent entries stay."""
    layers = (grow_kv(x, capacity) if isinstance(x, KVCache) else x for x in cache.layers)
    return cache._replace(layers=tuple(layers))


def grow_kv(entry: KVCache, capacity: int) -> KVCache:
    """Copy keys and values into buffers of `capacity` slots."""
    extra = capacity - entry.k.shape[2]
    if extra < 0:
        raise ValueError(f"the cache already holds {entry.k.shape[2]} tokens, more than {capacity}")
    return KVCache(*(jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))) for x in entry))


def commit(cache: Cache, updates: Updates, path: Int[Array, "B P"]) -> Cache:
    """Add the accepted path of each row; `updates` come from `HybridLM.verify` on this cache.

    Args:
      path: node indices from a root downwards, padded at the end with -1. A row of -1 (nothing
        accepted, or a finished request) keeps its cache bit for bit.
    """
    count = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)

    def advance(entry, update):
        if isinstance(entry, KVCache):
            return _commit_kv(entry, update, path, cache.lengths, count)
        return _commit_recurrent(entry, update, path, count)

    layers = tuple(map(advance, cache.layers, updates))
    return Cache(layers, cache.lengths + count)


def take_nodes(updates: Updates, nodes: Int[Array, "B P"]) -> Updates:
    """Pick nodes out of what candidates would write; P may be any number, and repeat them."""

    def take(x: jax.Array, axis: int) -> jax.Array:
        shape = [1] * x.ndim
        shape[0], shape[axis] = nodes.shape
        return jnp.take_along_axis(x, nodes.reshape(shape), axis=axis)

    return tuple(
        type(update)(*(take(x, 2 if isinstance(update, KVUpdate) else 1) for x in update))
        for update in updates
    )


def write_rows(
    buffer: Float[Array, "B K S H"],
    rows: Float[Array, "B K T H"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Float[Array, "B K S H"]:
    """Write the first `count` rows of each batch row to slots from `start` on; drop what is beyond
    S.

    One slice a batch row, read, blended and written back: unlike a scatter this stays in place.
    """
    kv = (ROWS, TENSOR, None, None)
    axes = (kv, kv, (ROWS,), (ROWS,))
    return on_each_device(_write_rows, axes, kv, buffer.shape[0], buffer, rows, start, count)


def _write_rows(buffer, rows, start, count):
    size = min(rows.shape[2], buffer.shape[2])

    def write(b, buffer):
        # A slice that would reach past the end is moved back, so its rows move forward inside it.
        first = jnp.clip(start[b], 0, buffer.shape[2] - size)
        source = jnp.arange(size) - (start[b] - first)
        real = ((source >= 0) & (source < count[b]))[:, None]
        index = (b, 0, first, 0)
        shape = (1, buffer.shape[1], size, buffer.shape[3])
        old = jax.lax.dynamic_slice(buffer, index, shape)
        new = jnp.take(rows[b], jnp.clip(source, 0, rows.shape[2] - 1), axis=1)[None]
        new = jnp.where(real, new.astype(buffer.dtype), old)
        return jax.lax.dynamic_update_slice(buffer, new, index)

    if buffer.shape[0] == 1:
        return write(0, buffer)
    return jax.lax.fori_loop(0, buffer.shape[0], write, buffer)


def _take_nodes(x: jax.Array, path: Int[Array, "B P"], axis: int = 1) -> jax.Array:
    shape = [1] * x.ndim
    shape[0], shape[axis] = path.shape
    return jnp.take_along_axis(x, jnp.maximum(path, 0).reshape(shape), axis=axis)


def _commit_kv(entry: KVCache, update: KVUpdate, path, lengths, count) -> KVCache:
    k, v = (_take_nodes(x, path, axis=2) for x in update)
    return KVCache(write_rows(entry.k, k, lengths, count), write_rows(entry.v, v, lengths, count))


def _commit_recurrent(
    entry: RecurrentState, update: RecurrentUpdate | SequentialUpdate, path, count
) -> RecurrentState:
    add = native.commit_state if isinstance(update, SequentialUpdate) else commit_state
    state = add(entry.state, update.k, update.u, update.g, path)
    return RecurrentState(state, advance_window(entry.conv, _take_nodes(update.conv, path), count))
