"""Training runs of the smallest configuration, for the files that test them."""

from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

import train
from eagle3.config_reader import read_stages
from eagle3.training.checkpoint import Checkpoints
from eagle3.training.config import TrainConfig
from eagle3.training.jobs import build_job

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs/tiny.yaml")
FOX = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 3


def overrides(folder: Path, *more: str) -> list[str]:
    """Put what the smallest configuration writes into a folder."""
    target, draft = folder / "target", folder / "draft"
    places = [f"stages.target.out={target}", f"stages.draft.out={draft}"]
    return [*places, f"stages.draft.target={target}", f"data.cache={folder / 'cache'}", *more]


def run(folder: Path, *more: str) -> int:
    return train.main(["--config", TINY, *overrides(folder, *more)])


def told(folder: Path, tag: str) -> dict[int, np.ndarray]:
    """Return what TensorBoard shows under a tag, by step."""
    everything = {"tensors": 0}  # the default is a sample
    events = EventAccumulator(str(folder / "tensorboard"), everything).Reload()
    return {e.step: tensor_util.make_ndarray(e.tensor_proto) for e in events.Tensors(tag)}


def text_run(folder: Path, *more: str) -> list[str]:
    """Return arguments of a run on one short text, measured on the same."""
    path = folder / "fox.txt"
    path.write_text(FOX)
    return overrides(
        folder, f"data.sources.fox.files={path}", f"eval.sources.fox.files={path}",
        "eval.every=0", *more,
    )  # fmt: skip


def newest(folder: Path, argv: list[str], stage: str):
    """Return the state of a run's newest checkpoint."""
    config = read_stages(TrainConfig, TINY, argv, stage)[stage]
    job = build_job(config, lambda text: None)
    with Checkpoints(folder / stage / "checkpoints", keep_last=2) as checkpoints:
        return checkpoints.load(job.state)
