"""Tokenised sources in files: one folder a source, written once and mapped into memory.

A folder is named by a fingerprint of all that decides its content. It appears complete or not at
all: it is written under another name and then renamed, so an interrupted build is built again, and
of two builds at the same time one is kept. Checksums tell a damaged folder from a good one.
"""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle3.config import ConfigError
from eagle3.files import new_folder
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.data.masking import Example, Marked, Masker
from eagle3.training.data.progress import Progress
from eagle3.training.data.rows import (
    MALFORMED,
    NO_ANSWER,
    REFUSED,
    STRADDLED,
    TOO_LONG,
    UNREADABLE,
    Dropped,
    Tally,
    parse_row,
)
from eagle3.training.data.sources import read_rows, source_fingerprint

_VERSION = 1  # of the files and of how tokens are made: raise it when either changes
_DTYPES = {"tokens": np.dtype("<i4"), "mask": np.dtype("?"), "offsets": np.dtype("<i8")}
_BATCH = 1 << 20  # characters, or tokens that rows bring, taken together
_ADVICE = {
    UNREADABLE: "convert the file to UTF-8, with one JSON value a line if it is .jsonl",
    TOO_LONG: "raise data.length, or set data.truncate=true",
    MALFORMED: "set the format of the source, or mend its rows",
    NO_ANSWER: "only answers of the assistant are trained on: take data that has some",
    REFUSED: "the conversations do not fit the chat template of the target",
    STRADDLED: "the texts do not fit the tokenizer and chat template of the target",
}


class TokenDataset(NamedTuple):
    """Documents one after the other."""

    tokens: np.ndarray  # int32, of all documents
    mask: np.ndarray  # bool: the model has to produce the token
    offsets: np.ndarray  # int64: where each document begins, and the number of tokens
    tally: Tally
    fingerprint: str  # of the sources, tokenizer, template and settings

    def __str__(self) -> str:
        """Return one line: what was kept, what was lost and why, and how many tokens there are."""
        count, masked = len(self.tokens), int(self.mask.sum())
        return (
            f"{self.tally}; {count:,} tokens, {masked:,} trained on; fingerprint"
            f" {self.fingerprint[:12]}"
        )


def open_datasets(
    cfg: DataConfig, masker: Masker, report: Callable[[str], Any] = print
) -> dict[str, TokenDataset]:
    """Return every source of the configuration by name, tokenised now or in an earlier run.

    Args:
      report: takes lines about progress and, for every source, what was kept and what was not.

    Raises:
      ValueError: a source or a cache cannot be used; says which and what to do.
    """
    found = {}
    for name, source in cfg.named_sources.items():
        found[name] = open_dataset(name, source, cfg, masker, report)
        report(f"{name}: {found[name]}")
    return found


def open_dataset(
    name: str,
    source: SourceConfig,
    cfg: DataConfig,
    masker: Masker,
    report: Callable[[str], Any] = print,
) -> TokenDataset:
    """Return one source, from the cache if it is there; `open_datasets` describes the rest."""
    limit = 0 if cfg.packing == "window" else cfg.length
    parts = (_VERSION, source_fingerprint(source), source.format, masker.fingerprint)
    content = json.dumps([*parts, limit, cfg.truncate])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    folder = Path(cfg.cache) / fingerprint[:24]
    if not folder.exists():
        _build(name, source, cfg, masker, fingerprint, folder, report)
    return read_dataset(folder)


def read_dataset(folder: Path) -> TokenDataset:
    """Map a finished folder into memory.

    Raises:
      ValueError: a file is missing or is not as it was written.
    """
    remedy = "delete the folder and run again"
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {
            name: np.memmap(folder / f"{name}.bin", dtype, "r") for name, dtype in _DTYPES.items()
        }
        tally = Tally(meta["kept"], Counter(meta["dropped"]), meta["first"])
        checks, fingerprint = dict(meta["crc32"]), str(meta["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cache {folder} is damaged ({error}); {remedy}") from error
    for name, array in arrays.items():
        if zlib.crc32(array.data) != checks.get(name):
            raise ValueError(f"cache {folder} is damaged ({name}.bin has changed); {remedy}")
    return TokenDataset(**arrays, tally=tally, fingerprint=fingerprint)


def _build(
    name: str,
    source: SourceConfig,
    cfg: DataConfig,
    masker: Masker,
    fingerprint: str,
    folder: Path,
    report: Callable[[str], Any],
) -> None:
    """Tokenise a source into its folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"data.cache {cfg.cache} cannot be written: {error}") from error
    with new_folder(folder) as partial:
        with _Writer(partial) as writer, Progress(f"tokenise {name}", report) as progress:
            tally = _tokenise(source, cfg, masker, writer, progress)
        _check(name, tally)
        meta = {
            "fingerprint": fingerprint,
            "source": vars(source),
            "kept": tally.kept,
            "dropped": tally.dropped,
            "first": tally.first,
            "crc32": writer.crc32,
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _tokenise(
    source: SourceConfig, cfg: DataConfig, masker: Masker, writer: "_Writer", progress: Progress
) -> Tally:
    tally, pending, size = Tally(), [], 0
    limit = None if cfg.packing == "window" else cfg.length
    for row in read_rows(source):
        progress.advance()
        try:
            marked = masker.mark(parse_row(row.fields, source.format))
        except Dropped as why:
            tally.drop(row.where, why)
            continue
        pending += [(row.where, item) for item in marked]
        size += sum(item.size for item in marked)
        if size >= _BATCH:
            _flush(pending, masker, limit, cfg.truncate, writer, tally)
            pending, size = [], 0
    _flush(pending, masker, limit, cfg.truncate, writer, tally)
    return tally


def _flush(
    pending: list[tuple[str, Marked]],
    masker: Masker,
    limit: int | None,
    truncate: bool,
    writer: "_Writer",
    tally: Tally,
) -> None:
    """Tokenise what is pending and write it; count what is kept and what is not."""
    examples = masker.encode([item for _, item in pending])
    for (where, _), example in zip(pending, examples, strict=True):
        if isinstance(example, Example) and limit is not None and len(example.tokens) > limit:
            example = _shortened(example, limit, truncate)
        if isinstance(example, Dropped):
            tally.drop(where, example)
        else:
            writer.write(example)
            tally.kept += 1


def _shortened(example: Example, limit: int, truncate: bool) -> Example | Dropped:
    if not truncate:
        return Dropped(TOO_LONG, f"{len(example.tokens):,} tokens, a row has {limit:,}")
    cut = Example(example.tokens[:limit], example.mask[:limit])
    if not cut.mask.any():
        return Dropped(NO_ANSWER, f"no answer begins within the {limit:,} tokens of a row")
    return cut


def _check(name: str, tally: Tally) -> None:
    if not tally.total:
        raise ConfigError(f"source {name} has no rows")
    if tally.is_mostly_dropped:
        reason, _ = tally.dropped.most_common(1)[0]
        raise ConfigError(
            f"source {name}: more than half cannot be used: {tally}; {_ADVICE[reason]}"
        )


class _Writer:
    """Appends examples to the files of a folder."""

    def __init__(self, folder: Path):
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in _DTYPES}
        self.crc32 = dict.fromkeys(_DTYPES, 0)
        self._end = 0
        self._append("offsets", np.zeros(1))

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, example: Example) -> None:
        """Add a document."""
        self._end += len(example.tokens)
        self._append("tokens", example.tokens)
        self._append("mask", example.mask)
        self._append("offsets", np.array([self._end]))

    def _append(self, name: str, values: np.ndarray) -> None:
        content = values.astype(_DTYPES[name]).tobytes()
        self._files[name].write(content)
        self.crc32[name] = zlib.crc32(content, self.crc32[name])
