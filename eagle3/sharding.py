"""A configuration's mesh, and how drafts and what decoding carries along lie on it.

The table of the target and the machinery are in `gdn.sharding`; here are the names that only this
package has, and the checks of a configuration.
"""

import contextlib
from functools import cache, partial
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle3.config import ConfigError, MeshConfig
from eagle3.draft_config import DraftConfig
from eagle3.processes import is_alone, is_first
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
      ConfigError: there are not so many devices, or some processes would have none.
    """
    if not is_alone() and mesh.size != jax.device_count():
        raise ConfigError(
            f"mesh is of {mesh.size} devices, the {jax.process_count()} processes have"
            f" {jax.device_count()}: data * fsdp * tensor has to be as many"
        )
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


def own_rows(count: int) -> range:
    """Return the rows, of the `count` of a batch, that the devices of this process compute."""
    if active_mesh() is None:
        return range(count)
    here = NamedSharding(jax.sharding.get_mesh(), fitted((ROWS,), (count,)))
    slices = here.addressable_devices_indices_map((count,)).values()
    parts = [index[0].indices(count) for index in slices]  # type: ignore[index]
    return range(min(part[0] for part in parts), max(part[1] for part in parts))


def spread(batch: Any, count: int | None = None) -> Any:
    """Bring pieces of a batch, arrays [A, B, ...], each row to the devices that compute it.

    Args:
      count: rows of the whole batch, of which this process has its `own_rows`; None: it has all.
    """
    if active_mesh() is None:
        return batch
    mesh = jax.sharding.get_mesh()
    first = 0 if count is None else own_rows(count).start

    def of(x: Any) -> jax.Array:
        pieces, rows, *rest = x.shape
        shape = (pieces, count or rows, *rest)
        sharding = NamedSharding(mesh, fitted((None, ROWS), shape))
        if isinstance(x, jax.Array):
            return jax.device_put(x, sharding)

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(shape[1])
            return x[:, start - first : stop - first]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(of, batch)


def gathered(tree: Any) -> Any:
    """Return arrays in whole; of several processes, on the host of the first, and None elsewhere.

    All processes take part, array by array.
    """
    if is_alone():
        return tree
    whole = NamedSharding(jax.sharding.get_mesh(), P())

    def of(x: jax.Array) -> np.ndarray | None:
        found = _to(whole)(x)
        return np.asarray(found) if is_first() else None

    found = jax.tree.map(of, tree)
    return found if is_first() else None


@cache
def _to(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


def abstract(tree: Any) -> Any:
    """Return shapes, dtypes and shardings of arrays, which keep none of them alive."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
