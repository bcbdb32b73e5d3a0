"""Ctrl-C and SIGTERM as wishes."""

import signal
import sys
from collections.abc import Sequence
from typing import Any


class Interrupt:
    """A signal as a wish: noted, to be asked for between two steps. A second one is not waited for.

    Inside `with`, the first one does not raise, so no device call is cut in two.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGINT,)):
        """Start without a wish."""
        self.is_set = False
        self._signals = signals
        self._before: list[Any] = []

    def __enter__(self) -> "Interrupt":
        self.is_set = False
        self._before = [signal.signal(number, self._note) for number in self._signals]
        return self

    def __exit__(self, *_) -> None:
        for number, handler in zip(self._signals, self._before, strict=True):
            signal.signal(number, handler)

    def _note(self, *_) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        text = "\nthis ends after the current step; a second Ctrl-C ends it at once"
        print(text, file=sys.stderr, flush=True)
