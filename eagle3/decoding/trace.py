"""A generation round by round: the tree of each, what became of it, how long it took.

The rounds are those of every other session, run by the same program with the host looking at each
of them: so the text is the same, but time goes into the visits. Knows token ids, not text.

    rounds = trace(target, Eagle3Drafter(draft, dynamic_plan(3, 4, 8)), Request(prompt=ids))
    rounds[0].tokens, rounds[0].parents, rounds[0].path  # the first tree, and what was right
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle3.decoding.drafter import Drafter
from eagle3.decoding.request import Request
from eagle3.decoding.session import Session
from eagle3.decoding.speculate import DecodeState, Emitted, run_rounds
from eagle3.decoding.tree import Proposal
from eagle3.machine import Compilations
from gdn import HybridLM


class Round(NamedTuple):
    """One pass of the target over one tree of M nodes, and the E tokens of text it brought.

    The first tokens are those of the A accepted nodes, E = A or A + 1. The last one of E = A + 1 is
    the target's own: a correction, or a bonus where a leaf was accepted. E = A if the text ends
    with an accepted node.
    """

    tokens: np.ndarray  # [M] ids; node 0 is the root, the last token of the text before
    parents: np.ndarray  # [M] parents[i] < i, -1 for node 0
    # [M] natural log of the draft's probability of the path to each node, 0 for node 0; of trees
    # that adapt, corrected by experience. Where the target samples, the draft looks at the noise of
    # the draw: of the path given that noise. None: the drafter has none to tell.
    log_probs: np.ndarray | None
    path: np.ndarray  # [A] accepted nodes, each the parent of the next; the root is not in it
    emitted: np.ndarray  # [E] ids
    target_log_probs: np.ndarray  # [E] natural log of the target's probability of each of them
    seconds: float  # drafting included
    is_compiled: bool  # the time contains compilation


class TracedSession(Session):
    """A session of one request at a time that keeps its rounds."""

    def __init__(self, target: HybridLM, drafter: Drafter | None = None, **options: Any):
        """Prepare, as `Session` does; the host visits the device after every round."""
        options["stream_every"] = 1
        super().__init__(target, drafter, **options)
        Compilations.listen()
        self.rounds: list[Round] = []

    def start(self, requests: Sequence[Request]) -> int:
        """Read the prompt; see `Session.start`.

        Raises:
          ValueError: there is more than one request, or it cannot be served.
        """
        if len(requests) > 1:
            raise ValueError(f"{len(requests)} requests: rounds are kept of one at a time")
        reused = super().start(requests)
        self.rounds = []
        return reused

    def _run(self, rounds: int) -> tuple[DecodeState, Emitted]:
        compiled, began = Compilations.count, time.perf_counter()
        new_state, out = run_rounds(
            self._graph, self._params, self._take_state(), self._requests, rounds, 1, True
        )
        out: Emitted = jax.device_get(out)
        seconds = time.perf_counter() - began
        self.rounds.append(_round(out, seconds, Compilations.count > compiled))
        return new_state, out

    def stop(self, row: int, keep: int | None = None, reason: str = "stop") -> None:
        """End the text from the host's side; rounds beyond its first `keep` tokens are dropped."""
        super().stop(row, keep, reason)
        left, kept = len(self.answers[row].tokens), []
        for one in self.rounds:
            if left > 0:
                kept.append(
                    one._replace(
                        path=one.path[:left],
                        emitted=one.emitted[:left],
                        target_log_probs=one.target_log_probs[:left],
                    )
                )
            left -= len(one.emitted)
        self.rounds = kept


def trace(target: HybridLM, drafter: Drafter, request: Request, **options: int) -> list[Round]:
    """Answer a request; returns its rounds.

    Args:
      options: of `Session`.

    Raises:
      ValueError: the request cannot be served.
    """
    session = TracedSession(target, drafter, **options)
    session.start([request])
    while session.is_running:
        session.advance()
    return session.rounds


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Return tokens a round (tau)."""
    return sum(len(one.emitted) for one in rounds) / max(len(rounds), 1)


def _round(out: Emitted, seconds: float, is_compiled: bool) -> Round:
    """Cut row 0 of a round to what is real."""
    tree: Any = out.tree
    assert isinstance(tree, Proposal)
    size = 1 + int((tree.parents[0] >= 0).sum())  # padding comes last
    tokens, parents = np.array(tree.tokens[0, :size]), np.array(tree.parents[0, :size])
    log_probs = None if tree.scores is None else np.array(tree.scores[0, :size])
    count = int(out.count[0])
    emitted = np.array(out.tokens[0, :count])
    path = _path(tokens, parents, emitted[np.array(out.is_drafted[0, :count])])
    logprobs = np.array(out.logprobs[0, :count])
    return Round(tokens, parents, log_probs, path, emitted, logprobs, seconds, is_compiled)


def _path(tokens: np.ndarray, parents: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Return the nodes that hold the accepted tokens, from the root down."""
    path, node = [], 0
    for token in accepted:
        node = int(np.flatnonzero((parents == node) & (tokens == token))[0])
        path.append(node)
    return np.array(path, np.int32)
