"""Lines of `benchmarks/spec_bench.py` in figures and tables, as the papers have them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle3.decoding.request import Answer, total_acceptance

SIDES = ("plain", "speculative")

# Of one question at one temperature; for each side, what `Result.to_json` says of every turn.
Line = dict[str, Any]


class Figures(NamedTuple):
    """What lines say together."""

    prompts: int
    tokens: int  # made with the draft
    speeds: tuple[float, float]  # tokens/s, plain and speculative
    ratio: float
    spread: tuple[float, float]  # quartiles of the ratios of single questions
    tau: float
    by_depth: list[float]
    identical: int
    margin: float | None  # largest, in logits, where greedy texts part

    @classmethod
    def of(cls, lines: Sequence[Line]) -> "Figures":
        """Sum up lines of one temperature."""
        answers = [
            Answer(list(turn["tokens"]), [bool(x) for x in turn["is_drafted"]])
            for line in lines
            for turn in line["speculative"]
        ]
        tau, by_depth = total_acceptance(answers)
        plain, drafted = (_speed([turn for x in lines for turn in x[side]]) for side in SIDES)
        ratios = [_speed(x["speculative"]) / max(_speed(x["plain"]), 1e-9) for x in lines]
        low, high = np.quantile(ratios, (0.25, 0.75))
        margins = [x["difference"]["margin"] for x in lines if x["difference"] is not None]
        known = [abs(margin) for margin in margins if margin is not None]
        return cls(
            len(lines), sum(len(answer.tokens) for answer in answers), (plain, drafted),
            drafted / max(plain, 1e-9), (float(low), float(high)), tau, by_depth,
            sum(line["identical"] for line in lines), max(known, default=None),
        )  # fmt: skip


def _speed(turns: Sequence[Line]) -> float:
    seconds = sum(turn["seconds"] for turn in turns)
    return sum(len(turn["tokens"]) for turn in turns) / max(seconds, 1e-9)


def report(lines: Sequence[Line], about: Sequence[str]) -> str:
    """Return the tables as markdown.

    Args:
      about: what was measured, and what was left out.
    """
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    temperatures = list(dict.fromkeys(line["temperature"] for line in lines))
    short = [["temperature", *tasks, "mean"]]
    long = [
        ["temperature", "task", "questions", "tokens", "plain tokens/s", "with the draft",
         "speed-up", "its quartiles", "tau", "accepted at depth 1, 2, ...", "identical",
         "largest margin"],
    ]  # fmt: skip
    for temperature in temperatures:
        mine = [line for line in lines if line["temperature"] == temperature]
        found = {t: Figures.of(part) for t in tasks if (part := _of_task(mine, t))}
        mean = [float(np.mean([getattr(f, x) for f in found.values()])) for x in ("ratio", "tau")]
        cells = [_cell(found[t].ratio, found[t].tau) if t in found else "" for t in tasks]
        short.append([f"{temperature:g}", *cells, _cell(*mean)])
        for task, figures in [*found.items(), ("all", Figures.of(mine))]:
            long.append([f"{temperature:g}", task, *_row(figures)])
    first = "Speed-up over plain decoding / tau (tokens a round); the mean is that of the tasks."
    parts = [first, _table(short), _table(long), "\n".join(f"- {line}" for line in about)]
    return "\n\n".join(parts) + "\n"


def _of_task(lines: Sequence[Line], task: str) -> list[Line]:
    return [line for line in lines if line["task"] == task]


def _cell(ratio: float, tau: float) -> str:
    return f"{ratio:.2f}x / {tau:.2f}"


def _row(figures: Figures) -> list[str]:
    margin = "" if figures.margin is None else f"{figures.margin:.2g}"
    return [
        str(figures.prompts), f"{figures.tokens:,}", *(f"{x:.1f}" for x in figures.speeds),
        f"{figures.ratio:.2f}", "{:.2f} to {:.2f}".format(*figures.spread), f"{figures.tau:.2f}",
        " ".join(f"{x:.2f}" for x in figures.by_depth),
        f"{figures.identical} of {figures.prompts}", margin,
    ]  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(n) for cell, n in zip(row, widths, strict=True)] for row in rows]
    padded.insert(1, ["-" * n for n in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)
