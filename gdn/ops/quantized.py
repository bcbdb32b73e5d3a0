"""int8 weights with one scale an output, and their product in plain XLA.

Weights lose next to nothing by one scale for a whole row. Activations do: real models keep some
inputs a hundred times as large as the rest. The native kernels (`packed.py`) round them to int8
with a scale for every 64; XLA has no fast product for that, so here few rows are two int8 rows
each, what is rounded and the rest, and many rows stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.ops.skinny import SKINNY_ROWS

TOP = 127.0  # -128 is not used: ranges are the same on both sides
TINY = 1e-30  # a row below is zero: its inverse scale would overflow
LONGEST = (2**31 - 1) // 127**2  # inputs


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [out, in] as values * scales, or a stack; stands where a parameter's array stood."""

    values: Int[Array, "*stack O I"]
    scales: Float[Array, "*stack O"]

    dtype = jnp.dtype(jnp.float32)  # of the activations it works with

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (out, in), of a stack with its length before."""
        return self.values.shape

    def __getitem__(self, key) -> QuantizedWeight:
        """Return itself for `[...]`, as a parameter's value is read; or a matrix of a stack."""
        if key is ...:
            return self
        if self.values.ndim < 3:
            raise TypeError("a quantized weight has no slices; use `rows`")
        return QuantizedWeight(self.values[key], self.scales[key])

    def rows(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch I"]:
        """Look up rows, in float32."""
        return self.values[index].astype(jnp.float32) * self.scales[index][..., None]


@jax.jit
def quantize(x: Float[Array, "R I"]) -> QuantizedWeight:
    """Round each row to -127..127 times a scale of its own, max |x| / 127.

    Raises:
      ValueError: rows are so long that sums of products may not fit into 32 bits.
    """
    if x.shape[1] > LONGEST:
        raise ValueError(f"rows of {x.shape[1]} entries are too long for int8, at most {LONGEST}")
    x = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=1)
    is_some = top > TINY
    inverse = jnp.where(is_some, TOP / jnp.where(is_some, top, 1.0), 0.0)
    values = jnp.round(x * inverse[:, None])
    # NaN and infinity have no int8: they stay in the scale, and so in every product.
    values = jnp.where(jnp.isfinite(top)[:, None], values, 0.0)
    return QuantizedWeight(
        values.astype(jnp.int8), jnp.where(jnp.isfinite(top), top / TOP, jnp.nan)
    )


@jax.jit
def quantize_stack(x: Float[Array, "E R I"]) -> QuantizedWeight:
    """Round each row of some matrices, see `quantize`."""
    flat = quantize(x.reshape(-1, x.shape[-1]))
    return QuantizedWeight(flat.values.reshape(x.shape), flat.scales.reshape(x.shape[:2]))


def quantized_matmul(x: Float[Array, "R I"], weight: QuantizedWeight) -> Float[Array, "R O"]:
    """Return x W^T in float32: of few rows with 15 bits of each x, of many with all of them.

    Few and many differ by one part in 30,000 of a row's largest x. Of many the matrix is widened
    for the time of the product.
    """
    x, rows = x.astype(jnp.float32), x.shape[0]
    if rows > SKINNY_ROWS:  # then it is arithmetic that takes the time, which floats have more of
        values = weight.values.astype(jnp.float32)
        y = jnp.einsum("ri,oi->ro", x, values, precision=jax.lax.Precision.HIGHEST)
        return y * weight.scales
    coarse = quantize(x)
    fine = quantize(x - coarse.values.astype(jnp.float32) * coarse.scales[:, None])
    # Side by side, which also keeps XLA's CPU backend from its scalar loop for a single row.
    values = jnp.concatenate([coarse.values, fine.values])
    sums = jnp.einsum("ri,oi->ro", values, weight.values, preferred_element_type=jnp.int32)
    sums = sums.astype(jnp.float32) * jnp.concatenate([coarse.scales, fine.scales])[:, None]
    return (sums[:rows] + sums[rows:]) * weight.scales
