"""From a TrainConfig to what the loop runs: models, data, what is told and what is left behind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3.config import ConfigError
from eagle3.digest import digest, directory_digest
from eagle3.draft import draft_for
from eagle3.draft_config import DraftConfig
from eagle3.files import write_whole
from eagle3.generated import generated_target
from eagle3.interop import save_draft
from eagle3.processes import first_goes_ahead, is_alone, is_first
from eagle3.sharding import check_shape, create, gathered, own_rows, place, place_module, spread
from eagle3.training import evaluate
from eagle3.training.config import TrainConfig
from eagle3.training.data.batches import Batch, Batches
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.data.dataset import TokenDataset, open_datasets
from eagle3.training.data.masking import Masker
from eagle3.training.evaluate import Evaluation
from eagle3.training.feature_cache import FeatureCache
from eagle3.training.features import FeaturedBatch, Features, head_rows, target_features
from eagle3.training.flops import draft_flops, target_flops
from eagle3.training.new_tokenizer import place_tokenizer
from eagle3.training.optim import make_optimizer
from eagle3.training.regenerate import regenerate
from eagle3.training.step import DraftTask, TargetTask, TrainState, cast
from eagle3.vocab import count_tokens, draft_vocabulary
from gdn import HybridLM, TargetConfig, load_pretrained, save_pretrained
from gdn.sharding import active_mesh

Report = Callable[[str], Any]
PROMPTS = "prompts.jsonl"  # held-out beginnings that choosing the best draft did not look at


class Job(NamedTuple):
    """What is trained, on what, and what becomes of it."""

    task: Any
    optimizer: Any
    state: TrainState  # before the first step
    frozen: Any
    batches: Batches
    take: Callable[[int, Batch], Any]  # step and its batch [A, B, T] -> what the task takes
    scalars: Callable[[Any], dict[str, float]]  # of the task's sums
    evaluate: Callable[[Any], Evaluation] | None  # of weights; None: there is no held-out text
    export: Callable[[Any], None]  # writes weights as a checkpoint for others
    flops: float  # operations of a step per token
    identity: dict[str, Any]  # digests of data and models


def build_job(config: TrainConfig, report: Report) -> Job:
    """Load or make models and data.

    Raises:
      ValueError: a file or a value cannot be used.
    """
    if config.eval.prompts and not is_alone():
        raise ConfigError(
            f"eval.prompts is {config.eval.prompts}, but decoding is for one process: set it to 0,"
            " the best weights are then those with the best held-out loss or simulated tau"
        )
    if config.data.feature_cache and not is_alone():
        raise ConfigError("data.feature_cache is for one process: leave it empty for several")
    return (_target_job if config.task == "target" else _draft_job)(config, report)


def _target_job(config: TrainConfig, report: Report) -> Job:
    if config.target is None:
        vocab_size, load = config.generated.vocab_size, None
    else:
        load = load_pretrained(config.target, jnp.float32)
        vocab_size = load.cfg.vocab_size
    with first_goes_ahead():
        tokenizer = place_tokenizer(config, vocab_size, report)
    masker = Masker.load(tokenizer, vocab_size)
    datasets = _open(config.data, masker, report)
    model = load or generated_target(config.generated, jnp.float32, masker.tokenizer.end_ids)
    cfg = model.cfg
    check_shape(config.mesh, cfg)
    model = place_module(model)
    _check_tokens(config, cfg, datasets)
    graph, params, _ = _split(model)
    half = jax.eval_shape(lambda: HybridLM(cfg, dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(0)))
    dtypes = tuple(x.dtype for x in jax.tree.leaves(_split(half)[1]))
    task = TargetTask(graph, dtypes)
    held, held_data = _heldout(config, masker, report)
    prompts = _prompts(config, held_data, cfg)

    def evaluate_target(params: Any) -> Evaluation:
        sums = evaluate.heldout_sums(task, params, (), held)
        scalars = evaluate.target_scalars(sums)
        line = f"held-out loss {scalars['loss']:.3f}, accuracy {scalars['accuracy']:.1%}"
        return Evaluation(scalars, -scalars["loss"], line, texts=sample(params))

    def sample(params: Any) -> dict[str, str]:
        if not prompts:
            return {}
        answers = evaluate.decode_prompts(
            nnx.merge(graph, params), None, prompts[:1], None, config.eval.max_new_tokens,
            masker.tokenizer.end_ids,
        )  # fmt: skip
        return {"sample": masker.tokenizer.decode([*prompts[0], *answers[0].tokens])}

    def export(params: Any) -> None:
        params = gathered(params)
        if is_first():
            save_pretrained(nnx.merge(graph, params), config.out)

    return Job(
        task=task,
        optimizer=(optimizer := make_optimizer(config.optim, config.steps)),
        state=_first_state(params, optimizer, config.optim.ema),
        frozen=(),
        batches=Batches(config.data, datasets),
        take=lambda step, batch: spread(batch, config.data.batch_size),
        scalars=evaluate.target_scalars,
        evaluate=None if not held else evaluate_target,
        export=export,
        flops=3 * target_flops(cfg, config.data.length),
        identity=_identity(config, datasets),
    )


def _draft_job(config: TrainConfig, report: Report) -> Job:
    assert config.target is not None
    if not Path(config.target).is_dir():
        raise ConfigError(f"target {config.target} is no directory: train or download it first")
    dtype = jnp.dtype(config.dtype)
    target_cfg = TargetConfig.from_hf(config.target)
    cfg = config.draft.for_target(target_cfg)
    check_shape(config.mesh, target_cfg)
    check_shape(config.mesh, cfg)
    masker = Masker.load(config.target, target_cfg.vocab_size)
    # Before the target is loaded here: answering loads it too.
    data = regenerate(config, masker, report) if config.regenerate.rows else config.data
    datasets = _open(data, masker, report)
    _check_tokens(config, target_cfg, datasets)
    target = load_pretrained(config.target, dtype)
    counts = sum(count_tokens(d.tokens, d.mask, cfg.vocab_size) for d in datasets.values())
    vocabulary = draft_vocabulary(
        np.asarray(counts), cfg.draft_vocab_size, masker.tokenizer.control_ids
    )
    report(str(vocabulary))
    draft = draft_for(target, cfg, vocabulary.target_ids, rngs=nnx.Rngs(config.draft.seed))
    graph, params, tables = _split(draft)
    dtypes = tuple(x.dtype for x in jax.tree.leaves(params))
    params = place(jax.tree.map(lambda x: jnp.array(x, jnp.float32), params))
    ttt = config.ttt
    task = DraftTask(graph, dtypes, ttt.steps, ttt.decay, ttt.loss, ttt.keep_unknown, ttt.remat)
    rows = head_rows(target, jnp.asarray(vocabulary.target_ids))
    frozen = (place(tables), place({"head_rows": rows})["head_rows"])
    target_graph, target_params, _ = _split(target)

    def look(batch: Batch, count: int = config.data.batch_size) -> FeaturedBatch:
        batch = spread(batch, count)
        features = target_features(target_graph, target_params, cfg.aux_layers, batch)
        return FeaturedBatch(batch, features)

    batches = Batches(data, datasets)
    identity = _identity(config, datasets)
    cache = _feature_cache(config, cfg, identity, batches.num_rows, dtype, report)

    def take(step: int, batch: Batch) -> FeaturedBatch:
        if cache is None:
            return look(batch)
        first = step * config.accumulate
        rows = np.stack([batches.rows_at(first + i) for i in range(config.accumulate)])

        def look_at(places: np.ndarray) -> Features:
            flat = (x.reshape(-1, *x.shape[2:]) for x in batch)
            return look(Batch(*(x[places] for x in flat)), places.shape[1]).features

        features = cache.features(rows, look_at)
        return spread(FeaturedBatch(batch, features))

    def merged(params: Any):
        return nnx.merge(graph, cast(params, dtypes), tables)

    held, held_data = _heldout(config, masker, report)
    prompts = _prompts(config, held_data, target.cfg)
    if held and len(prompts) < config.eval.prompts:
        report(
            f"eval.prompts: {len(prompts)} of {config.eval.prompts} found; held-out texts need more"
            f" than {config.eval.prompt_tokens} tokens (eval.prompt_tokens), or an answer"
        )
    _write_prompts(config, held_data, target.cfg, masker)
    plan = config.eval.tree.plan()

    def evaluate_draft(params: Any) -> Evaluation:
        sums = evaluate.heldout_sums(task, params, frozen, map(look, held))
        scalars = evaluate.draft_scalars(sums)
        tau = scalars["tau_simulated"]
        line = f"held-out simulated tau {tau:.2f}"
        if not prompts:
            return Evaluation(scalars, tau, line)
        answers = evaluate.decode_prompts(
            target, merged(params), prompts, plan, config.eval.max_new_tokens,
            masker.tokenizer.end_ids,
        )  # fmt: skip
        tau, by_depth = evaluate.acceptance(answers, plan.depth)
        sample = masker.tokenizer.decode([*prompts[0], *answers[0].tokens])
        return Evaluation(
            scalars | {"tau_real": tau}, tau, f"{line}, real tau {tau:.2f}",
            {"acceptance_by_depth": by_depth}, {"sample": sample},
            evaluate.acceptance_picture(by_depth, tau),
        )  # fmt: skip

    def export(params: Any) -> None:
        params, own_tables = gathered((cast(params, dtypes), tables)) or (None, None)
        if is_first():
            draft = nnx.merge(graph, params, own_tables)
            save_draft(draft, config.out, config.draft.layout, target_name=config.target)

    length = config.data.length
    return Job(
        task=task,
        optimizer=(optimizer := make_optimizer(config.optim, config.steps)),
        state=_first_state(params, optimizer, config.optim.ema),
        frozen=frozen,
        batches=batches,
        take=take,
        scalars=evaluate.draft_scalars,
        evaluate=None if not held else evaluate_draft,
        export=export,
        flops=3 * draft_flops(cfg, length, config.ttt.steps) + target_flops(target.cfg, length),
        identity=identity | {"draft_vocabulary": digest(vocabulary.target_ids.tolist())},
    )


def _feature_cache(
    config: TrainConfig, cfg: DraftConfig, identity: Any, rows: int, dtype: Any, report: Report
) -> FeatureCache | None:
    data = config.data
    if not data.feature_cache:
        return None
    parts = [identity, cfg.aux_layers, data.packing, jax.default_backend()]
    return FeatureCache(
        data.feature_cache, digest(parts), num_rows=rows, length=data.length, num_aux=cfg.num_aux,
        width=cfg.target_hidden_size, dtype=dtype, limit_gb=data.feature_cache_gb,
        share=data.share, in_parts=active_mesh() is None, report=report,
    )  # fmt: skip


def _heldout(
    config: TrainConfig, masker: Masker, report: Report
) -> tuple[list[Batch], dict[str, TokenDataset]]:
    """Return batches [1, B, T] of what is not trained on, and all of it; nothing if none is there.

    It is text as it was found, also where the answers that are trained on were made.
    """
    sources = dict(config.eval.sources)
    trained = config.data.named_sources.values()
    if not sources and all(s.kind == "stdlib" and s.split != "heldout" for s in trained):
        sources = {"heldout": SourceConfig(split="heldout")}
    if not sources:
        report("no eval.sources: nothing is measured on held-out text, the last weights are kept")
        return [], {}
    held = dataclasses.replace(config.data, sources=sources, share=1.0)
    datasets = _open(held, masker, report)
    batches = Batches(held, datasets)
    count = config.data.batch_size
    own = own_rows(count)
    made = (batches.batch_at(number, own) for number in range(config.eval.batches))
    return [spread(Batch(*(x[None] for x in batch)), count) for batch in made], datasets


def _open(data: DataConfig, masker: Masker, report: Report) -> dict[str, TokenDataset]:
    """Return the sources; of several processes, the first one tokenises them."""
    with first_goes_ahead():
        return open_datasets(data, masker, report)


def _check_tokens(
    config: TrainConfig, cfg: TargetConfig, datasets: dict[str, TokenDataset]
) -> None:
    """Refuse rows that the target cannot read."""
    largest = max(int(d.tokens.max()) for d in datasets.values())
    if largest >= cfg.vocab_size:
        raise ConfigError(
            f"the data has token {largest}, the target has {cfg.vocab_size}: the tokenizer is not"
            " the target's, or generated.vocab_size is too small for it"
        )
    if config.data.length > cfg.max_position_embeddings:
        raise ConfigError(
            f"data.length is {config.data.length}, the target has {cfg.max_position_embeddings}"
            " positions: lower it"
        )


def _prompts(
    config: TrainConfig, held: dict[str, TokenDataset], cfg: TargetConfig, skip: int = 0
) -> list[list[int]]:
    """Return held-out beginnings that leave room for what is decoded after them."""
    sizes = config.eval
    room = cfg.max_position_embeddings - sizes.max_new_tokens
    if held and sizes.prompts and room < sizes.prompt_tokens:
        raise ConfigError(
            f"eval.prompt_tokens {sizes.prompt_tokens} and eval.max_new_tokens"
            f" {sizes.max_new_tokens} are more than the {cfg.max_position_embeddings} positions of"
            " the target: lower one of them"
        )
    return evaluate.beginnings(held, sizes.prompts, sizes.prompt_tokens, room, skip)


def _write_prompts(
    config: TrainConfig, held: dict[str, TokenDataset], cfg: TargetConfig, masker: Masker
) -> None:
    """Leave prompts for `decode.py --compare` that choosing the best draft did not look at."""
    prompts = _prompts(config, held, cfg, skip=config.eval.prompts)
    if not is_first():
        return
    lines = [json.dumps({"prompt": masker.tokenizer.prompt_of(ids)}) for ids in prompts]
    path = Path(config.out) / PROMPTS
    if not prompts:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(line + "\n" for line in lines))


def _split(module: nnx.Module) -> tuple[Any, Any, Any]:
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def _first_state(params: Any, optimizer: Any, ema: float) -> TrainState:
    average = jax.tree.map(jnp.copy, params) if ema else None
    moments = create(optimizer.init, params)
    return TrainState(place(jnp.int32(0)), params, moments, average)


def _identity(config: TrainConfig, datasets: dict[str, TokenDataset]) -> dict[str, Any]:
    found: dict[str, Any] = {"data": {name: d.fingerprint for name, d in datasets.items()}}
    if config.target is not None:
        found["target"] = directory_digest(config.target)
    return found
