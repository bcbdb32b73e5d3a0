"""A configuration's mesh, and how drafts and what decoding carries along lie on it.

The table of the target and the machinery are in `gdn.sharding`; here are the names that only this
package has, and the checks of a configuration.
"""

import contextlib
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from eagle3.config import ConfigError, MeshConfig
from eagle3.draft_config import DraftConfig
from gdn import TargetConfig, sharding
from gdn.sharding import AXES, FSDP, ROWS, TENSOR, active_mesh, fitted

M = TypeVar("M", bound=nnx.Module)

RULES: sharding.Rules = {
    **sharding.RULES,
    ("fc", 2): (FSDP, TENSOR),
    ("head_rows", 2): (TENSOR, FSDP),
    # Of a batch between two rounds, and of its draft.
    ("root", 1): (ROWS,),
    ("emitted", 1): (ROWS,),
    ("is_running", 1): (ROWS,),
    ("counts", 2): (ROWS, None),
    ("hidden", 2): (ROWS, None),
    ("logits", 2): (ROWS, TENSOR),
}
specs = partial(sharding.specs, rules=RULES)
shardings = partial(sharding.shardings, rules=RULES)
place = partial(sharding.place, rules=RULES)
pin = partial(sharding.pin, rules=RULES)
create = partial(sharding.create, rules=RULES)


def on_mesh(mesh: MeshConfig) -> contextlib.AbstractContextManager[Any]:
    """Make the mesh current, for this thread; a mesh of one device is none.

    Raises:
      ConfigError: there are not so many devices.
    """
    if mesh.size == 1:
        return contextlib.nullcontext()
    devices = jax.devices()
    if len(devices) < mesh.size:
        raise ConfigError(
            f"mesh wants {mesh.size} devices (data {mesh.data} * fsdp {mesh.fsdp} * tensor"
            f" {mesh.tensor}), there are {len(devices)}: make it smaller, or see what it would take"
            " with --dry-run"
        )
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    auto = (AxisType.Auto,) * len(AXES)
    return jax.set_mesh(jax.make_mesh(sizes, AXES, axis_types=auto, devices=devices[: mesh.size]))


def check_shape(mesh: MeshConfig, cfg: TargetConfig | DraftConfig) -> None:
    """Refuse a model whose parts cannot be split evenly.

    Raises:
      ConfigError: naming every size that does not divide.
    """
    split = {
        TENSOR: "num_attention_heads num_key_value_heads linear_num_key_heads"
        " linear_num_value_heads intermediate_size num_experts shared_expert_intermediate_size"
        " vocab_size draft_vocab_size",
        FSDP: "hidden_size target_hidden_size",
    }
    for axis, names in split.items():
        count = getattr(mesh, axis)
        wrong = [
            f"{name} ({getattr(cfg, name)})"
            for name in names.split()
            if getattr(cfg, name, 0) % count
        ]
        if wrong:
            whose = "draft" if isinstance(cfg, DraftConfig) else "target"
            raise ConfigError(
                f"mesh.{axis} is {count}, which does not divide {', '.join(wrong)} of the {whose}:"
                " choose one that does"
            )


def place_module(module: M) -> M:
    """Return the module with its weights where the table has them."""
    if active_mesh() is None:
        return module
    graph, state = nnx.split(module)
    return nnx.merge(graph, place(nnx.to_pure_dict(state)))


def spread(batch: Any) -> Any:
    """Bring pieces of a batch, arrays [A, B, ...], each row to the devices that compute it."""
    if active_mesh() is None:
        return batch
    mesh = jax.sharding.get_mesh()

    def of(x: np.ndarray) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, fitted((None, ROWS), x.shape)))

    return jax.tree.map(of, batch)


def abstract(tree: Any) -> Any:
    """Return shapes, dtypes and shardings of arrays, which keep none of them alive."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
