"""`--prompts`: answer a file of rows, some at a time, and go on where an earlier run stopped.

Each answer is one line, written as soon as its row ends: so rows are not in order, `row` says which
one it is. `key` ties it to the row's content and to the settings that decide the answer.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.cli.answers import Interrupt, decode
from eagle3.cli.arguments import Options
from eagle3.cli.console import json_line, note, print_json
from eagle3.cli.engine import Engine
from eagle3.cli.rows import Row, read_rows
from eagle3.config import ConfigError, DecodeConfig
from eagle3.digest import digest, directory_digest

_BEGIN = '{"row": '  # of every line that is written here
_REFILLS = 8  # batches of prompts of like lengths that are decoded with the same caches
_NO_EFFECT = (  # on any row's answer
    "prompt", "batch_size", "stream_every", "prefill_chunk", "recalibrate", "draft_dtype",
)  # fmt: skip


def run_batch(engine: Engine, options: Options) -> bool:
    """Answer all rows that have no answer yet; returns False if interrupted."""
    assert options.prompts is not None
    rows = read_rows(options.prompts, engine)
    settings = fingerprint(engine.config)
    keys = [f"{settings}-{digest(row.fields)}" for row in rows]
    done = set() if options.out is None else finished_rows(Path(options.out), keys)
    left = [row for row in rows if row.index not in done]
    if done:
        note(f"{len(done)} of {len(rows)} rows are in {options.out} already")
    count = len(done)
    with appending(options.out) as write, Interrupt() as interrupt:
        for line in _answers(engine, left, keys, interrupt):
            # A row that was cut off has no place in a file that a later run goes on with.
            if write is not None and line["finish_reason"] != "cancelled":
                write(line)
                count += 1
                note(f"row {line['row']} ({count} of {len(rows)})")
            if write is None or options.json:
                print_json(line)
        if interrupt.is_set and options.out is not None:
            note(f"interrupted: {count} of {len(rows)} rows are in {options.out}; run it again")
        return not interrupt.is_set


def _answers(
    engine: Engine, rows: list[Row], keys: list[str], interrupt: Interrupt
) -> Iterator[dict[str, Any]]:
    """Yield the line of each row when it ends."""
    stops, size = engine.config.stop_strings, engine.config.batch_size
    session = engine.session(engine.drafter)
    for batch in in_batches(rows, size * _REFILLS if size > 1 else 1):
        requests = [row.request for row in batch]
        for event in decode(session, requests, engine.tokenizer, stops, interrupt, size):
            if event.result is not None:
                row = batch[event.number]
                line = {"row": row.index, "key": keys[row.index]}
                line |= {"id": row.fields["id"]} if "id" in row.fields else {}
                yield line | event.result.to_json()
        if interrupt.is_set:
            return


def in_batches(rows: list[Row], size: int) -> list[list[Row]]:
    """Put rows with prompts of like lengths together: the longest decides what caches hold.

    Batches come in a random order, the same in every run: what an interrupted one leaves behind is
    of all lengths. One at a time, rows keep their order.
    """
    if size == 1:
        return [[row] for row in rows]
    rows = sorted(rows, key=lambda row: len(row.request.prompt))
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [batches[i] for i in np.random.default_rng(0).permutation(len(batches))]


@contextlib.contextmanager
def appending(path: str | None):
    """Open the file for appending; gives a function that writes a line and flushes it."""
    if path is None:
        yield None
        return
    try:
        file = open(path, "a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error}") from error
    with file:

        def write(line: dict[str, Any]) -> None:
            file.write(json_line(line) + "\n")
            file.flush()

        yield write


def finished_rows(path: Path, keys: list[str]) -> set[int]:
    """Return which rows a file of answers has; a last line that a kill cut short is taken off.

    Raises:
      ConfigError: the file was not written here, or for other prompts or settings.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be read: {error}") from error
    *lines, tail = data.split(b"\n")
    done = {_check_line(path, number, line, keys) for number, line in enumerate(lines, start=1)}
    if tail:
        begin = _BEGIN.encode()
        if not tail.startswith(begin) and not (lines and begin.startswith(tail)):
            raise ConfigError(f"{path} holds something else than answers: choose another --out")
        note(f"{path}: the last line was cut short, its row is decoded again")
        with path.open("r+b") as file:
            file.truncate(len(data) - len(tail))
    return done


def _check_line(path: Path, number: int, line: bytes, keys: list[str]) -> int:
    """Return the row that a line answers.

    Raises:
      ConfigError: it answers none of these.
    """
    try:
        value = json.loads(line)
        row, key = value["row"], value["key"]
        settings, content = key.split("-")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} line {number} is no answer of this program: choose another --out"
        ) from error
    if type(row) is not int or not 0 <= row < len(keys):
        problem = f"the prompts have no row {row}"
    elif settings != keys[row].split("-")[0]:
        problem = "it was made with other settings or models"
    elif content != keys[row].split("-")[1]:
        problem = f"row {row} of the prompts has changed"
    else:
        return row
    raise ConfigError(f"{path} line {number}: {problem}; choose another --out")


def fingerprint(config: DecodeConfig) -> str:
    """Digest all that decides an answer: the settings, and the models by samples of their files."""
    settings = dataclasses.asdict(config)
    for name in _NO_EFFECT:
        del settings[name]
    for name in ("target", "draft"):
        if settings[name] is not None:
            settings[name] = directory_digest(settings[name])
    return digest(settings)
