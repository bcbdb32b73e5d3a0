"""`--dry-run`: what a configuration takes, without weights and without the memory for them.

Models are shapes (`jax.eval_shape`), the very functions that would run are compiled for the mesh
(on CPU devices, as many as it wants), and what they plan is told. `training.dry_run` and
`cli.dry_run` say which functions those are.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3.config import ConfigError, GeneratedTarget, MeshConfig
from eagle3.draft import Eagle3Draft
from eagle3.draft_config import DraftConfig
from eagle3.generated import generated_target
from eagle3.hlo import Traffic, collectives
from eagle3.sharding import shardings
from gdn import HybridLM, TargetConfig
from gdn.published import NAMES, published_shape
from gdn.sharding import active_mesh
from gdn.tensor_files import CONFIG

_UNITS = {"": 1, "B": 1} | {f"{x}iB": 1 << 10 * i for i, x in enumerate("KMGT", 1)}
_UNITS |= {f"{x}B": 1000**i for i, x in enumerate("KMGT", 1)}
_OPTIONS = {
    # Fewer optimisations of machine code that never runs; what is planned stays.
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    # By default XLA for a CPU lets as much run at once as it can, and gathers the sharded weights
    # of all layers first.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


class Program(NamedTuple):
    """A compiled function."""

    name: str
    scratch: int  # bytes on each device beside arguments and results
    traffic: Traffic


class Plan(NamedTuple):
    """What a configuration takes."""

    title: str
    mesh: MeshConfig
    parameters: dict[str, int]
    flops: dict[str, float]  # per token
    memory: dict[str, int]  # bytes on each device, of what is there all the time
    programs: list[Program]

    def lines(self, device_memory: int | None) -> list[str]:
        """Return the report.

        Args:
          device_memory: bytes that a device has; None: nobody asked.
        """
        mesh, memory = self.mesh, dict(self.memory)
        memory["activations"] = max(program.scratch for program in self.programs)
        total = sum(memory.values())
        found = [
            f"{self.title}: data {mesh.data} * fsdp {mesh.fsdp} * tensor {mesh.tensor} ="
            f" {mesh.size} devices, compiled for CPU",
            "parameters: " + ", ".join(f"{k} {v:,}" for k, v in self.parameters.items()),
            "FLOPs per token: " + "; ".join(f"{k} {v:.3g}" for k, v in self.flops.items()),
            "on each device: " + ", ".join(f"{k} {size_text(v)}" for k, v in memory.items()),
        ]
        found += [f"collectives, {x.name}: {x.traffic}" for x in self.programs]
        fits = f"memory of a device: {size_text(total)}"
        if device_memory is not None:
            verdict = "fits" if total <= device_memory else "does not fit"
            fits += f" of {size_text(device_memory)}: {verdict}"
        return [*found, fits]


def parse_memory(text: str) -> int:
    """Return bytes, of such as 80GiB.

    Raises:
      ConfigError: it is no size.
    """
    match = re.fullmatch(r"([\d.]+) ?([KMGT]?i?B?)", text)
    with contextlib.suppress(ValueError):
        if match and match[2] in _UNITS:
            return int(float(match[1]) * _UNITS[match[2]])
    raise ConfigError(f"--device-memory is {text!r}, it must be a size such as 80GiB or 24GB")


def size_text(size: int) -> str:
    """Return bytes for people."""
    unit, name = (1 << 30, "GiB") if size >= 1 << 30 else (1 << 20, "MiB")
    return f"{size / unit:,.2f} {name}"


def pretend_devices(count: int) -> None:
    """Let JAX have so many CPU devices, unless it has started with those it has."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def target_shape(
    directory: str | None,
    generated: GeneratedTarget,
    made: Mapping[str, TargetConfig] | None = None,
) -> TargetConfig:
    """Find out what a target is.

    Args:
      made: by folder, what earlier stages of a run would leave there.

    Raises:
      ValueError: there is no config.json, and no released model has the folder's name.
    """
    if directory is None:
        return nnx.eval_shape(lambda: generated_target(generated, jnp.float32)).cfg
    if made and directory in made:
        return made[directory]
    if (Path(directory) / CONFIG).exists():
        return TargetConfig.from_hf(directory)
    if (found := published_shape(Path(directory).name)) is None:
        raise ConfigError(
            f"target {directory} has no {CONFIG}, and its name is none of {', '.join(NAMES)}: put"
            f" the {CONFIG} there, the weights are not needed"
        )
    return found


def abstract_target(cfg: TargetConfig, dtype: Any) -> HybridLM:
    """Make a target without memory."""
    return nnx.eval_shape(lambda: HybridLM(cfg, dtype=dtype, rngs=nnx.Rngs(0)))


def abstract_draft(cfg: DraftConfig, dtype: Any) -> Eagle3Draft:
    """Make a draft without memory."""

    def make():
        table = jnp.zeros((cfg.vocab_size, cfg.hidden_size), dtype)
        ids = np.arange(cfg.draft_vocab_size)
        return Eagle3Draft(cfg, table, ids, dtype=dtype, rngs=nnx.Rngs(0))

    return nnx.eval_shape(make)


def placed(tree: Any) -> Any:
    """Say of shapes where they would lie on the current mesh."""
    if active_mesh() is None:
        return tree
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        tree, shardings(tree),
    )  # fmt: skip


def number_of(tree: Any) -> int:
    """Count the entries of all arrays."""
    return sum(x.size for x in jax.tree.leaves(tree))


def bytes_of(tree: Any) -> int:
    """Return how much of arrays, or of what `placed` returned, lies on one device."""

    def size(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return int(np.prod(shape, dtype=np.int64)) * jax.dtypes.itemsize_bits(x.dtype) // 8

    return sum(map(size, jax.tree.leaves(tree)))


def compile_program(name: str, function: Any, *arguments: Any) -> Program:
    """Compile a jitted function for shapes."""
    compiled = function.lower(*arguments).compile(_OPTIONS)
    analysis = compiled.memory_analysis()
    return Program(name, analysis.temp_size_in_bytes, collectives(compiled.as_text()))


def tell(
    plans: Iterable[Plan], device_memory: str | None, report: Callable[[str], Any] = print
) -> None:
    """Print plans, one after the other, as they are made."""
    size = None if device_memory is None else parse_memory(device_memory)
    for plan in plans:
        report("\n".join(plan.lines(size)))
