"""The small parts every layer is made of: linear maps, norms, RoPE, the SwiGLU MLP.

Weights lie as in Hugging Face files, [out, in], so that loading copies nothing around.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn.ops import native
from gdn.ops.packed import NativeNorm, PackedWeight
from gdn.ops.quantized import QuantizedWeight, quantized_matmul
from gdn.ops.skinny import SKINNY_ROWS
from gdn.sharding import DATA, FSDP, ROWS, TENSOR, active_mesh, constrain, row_shards

Weight = Float[Array, "O I"] | PackedWeight | QuantizedWeight


def linear(x: Float[Array, "*batch I"], weight: Weight, out_dtype=None) -> Float[Array, "*batch O"]:
    """Return x W^T in `out_dtype` (default: that of x).

    Of plain arrays on a CPU, few rows are multiplied with the weight on the left, y^T = W x^T: XLA
    streams the left operand and repacks the right one, which makes eight rows 2 to 3 times cheaper.
    The barrier keeps XLA from turning the product round again.
    """
    out_dtype = out_dtype or x.dtype
    rows = math.prod(x.shape[:-1])
    flat = x.reshape(rows, -1)
    if isinstance(weight, PackedWeight):
        y = native.matmul(flat, weight)
    elif isinstance(weight, QuantizedWeight):
        y = quantized_matmul(flat, weight)
    elif rows > SKINNY_ROWS or jax.default_backend() != "cpu":
        y = _many_rows(flat, weight)
    else:
        # Row counts off the vector width take slow kernels, one bfloat16 row a scalar loop.
        padded = 1 << (rows - 1).bit_length()
        if weight.dtype == jnp.bfloat16:
            padded = max(padded, 2)
        flat = jnp.pad(flat, ((0, padded - rows), (0, 0)))
        y = jnp.einsum("oi,ri->or", weight, flat, preferred_element_type=jnp.float32)
        y = jax.lax.optimization_barrier(y).T[:rows]
    return y.astype(out_dtype).reshape(*x.shape[:-1], -1)


def linears(
    x: Float[Array, "*batch I"], *weights: Float[Array, "_ I"] | PackedWeight | QuantizedWeight
) -> list[Float[Array, "*batch _"]]:
    """Return x W^T of several matrices, as `linear` does; packed ones of a type in one call."""
    found: list[Any] = [None] * len(weights)
    packed: dict[Any, dict[int, PackedWeight]] = {}
    for place, weight in enumerate(weights):
        if isinstance(weight, PackedWeight):
            packed.setdefault(weight.data.dtype, {})[place] = weight
        else:
            found[place] = linear(x, weight)
    flat = x.reshape(math.prod(x.shape[:-1]), -1)
    for alike in packed.values():
        for place, y in zip(alike, native.matmuls(flat, [*alike.values()]), strict=True):
            found[place] = y.astype(x.dtype).reshape(*x.shape[:-1], -1)
    return found


@jax.custom_vjp
def _many_rows(x: Float[Array, "R I"], weight: Float[Array, "O I"]) -> Float[Array, "R O"]:
    """Return x W^T in float32, with a gradient in which dy is never transposed.

    The plain dW = dy^T x makes XLA compute dy, and all that is fused into it, in column order:
    (x^T dy)^T took a tenth off a whole training step.
    """
    return jnp.einsum("ri,oi->ro", x, weight, preferred_element_type=jnp.float32)


def _many_rows_forward(x, weight):
    return _many_rows(x, weight), (x, weight)


def _many_rows_backward(saved, grad):
    x, weight = saved
    grad = grad.astype(x.dtype)
    x_grad = jnp.einsum("ro,oi->ri", grad, weight, preferred_element_type=jnp.float32)
    weight_grad = jnp.einsum("ri,ro->io", x, grad, preferred_element_type=jnp.float32)
    weight_grad = jax.lax.optimization_barrier(weight_grad).T
    return x_grad.astype(x.dtype), weight_grad.astype(weight.dtype)


_many_rows.defvjp(_many_rows_forward, _many_rows_backward)


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], eps: float, unit_offset: bool
) -> Float[Array, "*batch D"]:
    """Normalise by the root mean square in float32; `unit_offset` multiplies by 1 + w (Qwen3.5)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32)
    return (x32 * scale * (1.0 + weight if unit_offset else weight)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, in either convention of its weight."""

    def __init__(self, dim: int, eps: float, unit_offset: bool, dtype):
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nnx.Param(jnp.full(dim, 0.0 if unit_offset else 1.0, dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        weight = self.weight[...]
        if isinstance(weight, NativeNorm):
            return native.rms_norm(x, weight.data, self.eps, float(self.unit_offset))
        return rms_norm(x, weight, self.eps, self.unit_offset)


def rope_frequencies(rotary_dim: int, theta: float) -> Float[Array, " R"]:
    """Return theta^(-2i / rotary_dim) for i < R = rotary_dim // 2."""
    return theta ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)


def rope_angles(
    positions: Int[Array, "B T"], frequencies: Float[Array, " R"]
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Return cos and sin of position * frequency.

    On a CPU, XLA fuses them into what they rotate, and makes them anew in every layer for every
    head: three quarters of the time of all rotations. It fuses nothing through a product, and times
    1 is exact.
    """
    angle = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if jax.default_backend() == "cpu":
        one = jnp.eye(len(frequencies))
        both = jnp.stack([cos, sin])
        cos, sin = jnp.einsum("...r,rs->...s", both, one, precision=jax.lax.Precision.HIGHEST)
    return cos, sin


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"]
) -> Float[Array, "B T N H"]:
    """Rotate channel i with channel i + R for i < R; channels from 2R on pass through."""
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def embed(
    table: Weight, tokens: Int[Array, "*batch"], differentiable: bool = True
) -> Float[Array, "*batch D"]:
    """Look up rows.

    Where a mesh splits the rows among devices, and each has fewer tokens than there are rows, each
    looks up its part of the rows of all tokens, and what was found is exchanged, not the table.

    Args:
      differentiable: in the table; see `_rows_of`.
    """
    if not isinstance(table, jax.Array):
        return table.rows(tokens)
    if active_mesh() is None:
        return _rows_of(table, tokens, differentiable)
    shards = row_shards(tokens.shape[0])
    if tokens.size // shards >= table.shape[0]:
        return _rows_of(constrain(table, TENSOR, None), tokens, differentiable)
    axis = DATA if shards > 1 else None
    parts = _rows_of(table, constrain(tokens, axis), differentiable)
    parts = constrain(parts, axis, *(None,) * (tokens.ndim - 1), FSDP)
    return constrain(parts, ROWS)


def _rows_of(table: jax.Array, tokens: jax.Array, differentiable: bool) -> jax.Array:
    """Return table[tokens].

    Inside a device loop XLA would widen a whole bfloat16 table to float32 first; gathering its bits
    avoids that, at the price of the gradient.
    """
    if differentiable or table.dtype != jnp.bfloat16:
        return table[tokens]
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[tokens]
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def normal_init(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype) -> nnx.Param:
    """Make a parameter with entries from N(0, std^2)."""
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, dim: int, hidden: int, std: float, dtype, *, rngs: nnx.Rngs):
        self.gate_proj = normal_init(rngs, (hidden, dim), std, dtype)
        self.up_proj = normal_init(rngs, (hidden, dim), std, dtype)
        self.down_proj = normal_init(rngs, (dim, hidden), std, dtype)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        gate, up = linears(x, self.gate_proj[...], self.up_proj[...])
        return linear(jax.nn.silu(gate) * up, self.down_proj[...])
