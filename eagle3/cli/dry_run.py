"""What decoding takes; see `eagle3.dry_run`."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3.config import DecodeConfig
from eagle3.decoding.accept import Limits
from eagle3.decoding.drafter import NoDraft
from eagle3.decoding.generate import make_drafter
from eagle3.decoding.sampling import batch_sampling
from eagle3.decoding.speculate import DecodeState, Requests, merge, run_prefill, run_rounds, split
from eagle3.draft_config import DraftConfig
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
from eagle3.interop import draft_shape
from eagle3.sharding import check_shape, on_mesh
from eagle3.training.config import DraftShape
from eagle3.training.flops import draft_flops, target_flops
from gdn import TargetConfig, init_cache
from gdn.packing import Packer
from gdn.tensor_files import CONFIG


def plan_decoding(config: DecodeConfig) -> Plan:
    """Plan decoding of full batches, whose rows hold a chunk of prompt and the longest answer.

    Raises:
      ValueError: a model is not known, or does not fit the mesh.
    """
    cfg = target_shape(config.target, config.generated)
    draft_cfg = None
    if config.draft is not None and config.method != "autoregressive":
        draft_cfg = _draft_shape(config.draft, cfg)
    with on_mesh(config.mesh):
        for one in (cfg, draft_cfg):
            if one is not None:
                check_shape(config.mesh, one)
        return _plan(config, cfg, draft_cfg)


def _draft_shape(directory: str, target: TargetConfig) -> DraftConfig:
    """Read the shape of a draft; one that is still to be trained has the usual one."""
    if (Path(directory) / CONFIG).exists():
        return draft_shape(directory, target)
    return DraftShape(vocab_size=min(32000, target.vocab_size)).for_target(target)


def _plan(config: DecodeConfig, cfg: TargetConfig, draft_cfg: DraftConfig | None) -> Plan:
    dtype = Packer(config.dtype, native=False).load_dtype
    batch, chunk = config.batch_size, config.prefill_chunk
    capacity = 1 << (chunk + config.max_new_tokens - 1).bit_length()
    parameters = {"target": cfg.num_parameters()}
    models: Any = abstract_target(cfg, dtype), NoDraft()
    if draft_cfg is not None:
        kept = Packer(config.draft_dtype or config.dtype, native=False).load_dtype
        draft = abstract_draft(draft_cfg, kept)
        parameters["draft"] = number_of(nnx.state(draft, nnx.Param))
        # A tree that adapts is at most as large, and what rounds cost is not known here.
        plan = dataclasses.replace(config.tree.plan(), adapts=False)
        models = models[0], make_drafter("eagle3", draft, plan)
    graph, params = split(*models)
    params = placed(params)
    cache = placed(jax.eval_shape(lambda: init_cache(cfg, batch, capacity, dtype)))
    draft_state = placed(
        jax.eval_shape(lambda x: merge(graph, x)[1].init_state(batch, capacity), params)
    )
    numbers: Any = jax.ShapeDtypeStruct((batch,), jnp.int32)
    requests = _requests(config, cfg)
    counts: Any = None
    if requests.sampling.counts_tokens:
        counts = jax.ShapeDtypeStruct((batch, cfg.vocab_size), jnp.int32)
    is_running: Any = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    state = placed(DecodeState(cache, draft_state, numbers, numbers, is_running, counts))
    tokens = jax.ShapeDtypeStruct((batch, chunk), jnp.int32)
    every = config.stream_every
    programs = [
        compile_program(
            f"prefill of {chunk} tokens a row",
            run_prefill, graph, params, cache, draft_state, tokens, tokens, numbers,
        ),
        compile_program(
            f"round of {config.tree.plan().size if draft_cfg else 1} nodes a row",
            run_rounds, graph, params, state, requests, jnp.int32(every), every,
        ),
    ]  # fmt: skip
    memory = {"weights": _weights(params), "caches": bytes_of(state)}
    flops = {f"target after {capacity:,}": target_flops(cfg, capacity)}
    if draft_cfg is not None:
        flops["draft"] = draft_flops(draft_cfg, capacity, 1)
    title = f"decode, {batch} rows of {capacity:,} tokens"
    return Plan(title, config.mesh, parameters, flops, memory, programs)


def _weights(params: Any) -> int:
    """Return bytes on a device, the embedding that a draft shares counted once."""
    target, drafter = params[0], params[1]
    shared = drafter.get("draft", {}).get("embed_tokens")
    return bytes_of((target, drafter)) - (0 if shared is None else bytes_of(shared))


def _requests(config: DecodeConfig, cfg: TargetConfig) -> Requests:
    """Make what the rows of a batch ask for; this much is small enough to be real."""
    batch = config.batch_size
    sampling = batch_sampling([config.sampling.params()] * batch, [[0]] * batch, cfg.vocab_size)
    most = np.full(batch, config.max_new_tokens, np.int32)
    return Requests(sampling, Limits(jnp.full((batch, 4), -1, jnp.int32), jnp.asarray(most)))
