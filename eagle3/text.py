"""Between text and token ids: tokenizers, text as it is made, stop strings.

Text is given out only when it can no longer change: what a prefix of an answer prints is a prefix
of what the whole answer prints. Nothing here knows of models or sessions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from eagle3.config import ConfigError
from gdn.config import is_int
from gdn.hf_config import read_json

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no UTF-8
_WINDOW, _OVERLAP = 48, 12  # tokens decoded again for each new one, at most and at least


class ByteTokenizer:
    """One token a byte."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the UTF-8 bytes.

        Raises:
          ConfigError: it is no text.
        """
        return list(_utf8(text))

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text, each broken sequence of bytes replaced."""
        return bytes(ids).decode(errors="replace")

    def is_byte(self, token: int) -> bool:
        """Return False: a broken byte spoils no other."""
        return False


class FileTokenizer:
    """The `tokenizer.json` of a checkpoint."""

    def __init__(self, path: Path):
        """Read the file.

        Raises:
          ConfigError: there is none, or it cannot be used.
        """
        if not path.exists():
            raise ConfigError(f"{path} does not exist; copy the tokenizer next to the weights")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return token ids; `special` adds those a text starts with, if there are any.

        Raises:
          ConfigError: it is no text.
        """
        _utf8(text)
        return self._backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text; `special` keeps the special tokens in it."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; None if there is none."""
        return self._backend.token_to_id(token)

    def is_byte(self, token: int) -> bool:
        """Tell a byte-fallback token, `<0xE2>`; if one of a run is broken, all of it is."""
        return re.fullmatch("<0x[0-9A-F]{2}>", self._backend.id_to_token(token) or "") is not None


Tokenizer = ByteTokenizer | FileTokenizer


def _utf8(text: str) -> bytes:
    """Encode; Python writes bytes that are no UTF-8, in arguments or input, as lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text is not valid UTF-8 at character {error.start}: correct or remove it"
        ) from error


def load_tokenizer(directory: str | None, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a checkpoint; a target over the 256 bytes needs no file.

    Raises:
      ConfigError: there is none, or it cannot be used.
    """
    if directory is None and vocab_size != 256:
        raise ConfigError(
            f"a vocabulary of {vocab_size} needs the directory of a target, for its tokenizer; only"
            " the 256 bytes need none: leave generated.vocab_size at 256"
        )
    path = None if directory is None else Path(directory) / "tokenizer.json"
    if path is None or (vocab_size == 256 and not path.exists()):
        return ByteTokenizer()
    return FileTokenizer(path)


def end_ids(directory: str | Path, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that a checkpoint's files say end a text; the first one is config.json's.

    Chat models often end turns with a token that only generation_config.json has, or only
    tokenizer_config.json, by its text.

    Raises:
      ConfigError: a file cannot be used.
    """
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = Path(directory) / name
        config = read_object(path)
        inner = config.get("text_config")
        value = inner.get("eos_token_id") if isinstance(inner, dict) else None
        value = config.get("eos_token_id") if value is None else value
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(is_int(token, 0, vocab_size) for token in listed):
            raise ConfigError(
                f"{path}: eos_token_id is {value!r}, it must be token ids in 0..{vocab_size - 1}"
            )
        ids += listed
    token = read_object(Path(directory) / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(tokenizer, FileTokenizer) and isinstance(text, str):
        found = tokenizer.id_of(text)
        ids += [] if found is None or found >= vocab_size else [found]
    return tuple(dict.fromkeys(ids))


def read_object(path: Path) -> dict[str, Any]:
    """Return what a JSON file says; nothing if it is not there.

    Raises:
      ConfigError: it cannot be read, or holds no JSON object.
    """
    try:
        return read_json(path) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(str(error)) from error


class TextDecoder:
    """Turns tokens into text one by one; the pieces join to the decoded whole.

    Every token is decoded again with a few before it, so tokenizers whose text depends on
    neighbours (spaces, bytes of one character) are right. Of bytes that may still become a
    character, nothing is given out.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Start before the first token."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # characters of the decoded window that are out

    def push(self, token: int) -> str:
        """Take in a token; returns the text that is now certain."""
        self._ids.append(token)
        run = len(self._ids)
        while run and self._tokenizer.is_byte(self._ids[run - 1]):
            run -= 1
        text = self._tokenizer.decode(self._ids[:run])
        # Of a sequence of bytes that is cut short, decoders make one character.
        certain = text[:-1] if text.endswith(REPLACEMENT) else text
        piece = certain[self._given :]
        self._given = max(self._given, len(certain))
        if run > _WINDOW:
            self._shorten(self._tokenizer.decode(self._ids))
        return piece

    def finish(self) -> str:
        """Return what was kept back."""
        piece = self._tokenizer.decode(self._ids)[self._given :]
        self._given += len(piece)
        return piece

    def _shorten(self, text: str) -> None:
        """Forget old tokens, unless the rest would then read differently, as within a character."""
        rest = self._ids[-_OVERLAP:]
        tail = self._tokenizer.decode(rest)
        given = self._given - (len(text) - len(tail))
        if tail and given >= 0 and text.endswith(tail):
            self._ids, self._given = rest, given


class StopStrings:
    """Gives out text only as far as no stop string can begin in it."""

    def __init__(self, stops: Sequence[str]):
        """Start before the first character."""
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """Take in text; returns what comes before any stop string, as soon as that is certain."""
        if self.is_found:
            return ""
        text = self._held + text
        places = [(text.find(stop), len(stop)) for stop in self._stops if stop in text]
        if places:
            # The one that is complete first, so it does not matter in what pieces text comes.
            place, _ = min(places, key=lambda found: (sum(found), found))
            self.is_found, self._held = True, ""
            return text[:place]
        size = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]

    def finish(self) -> str:
        """Return what was kept back: no stop string came of it."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return how many characters at the end of the text begin the stop string."""
        sizes = range(min(len(text), len(stop) - 1), 0, -1)
        return next((size for size in sizes if text.endswith(stop[:size])), 0)


class Piece(NamedTuple):
    """Some text of an answer, and whether the token that completed it was a draft's."""

    text: str
    is_drafted: bool


class AnswerText:
    """The text of one answer as it grows."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        """Start before the first token."""
        self._decoder, self._stops = TextDecoder(tokenizer), StopStrings(stops)
        self._decoded: list[Piece] = []  # decoded, but not yet given out
        self._ends = [0]  # characters decoded after 0, 1, 2, ... tokens
        self._is_drafted = False  # the last token
        self.text = ""  # all that was given out

    @property
    def is_stopped(self) -> bool:
        """Tell whether a stop string was found; what follows it is ignored."""
        return self._stops.is_found

    @property
    def num_tokens(self) -> int:
        """Return how many tokens, from the first on, the text takes."""
        return next(n for n, end in enumerate(self._ends) if end >= len(self.text))

    def push(self, token: int, is_drafted: bool) -> list[Piece]:
        """Take in a token; returns the text that is now certain."""
        self._ends.append(self._ends[-1])
        self._is_drafted = is_drafted
        return self._take(self._decoder.push(token))

    def finish(self) -> list[Piece]:
        """Return what was kept back at the end of the answer."""
        if self.is_stopped:
            return []
        return self._take(self._decoder.finish()) + self._release(self._stops.finish())

    def _take(self, text: str) -> list[Piece]:
        """Take in text that the last token completed."""
        self._ends[-1] += len(text)
        self._decoded.append(Piece(text, self._is_drafted))
        return self._release(self._stops.push(text))

    def _release(self, text: str) -> list[Piece]:
        """Cut the text where the tokens that made it did."""
        self.text += text
        pieces, size = [], len(text)
        while size and self._decoded:
            first = self._decoded.pop(0)
            if len(first.text) > size:
                self._decoded.insert(0, first._replace(text=first.text[size:]))
                first = first._replace(text=first.text[:size])
            size -= len(first.text)
            if first.text:
                pieces.append(first)
        return pieces
