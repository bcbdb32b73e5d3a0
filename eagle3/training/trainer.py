"""The loop: batch, step, log, evaluate, save; and how a run goes on where it stopped.

A run is a directory. `checkpoints/` holds all that a step changes, so that a run in pieces is the
run in one, bit for bit; the model's files are those of the best evaluation so far; `tensorboard/`
is what it told; `train.yaml` the configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3.config_reader import to_yaml
from eagle3.digest import digest
from eagle3.files import write_whole
from eagle3.interrupt import Interrupt
from eagle3.processes import Agreement, anyone, ending_together, is_first
from eagle3.sharding import abstract, on_mesh, own_rows
from eagle3.training.checkpoint import Checkpoints
from eagle3.training.config import TrainConfig
from eagle3.training.data.batches import PADDING, Batch
from eagle3.training.data.prefetch import Prefetcher
from eagle3.training.flops import measured_peak
from eagle3.training.jobs import Job, Report, build_job
from eagle3.training.metrics import Metrics
from eagle3.training.optim import OptimConfig, hold_end, learning_rate, same_rates
from eagle3.training.run_log import NotFiniteError, RunLog
from eagle3.training.step import TrainState, train_step

CHECKPOINTS = "checkpoints"  # below the directory of a run
_BEST = "best.json"
# What a run may be resumed with another value of: where things are, and what is looked at when.
_FREE = ("out", "target", "tokenizer", "eval", "save", "log_every", "profile_from")
_FREE += ("profile_steps", "peak_tflops", "mesh")
# What may change while it makes no difference to the steps that were taken.
_PLAN = ("config.steps", "config.optim.schedule", "config.optim.warmup", "config.optim.decay")
_FREE_DATA = ("cache", "feature_cache", "feature_cache_gb", "prefetch")
# What has no part in a task.
_UNUSED = {"target": ("draft", "ttt", "regenerate"), "draft": ("generated",)}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def train(config: TrainConfig, report: Report = print) -> bool:
    """Train, or go on; returns False if a signal ended it between two steps, after saving.

    Raises:
      ValueError: data, models or checkpoints cannot be used, the loss is not finite, or the disk is
        full; checkpoints that were there stay. One of several processes ends in place of this.
    """
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack, ending_together():
        stack.enter_context(on_mesh(config.mesh))
        save = config.save
        checkpoints = stack.enter_context(
            Checkpoints(out / CHECKPOINTS, save.keep_last, save.keep_every or None, [_held(config)])
        )
        job = build_job(config, report)
        recorded = _recorded(config, job)
        like, state = abstract(job.state), job.state
        job = job._replace(state=None)  # nobody else holds it, so that it can be given away
        is_new = checkpoints.latest() is None
        if not is_new:
            _refuse_contradictions(checkpoints, recorded)
            del state  # room for the other
            state = checkpoints.load(like)
            report(f"{config.out}: going on after step {int(state.step)} of {config.steps}")
        if is_first():
            write_whole(out / "train.yaml", to_yaml(config))
        metrics = stack.enter_context(Metrics(out / "tensorboard" if is_first() else None))
        if is_new:
            metrics.text(0, "config", to_yaml(config))
        # Before this, signals end the run at once: what was prepared is in caches.
        interrupt = stack.enter_context(Interrupt(SIGNALS))
        best = _Best(out, job, _measures(config), is_new, int(state.step))
        run = _Run(config, job, checkpoints, metrics, best, recorded, interrupt, report)
        return run.steps(state, is_new)


def _held(config: TrainConfig) -> int:
    """Return the step whose checkpoint stays because longer runs may go on from it; 0: none."""
    return hold_end(config.optim, config.steps) if config.optim.schedule == "wsd" else 0


def _measures(config: TrainConfig) -> tuple[str, str]:
    """Return digests of how weights are scored: without how often, and as older runs have it."""
    values = dataclasses.asdict(config.eval)
    before = digest(values)
    del values["every"]
    return digest(values), before


def _recorded(config: TrainConfig, job: Job) -> dict[str, Any]:
    """Return all that decides the weights, as JSON has it."""
    values = dataclasses.asdict(config)
    for name in (*_FREE, *_UNUSED[config.task]):
        del values[name]
    for name in _FREE_DATA:
        del values["data"][name]
    for source in values["data"]["sources"].values():  # its content is in the identity
        del source["files"], source["streaming"]
    if "regenerate" in values:
        del values["regenerate"]["batch_size"]
    return json.loads(json.dumps({"config": values, "identity": job.identity}))


def _refuse_contradictions(checkpoints: Checkpoints, now: dict[str, Any]) -> None:
    """Compare with what the newest checkpoint was made with.

    Raises:
      ValueError: naming every field that differs, with both values.
    """
    found, step = checkpoints.config(), checkpoints.latest()
    assert step is not None
    free = _PLAN if _is_one_plan(found["config"], now["config"], step) else ()
    before, now = _flat(found), _flat(now)
    # A field that is younger than the checkpoint had its default then; a source had none.
    values = {"config": dataclasses.asdict(TrainConfig(out="any", target="another"))}
    defaults = _flat(json.loads(json.dumps(values)))
    before = {name: defaults[name] for name in now.keys() & defaults.keys()} | before
    names = [
        name
        for name in sorted(before.keys() | now.keys())
        if name not in free and before.get(name) != now.get(name)
    ]
    if names:
        wrong = [
            f"{name.removeprefix('config.')} was {before.get(name)!r} and is {now.get(name)!r}"
            for name in names
        ]
        hint = ""
        if set(names) <= set(_PLAN):
            hint = (
                f". The {step} steps that were taken would have had other learning rates: give"
                " optim.warmup as a number of steps, or remove the folders of checkpoints from"
                " after the rate began to fall"
            )
        raise ValueError(
            f"{checkpoints.directory} was made with another configuration: {'; '.join(wrong)}."
            f" Set these back to go on, or choose another out to start anew{hint}"
        )


def _is_one_plan(a: dict[str, Any], b: dict[str, Any], step: int) -> bool:
    """Tell whether two plans of the learning rate are one as far as they were carried out."""
    try:
        plans = [(OptimConfig(**values["optim"]), values["steps"]) for values in (a, b)]
    except (TypeError, KeyError):  # of another version
        return False
    return same_rates(*plans[0], *plans[1], step)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return found


class _Best:
    """The best weights so far, exported; survives a restart."""

    def __init__(self, out: Path, job: Job, measures: Sequence[str], is_new: bool, step: int):
        """Go on from the files of an earlier start.

        Args:
          step: that the run goes on from; later ones, if there were any, will be made anew.
          measures: digests of how scores are made, the first one written; those of others cannot
            be compared.
        """
        self._out, self._job, self._measure = out, job, measures[0]
        self._file = out / _BEST
        self._step = self.evaluated = -1
        self.score: float | None = None
        # A kill in the middle of an export leaves no config.json: then nothing is there.
        if not is_new and self._file.exists() and self.is_exported:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            if found.get("measure") in measures:
                self._step, self.score = found["step"], found["score"]
                self.evaluated = found["evaluated"] if found["evaluated"] <= step else -1

    @property
    def is_exported(self) -> bool:
        """Tell whether the model's files are there."""
        return (self._out / "config.json").exists()

    def offer(self, step: int, params: Any, score: float) -> bool:
        """Export the weights if they are better than those before.

        Raises:
          NotFiniteError: the score is not a number.
        """
        if not math.isfinite(score):
            raise NotFiniteError(f"the evaluation after step {step} gives {score}")
        is_best = self.score is None or score > self.score
        if is_best:
            self._job.export(params)
            self._step, self.score = step, score
        self._note(step)
        return is_best

    def keep(self, step: int, params: Any) -> None:
        """Export the weights, which nothing tells better or worse."""
        self._job.export(params)
        self._step = step
        self._note(step)

    def _note(self, step: int) -> None:
        self.evaluated = step
        found = {"step": self._step, "score": self.score, "evaluated": step}
        text = json.dumps(found | {"measure": self._measure}) + "\n"
        if is_first():
            write_whole(self._file, text)


class _Run:
    """The parts of one call of `train`, so that the loop reads as what it does."""

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        checkpoints: Checkpoints,
        metrics: Metrics,
        best: _Best,
        recorded: dict[str, Any],
        interrupt: Interrupt,
        report: Report,
    ):
        self._config, self._job, self._checkpoints = config, job, checkpoints
        self._metrics, self._best, self._recorded = metrics, best, recorded
        self._interrupt, self._report = interrupt, report
        self._is_traced = False
        self._held = _held(config)
        self._own = own_rows(config.data.batch_size)  # here: a thread does not know the mesh

    def steps(self, state: TrainState, is_new: bool) -> bool:
        """Run to the end or to an interrupt; returns whether it is the end."""
        config, job = self._config, self._job
        first = int(state.step)
        peak = config.peak_tflops * 1e12 or measured_peak(jnp.dtype(config.dtype))
        log = RunLog(
            self._metrics, self._report, first=first, total=config.steps, every=config.log_every,
            scalars=job.scalars, rate=learning_rate(config.optim, config.steps), flops=job.flops,
            peak=peak * config.mesh.size,
        )  # fmt: skip
        with contextlib.closing(log), Prefetcher(self._batch, first, config.data.prefetch) as ahead:
            if first < config.steps:
                self._report("compiling: the first step takes a while")
            is_missed = self._best.evaluated != first or not self._best.is_exported
            if self._is_due(first) and (is_new or is_missed):
                with self._guarded():
                    self._evaluate(first, state, log)
            agreement = Agreement()
            for step in range(first + 1, config.steps + 1):
                if agreement.is_reached(self._interrupt.is_set):
                    break
                batch, tokens = next(ahead)
                if jax.default_backend() == "cpu":  # two programs at once share the cores badly
                    jax.block_until_ready(state)
                with self._profile(step):
                    state, found = train_step(
                        job.task, job.optimizer, state, job.frozen, job.take(step - 1, batch),
                        config.optim.ema,
                    )  # fmt: skip
                if step == config.profile_from + config.profile_steps - 1:
                    self._stop_trace(state)
                with self._guarded():
                    log.push(step, found, tokens)
                if self._is_due(step) or step % config.save.every == 0 or step == self._held:
                    with self._guarded():
                        log.flush()
                    self._save(state, log)  # first: an evaluation takes its time, or fails
                if self._is_due(step):
                    with self._guarded():
                        self._evaluate(step, state, log)
            self._stop_trace(state)
            with self._guarded():
                log.flush()
            self._save(state, log)
            self._checkpoints.wait()
        return not anyone(self._interrupt.is_set)

    def _is_due(self, step: int) -> bool:
        """Tell whether the weights after a step are evaluated."""
        every = self._config.eval.every
        return step == self._config.steps or (every > 0 and step % every == 0)

    def _batch(self, step: int) -> tuple[Batch, int]:
        """Make this process's rows of a step's batch, and count the tokens, by these, of all."""
        pieces, own = self._config.accumulate, self._own
        made = [self._job.batches.batch_at(step * pieces + i, own) for i in range(pieces)]
        batch = Batch(*(np.stack(arrays) for arrays in zip(*made, strict=True)))
        count = int(np.count_nonzero(batch.segment_ids != PADDING))
        return batch, count * self._config.data.batch_size // len(own)

    def _evaluate(self, step: int, state: TrainState, log: RunLog) -> None:
        """Measure, tell, and keep what is best."""
        weights = state.params if state.average is None else state.average
        with log.aside():
            if self._job.evaluate is None:
                if step == self._config.steps:
                    self._best.keep(step, weights)
                return
            found = self._job.evaluate(weights)
            self._metrics.scalars(step, {f"eval/{k}": v for k, v in found.scalars.items()})
            for name, values in found.bars.items():
                self._metrics.bars(step, f"eval/{name}", values)
            for name, text in found.texts.items():
                self._metrics.text(step, f"eval/{name}", text)
            for name, png in found.pictures.items():
                self._metrics.image(step, f"eval/{name}", png)
            self._metrics.flush()
            is_best = self._best.offer(step, weights, found.score)
            log.say(f"step {step}/{self._config.steps}: {found.line}{' (best)' if is_best else ''}")

    def _save(self, state: TrainState, log: RunLog) -> None:
        with log.aside():
            self._checkpoints.save(state, self._recorded)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Say, of a loss that is not finite, where to go on from."""
        try:
            yield
        except NotFiniteError as error:
            last = self._checkpoints.latest()
            where = "there is no checkpoint" if last is None else f"the last checkpoint is {last}"
            raise ValueError(
                f"{error}; {where} in {self._checkpoints.directory} (remove its folder to go on"
                " from the one before). Lower optim.lr or optim.clip in a new run; a target in"
                " bfloat16 may overflow"
            ) from error

    @contextlib.contextmanager
    def _profile(self, step: int) -> Iterator[None]:
        """Trace the steps that the configuration names, as far as they are in this run."""
        config = self._config
        last = config.profile_from + config.profile_steps - 1
        is_inside = is_first() and config.profile_steps > 0 and config.profile_from <= step <= last
        if is_inside and not self._is_traced:
            jax.profiler.start_trace(str(Path(config.out) / "tensorboard"))
            self._is_traced = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def _stop_trace(self, state: TrainState) -> None:
        """End a trace once the device has done what it is of."""
        if self._is_traced:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._is_traced = False
