"""Weights in the layout of the native kernels: outputs in panels of 16, small types in groups.

    data[panel, group, output, input],  input < K = 1 (float32), 2 (bfloat16), 4 (int8)

padded with zeros. A panel is read front to back, whatever the width of the processor's vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.ops.quantized import quantize

PANEL = 16  # outputs, as in `native/products.h`
GROUP = {"float32": 1, "bfloat16": 2, "int8": 4}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scales"],
    meta_fields=["shape"],
)
@dataclass(frozen=True)
class PackedWeight:
    """A matrix [out, in], packed, or a stack of such; stands where a parameter's array stood.

    bfloat16 is kept as its bits, so that no compiler widens the whole matrix to float32. Products
    and looked-up rows are float32.
    """

    data: Array  # [*stack, panels, groups, 16, K]: float32, uint16 or int8
    scales: Float[Array, "*stack O"] | None  # of each output, int8 only
    shape: tuple[int, int]

    dtype = jnp.dtype(jnp.float32)  # of the activations it works with

    def __getitem__(self, key) -> PackedWeight:
        """Return itself for `[...]`, as a parameter's value is read."""
        if key is not ...:
            raise TypeError("a packed weight has no slices; use `rows`")
        return self

    def rows(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch I"]:
        """Look up rows, in float32."""
        picked = self.data[index // PANEL, :, index % PANEL]  # [*batch, groups, K]
        picked = picked.reshape(*index.shape, -1)[..., : self.shape[1]]
        if picked.dtype == jnp.uint16:
            return jax.lax.bitcast_convert_type(picked.astype(jnp.uint32) << 16, jnp.float32)
        if self.scales is not None:
            return picked.astype(jnp.float32) * self.scales[index][..., None]
        return picked


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=[])
@dataclass(frozen=True)
class NativeNorm:
    """The weight of a norm that the native kernels compute; stands where its array stood."""

    data: Array  # [D], float32

    def __getitem__(self, key) -> NativeNorm:
        """Return itself for `[...]`, as a parameter's value is read."""
        if key is not ...:
            raise TypeError("the weight of a native norm has no slices")
        return self


@partial(jax.jit, static_argnames=("dtype",))
def pack(weight: Float[Array, "O I"], dtype: str) -> PackedWeight:
    """Pack a matrix.

    Args:
      dtype: float32, bfloat16, or int8 (as `quantize`).
    """
    out, inputs = weight.shape
    scales = None
    if dtype == "int8":
        quantized = quantize(weight)
        weight, scales = quantized.values, quantized.scales
    weight = weight.astype(dtype)
    if dtype == "bfloat16":
        weight = jax.lax.bitcast_convert_type(weight, jnp.uint16)
    group = GROUP[dtype]
    weight = jnp.pad(weight, ((0, -out % PANEL), (0, -inputs % group)))
    data = weight.reshape(-1, PANEL, weight.shape[1] // group, group).swapaxes(1, 2)
    return PackedWeight(data, scales, (out, inputs))


@partial(jax.jit, static_argnames=("dtype",))
def pack_stack(weights: Float[Array, "E O I"], dtype: str) -> PackedWeight:
    """Pack matrices one by one, so that beside both forms there is one matrix more at most."""
    return jax.lax.map(partial(pack, dtype=dtype), weights)
