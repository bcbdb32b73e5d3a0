"""How weights, caches and activations lie on a mesh of devices: one table, by name.

`data` and `fsdp` split the rows of a batch; `fsdp` also splits weights, which are gathered where
they are used; `tensor` splits heads, MLP widths, experts and vocabularies. The mesh is the one that
`jax.set_mesh` made current. Without one, all of this returns what it is given, so models and ops
run on one device as if it were not there.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

T = TypeVar("T")
Axis = str | tuple[str, ...] | None
Rules = Mapping[tuple[str, int], tuple[Axis, ...]]

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
ROWS = (DATA, FSDP)  # what splits the rows of a batch

_OUT, _IN = (TENSOR, FSDP), (FSDP, TENSOR)  # of [out, in]: outputs split among devices, or inputs
# (last name of the path, number of dimensions) -> axis of each dimension. An optimiser's moments
# have the names of their weights. What is not here is small, and every device has all of it.
RULES: Rules = {
    **dict.fromkeys([("embed_tokens", 2), ("lm_head", 2)], _OUT),
    **dict.fromkeys([("q_proj", 2), ("k_proj", 2), ("v_proj", 2)], _OUT),
    **dict.fromkeys([(f"in_proj_{name}", 2) for name in ("qkv", "z", "b", "a")], _OUT),
    **dict.fromkeys([("gate_proj", 2), ("up_proj", 2)], _OUT),
    **dict.fromkeys([("o_proj", 2), ("out_proj", 2), ("down_proj", 2)], _IN),
    ("conv1d", 2): (TENSOR, None),
    ("A_log", 1): (TENSOR,),
    ("dt_bias", 1): (TENSOR,),
    # A device has some experts whole; the router and the shared gate are needed by all.
    ("gate_up_proj", 3): (TENSOR, None, FSDP),
    ("down_proj", 3): (TENSOR, FSDP, None),
    ("gate", 2): (None, FSDP),
    ("shared_expert_gate", 2): (None, FSDP),
    # Caches.
    ("k", 4): (ROWS, TENSOR, None, None),
    ("v", 4): (ROWS, TENSOR, None, None),
    ("state", 4): (ROWS, TENSOR, None, None),
    ("conv", 3): (ROWS, None, TENSOR),
    ("lengths", 1): (ROWS,),
}


def active_mesh() -> Any:
    """Return the mesh that `jax.set_mesh` made current, if it has our axes; else None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if set(AXES) <= set(mesh.axis_names) else None


def row_shards(rows: int) -> int:
    """Return among how many groups of devices the rows of a batch are split.

    All have all rows where these do not divide: a last batch, a single prompt.
    """
    mesh = active_mesh()
    if mesh is None:
        return 1
    shards = mesh.shape[DATA] * mesh.shape[FSDP]
    return shards if rows % shards == 0 else 1


def fitted(axes: tuple[Axis, ...], shape: tuple[int, ...]) -> P:
    """Return the axes of an array of this shape, the rows' left away where rows do not divide.

    Axes of one device are left away too: as the compiler writes it, so that arrays made in a jit
    and arrays placed by hand are the same to the next jit.
    """
    return _spec(
        None if axis == ROWS and row_shards(size) == 1 else axis
        for axis, size in zip(axes, shape, strict=False)
    )


def _spec(axes: Iterable[Axis]) -> P:
    sizes, found = active_mesh().shape, []
    for axis in axes:
        names = tuple(x for x in ([axis] if isinstance(axis, str) else axis or ()) if sizes[x] > 1)
        found.append(names if len(names) > 1 else names[0] if names else None)
    while found and found[-1] is None:
        found.pop()
    return P(*found)


def spec_of(path: str, shape: tuple[int, ...], rules: Rules = RULES) -> P:
    """Return how the table splits an array over the active mesh.

    Raises:
      ValueError: a weight's dimension does not divide.
    """
    spec = fitted(rules.get((path.rpartition(".")[2], len(shape)), ()), shape)
    for axis, size in zip(spec, shape, strict=False):
        if isinstance(axis, str) and size % active_mesh().shape[axis]:
            raise ValueError(
                f"mesh.{axis} is {active_mesh().shape[axis]}, which does not divide {path} of"
                f" shape {shape}: lower it"
            )
    return spec


def specs(tree: Any, rules: Rules = RULES) -> Any:
    """Return `spec_of` of every leaf, in the tree's own structure."""

    def of(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return spec_of(name, tuple(leaf.shape), rules)

    return jax.tree_util.tree_map_with_path(of, tree)


def shardings(tree: Any, rules: Rules = RULES) -> Any:
    """Return the same as shardings, for what lies on devices or is to lie there."""
    mesh = jax.sharding.get_mesh()
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, rules))


def place(tree: T, rules: Rules = RULES) -> T:
    """Bring arrays to where the table has them; those of one process are the same in each."""
    if active_mesh() is None:
        return tree
    found = shardings(tree, rules)
    if jax.sharding.get_mesh().is_multi_process:
        return jax.tree.map(_place, tree, found)
    return jax.device_put(tree, found)


def _place(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)  # device_put would compare the copies of all processes
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def pin(tree: T, rules: Rules = RULES) -> T:
    """The same inside a jit: say where its results are to lie."""
    if active_mesh() is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, specs(tree, rules))


def create(make: Callable[..., T], *args: Any, rules: Rules = RULES) -> T:
    """Call `make`; on a mesh, each device makes its own part only."""
    if active_mesh() is None:
        return make(*args)
    found = shardings(jax.eval_shape(make, *args), rules)
    return jax.jit(make, out_shardings=found)(*args)


def load(path: str, value: np.ndarray, dtype: Any) -> jax.Array:
    """Bring a weight from the host to where the table has it; no device sees more than its part."""
    if active_mesh() is None:
        return jnp.asarray(value, dtype)
    sharding = NamedSharding(jax.sharding.get_mesh(), spec_of(path, value.shape))

    def part(index: Any) -> np.ndarray:
        return value[index].astype(dtype)  # a copy: a view would keep all of the tensor

    return jax.make_array_from_callback(value.shape, sharding, part)


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
    """Say, inside a jit, how an activation is split, one axis a dimension."""
    if active_mesh() is None:
        return x
    return jax.lax.with_sharding_constraint(x, fitted(axes, x.shape))


def on_each_device(
    f: Callable[..., Any],
    in_axes: tuple[tuple[Axis, ...], ...],
    out_axes: tuple[Axis, ...],
    rows: int,
    *args: Any,
) -> Any:
    """Call `f` on every device, with its own part of each argument; without a mesh, once with all.

    Args:
      in_axes, out_axes: of the arguments and the one result; dimensions left away are not split.
      rows: of the batch. A dimension that ROWS splits has as many, or tokens of one after another.
    """
    if active_mesh() is None:
        return f(*args)
    is_split = row_shards(rows) > 1

    def spec(axes: tuple[Axis, ...]) -> P:
        return _spec(None if axis == ROWS and not is_split else axis for axis in axes)

    in_specs = tuple(map(spec, in_axes))
    return jax.shard_map(f, in_specs=in_specs, out_specs=spec(out_axes), check_vma=False)(*args)


def on_own_rows(f: Callable[..., Any], weights: Any, *args: jax.Array) -> Any:
    """Call `f(weights, *args)`, on a mesh with each device's own rows of the arguments [B, ...].

    For loops over blocks of positions: left to the compiler, each pass of such a loop would gather
    the weights, and add up their gradients among devices, anew.

    Args:
      f: returns what is to be summed over rows, and results [B, ...].
    """
    if row_shards(args[0].shape[0]) == 1:
        return f(weights, *args)

    dtypes = jax.tree.map(lambda x: x.dtype, weights)

    def own(weights, *args):
        weights = jax.tree.map(lambda x, dtype: x.astype(dtype), weights, dtypes)
        sums, results = f(weights, *args)
        return jax.tree.map(lambda x: x[None], sums), results

    # So that gradients are added up in float32; XLA for CPU also fails on sums of bfloat16 here.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
    rows = P(ROWS)
    sums, results = jax.shard_map(
        own, in_specs=(P(), *(rows for _ in args)), out_specs=rows, axis_names=set(ROWS),
        check_vma=False,
    )(wide, *args)  # fmt: skip
    return jax.tree.map(lambda x: x.sum(0), sums), results
