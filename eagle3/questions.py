"""Questions of the field's benchmarks: what users say, turn by turn, and the task it is part of.

Knows the rows of Spec-Bench and of EAGLE's files (`turns`), HumanEval and Arena-Hard (`prompt`) and
GSM8K (`question`). Answers that come with them are not read: they are not what is measured.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle3.config import ConfigError
from eagle3.digest import digest
from eagle3.training.data.config import SourceConfig
from eagle3.training.data.rows import (
    MALFORMED,
    UNREADABLE,
    Dropped,
    Tally,
    Unreadable,
    checked_text,
)
from eagle3.training.data.sources import matching_files, read_rows

EMPTY = "without a question"
REPEATED = "asked before"

_SINGLE = ("prompt", "question")  # fields with the only turn
_IDS = ("question_id", "task_id", "uid", "id")
# Spec-Bench's categories and the tasks that its tables have.
_MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities"
_GROUPS: dict[str, str] = dict.fromkeys(_MT_BENCH.split(), "mt_bench")
_GROUPS |= {x: x for x in ("summarization", "qa", "math_reasoning", "translation", "rag")}
_SUFFIX = re.compile(r"(\.jsonl|\.parquet|\.txt)?(\.gz)?$")
_SAYS_NOTHING = re.compile("questions?|test|train|valid|dev")  # names of files, or their beginning


class Question(NamedTuple):
    """What a user says, and where it is from."""

    task: str
    turns: tuple[str, ...]  # each after the answer to the one before
    name: str  # the file's own number or name for it, or else its place

    @property
    def digest(self) -> str:
        """Return a short name for its content."""
        return digest([self.task, self.turns])


def read_questions(
    patterns: Sequence[str], limit: int = 0
) -> tuple[list[Question], dict[str, Tally]]:
    """Read files of questions.

    Args:
      patterns: paths or globs.
      limit: so many questions of each task of a file, evenly spread over it; 0: all.

    Returns:
      The questions, each once, and by file how many there were and why others were none.

    Raises:
      ConfigError: a file is not there, has no rows, or more than half of them are no questions.
      ValueError: a file is damaged.
    """
    found: list[Question] = []
    tallies: dict[str, Tally] = {}
    seen: set[str] = set()
    for path in (path for pattern in patterns for path in matching_files(pattern)):
        tally, questions = Tally(), []
        for where, question in _file(path, tally):
            if question.digest in seen:
                tally.kept -= 1
                tally.drop(where, Dropped(REPEATED, question.name))
            else:
                seen.add(question.digest)
                questions.append(question)
        tallies[str(path)] = tally
        for task in dict.fromkeys(question.task for question in questions):
            found += _spread([q for q in questions if q.task == task], limit)
    return found, tallies


def _file(path: Path, tally: Tally) -> list[tuple[str, Question]]:
    """Read one file; with each question, where it is."""
    found: list[tuple[str, Question]] = []
    groups: list[str | None] = []
    own = task_name(path)
    for number, row in enumerate(read_rows(SourceConfig(files=str(path))), start=1):
        try:
            turns = parse_turns(row.fields)
        except Dropped as why:
            tally.drop(row.where, why)
            continue
        tally.kept += 1
        found.append((row.where, Question(own, turns, _name(row.fields, number))))
        category = row.fields.get("category")
        groups.append(_GROUPS.get(category) if isinstance(category, str) else None)
    if not tally.total:
        raise ConfigError(f"{path} has no rows: give a file of questions")
    if tally.is_mostly_dropped:
        raise ConfigError(f"{path}: more than half of its rows are no questions: {tally}")
    if len(set(groups)) == 1:  # all of one task: the file's name is that of its authors
        return found
    pairs = zip(found, groups, strict=True)
    return [(where, q._replace(task=group or own)) for (where, q), group in pairs]


def task_name(path: Path) -> str:
    """Return the file's name, or the folder's for names such as `test` or `question`."""
    stem = _SUFFIX.sub("", path.name)
    return path.resolve().parent.name if _SAYS_NOTHING.match(stem) else stem


def parse_turns(row: Any) -> tuple[str, ...]:
    """Return what the user says in a row.

    Raises:
      Dropped: the row has no question of any known kind.
    """
    if isinstance(row, Unreadable):
        raise Dropped(UNREADABLE, row.problem)
    if not isinstance(row, Mapping):
        raise Dropped(MALFORMED, f"the row is {type(row).__name__}, expected an object")
    known = [name for name in ("turns", *_SINGLE) if name in row]
    if not known:
        has = ", ".join(map(str, row)) or "nothing"
        raise Dropped(MALFORMED, f"has {has}; expected one of turns, {', '.join(_SINGLE)}")
    name = known[0]
    turns = row[name] if name == "turns" else [row[name]]
    if not isinstance(turns, list):
        raise Dropped(MALFORMED, f"turns is {type(turns).__name__}, expected a list of texts")
    checked = tuple(checked_text(turn, f"a part of {name}") for turn in turns)
    if not checked or not all(turn.strip() for turn in checked):
        raise Dropped(EMPTY, f"{name} is empty, or a part of it is")
    return checked


def _name(row: Mapping[str, Any], number: int) -> str:
    value = next((row[name] for name in _IDS if name in row), None)
    if type(value) is int:
        return str(value)
    if isinstance(value, str) and value and value.isprintable():  # half a character is not
        return value
    return f"row {number}"


def _spread(questions: list[Question], limit: int) -> list[Question]:
    count = min(limit or len(questions), len(questions))
    return [questions[place * len(questions) // count] for place in range(count)]
