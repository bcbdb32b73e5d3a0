"""A language that is learned in half a minute, and runs on it: for notebooks.

Sentences such as `Clara paints 4 golden drums by the river.`, as bytes. What a word is, nobody can
know before it begins; how it goes on, a small model soon does. So there is something to guess right
and something to guess wrong.
"""

import json
import random
from pathlib import Path
from typing import Any

import jax

from eagle3.config import GeneratedTarget, TreeConfig
from eagle3.files import write_whole
from eagle3.training.config import DraftShape, EvalConfig, TrainConfig, TTTConfig
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.jobs import Job, build_job
from eagle3.training.optim import OptimConfig
from eagle3.training.step import train_step

NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix")
VERBS = ("finds", "sells", "paints", "keeps", "borrows")
KINDS = ("red", "golden", "wooden", "small", "heavy")
THINGS = ("apples", "boats", "candles", "drums", "kettles", "ladders")
PLACES = ("by the river", "in the garden", "under the bridge", "at the market")
DEPTH = 5  # tokens that are drafted in a row


def toy_text(sentences: int, seed: int) -> str:
    """Return some sentences, a line each."""
    rng = random.Random(seed)

    def sentence() -> str:
        name, verb, kind, thing, place = map(rng.choice, (NAMES, VERBS, KINDS, THINGS, PLACES))
        return f"{name} {verb} {rng.randint(2, 9)} {kind} {thing} {place}.\n"

    return "".join(sentence() for _ in range(sentences))


def toy_config(folder: Path, task: str, name: str, **changes: Any) -> TrainConfig:
    """Return a run on the language, and write the text it needs.

    Args:
      task: as in `TrainConfig`; a draft is for the target of the run `target` in `folder`.
      name: of the run.
      changes: other fields of `TrainConfig`.
    """
    sources = {}
    for split, (texts, seed) in {"train": (300, 1), "heldout": (24, 2)}.items():
        path = folder / f"{split}.jsonl"
        rows = (json.dumps({"text": toy_text(6, seed * 1000 + i)}) for i in range(texts))
        write_whole(path, "".join(row + "\n" for row in rows))
        sources[split] = SourceConfig(files=str(path))
    values: dict[str, Any] = dict(
        task=task,
        out=str(folder / name),
        target=str(folder / "target") if task == "draft" else None,
        generated=GeneratedTarget(max_position_embeddings=1024),
        draft=DraftShape(vocab_size=64),
        ttt=TTTConfig(steps=DEPTH),
        data=DataConfig({"toy": sources["train"]}, 8, 64, cache=str(folder / "cache")),
        optim=OptimConfig(kind="muon", lr=1e-2, clip=1.0, warmup=0.05),
        steps=80,
        eval=EvalConfig(
            sources={"toy": sources["heldout"]}, batches=4, prompt_tokens=24, max_new_tokens=64,
            tree=TreeConfig(kind="chain", depth=DEPTH),
        ),
    )  # fmt: skip
    return TrainConfig(**(values | changes))


def fit(config: TrainConfig) -> tuple[Job, Any, list[dict[str, float]]]:
    """Train without checkpoints, and write the model's files.

    Returns:
      The job, whose `evaluate` measures weights; the weights; and what each step told of itself.
    """
    job = build_job(config, lambda text: None)
    state, history = job.state, []
    job = job._replace(state=None)  # its arrays are given away
    for step in range(config.steps):
        batch = jax.tree.map(lambda x: x[None], job.batches.batch_at(step))
        state, found = train_step(job.task, job.optimizer, state, job.frozen, job.take(step, batch))
        history.append(found.sums)
    job.export(state.params)
    return job, state.params, [job.scalars(sums) for sums in jax.device_get(history)]
