"""Answers of the target in place of those in the data: a draft learns what the target says.

Prompts are made of the rows of the sources and answered as `decode.py --prompts FILE --out FILE`
does it, in files below the directory of the run, so an interrupted run goes on where it stopped. A
conversation is answered turn by turn: pass 1 makes the first answers, pass 2 the second ones, each
after the target's own first, and so on. Kept are the token ids that the target read and produced:
its text might be tokenised in another way.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle3.cli import rows as prompt_rows
from eagle3.cli.arguments import Options
from eagle3.cli.batch import run_batch
from eagle3.cli.engine import Engine, build
from eagle3.config import ConfigError, DecodeConfig, SamplingConfig
from eagle3.digest import digest, directory_digest
from eagle3.files import write_whole
from eagle3.processes import is_alone
from eagle3.training.config import TrainConfig
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.data.masking import Masker
from eagle3.training.data.sources import source_fingerprint
from eagle3.training.prompts import Fields, Prompts, Report

FOLDER = "regenerated"  # below the directory of the run
_VERSION = 3  # of how prompts are made and what is kept: raise it when either changes


class Answered(NamedTuple):
    """A prompt, and what the target said."""

    fields: Fields
    prompt: Sequence[int]  # as the target read it
    line: dict[str, Any]  # of the file of answers


def regenerate(config: TrainConfig, masker: Masker, report: Report = print) -> DataConfig:
    """Let the target answer prompts made of the data, unless that was done in an earlier run.

    Returns:
      `config.data` with the answers as its only source.

    Raises:
      KeyboardInterrupt: interrupted; the next call goes on.
      ConfigError: the data gives no prompts, the directory has answers of another kind, or they
        would have to be made by several processes.
    """
    assert config.target is not None
    folder, fingerprint = Path(config.out) / FOLDER, _fingerprint(config)
    rows, state = folder / "rows.jsonl", _State.read(folder)
    if state.fingerprint not in ("", fingerprint):
        raise ConfigError(
            f"{folder} was made with other settings of regenerate or data, for another target or"
            " by another version of this package: set these back to go on, choose another out, or"
            " delete it"
        )
    tokenizer = masker.tokenizer.fingerprint[:12]
    if state.tokenizer == tokenizer and state.sha256 == _sha256(rows):
        report(f"{rows} has {state.rows:,} answers of the target already")
    elif not is_alone():
        raise ConfigError(
            "regenerate.rows: the target answers in one process. Start this with one, stop it when"
            " it trains, and start it again with several"
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        maker = Prompts(config, masker, build(_decode_config(config)))
        if not state.fingerprint or not (folder / "prompts-1.jsonl").exists():
            prompts = maker.first(report)
            _write(folder / "prompts-1.jsonl", prompts)
            _State(fingerprint).write(folder)
        answers = _all_answers(folder, maker, report)
        _write(rows, [_token_row(answer, tokenizer) for answer in answers])
        _State(fingerprint, tokenizer, len(answers), _sha256(rows)).write(folder)
        count = sum(len(answer.line["tokens"]) for answer in answers)
        ended = sum(answer.line["finish_reason"] == "stop" for answer in answers)
        report(
            f"{rows}: {len(answers):,} answers of the target ({config.regenerate.rows:,} asked"
            f" for), {count:,} tokens; {ended:,} ended by it, the others cut"
        )
    source = SourceConfig(files=str(rows), format="tokens")
    return dataclasses.replace(config.data, sources={FOLDER: source})


class _State(NamedTuple):
    """How far it is."""

    fingerprint: str = ""  # of all that decides the prompts and answers; empty: not begun
    tokenizer: str = ""  # that rows.jsonl says its tokens are of; empty: not done
    rows: int = 0
    sha256: str = ""  # of rows.jsonl

    @classmethod
    def read(cls, folder: Path) -> "_State":
        path = folder / "state.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): delete it to begin anew") from error

    def write(self, folder: Path) -> None:
        _write(folder / "state.json", [self._asdict()])


def _all_answers(folder: Path, maker: Prompts, report: Report) -> list[Answered]:
    """Answer the prompts that are there, and what follows from the answers."""
    found: list[Answered] = []
    number = 1
    while True:
        report(f"the target answers {folder / f'prompts-{number}.jsonl'}")
        answered = _answers(folder, number, maker.engine)
        found += answered
        said = ((answer.fields, answer.line["text"]) for answer in answered)
        prompts = maker.later(said, len(found), report)
        if not prompts:
            return found
        number += 1
        _write(folder / f"prompts-{number}.jsonl", prompts)


def _answers(folder: Path, number: int, engine: Engine) -> list[Answered]:
    """Answer one file of prompts, or what is left of it."""
    prompts, answers = (str(folder / f"{kind}-{number}.jsonl") for kind in ("prompts", "answers"))
    if not run_batch(engine, Options(prompts=prompts, out=answers)):
        raise KeyboardInterrupt
    text = Path(answers).read_text(encoding="utf-8")
    lines = {line["row"]: line for line in map(json.loads, text.split("\n")[:-1])}
    rows = prompt_rows.read_rows(prompts, engine)
    return [Answered(row.fields, row.request.prompt, lines[row.index]) for row in rows]


def _token_row(answer: Answered, tokenizer: str) -> dict[str, Any]:
    ids = [*answer.prompt, *answer.line["tokens"]]
    return {"tokens": ids, "prompt_tokens": len(answer.prompt), "tokenizer": tokenizer}


def _decode_config(config: TrainConfig) -> DecodeConfig:
    settings = config.regenerate
    return DecodeConfig(
        target=config.target,
        max_new_tokens=settings.max_new_tokens,
        dtype=settings.dtype or config.dtype,
        sampling=SamplingConfig(temperature=settings.temperature),
        batch_size=settings.batch_size,
    )


def _fingerprint(config: TrainConfig) -> str:
    """Digest all that decides prompts and answers."""
    assert config.target is not None
    settings = dataclasses.asdict(config.regenerate)
    del settings["batch_size"]
    dtype = settings.pop("dtype") or config.dtype
    sources = {
        name: (source_fingerprint(source), source.format, source.weight)
        for name, source in config.data.named_sources.items()
    }
    room = 0 if config.data.packing == "window" else config.data.length
    target = directory_digest(config.target)
    return digest([_VERSION, settings, sources, room, dtype, target])


def _sha256(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, rows: Sequence[Any]) -> None:
    """Write JSON lines."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
