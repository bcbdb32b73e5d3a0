"""What is asked of a session, and what comes back: token ids, not text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eagle3.decoding.sampling import SamplingParams
from gdn import TargetConfig


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and what to do with it."""

    prompt: Sequence[int]  # token ids, at least one
    max_new_tokens: int = 256  # exact, unless a stop token comes first
    sampling: SamplingParams = SamplingParams()
    stop_ids: Sequence[int] = ()  # any of them ends the answer, as its last token


def request_problem(cfg: TargetConfig, request: Request) -> str | None:
    """Say why a target cannot serve a request, and what to do; None if it can."""
    prompt, most, longest = request.prompt, request.max_new_tokens, cfg.max_position_embeddings
    if not len(prompt):
        return "the prompt is empty; it needs at least one token"
    if most < 1:
        return f"max_new_tokens is {most}, it must be at least 1"
    wrong = [t for t in (*prompt, *request.stop_ids) if not 0 <= t < cfg.vocab_size]
    if wrong:
        return (
            f"token {wrong[0]} is outside the vocabulary of {cfg.vocab_size}; is this the target's"
            " tokenizer?"
        )
    if len(prompt) + most > longest:
        return (
            f"{len(prompt)} prompt tokens and max_new_tokens {most} are more than the {longest}"
            " positions of the target; shorten one of them"
        )
    return None


class Chunk(NamedTuple):
    """New tokens of one row."""

    row: int
    tokens: list[int]
    is_drafted: list[bool]  # False: a correction or a bonus, chosen by the target alone
    logprobs: list[float]  # natural log of the model's probability, before any sampling parameter


@dataclass
class Answer:
    """All tokens of one row so far."""

    tokens: list[int] = field(default_factory=list)
    is_drafted: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "cancelled"; None: still running

    @property
    def histogram(self) -> np.ndarray:
        """Return how many rounds accepted 0, 1, 2, ... drafted tokens.

        Every round ends with a token that the target alone chose, but for one cut short by the end.
        """
        ends = [-1, *np.flatnonzero(~np.array(self.is_drafted, bool))]
        if self.is_drafted and self.is_drafted[-1]:
            ends.append(len(self.is_drafted))
        return np.bincount(np.diff(ends) - 1, minlength=1)

    @property
    def rounds(self) -> int:
        """Return how many passes of the target the answer took."""
        return int(self.histogram.sum())

    @property
    def acceptance_length(self) -> float:
        """Return tokens per target pass (tau): accepted drafts and the bonus token of each."""
        return len(self.tokens) / max(self.rounds, 1)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Return, per depth, how often a token there was accepted if the one above was."""
        return acceptance_by_depth(self.histogram)


def acceptance_by_depth(histogram: np.ndarray) -> list[float]:
    """Return the shares of rounds that went on at depth 1, 2, ... of those that came so far."""
    reached = np.cumsum(histogram[::-1])[::-1]
    return [float(b / a) for a, b in zip(reached, reached[1:], strict=False) if a]


def total_acceptance(answers: Sequence[Answer]) -> tuple[float, list[float]]:
    """Return tau and acceptance by depth of several answers, as if they were one."""
    deepest = max((len(answer.histogram) for answer in answers), default=1)
    histogram = np.zeros(deepest, np.int64)
    for answer in answers:
        histogram[: len(answer.histogram)] += answer.histogram
    tau = sum(len(answer.tokens) for answer in answers) / max(int(histogram.sum()), 1)
    return tau, acceptance_by_depth(histogram)
