"""What the parts of a round cost on this machine: measured once, kept in the user's cache folder.

A file is named by a fingerprint of all that decides the figures, and says it again inside. One that
cannot be read, or says something else, is measured anew.
"""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from eagle3.decoding.tree import TreePlan
from eagle3.digest import digest
from eagle3.files import write_whole
from eagle3.machine import processor
from gdn import HybridLM
from gdn.ops import native
from gdn.ops.native.compiler import cache_folder

log = logging.getLogger(__name__)

# Fine at first: a chain of two drafts is a tree of three nodes, and on a CPU a fourth costs.
_SIZES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)
_VERSION = 1  # of how costs are measured; others' are measured anew
_NOISE = 1.02  # sizes whose costs differ less cost the same


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round."""

    rounds: tuple[tuple[int, float], ...]  # (nodes, verify + accept + commit), ascending from 1
    levels: tuple[float, float]  # a draft pass of one node, and of the widest frontier
    absorb: float  # before a draft: reading what the round before committed


def sizes_of(plan: TreePlan) -> tuple[int, ...]:
    """Return the sizes that a round chooses from, up to the most there may be."""
    return (*(n for n in _SIZES if n < plan.size), plan.size)


def worth_offering(costs: Costs, depth: int) -> Costs:
    """Leave away sizes that cannot pay whatever the draft does; each takes long to compile.

    A tree of n nodes brings at most min(n, depth + 1) tokens, so many if all is accepted. And no
    size is needed beside a larger one of the same cost.
    """
    plain, offered = costs.rounds[0], []
    cheapest = math.inf
    for nodes, seconds in reversed(costs.rounds[1:]):
        pays = any(
            tokens * plain[1] > seconds + costs.absorb + (tokens - 2) * costs.levels[0]
            for tokens in range(2, min(nodes, depth + 1) + 1)
        )
        if pays and seconds * _NOISE < cheapest:
            offered.append((nodes, seconds))
            cheapest = seconds
    return dataclasses.replace(costs, rounds=(plain, *reversed(offered)))


class CostBook:
    """Looks costs up: in memory, in the cache folder, and last by measuring."""

    def __init__(
        self,
        measure: Callable[[HybridLM, Any, int, int], Costs],
        recalibrate: bool = False,
        folder: Path | None = None,
    ):
        """Prepare; nothing is read yet.

        Args:
          measure: of target, drafter, rows and slots; see `measure_costs`.
          recalibrate: measure once more, whatever the folder has.
          folder: default: in the user's cache.
        """
        self._measure, self._recalibrate = measure, recalibrate
        self._folder = _default_folder() if folder is None else folder
        self._known: dict[tuple[int, int], Costs] = {}

    def costs(self, target: HybridLM, drafter: Any, batch: int, capacity: int) -> Costs:
        """Return the costs of what is worth offering; see `measured`."""
        return worth_offering(self.measured(target, drafter, batch, capacity), drafter.depth)

    def measured(self, target: HybridLM, drafter: Any, batch: int, capacity: int) -> Costs:
        """Return the costs of rounds of up to so many rows, over up to so many tokens.

        Figures hold for a range: rows up to the next power of two, tokens up to the next of four.
        """
        found = self.known(target, drafter, batch, capacity)
        if found is None:
            rows, slots = range_ = _range(batch, capacity)
            log.warning(
                "measuring what rounds cost here (%d rows, %d tokens), which is kept; for a deep"
                " target compiling takes half a minute",
                rows, slots,
            )  # fmt: skip
            found = self._known[range_] = self._measure(target, drafter, rows, slots)
            mark = fingerprint(target, drafter, rows, slots)
            if (path := self._path(mark)) is not None:
                _write(path, mark, found)
        return found

    def known(self, target: HybridLM, drafter: Any, batch: int, capacity: int) -> Costs | None:
        """Return what `measured` would, if it need not be measured; None if it has to."""
        rows, slots = range_ = _range(batch, capacity)
        if range_ not in self._known and not self._recalibrate:
            mark = fingerprint(target, drafter, rows, slots)
            path = self._path(mark)
            found = None if path is None else read_costs(path, mark)
            if found is not None:
                self._known[range_] = found
        return self._known.get(range_)

    def _path(self, mark: dict[str, Any]) -> Path | None:
        return None if self._folder is None else self._folder / f"{digest(mark)}.json"


def _default_folder() -> Path | None:
    try:
        return cache_folder() / "costs"
    except OSError as error:
        log.warning("costs are not kept for the next run: %s", error)
        return None


def _range(batch: int, capacity: int) -> tuple[int, int]:
    """Return the most rows and tokens that the figures of such a batch hold for."""
    slots = 1024
    while slots < capacity:
        slots *= 4
    return 1 << (batch - 1).bit_length(), slots


def fingerprint(target: HybridLM, drafter: Any, rows: int, slots: int) -> dict[str, Any]:
    """Return all that decides costs; weights count by shape and type, so packed ones are others."""
    draft = drafter.inner.draft
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.split((target, draft))[1]))
    mark = {
        "target": target.cfg,
        "draft": draft.cfg,
        "plan": drafter.plan,
        "sizes": drafter.sizes,
        "version": _VERSION,
        "weights": digest([(x.shape, str(x.dtype)) for x in leaves]),
        "rows": rows,
        "tokens": slots,
        "device": jax.devices()[0].device_kind,
        "processor": processor(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "jax": jax.__version__,
        "kernels": native.version(),
    }
    return json.loads(json.dumps(mark, default=dataclasses.asdict))


def read_costs(path: Path, mark: dict[str, Any]) -> Costs | None:
    """Return what a file says; None, with a line, if it cannot be used, without if there is none.

    Args:
      mark: the fingerprint that it has to have.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["fingerprint"] != mark:
            raise ValueError("it was measured for something else")
        levels = tuple(map(float, value["levels"]))
        rounds = tuple((int(n), float(s)) for n, s in value["rounds"])
        costs = Costs(rounds, (levels[0], levels[1]), float(value["absorb"]))
        seconds = [costs.absorb, *costs.levels, *(s for _, s in rounds)]
        nodes = [n for n, _ in rounds]
        if nodes[0] != 1 or nodes != sorted(set(nodes)) or not set(nodes) <= set(mark["sizes"]):
            raise ValueError("its sizes are no list of those there are that ascends from 1")
        if not all(1e-9 < s < 1e6 for s in seconds):
            raise ValueError("it has seconds that are none")
        return costs
    except FileNotFoundError:
        return None
    except (
        OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError
    ) as error:  # fmt: skip
        log.warning("%s cannot be used (%s): costs are unknown", path, " ".join(str(error).split()))
        return None


def _write(path: Path, mark: dict[str, Any], costs: Costs) -> None:
    """Keep costs for the next run; without a folder to write to, they are measured again then."""
    text = json.dumps({"fingerprint": mark, **dataclasses.asdict(costs)}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:
        log.warning("costs are not kept for the next run: %s", error)
