"""What a training run takes; see `eagle3.dry_run`."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from eagle3.dry_run import (
    Plan,
    abstract_draft,
    abstract_target,
    bytes_of,
    compile_program,
    number_of,
    placed,
    target_shape,
)
from eagle3.sharding import check_shape, on_mesh
from eagle3.training.config import TrainConfig
from eagle3.training.data.batches import Batch
from eagle3.training.features import FeaturedBatch, target_features
from eagle3.training.flops import draft_flops, target_flops
from eagle3.training.optim import make_optimizer
from eagle3.training.step import DraftTask, TargetTask, TrainState, train_step
from gdn import TargetConfig
from gdn.sharding import ROWS, active_mesh, fitted


def plan_stages(stages: Mapping[str, TrainConfig]) -> Iterator[Plan]:
    """Plan each stage; a draft's target may be one that an earlier stage would train.

    Raises:
      ValueError: a target is not known, or does not fit the mesh.
    """
    made: dict[str, TargetConfig] = {}
    for name, config in stages.items():
        cfg = target_shape(config.target, config.generated, made)
        if config.task == "target":
            made[config.out] = cfg
        with on_mesh(config.mesh):
            check_shape(config.mesh, cfg)
            title = f"{name}: {config.task}" if name else config.task
            yield (_plan_target if config.task == "target" else _plan_draft)(config, cfg, title)


def _plan_target(config: TrainConfig, cfg: TargetConfig, title: str) -> Plan:
    graph, params, _ = nnx.split(abstract_target(cfg, jnp.dtype(config.dtype)), nnx.Param, ...)
    params, dtypes = _trained(nnx.to_pure_dict(params))
    optimizer, state = _optimizer_state(config, params)
    task, batch = TargetTask(graph, dtypes), _batch(config)
    step = compile_program("step", train_step, task, optimizer, state, (), batch, config.optim.ema)
    flops = target_flops(cfg, config.data.length)
    return Plan(
        title, config.mesh, {"target": number_of(params)}, {"trained": 3 * flops},
        _memory({}, state, batch), [step],
    )  # fmt: skip


def _plan_draft(config: TrainConfig, target_cfg: TargetConfig, title: str) -> Plan:
    cfg, dtype = config.draft.for_target(target_cfg), jnp.dtype(config.dtype)
    check_shape(config.mesh, cfg)
    target_graph, weights, _ = nnx.split(abstract_target(target_cfg, dtype), nnx.Param, ...)
    weights = placed(nnx.to_pure_dict(weights))
    graph, params, tables = nnx.split(abstract_draft(cfg, dtype), nnx.Param, ...)
    params, dtypes = _trained(nnx.to_pure_dict(params))
    optimizer, state = _optimizer_state(config, params)
    rows = jax.ShapeDtypeStruct((cfg.draft_vocab_size, cfg.target_hidden_size), dtype)
    rows = placed({"head_rows": rows})["head_rows"]
    batch, ttt = _batch(config), config.ttt
    look = (target_graph, weights, cfg.aux_layers, batch)
    features = _by_rows(jax.eval_shape(target_features, *look))
    featured = FeaturedBatch(batch, features)
    task = DraftTask(graph, dtypes, ttt.steps, ttt.decay, ttt.loss, ttt.keep_unknown, ttt.remat)
    frozen = (placed(nnx.to_pure_dict(tables)), rows)
    programs = [
        compile_program("target", target_features, *look),
        compile_program(
            "step", train_step, task, optimizer, state, frozen, featured, config.optim.ema
        ),
    ]
    length = config.data.length
    forward = target_flops(target_cfg, length)
    flops = {"target": forward, "draft, trained": 3 * draft_flops(cfg, length, ttt.steps)}
    parameters = {"target": number_of(weights), "draft": number_of(params)}
    fixed = {"target": bytes_of((weights, rows))}  # the embedding is the target's own
    return Plan(
        title, config.mesh, parameters, flops, _memory(fixed, state, featured), programs
    )  # fmt: skip


def _trained(params: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the weights as they are trained, and the dtypes that are computed in."""
    dtypes = tuple(x.dtype for x in jax.tree.leaves(params))
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
    return placed(whole), dtypes


def _optimizer_state(config: TrainConfig, params: Any) -> tuple[Any, TrainState]:
    optimizer = make_optimizer(config.optim, config.steps)
    moments = placed(jax.eval_shape(optimizer.init, params))
    step = placed(jax.ShapeDtypeStruct((), jnp.int32))
    average = params if config.optim.ema else None
    return optimizer, TrainState(step, params, moments, average)


def _batch(config: TrainConfig) -> Batch:
    shape = (config.accumulate, config.data.batch_size, config.data.length)
    kinds = (jnp.int32, jnp.bool_, jnp.int32)
    return _by_rows(Batch(*(jax.ShapeDtypeStruct(shape, kind) for kind in kinds)))


def _by_rows(batch: Any) -> Any:
    """Say of pieces of a batch, [A, B, ...], that devices have their rows."""
    if active_mesh() is None:
        return batch
    mesh = jax.sharding.get_mesh()

    def of(x: Any) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, fitted((None, ROWS), x.shape))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return jax.tree.map(of, batch)


def _memory(fixed: dict[str, int], state: TrainState, batch: Any) -> dict[str, int]:
    return fixed | {
        "trained weights": bytes_of(state.params),
        "optimiser": bytes_of((state.optimizer, state.average)),
        "batch": bytes_of(batch),
    }
