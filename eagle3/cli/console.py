"""What people see: text as it is made, which of it was drafted, and a closing line."""

import json
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from eagle3.text import Piece

# What a terminal would obey instead of showing, but for tab and line feed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


class Console:
    """Writes text to stdout and notes to stderr."""

    def __init__(self, show_acceptance: bool = False, color: str = "auto"):
        """Prepare.

        Args:
          show_acceptance: mark accepted draft tokens, by colour where there is one.
          color: always, never, or auto: on a terminal.
        """
        self._is_terminal = sys.stdout.isatty()
        has_color = color == "always" or (color == "auto" and self._is_terminal)
        self._marks = ("", "")
        if show_acceptance:
            self._marks = (_GREEN, _PLAIN) if has_color else ("⟦", "⟧")
        self._is_marked = False
        self._has_text = self._ends_line = False
        if show_acceptance:
            shown = f"{self._marks[0]}accepted draft tokens{self._marks[1]}"
            kind = "in colour" if has_color else "in ⟦ ⟧"
            note(f"{shown} are {kind}, the target's own tokens are not")

    def show(self, text: str) -> None:
        """Write text that is not part of an answer."""
        self._put(text)
        sys.stdout.flush()

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write a part of an answer."""
        for piece in pieces:
            if piece.is_drafted != self._is_marked:
                self._mark(piece.is_drafted)
            self._put(piece.text)
        sys.stdout.flush()

    def end(self) -> None:
        """End an answer, on a line of its own."""
        if self._is_marked:
            self._mark(False)
        if self._has_text and not self._ends_line:
            sys.stdout.write("\n")
        self._has_text = False
        sys.stdout.flush()

    def _mark(self, is_drafted: bool) -> None:
        sys.stdout.write(self._marks[0 if is_drafted else 1])
        self._is_marked = is_drafted

    def _put(self, text: str) -> None:
        if text:
            self._has_text, self._ends_line = True, text.endswith("\n")
            if self._is_terminal:
                text = _CONTROL.sub(lambda c: f"\\x{ord(c[0]):02x}", text)
            sys.stdout.write(text)


def note(text: str) -> None:
    """Write a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: dict[str, Any]) -> None:
    """Write one JSON line to stdout."""
    print(json_line(value), flush=True)


def json_line(value: dict[str, Any]) -> str:
    """Return strict JSON: null for NaN and infinities, which it lacks."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
