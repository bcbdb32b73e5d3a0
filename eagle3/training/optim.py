"""The optimiser: AdamW, or Muon for matrices, with warm-up, a schedule to zero, and clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

from eagle3.config import ConfigError


@dataclass(frozen=True)
class OptimConfig:
    """How weights move."""

    kind: str = "adamw"  # adamw, or muon: matrices of layers by Muon, the rest by AdamW
    lr: float = 1e-3  # peak, after warm-up; of Muon's matrices, scaled to Adam's size of update
    # From the peak to 0 by the last step: cosine, linear, wsd, which holds it first; or constant.
    schedule: str = "cosine"
    warmup: float = 0.02  # share of all steps; from 1 on, their number
    decay: float = 0.2  # wsd: share of all steps in which the rate falls, the last ones
    weight_decay: float = 0.0  # per step and unit of learning rate, on matrices (muon: its own)
    b1: float = 0.9  # of Adam's first moment
    b2: float = 0.95  # of its second, as in the EAGLE papers
    clip: float = 0.5  # largest global norm of a gradient, as in the EAGLE papers; 0: off
    ema: float = 0.0  # decay of an average of the weights that is evaluated and saved; 0: off

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field, its value and what it may be.
        """
        for name, ok, expected in (
            ("kind", self.kind in ("adamw", "muon"), "adamw or muon"),
            ("lr", 0 < self.lr < math.inf, "above 0"),
            (
                "schedule",
                self.schedule in ("cosine", "linear", "wsd", "constant"),
                "cosine, linear, wsd or constant",
            ),
            (
                "warmup",
                0 <= self.warmup < 1 or 1 <= self.warmup < math.inf and self.warmup % 1 == 0,
                "in 0..1, a share of all steps, or a whole number of them",
            ),
            ("decay", 0 < self.decay <= 1, "above 0 and at most 1, a share of all steps"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("b1", 0 <= self.b1 < 1, "in 0..1"),
            ("b2", 0 <= self.b2 < 1, "in 0..1"),
            ("clip", 0 <= self.clip < math.inf, "0 (off) or more"),
            ("ema", 0 <= self.ema < 1, "in 0 (off)..1"),
        ):
            if not ok:
                raise ConfigError(f"optim.{name} is {getattr(self, name)}, it must be {expected}")


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """Return the learning rate of each of `steps` steps."""
    warmup = warmup_steps(config, steps)
    rest = max(1, steps - warmup)
    held = max(0, hold_end(config, steps) - warmup)
    after = {
        "cosine": optax.cosine_decay_schedule(config.lr, rest),
        "linear": optax.linear_schedule(config.lr, 0.0, rest),
        "wsd": optax.linear_schedule(config.lr, 0.0, max(1, rest - held), held),
        "constant": optax.constant_schedule(config.lr),
    }[config.schedule]
    # The first step already moves: a rate of 0 would waste it.
    start = optax.linear_schedule(config.lr / (warmup + 1), config.lr, max(1, warmup))
    return optax.join_schedules([start, after], [warmup])


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """Return after how many steps the rate is at its peak."""
    return round(config.warmup * steps) if config.warmup < 1 else int(config.warmup)


def hold_end(config: OptimConfig, steps: int) -> int:
    """Return after how many steps the rate of `wsd` begins to fall.

    Until then a run does not depend on how long it is to be: from there on it can be made a longer
    or a shorter one (warm-up, stable, decay: arXiv 2404.06395, section 4).
    """
    return steps - max(1, round(config.decay * steps))


def same_rates(a: OptimConfig, a_steps: int, b: OptimConfig, b_steps: int, count: int) -> bool:
    """Tell whether the first `count` steps of two runs have the same learning rates."""
    if count > min(a_steps, b_steps):
        return False
    rates = (learning_rate(a, a_steps), learning_rate(b, b_steps))
    first, second = (np.asarray(jax.vmap(rate)(np.arange(count))) for rate in rates)
    return np.array_equal(first, second)


def _dimensions(params: Any) -> Any:
    """Mark the matrices between layers, which Muon orthogonalises; None is Adam's.

    Rows of tables and heads stand for tokens, and rows of convolutions for channels, which share no
    directions (arXiv 2502.16982 leaves the tables to AdamW too).
    """

    def of(path, x):
        is_table = path[-1].key in ("embed_tokens", "lm_head", "conv1d")
        return None if x.ndim != 2 or is_table else optax.contrib.MuonDimensionNumbers()

    return jax.tree_util.tree_map_with_path(of, params)


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Return the transformation of gradients into updates."""
    rate = learning_rate(config, steps)
    if config.kind == "muon":
        moves = optax.contrib.muon(
            rate, adam_b1=config.b1, adam_b2=config.b2, weight_decay=config.weight_decay,
            adam_weight_decay=0.0, consistent_rms=0.2, muon_weight_dimension_numbers=_dimensions,
        )  # fmt: skip
    else:
        moves = optax.adamw(
            rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params),
        )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(config.clip), moves) if config.clip else moves
