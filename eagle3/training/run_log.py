"""What a run says while it runs: a line or a bar, TensorBoard, and an error for a broken loss.

The numbers of a step are asked for when the next one is on its way, so the device never waits.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from eagle3.processes import is_first
from eagle3.training.metrics import Metrics
from eagle3.training.step import StepMetrics

Report = Callable[[str], Any]


class NotFiniteError(ValueError):
    """A run that has come to numbers that are none."""


class RunLog:
    """Collects the steps of a run and tells of them every so often."""

    def __init__(
        self,
        metrics: Metrics,
        report: Report,
        *,
        first: int,
        total: int,
        every: int,
        scalars: Callable[[Any], dict[str, float]],
        rate: Callable[[Any], Any],
        flops: float,
        peak: float,
    ):
        """Begin before step `first`.

        Args:
          scalars: makes numbers, by name, of the task's sums.
          rate: learning rate of a step, from 0 on, as optax's schedules are.
          flops: operations of a step per token.
          peak: operations a second that the device is measured against.
        """
        self._metrics, self._report = metrics, report
        self._first, self._total, self._every = first, total, every
        self._scalars, self._flops, self._peak = scalars, flops, peak
        self._rate, self._rates, self._rates_from = rate, np.zeros(0), 0
        self._pending: tuple[int, StepMetrics, int] | None = None
        self._sums: Any = None
        self._losses: list[float] = []
        self._tokens = 0
        self._since: float | None = None  # the first step compiles: time counts after it
        self._bar = _bar(first, total)

    def push(self, step: int, found: StepMetrics, tokens: int) -> None:
        """Take the numbers of a step (from 1 on), and tell of the step before.

        Raises:
          NotFiniteError: loss, gradient or weights of the step before are not finite.
        """
        self.flush()
        self._pending = (step, found, tokens)

    def flush(self) -> None:
        """Wait for the last step, and tell of it.

        Raises:
          NotFiniteError: its loss, gradient or weights are not finite.
        """
        if self._pending is None:
            return
        step, found, tokens = self._pending
        self._pending = None
        found = jax.device_get(found)
        for name, value in (
            ("loss", found.loss),
            ("norm of the gradient", found.gradient_norm),
            ("norm of the weights after it", found.weight_norm),
        ):
            if not math.isfinite(value):
                raise NotFiniteError(f"the {name} of step {step} is {float(value)}")
        self._losses.append(float(found.loss))
        self._sums = found.sums if self._sums is None else _add(self._sums, found.sums)
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._tokens += tokens
        if self._bar is not None:
            self._bar.update()
        if step % self._every == 0 or step in (self._first + 1, self._total):
            self._tell(step, float(found.gradient_norm))

    def _tell(self, step: int, gradient_norm: float) -> None:
        assert self._since is not None
        now = time.perf_counter()
        seconds = now - self._since
        speed = self._tokens / seconds if self._tokens else 0.0
        values = {f"train/{k}": v for k, v in self._scalars(self._sums).items()}
        loss = float(np.mean(self._losses))
        values |= {
            "train/loss": loss,
            "train/gradient_norm": gradient_norm,
            "train/learning_rate": self._rate_of(step - 1),
        }
        left = ""
        if self._tokens:
            values |= {
                "perf/tokens_per_second": speed,
                "perf/model_flop_utilisation": speed * self._flops / self._peak,
            }
            steps = len(self._losses)
            left = f", {speed:,.0f} tokens/s"
            left += f", {_time((self._total - step) * seconds / steps)} left"
        self._metrics.scalars(step, values)
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
        else:
            self._report(f"step {step}/{self._total}: loss {loss:.3f}{left}")
        self._sums, self._losses, self._tokens, self._since = None, [], 0, now

    def _rate_of(self, step: int) -> float:
        """Return a learning rate; many are made at once, as each waits for the step that runs."""
        if not 0 <= step - self._rates_from < len(self._rates):
            self._rates_from = step
            self._rates = np.asarray(jax.vmap(self._rate)(step + np.arange(10_000)))
        return float(self._rates[step - self._rates_from])

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do something else, whose time does not count."""
        start = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - start

    def say(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.clear()
        self._report(text)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(np.add, a, b)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 60 else f"{minutes / 60:.1f} h"


def _bar(first: int, total: int) -> Any:
    if not (is_first() and sys.stderr.isatty()):
        return None
    from tqdm import tqdm  # comes with datasets

    return tqdm(desc="train", initial=first, total=total, unit=" steps", leave=False)
