"""Softmax attention over consecutive keys, with grouped heads: dense when small, blockwise when long.

Which keys a query sees is one number, the index of the last visible key, plus optional document ids:
causal attention, a partly filled cache and a committed prefix are all of that form. The result comes
with its log-sum-exp, so attention over two sets of keys (the cache, and a draft tree) can be merged.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_HIGHEST = jax.lax.Precision.HIGHEST


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
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
      Values (zero where nothing is visible) and the log of the softmax denominator (-inf there).
    """
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], dim)
    if k.shape[1] <= block:
        mask = jnp.arange(k.shape[1]) <= last[..., None]
        if q_segments is not None:
            mask &= q_segments[..., None] == k_segments[:, None]
        out, lse = _dense(q, k, v, mask)
    else:
        if q_segments is None:
            q_segments = jnp.zeros((batch, length), jnp.int32)
            k_segments = jnp.zeros(k.shape[:2], jnp.int32)
        out, lse = _long(q, k, v, last, q_segments, k_segments, block)
    return out.reshape(batch, length, heads, dim), lse.reshape(batch, length, heads)


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attend where `mask` is True, all scores at once: for the few nodes of a draft tree."""
    batch, length, heads, dim = q.shape
    out, lse = _dense(q.reshape(batch, length, k.shape[2], -1, dim), k, v, mask)
    return out.reshape(q.shape), lse.reshape(batch, length, heads)


def merge_attention(
    first: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
    second: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]],
) -> Float[Array, "B T N H"]:
    """Combine attention over two disjoint sets of keys into attention over their union."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    total = jnp.logaddexp(lse_1, lse_2)
    return out_1 * jnp.exp(lse_1 - total)[..., None] + out_2 * jnp.exp(lse_2 - total)[..., None]


def _scores(q, k, mask):
    """Return masked, scaled scores [B, K, G, T, S] in float32."""
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", q, k, precision=_HIGHEST, preferred_element_type=jnp.float32
    )
    return jnp.where(mask[:, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)


def _values(weights, v):
    return jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(v.dtype), v,
        precision=_HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _time_major(x):
    return jnp.moveaxis(x, 3, 1)  # [B, K, G, T] -> [B, T, K, G]


def _dense(q, k, v, mask):
    scores = _scores(q, k, mask)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), -1e30))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    # Dividing the few values, not the many weights; a row that sees nothing divides 0 by 1.
    out = _values(weights, v) / _time_major(jnp.where(total > 0, total, 1.0))[..., None]
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)) + top[..., 0], -jnp.inf)
    return out, _time_major(lse)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _long(q, k, v, last, q_segments, k_segments, block):
    """Attend blockwise over queries and keys, [B, T, K, G, H] against [B, S, K, H]."""
    return _long_forward(q, k, v, last, q_segments, k_segments, block)[0]


def _pad_blocks(x, block, axis=1, value=0):
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, padding, constant_values=value)


def _split_queries(arrays, block):
    """[B, T, ...] -> [T / block, B, block, ...] for a map over blocks of queries."""
    return tuple(
        jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0) for x in arrays
    )


def _key_block(j, block, last, q_segments, k, v, k_segments):
    """Slice block j of the keys and say which queries see which of them."""
    k, v, k_segments = (
        jax.lax.dynamic_slice_in_dim(x, j * block, block, axis=1) for x in (k, v, k_segments)
    )
    mask = j * block + jnp.arange(block) <= last[..., None]
    return k, v, mask & (q_segments[..., None] == k_segments[:, None])


def _query_block(length, block):
    return min(block, max(8, 1 << (length - 1).bit_length()))


def _long_forward(q, k, v, last, q_segments, k_segments, block):
    length, rows = q.shape[1], _query_block(q.shape[1], block)
    keys = tuple(_pad_blocks(x, block) for x in (k, v, k_segments))
    queries = (_pad_blocks(q, rows), _pad_blocks(last, rows, value=-1), _pad_blocks(q_segments, rows))

    def one_block(block_inputs):
        q_b, last_b, segments_b = block_inputs
        shape = (q_b.shape[0], *q_b.shape[2:4], rows)

        def add_keys(j, carry):
            out, top, total = carry
            k_b, v_b, mask = _key_block(j, block, last_b, segments_b, *keys)
            scores = _scores(q_b, k_b, mask)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            out = out * _time_major(fade)[..., None] + _values(weights, v_b)
            return out, new_top, total * fade + weights.sum(-1)

        start = (
            jnp.zeros(q_b.shape, jnp.float32),
            jnp.full(shape, -1e30, jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )
        out, top, total = jax.lax.fori_loop(0, jnp.max(last_b) // block + 1, add_keys, start)
        safe = jnp.where(total > 0, total, 1.0)
        lse = jnp.where(total > 0, jnp.log(safe) + top, -jnp.inf)
        return out / _time_major(safe)[..., None], _time_major(lse)

    out, lse = jax.lax.map(one_block, _split_queries(queries, rows))
    out, lse = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in (out, lse))
    out, lse = out[:, :length], lse[:, :length]
    return (out, lse), (q, k, v, last, q_segments, k_segments, out, lse)


def _long_backward(block, saved, grads):
    q, k, v, last, q_segments, k_segments, out, lse = saved
    length, rows = q.shape[1], _query_block(q.shape[1], block)
    keys = tuple(_pad_blocks(x, block) for x in (k, v, k_segments))
    out_grad, lse_grad = grads
    # d scores = p * (dout . v - dout . out + dlse): the last two terms need no second pass.
    shift = lse_grad - jnp.sum(out_grad * out, axis=-1)
    queries = (
        _pad_blocks(q, rows), _pad_blocks(last, rows, value=-1), _pad_blocks(q_segments, rows),
        _pad_blocks(jnp.where(jnp.isfinite(lse), lse, 0.0), rows), _pad_blocks(shift, rows),
        _pad_blocks(out_grad, rows),
    )  # fmt: skip

    def one_block(carry, block_inputs):
        q_b, last_b, segments_b, lse_b, shift_b, grad_b = block_inputs

        def add_keys(j, carry):
            q_grad, k_grad, v_grad = carry
            k_b, v_b, mask = _key_block(j, block, last_b, segments_b, *keys)
            weights = jnp.exp(_scores(q_b, k_b, mask) - jnp.moveaxis(lse_b, 1, 3)[..., None])
            v_part = jnp.einsum("bkgts,btkgh->bskh", weights, grad_b, precision=_HIGHEST)
            weight_grad = jnp.einsum("btkgh,bskh->bkgts", grad_b, v_b, precision=_HIGHEST)
            score_grad = weights * (weight_grad + jnp.moveaxis(shift_b, 1, 3)[..., None])
            score_grad = score_grad * q.shape[-1] ** -0.5
            q_grad += jnp.einsum("bkgts,bskh->btkgh", score_grad, k_b, precision=_HIGHEST)
            k_part = jnp.einsum("bkgts,btkgh->bskh", score_grad, q_b, precision=_HIGHEST)
            return q_grad, _add_block(k_grad, k_part, j), _add_block(v_grad, v_part, j)

        def _add_block(total, part, j):
            here = jax.lax.dynamic_slice_in_dim(total, j * block, block, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(total, here + part, j * block, axis=1)

        start = (jnp.zeros(q_b.shape, jnp.float32), *carry)
        q_grad, *carry = jax.lax.fori_loop(0, jnp.max(last_b) // block + 1, add_keys, start)
        return tuple(carry), q_grad

    zeros = jnp.zeros(keys[0].shape, jnp.float32)
    (k_grad, v_grad), q_grad = jax.lax.scan(
        one_block, (zeros, zeros), _split_queries(queries, rows)
    )
    q_grad = jnp.moveaxis(q_grad, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :length]
    keys_length = k.shape[1]
    return (
        q_grad.astype(q.dtype), k_grad[:, :keys_length].astype(k.dtype),
        v_grad[:, :keys_length].astype(v.dtype), None, None, None,
    )  # fmt: skip


_long.defvjp(_long_forward, _long_backward)
