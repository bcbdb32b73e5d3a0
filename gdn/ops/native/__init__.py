"""Products of few rows by C++ kernels (`kernels.h`), called through `jax.ffi`; CPU only.

XLA's own skinny products reach half of the memory bandwidth in float32 and less in smaller types.
Nothing depends on the kernels: `problem` says why they cannot be used, and callers go on with XLA.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn.ops.native.compiler import BuildError, build
from gdn.ops.packed import PackedWeight

_TARGETS = {"float32": "float32", "uint16": "bfloat16", "int8": "int8"}


@functools.cache
def problem() -> str | None:
    """Compile and register the kernels once; returns why they cannot be used, or None."""
    if jax.default_backend() != "cpu":
        return f"the backend is {jax.default_backend()}, the kernels are for CPUs"
    try:
        try:
            functions = _functions(build())
        except (OSError, AttributeError):  # a file that was cut short, or made by another system
            functions = _functions(build(anew=True))
    except (BuildError, OSError, AttributeError) as error:
        return str(error)
    for name, function in functions.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return None


def _functions(library: Path) -> dict[str, Any]:
    loaded = ctypes.cdll.LoadLibrary(str(library))
    return {name: getattr(loaded, name) for name in map("gdn_matmul_{}".format, _TARGETS.values())}


def matmul(x: Float[Array, "R I"], weight: PackedWeight) -> Float[Array, "R O"]:
    """Return x W^T in float32.

    A row of the result depends on its own row of x alone, bit for bit, and not on the number of
    threads. int8 weights multiply activations that are rounded to int8 as well, with one scale a
    row; sums are exact.

    Raises:
      ValueError: shapes do not fit, or the kernels cannot be used.
    """
    if (why := problem()) is not None:
        raise ValueError(f"native kernels cannot be used: {why}")
    out, inputs = weight.shape
    if x.shape[1] != inputs:
        raise ValueError(f"x has {x.shape[1]} columns, the packed weight {inputs} inputs")
    name = _TARGETS[str(weight.data.dtype)]
    operands = [x.astype(jnp.float32), weight.data]
    if weight.scales is not None:
        operands += [weight.scales, weight.sums]
    result = jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32)
    return jax.ffi.ffi_call(f"gdn_matmul_{name}", result)(*operands)
