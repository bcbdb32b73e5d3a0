"""How far a long job is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

_EVERY = 30.0  # seconds between two lines


class Progress:
    """Counts rows as they are done; the total is not known."""

    def __init__(self, what: str, report: Callable[[str], Any]):
        """Begin; `report` takes the lines."""
        self._what, self._report = what, report
        self._count, self._start = 0, time.monotonic()
        self._next = self._start + _EVERY
        self._bar = _bar(what) if sys.stderr.isatty() else None

    def __enter__(self) -> "Progress":
        """Return this."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Take the bar away, and say how long it took if it came to its end."""
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            self._line("done")

    def advance(self) -> None:
        """Count one row."""
        self._count += 1
        if self._bar is not None:
            self._bar.update()
        elif time.monotonic() >= self._next:
            self._next += _EVERY
            self._line("so far")

    def _line(self, state: str) -> None:
        seconds = time.monotonic() - self._start
        self._report(f"{self._what}: {self._count:,} rows {state}, {seconds:.0f} s")


def _bar(what: str) -> Any:
    try:
        from tqdm import tqdm  # comes with datasets; without it there are lines
    except ImportError:
        return None
    return tqdm(desc=what, unit=" rows", leave=False)
