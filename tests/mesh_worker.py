"""Runs on eight forced CPU devices what `test_mesh.py` makes claims about; prints one JSON.

A process of its own, because the number of devices is fixed when JAX starts.
"""

import json
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import QWEN3_NEXT, random_draft, random_model

from eagle3.config import MeshConfig
from eagle3.decoding.drafter import Eagle3Drafter
from eagle3.decoding.request import Request
from eagle3.decoding.session import Session
from eagle3.decoding.tree import dynamic_plan
from eagle3.dry_run import abstract_target, bytes_of, placed
from eagle3.sharding import abstract, create, on_mesh, place, place_module, shardings, spread
from eagle3.training.checkpoint import Checkpoints
from eagle3.training.data.batches import Batch
from eagle3.training.features import FeaturedBatch, head_rows, target_features
from eagle3.training.optim import OptimConfig, make_optimizer
from eagle3.training.step import DraftTask, TargetTask, TrainState, train_step
from gdn.sharding import row_shards

ROWS, LENGTH, STEPS = 8, 16, 3
OPTIMIZER = make_optimizer(OptimConfig(lr=1e-3), 100)
TAPS = tuple(range(QWEN3_NEXT.num_hidden_layers + 1))  # as random_draft has them
MESHES = {
    "one": MeshConfig(),
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(fsdp=8),
    "all": MeshConfig(data=2, fsdp=2, tensor=2),
}
# Compiling takes the time. `all` has every axis; a draft is also resumed on fsdp.
TRAINED = {"target": ("one", "all"), "draft": ("one", "fsdp", "all")}


def batch_of(step: int) -> Batch:
    """Rows of two documents each, some tokens not trained on."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, QWEN3_NEXT.vocab_size, (1, ROWS, LENGTH)).astype(np.int32)
    segments = 1 + (np.arange(LENGTH) >= rng.integers(3, 13, (1, ROWS, 1))).astype(np.int32)
    return Batch(tokens, rng.random(tokens.shape) < 0.8, segments)


def split(module: nnx.Module) -> tuple[Any, Any, Any]:
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


TARGET = random_model(QWEN3_NEXT)
DRAFT = random_draft(TARGET)


class Training:
    """A target or a draft that is trained on the current mesh."""

    def __init__(self, kind: str):
        target = place_module(TARGET)
        self._graph, self._weights, _ = split(target)
        module = target if kind == "target" else place_module(DRAFT)
        graph, params, tables = split(module)
        dtypes = tuple(x.dtype for x in jax.tree.leaves(params))
        if kind == "target":
            self._task, self._frozen = TargetTask(graph, dtypes, rows=24), ()
        else:
            self._task = DraftTask(graph, dtypes, steps=2)
            rows = place({"head_rows": head_rows(target, tables["target_ids"])})
            self._frozen = (tables, rows["head_rows"])
        params = jax.tree.map(jnp.copy, params)
        self.state = TrainState(place(jnp.int32(0)), params, create(OPTIMIZER.init, params), None)

    def run(self, first: int, last: int) -> list[float]:
        """Return the losses, and the norms of the gradients, of some steps."""
        found = []
        for step in range(first, last):
            batch: Any = spread(batch_of(step))
            if isinstance(self._task, DraftTask):
                features = target_features(self._graph, self._weights, TAPS, batch)
                batch = FeaturedBatch(batch, features)
            self.state, metrics = train_step(self._task, OPTIMIZER, self.state, self._frozen, batch)
            found += [float(metrics.loss), float(metrics.gradient_norm)]
        return found


def lies_as_the_table_says(tree: Any) -> bool:
    wanted = jax.tree.leaves(shardings(tree))
    pairs = zip(jax.tree.leaves(tree), wanted, strict=True)
    return all(x.sharding.is_equivalent_to(w, x.ndim) for x, w in pairs)


def losses() -> dict[str, Any]:
    found: dict[str, Any] = {}
    compiled: Any = train_step
    for kind, names in TRAINED.items():
        for name in names:
            with on_mesh(MESHES[name]):
                before = compiled._cache_size()
                training = Training(kind)
                values = training.run(0, STEPS)
                found[f"{kind} {name}"] = {
                    "values": values,
                    "programs": compiled._cache_size() - before,
                    "lies": name == "one" or lies_as_the_table_says(training.state),
                }
    return found


def resumed() -> list[list[float]]:
    """Train a draft two steps on one mesh and one on another; and all of them on the first."""
    with tempfile.TemporaryDirectory() as folder:
        with on_mesh(MESHES["all"]):
            training = Training("draft")
            training.run(0, STEPS - 1)
            with Checkpoints(folder, keep_last=1) as checkpoints:
                checkpoints.save(training.state, {"steps": STEPS})
                straight = training.run(STEPS - 1, STEPS)  # gives away what is being saved
        with on_mesh(MESHES["fsdp"]), Checkpoints(folder, keep_last=1) as checkpoints:
            training = Training("draft")
            training.state = checkpoints.load(abstract(training.state))
            return [straight, training.run(STEPS - 1, STEPS)]


def decoded() -> dict[str, Any]:
    found = {}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, size).tolist() for size in (5, 9, 14, 3)]
    for name in ("one", "all"):
        with on_mesh(MESHES[name]):
            plan = dynamic_plan(top_k=2, depth=2, total_tokens=5)
            drafter = Eagle3Drafter(place_module(DRAFT), plan)
            session = Session(place_module(TARGET), drafter, min_capacity=64, stream_every=4)
            session.start([Request(prompt=p, max_new_tokens=24) for p in prompts])
            while session.is_running:
                session.advance()
            found[name] = {
                "tokens": [answer.tokens for answer in session.answers],
                "lies": name == "one" or lies_as_the_table_says(session._state),
            }
    return found


def planned() -> dict[str, list[int]]:
    """Return bytes of the weights on one device, planned and held, and how 8 and 3 rows split."""
    found = {}
    for name, mesh in MESHES.items():
        with on_mesh(mesh):
            _, params, _ = split(place_module(TARGET))
            here = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params)]
            plan = placed(split(abstract_target(QWEN3_NEXT, jnp.float32))[1])
            found[name] = [bytes_of(plan), sum(here), row_shards(8), row_shards(3)]
    return found


def main() -> None:
    parts = {"losses": losses, "resumed": resumed, "decoded": decoded, "planned": planned}
    wanted = sys.argv[1:] or list(parts)
    print(json.dumps({"devices": jax.device_count()} | {name: parts[name]() for name in wanted}))


if __name__ == "__main__":
    main()
