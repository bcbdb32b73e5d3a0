"""Give models the weights that decoding on this machine reads fastest.

Training and files know plain arrays only. For decoding a `Packer` replaces matrices, one at a time,
by packed ones for the native kernels or by int8 ones for XLA; `gdn.layers.linear` and `embed` take
any of them. Activations are float32 beside either; a product may round them as it does its weights.
"""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from gdn.config import TargetConfig
from gdn.ops import native
from gdn.ops.packed import NativeNorm, PackedWeight, pack, pack_stack
from gdn.ops.quantized import QuantizedWeight, quantize, quantize_stack

Parameter = jax.Array | PackedWeight | NativeNorm | QuantizedWeight

DTYPES = ("float32", "bfloat16", "int8")
_MATRIX = re.compile(r"(.*\.)?(\w+_proj|in_proj_\w+|fc|shared_expert_gate)$")
# Small, and what gates decide (how much is forgotten) multiplies up over the whole text; `fc` of a
# draft reads residual streams of very different sizes side by side, which had one scale when int8
# was tried there.
_FINE = re.compile(r"(.*\b(in_proj_b|in_proj_a|shared_expert_gate)|fc)$")
_FC = "fc"
_ROUTER = re.compile(r"(.*\.)?mlp\.gate$")  # small, and what it decides is all or nothing
_EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj$")
_NORM = re.compile(r"(.*\.)?(\w*norm|\w+_layernorm)\.weight$")  # of an `RMSNorm`
_TABLES = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Packer:
    """How to keep matrices: for the native kernels or for XLA, and in which precision.

    Convolutions, biases and the values of norms stay as they are. Where other matrices are int8,
    gates and a draft's `fc` are bfloat16 (in XLA, `fc` stays as it is, as it decides the dtype of
    what follows). Routers stay in the dtype that they were loaded in, in float32's layout for the
    kernels.
    """

    dtype: str  # one of DTYPES
    native: bool

    @property
    def load_dtype(self):
        """Return the dtype that weights are to have when they come here."""
        return jnp.dtype(jnp.bfloat16 if self.dtype == "bfloat16" else jnp.float32)

    def bitwise_problem(self, cfg: TargetConfig) -> str | None:
        """Say why verifying a tree of such a target may not give the bits of plain decoding.

        Returns:
          None where it does: products, norms, attention and the delta rule are then the native
          ones, which round a token's numbers alike whatever tokens and rows are beside it. What XLA
          still does is elementwise (RoPE, SiLU, gates), and keys and values are float32.
        """
        sizes = {
            "full_attention": (cfg.head_dim,),
            "linear_attention": (cfg.linear_key_head_dim, cfg.linear_value_head_dim),
        }
        used = [size for kind in set(cfg.layer_types) for size in sizes[kind]]
        if not self.native:
            return "the native kernels are off, or cannot be used here"
        if not native.has_heads_of(*used):
            return f"heads of {sorted(used)} numbers are not all of a multiple of 16"
        return None

    def __call__(self, path: str, value: jax.Array) -> Parameter:
        """Convert a parameter as it is loaded; tables wait for `finish`."""
        if self.native and _NORM.match(path):
            return NativeNorm(value.astype(jnp.float32))
        if self.native and _ROUTER.match(path):
            return pack(value, "float32")
        if _EXPERTS.match(path):
            return self._experts(value)
        return self._matrix(path, value) if _MATRIX.match(path) and value.ndim == 2 else value

    def table(self, path: str, value: jax.Array) -> Parameter:
        """Convert a parameter when all are loaded, a table as well."""
        return self._matrix(path, value) if path in _TABLES else self(path, value)

    def _matrix(self, path: str, value: jax.Array) -> Parameter:
        dtype = "bfloat16" if self.dtype == "int8" and _FINE.match(path) else self.dtype
        if path == _FC and self.dtype == "int8" and not self.native:
            return value
        if self.native:
            return pack(value, dtype)
        return quantize(value) if dtype == "int8" else value.astype(dtype)

    def _experts(self, value: jax.Array) -> Parameter:
        if self.native:
            return pack_stack(value, self.dtype)
        return quantize_stack(value) if self.dtype == "int8" else value.astype(self.dtype)


def finish(*models: tuple[nnx.Module, Packer]) -> None:
    """Convert in place what is left in models that belong together, each by its own packer.

    Arrays that they share stay shared, as the first wants them. One array at a time, so that of a
    model there are never two.
    """
    groups: dict[int, list[tuple[str, nnx.Variable, Packer]]] = {}
    for model, packer in models:
        for path, variable in _variables(model):
            if isinstance(variable[...], jax.Array):
                groups.setdefault(id(variable[...]), []).append((path, variable, packer))
    for members in groups.values():
        path, first, packer = members[0]
        kept = packer.table(path, first[...])
        for _, variable, _ in members:
            variable.set_value(kept)


def _variables(model: nnx.Module) -> list[tuple[str, nnx.Variable]]:
    found = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]
    return [(".".join(map(str, path)), variable) for path, variable in found]
