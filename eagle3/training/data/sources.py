"""Raw rows of every kind of source, and a fingerprint of what a source holds.

The only file that knows `datasets` (and pyarrow, which comes with it), imported when a source needs
them. JSON and text are read here, so that a line that cannot be read has a name and costs only its
own row.
"""

import glob
import gzip
import hashlib
import importlib
import json
import os
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from eagle3.config import ConfigError
from eagle3.training.data import stdlib
from eagle3.training.data.config import SourceConfig
from eagle3.training.data.rows import Unreadable

_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".txt", ".txt.gz")


class Row(NamedTuple):
    """A row as it was found."""

    where: str  # for messages: file and line, or dataset and number
    fields: Any  # an object with fields, if the row is what it should be; or Unreadable


def read_rows(source: SourceConfig) -> Iterator[Row]:
    """Yield the rows of a source in order, the first `max_rows` if that is set.

    Raises:
      ConfigError: there is no such source, or a library that it needs is missing.
      ValueError: a file breaks off or is of another kind; names the file and the line or row.
    """
    if source.kind == "stdlib":
        modules = stdlib.documents(source.split or "train")
        rows = (Row(name, {"text": text}) for name, text in modules)
    elif source.kind == "files":
        rows = (row for path in matching_files(source.files) for row in _file(path))
    else:
        rows = _hub(source)
    return islice(rows, source.max_rows or None)


def source_fingerprint(source: SourceConfig) -> str:
    """Return a hash that changes when the rows do.

    Of files it covers the contents. Of a hub dataset it covers the name and revision only, so that
    a finished cache needs no network.
    """
    found: list[Any] = [source.kind, source.max_rows]
    if source.kind == "stdlib":
        found.append(stdlib.fingerprint(source.split or "train"))
    elif source.kind == "files":
        for path in matching_files(source.files):
            with _readable(path, "rb") as file:
                found += [path.name, hashlib.file_digest(file, "sha256").hexdigest()]
    else:
        found += [source.hub, source.subset, source.split or "train", source.revision]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def matching_files(pattern: str) -> list[Path]:
    """Return the files that a path or glob names, in order of their paths.

    Raises:
      ConfigError: there are none, or some that cannot be read.
    """
    is_file = os.path.isfile(pattern)  # a name may contain brackets
    paths = [Path(p) for p in ([pattern] if is_file else glob.glob(pattern, recursive=True))]
    paths = sorted(path for path in paths if path.is_file())
    if not paths:
        raise ConfigError(f"no file matches {pattern}; give a path or a glob such as chats/*.jsonl")
    for path in paths:
        if not path.name.endswith(_SUFFIXES):
            raise ConfigError(f"{path} is of no known kind; expected one of {', '.join(_SUFFIXES)}")
    return paths


def _file(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return _parquet(path)
    return _jsonl(path) if path.name.endswith((".jsonl", ".jsonl.gz")) else _document(path)


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        text = _decoded(line, number == 1)
        if isinstance(text, Unreadable):
            yield Row(f"{path} line {number}", text)
        elif text.strip():
            yield Row(f"{path} line {number}", _parsed(text))


def _document(path: Path) -> Iterator[Row]:
    """Yield a text file, which is one document."""
    parts = []
    for number, line in enumerate(_lines(path), start=1):
        text = _decoded(line, number == 1)
        if isinstance(text, Unreadable):
            yield Row(f"{path} line {number}", text)
            return
        parts.append(text)
    yield Row(str(path), {"text": "".join(parts)})


def _decoded(line: bytes, is_first: bool) -> str | Unreadable:
    try:  # a file may begin with a mark of its byte order
        return line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8: {error}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"not JSON: {error}")


def _lines(path: Path) -> Iterator[bytes]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else _readable(path, "rb") as file:
            for line in file:
                yield line
                number += 1
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read after line {number}: {error}; fetch it again"
        ) from error


def _readable(path: Path, mode: str) -> Any:
    try:
        return open(path, mode)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    parquet, number = _library("pyarrow.parquet"), 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", fields)
    except (OSError, ValueError) as error:  # pyarrow's errors are these
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be read after row {number}: {reason}; fetch it again"
        ) from error


def _hub(source: SourceConfig) -> Iterator[Row]:
    if os.path.exists(source.hub):  # the library would read it, but no fingerprint covers it
        raise ConfigError(f"source.hub is {source.hub}, a path; give files, such as DIR/*.jsonl")
    datasets, split = _library("datasets"), source.split or "train"
    try:
        found = datasets.load_dataset(
            source.hub,
            source.subset or None,
            split=split,
            revision=source.revision or None,
            streaming=source.streaming,
        )
        for number, fields in enumerate(found, start=1):
            yield Row(f"{source.hub} {split} row {number}", fields)
    except Exception as error:  # network, names, formats: there is no common type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"dataset {source.hub!r} cannot be read from the hub: {reason}"
        ) from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this source needs the datasets library ({error}): pip install datasets"
        ) from error
