"""What decoding on a CPU spends its time on, by C++ kernels called through `jax.ffi`.

XLA's own skinny products reach half of the memory bandwidth in float32 and less in smaller types;
its attention of a few nodes costs as much as the products as soon as rows are decoded together.
Nothing depends on the kernels: `problem` says why they cannot be used, and callers go on with XLA.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdn.ops.native.compiler import BuildError, build
from gdn.ops.packed import PackedWeight

_MATMULS = {
    "float32": "gdn_matmul_float32", "uint16": "gdn_matmul_bfloat16", "int8": "gdn_matmul_int8",
}  # fmt: skip
_EXPERTS = {kind: name.replace("matmul", "experts") for kind, name in _MATMULS.items()}
_TREE_ATTENTION, _TREE_DELTA_NET = "gdn_tree_attention", "gdn_tree_delta_net"
_COMMIT_STATE, _RMS_NORM = "gdn_commit_state", "gdn_rms_norm"
_PEAK, _BEST = "gdn_peak", "gdn_best"
_LANES = 16  # numbers in the widest vector; a head that is a multiple suits all processors


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


@functools.cache
def version() -> str:
    """Return what tells these kernels from others, a new version's; empty if there are none."""
    return build().stem if problem() is None else ""


def _functions(library: Path) -> dict[str, Any]:
    loaded = ctypes.cdll.LoadLibrary(str(library))
    names = (*_MATMULS.values(), *_EXPERTS.values(), _TREE_ATTENTION, _TREE_DELTA_NET)
    names += (_COMMIT_STATE, _RMS_NORM, _PEAK, _BEST)
    return {name: getattr(loaded, name) for name in names}


def matmul(x: Float[Array, "R I"], weight: PackedWeight) -> Float[Array, "R O"]:
    """Return x W^T; see `matmuls`."""
    return matmuls(x, [weight])[0]


def matmuls(x: Float[Array, "R I"], weights: Sequence[PackedWeight]) -> list[Float[Array, "R _"]]:
    """Return x W^T of each of some matrices of one type, in float32.

    In one call: x is read and packed once, and a layer wakes the threads less often. A row of a
    result depends on its own row of x alone, bit for bit, and not on the number of threads nor on
    the other matrices. bfloat16 weights multiply activations that are rounded to bfloat16, int8
    weights such that are rounded to int8, with a scale for every 64 of a row, whose sums are exact.

    Raises:
      ValueError: shapes do not fit, types differ, or the kernels cannot be used.
    """
    _require()
    (kind, *others) = {str(weight.data.dtype) for weight in weights}
    if others:
        raise ValueError(f"packed weights of different types together: {kind}, {', '.join(others)}")
    operands, results = [x.astype(jnp.float32)], []
    for weight in weights:
        out, inputs = weight.shape
        if x.shape[1] != inputs:
            raise ValueError(f"x has {x.shape[1]} columns, the packed weight {inputs} inputs")
        operands.append(weight.data)
        if weight.scales is not None:
            operands.append(weight.scales)
        results.append(jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32))
    return list(jax.ffi.ffi_call(_MATMULS[kind], results)(*operands))


def experts(
    x: Float[Array, "R D"],
    logits: Float[Array, "R E"],
    up: PackedWeight,
    down: PackedWeight,
    chosen: int,
    normalise: bool,
) -> Float[Array, "R D"]:
    """Send each row through the experts that its router likes best, and add up what they say.

    An expert's weights are read once for all rows that chose it. A row's bits are its own: not
    those of `linear` and XLA's top_k and softmax, but the same beside any other rows.

    Args:
      logits: of the router.
      up, down: matrices [2F, D] (gate first) and [D, F] of E experts, see `pack_stack`.
      chosen: experts of a row.
      normalise: their shares add up to 1; else they are those of a softmax over all experts.

    Raises:
      ValueError: shapes do not fit, types differ, or the kernels cannot be used.
    """
    _require()
    kind, (out, width), inner = str(up.data.dtype), up.shape, down.shape[1]
    if down.data.dtype != up.data.dtype:
        raise ValueError(f"experts of different types together: {kind}, {down.data.dtype}")
    if x.shape[1] != width or out != 2 * inner or down.shape[0] != width:
        raise ValueError(f"x has {x.shape[1]} columns, experts are {up.shape} and {down.shape}")
    operands = [x.astype(jnp.float32), logits.astype(jnp.float32), up.data, down.data]
    if up.scales is not None:
        operands += [up.scales, down.scales]
    call = jax.ffi.ffi_call(_EXPERTS[kind], jax.ShapeDtypeStruct(x.shape, jnp.float32))
    numbers = {"inner": inner, "chosen": chosen, "normalise": normalise}
    return call(*operands, **{name: np.int64(value) for name, value in numbers.items()})


def commit_state(
    state: Float[Array, "B HV DK DV"],
    k: Float[Array, "B M HK DK"],
    u: Float[Array, "B M HV DV"],
    g: Float[Array, "B M HV"],
    path: Int[Array, "B P"],
) -> Float[Array, "B HV DK DV"]:
    """Take the nodes of a path into the state one by one, as `tree_delta_net` did on its way.

    Args:
      path: as in `gdn.cache.commit`.
    """
    _require(*state.shape[2:])
    call = jax.ffi.ffi_call(
        _COMMIT_STATE, jax.ShapeDtypeStruct(state.shape, jnp.float32), input_output_aliases={0: 0}
    )
    return call(state, k, u, g, path)


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], eps: float, offset: float
) -> Float[Array, "*batch D"]:
    """Return x / sqrt(mean(x^2) + eps) * (weight + offset), each row's bits its own."""
    _require()
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    call = jax.ffi.ffi_call(_RMS_NORM, jax.ShapeDtypeStruct(rows.shape, jnp.float32))
    normed = call(rows, weight.astype(jnp.float32), eps=np.float32(eps), offset=np.float32(offset))
    return normed.reshape(x.shape)


def peak(logits: Float[Array, "R V"]) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Return the lowest index of each row's maximum, and the logarithm of its exponentials' sum.

    XLA's own argmax and logsumexp over 248,000 entries take some milliseconds a row together.
    """
    _require()
    shape = logits.shape[:1]
    results = [jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)]
    place, log_total = jax.ffi.ffi_call(_PEAK, results)(logits.astype(jnp.float32))
    return place, log_total


def best(
    logits: Float[Array, "*batch V"], count: int, worst: float
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"], Float[Array, "*batch"]]:
    """Return the `count` greatest of each row, falling, where they are, and what `peak` adds up.

    As `jax.lax.top_k` orders them, which takes five times as long for 32,000 entries.

    Args:
      worst: what counts in place of NaN.
    """
    _require()
    rows = logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)
    shape = (len(rows), count)
    kinds = [(shape, jnp.float32), (shape, jnp.int32), (shape[:1], jnp.float32)]
    results = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    found = jax.ffi.ffi_call(_BEST, results)(rows, worst=np.float32(worst))
    values, places, log_total = (x.reshape(*logits.shape[:-1], *x.shape[1:]) for x in found)
    return values, places, log_total


def has_heads_of(*sizes: int) -> bool:
    """Tell whether `tree_attention` and `tree_delta_net` take heads of these sizes."""
    return all(size % _LANES == 0 for size in sizes)


def tree_attention(
    q: Float[Array, "B M N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    own_k: Float[Array, "B K M H"],
    own_v: Float[Array, "B K M H"],
    ancestors: Bool[Array, "B M M"],
) -> Float[Array, "B M N H"]:
    """Attend from the nodes of a tree over `start` committed keys, and each over its ancestors.

    The softmax runs over keys in the order of their positions. A node's bits depend on the keys
    that it sees alone: not on the other nodes, nor on which of its keys are committed.

    Args:
      ancestors: as in `Tree`, with parents before their children.

    Raises:
      ValueError: heads are of another size than the kernels take, or these cannot be used.
    """
    _require(q.shape[-1])
    operands = (*(x.astype(jnp.float32) for x in (q, k, v)), start)
    operands += (own_k.astype(jnp.float32), own_v.astype(jnp.float32), ancestors)
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return jax.ffi.ffi_call(_TREE_ATTENTION, result)(*operands)


class DeltaNetWeights(NamedTuple):
    """What a Gated DeltaNet layer has between its projections."""

    taps: Float[Array, "E W"]  # of the convolution
    a_log: Float[Array, " HV"]
    dt_bias: Float[Array, " HV"]
    norm: Float[Array, " DV"]


class DeltaNetOutput(NamedTuple):
    """What each node gives to the output projection, and what it would write into the state."""

    out: Float[Array, "B M HV DV"]  # normed and gated
    k: Float[Array, "B M HK DK"]
    u: Float[Array, "B M HV DV"]
    g: Float[Array, "B M HV"]


def tree_delta_net(
    inputs: Float[Array, "B M E"],
    window: Float[Array, "B P E"],
    a: Float[Array, "B M HV"],
    b: Float[Array, "B M HV"],
    z: Float[Array, "B M HV DV"],
    state: Float[Array, "B HV DK DV"],
    ancestors: Bool[Array, "B M M"],
    weights: DeltaNetWeights,
    key_heads: int,
    eps: float,
) -> DeltaNetOutput:
    """Run a Gated DeltaNet layer between its projections, for all nodes of a tree.

    What `gdn.deltanet` does in XLA with `short_conv_tree`, `tree_delta_rule` and a gated norm, but
    with the rule applied node by node down each path (arXiv 2412.06464, equation 10). So a node's
    bits are those of plain decoding along its path, if that is committed by `commit_state`.

    Args:
      inputs: q, k and v of all heads, before the convolution.
      window: the P = W - 1 inputs before them, oldest first.
      a, b: before softplus and sigmoid.
      z: output gate, before silu.
      ancestors: as in `Tree`, with parents before their children.

    Raises:
      ValueError: heads are of another size than the kernels take, or these cannot be used.
    """
    batch, nodes, heads, size = z.shape
    key_size = state.shape[2]
    _require(key_size, size)
    shapes = (z.shape, (batch, nodes, key_heads, key_size), z.shape, (batch, nodes, heads))
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    taps, a_log, dt_bias, norm = weights
    floats = (inputs, window, taps, a, b, a_log, dt_bias, z, norm, state)
    floats = (x.astype(jnp.float32) for x in floats)
    call = jax.ffi.ffi_call(_TREE_DELTA_NET, results)
    return DeltaNetOutput(*call(*floats, ancestors, eps=np.float32(eps)))


def _require(*head_sizes: int) -> None:
    if (why := problem()) is not None:
        raise ValueError(f"native kernels cannot be used: {why}")
    if not has_heads_of(*head_sizes):
        raise ValueError(
            f"native kernels take heads of a multiple of {_LANES} numbers, got"
            f" {' and '.join(map(str, head_sizes))}"
        )
