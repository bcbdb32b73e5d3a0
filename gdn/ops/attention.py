"""Softmax attention over consecutive keys, with grouped heads: dense when small, blockwise when
long.

Which keys a query sees is one number, the index of the last visible key, plus optional document
ids: causal attention, a partly filled cache and a committed prefix are all of that form. The result
comes with its log-sum-exp, so attention over two sets of keys (the cache, and a draft tree) can be
merged.

Keys and values lie heads before time, [B, K, S, H]: both products then read them where they are.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn.ops.skinny import SKINNY_ROWS

_HIGHEST = jax.lax.Precision.HIGHEST


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    last: Int[Array, "B T"],
    q_segments: Int[Array, "B T"] | None = None,
    k_segments: Int[Array, "B S"] | None = None,
    block: int = 512,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attend with scale H^-1/2 and a float32 softmax; head n reads key head n // (N // K).

    Beyond `block` keys, keys are taken a block at a time with a running softmax (arXiv 2205.14135):
    memory is linear in T and S, also in the gradient, and blocks after every `last` are not read.

    Args:
      last: index of the last key each query sees; -1 for none.
      q_segments, k_segments: a query sees keys of its own document only.

    Returns:
      Values (zero where nothing is visible) and the log of the softmax denominator (-inf there),
      both float32.
    """
    if (q_segments is None) != (k_segments is None):
        raise ValueError("q_segments and k_segments go together: give both or neither")
    grouped = _group_heads(q, k.shape[1])
    last = jnp.minimum(last, k.shape[2] - 1)
    if k.shape[2] <= block:
        mask = jnp.arange(k.shape[2]) <= last[..., None]
        if q_segments is not None and k_segments is not None:
            mask &= q_segments[..., None] == k_segments[:, None]
        out, lse = _dense(grouped, k, v, mask)
    else:
        if q_segments is None or k_segments is None:
            q_segments = jnp.zeros(q.shape[:2], jnp.int32)
            k_segments = jnp.zeros((k.shape[0], k.shape[2]), jnp.int32)
        out, lse = _attend_blockwise(grouped, k, v, last, q_segments, k_segments, block)
    return _ungroup_heads(out), _ungroup_heads(lse[..., None])[..., 0]


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attend where `mask` is True, all scores at once: for the few nodes of a draft tree."""
    out, lse = _dense(_group_heads(q, k.shape[1]), k, v, mask)
    return _ungroup_heads(out), _ungroup_heads(lse[..., None])[..., 0]


def merge_attention(
    first: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
    second: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
) -> Float[Array, "B T N H"]:
    """Combine attention over two disjoint sets of keys into attention over their union."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    total = jnp.logaddexp(lse_1, lse_2)
    return out_1 * jnp.exp(lse_1 - total)[..., None] + out_2 * jnp.exp(lse_2 - total)[..., None]


def _group_heads(q: Float[Array, "B T N H"], key_heads: int) -> Float[Array, "B K G T H"]:
    q = q.reshape(*q.shape[:2], key_heads, -1, q.shape[-1])
    return jnp.moveaxis(q, 1, 3)


def _ungroup_heads(x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _products(
    x: Float[Array, "B K G T H"], y: Float[Array, "B K S H"]
) -> Float[Array, "B K G T S"]:
    """Return all inner products, float32; few rows go right of the many, see `skinny`."""
    rows = x.reshape(*x.shape[:2], -1, x.shape[-1])
    product = partial(jnp.einsum, precision=_HIGHEST, preferred_element_type=jnp.float32)
    if rows.shape[2] > SKINNY_ROWS or jax.default_backend() != "cpu":
        out = product("bkxh,bksh->bkxs", rows, y)
    else:
        out = jax.lax.optimization_barrier(product("bksh,bkxh->bksx", y, rows))
        out = jnp.swapaxes(out, 2, 3)
    return out.reshape(*x.shape[:4], -1)


def _scores(q, k, mask):
    """Return masked, scaled scores [B, K, G, T, S]."""
    return jnp.where(mask[:, None, None], _products(q, k) * q.shape[-1] ** -0.5, -jnp.inf)


def _weighted(
    weights: Float[Array, "B K G T S"], v: Float[Array, "B K S H"]
) -> Float[Array, "B K G T H"]:
    """Sum over keys, float32."""
    return jnp.einsum(
        "bkgts,bksh->bkgth", weights.astype(v.dtype), v,
        precision=_HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _dense(q, k, v, mask):
    scores = _scores(q, k, mask)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), -1e30))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    # Dividing the few values, not the many weights; a row that sees nothing divides 0 by 1.
    safe = jnp.where(total > 0, total, 1.0)
    return _weighted(weights, v) / safe[..., None], jnp.where(
        total > 0, jnp.log(safe) + top[..., 0], -jnp.inf
    )


def _blockwise(q, k, v, last, q_segments, k_segments, block) -> tuple[jax.Array, jax.Array]:
    """Attend blockwise over queries and keys, [B, K, G, T, H] against [B, K, S, H]."""
    return _blockwise_forward(q, k, v, last, q_segments, k_segments, block)[0]


_attend_blockwise = jax.custom_vjp(_blockwise, nondiff_argnums=(6,))


def _pad_blocks(x, block, axis, value=0):
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, padding, constant_values=value)


def _split(x, rows, axis, value=0):
    """Cut the time axis into blocks of `rows` and bring the block index to the front."""
    x = _pad_blocks(x, rows, axis, value)
    x = x.reshape(*x.shape[:axis], -1, rows, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x, axis, length):
    """Undo `_split`."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _key_block(j, block, last, q_segments, k, v, k_segments):
    """Slice block j of the keys and say which queries see which of them."""
    k, v = (jax.lax.dynamic_slice_in_dim(x, j * block, block, axis=2) for x in (k, v))
    k_segments = jax.lax.dynamic_slice_in_dim(k_segments, j * block, block, axis=1)
    mask = j * block + jnp.arange(block) <= last[..., None]
    return k, v, mask & (q_segments[..., None] == k_segments[:, None])


def _query_rows(length, block):
    return min(block, max(1, 1 << (length - 1).bit_length()))


def _blockwise_forward(q, k, v, last, q_segments, k_segments, block):
    length, rows = q.shape[3], _query_rows(q.shape[3], block)
    keys = (_pad_blocks(k, block, 2), _pad_blocks(v, block, 2), _pad_blocks(k_segments, block, 1))

    def one_block(inputs):
        q_b, last_b, segments_b = inputs

        def add_keys(j, carry):
            out, top, total = carry
            k_b, v_b, mask = _key_block(j, block, last_b, segments_b, *keys)
            scores = _scores(q_b, k_b, mask)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            out = out * fade[..., None] + _weighted(weights, v_b)
            return out, new_top, total * fade + weights.sum(-1)

        zeros = jnp.zeros(q_b.shape, jnp.float32)
        start = (zeros, jnp.full(q_b.shape[:4], -1e30, jnp.float32), zeros[..., 0])
        out, top, total = jax.lax.fori_loop(0, jnp.max(last_b) // block + 1, add_keys, start)
        safe = jnp.where(total > 0, total, 1.0)
        return out / safe[..., None], jnp.where(total > 0, jnp.log(safe) + top, -jnp.inf)

    queries = (_split(q, rows, 3), _split(last, rows, 1, -1), _split(q_segments, rows, 1))
    out, lse = jax.lax.map(one_block, queries)
    out, lse = _join(out, 3, length), _join(lse, 3, length)
    return (out, lse), (q, k, v, last, q_segments, k_segments, out, lse)


def _blockwise_backward(block, saved, grads):
    q, k, v, last, q_segments, k_segments, out, lse = saved
    length, rows = q.shape[3], _query_rows(q.shape[3], block)
    keys = (_pad_blocks(k, block, 2), _pad_blocks(v, block, 2), _pad_blocks(k_segments, block, 1))
    out_grad, lse_grad = grads
    # d scores = p * (dout . v - dout . out + dlse): the last two terms need no second pass.
    shift = lse_grad - jnp.sum(out_grad * out, axis=-1)
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)

    def one_block(carry, inputs):
        q_b, last_b, segments_b, lse_b, shift_b, grad_b = inputs

        def add_keys(j, carry):
            q_grad, k_grad, v_grad = carry
            k_b, v_b, mask = _key_block(j, block, last_b, segments_b, *keys)
            weights = jnp.exp(_scores(q_b, k_b, mask) - lse_b[..., None])
            score_grad = (
                weights * (_products(grad_b, v_b) + shift_b[..., None]) * q.shape[-1] ** -0.5
            )
            k_part = jnp.einsum("bkgts,bkgth->bksh", score_grad, q_b, precision=_HIGHEST)
            v_part = jnp.einsum("bkgts,bkgth->bksh", weights, grad_b, precision=_HIGHEST)
            q_grad += _weighted(score_grad, k_b)
            return q_grad, add_block(k_grad, k_part, j), add_block(v_grad, v_part, j)

        def add_block(total, part, j):
            here = jax.lax.dynamic_slice_in_dim(total, j * block, block, axis=2)
            return jax.lax.dynamic_update_slice_in_dim(total, here + part, j * block, axis=2)

        start = (jnp.zeros(q_b.shape, jnp.float32), *carry)
        q_grad, *carry = jax.lax.fori_loop(0, jnp.max(last_b) // block + 1, add_keys, start)
        return tuple(carry), q_grad

    queries = (
        _split(q, rows, 3), _split(last, rows, 1, -1), _split(q_segments, rows, 1),
        _split(lse, rows, 3), _split(shift, rows, 3), _split(out_grad, rows, 3),
    )  # fmt: skip
    zeros = jnp.zeros(keys[0].shape, jnp.float32)
    (k_grad, v_grad), q_grad = jax.lax.scan(one_block, (zeros, zeros), queries)
    size = k.shape[2]
    return (
        _join(q_grad, 3, length).astype(q.dtype), k_grad[:, :, :size].astype(k.dtype),
        v_grad[:, :, :size].astype(v.dtype), None, None, None,
    )  # fmt: skip


_attend_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
