"""Prompts for the target, made of the rows of training data.

A text is begun, and continued from further places if more answers are wanted than there are texts;
a conversation is cut where an answer comes, one after the other.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from eagle3.cli.engine import Engine
from eagle3.config import ConfigError
from eagle3.text import REPLACEMENT
from eagle3.training.config import TrainConfig
from eagle3.training.data.config import SourceConfig
from eagle3.training.data.masking import Masker
from eagle3.training.data.progress import Progress
from eagle3.training.data.rows import (
    MALFORMED,
    NO_ANSWER,
    TOO_LONG,
    Chat,
    Dropped,
    Tally,
    Text,
    Tokens,
    parse_row,
)
from eagle3.training.data.sources import read_rows

_ASSISTANT = "assistant"

Report = Callable[[str], Any]
Fields = dict[str, Any]  # of a row that `decode.py --prompts` reads


class Prompts:
    """Makes rows for `decode.py --prompts`, each with a seed and a limit of its own."""

    def __init__(self, config: TrainConfig, masker: Masker, engine: Engine):
        """Take the settings, and what will read the prompts."""
        self.engine = engine
        self._config, self._settings, self._masker = config, config.regenerate, masker
        self._room = engine.target.cfg.max_position_embeddings
        if config.data.packing != "window":  # what does not fit into a row would be lost
            self._room = min(self._room, config.data.length)

    def first(self, report: Report) -> list[Fields]:
        """Return the rows of pass 1: in the end they make the configured number of answers, less
        those that would be given twice.

        Raises:
          ConfigError: a source has no rows, or most of them cannot be used.
        """
        sources, found = self._config.data.named_sources, []
        weights = np.cumsum([source.weight for source in sources.values()])
        ends = np.rint(weights / weights[-1] * self._settings.rows).astype(int)
        for number, (name, source) in enumerate(sources.items()):
            share = int(ends[number] - (ends[number - 1] if number else 0))
            if share:
                rng = np.random.default_rng((self._settings.seed, number))
                sample = _sample(name, source, share, rng, report)
                tally = Tally()
                found += self._of_sample(sample, share, rng, tally)
                _check(name, tally, report, "prompts")
        if not self._settings.temperature:
            found = _different(found, report)
        # Mixed, so that no part of the answers is of one source.
        order = np.random.default_rng((self._settings.seed, len(sources))).permutation(len(found))
        return self._numbered([found[place] for place in order], 0)

    def later(
        self, answered: Iterable[tuple[Fields, str]], before: int, report: Report
    ) -> list[Fields]:
        """Return the rows that go on with conversations.

        Args:
          answered: rows of a pass, and what the target said.
          before: how many answers there are, of all passes.
        """
        found, tally = [], Tally()
        for number, (fields, text) in enumerate(answered):
            said = {"role": _ASSISTANT, "content": text}
            asked = next_turn([*fields.get("messages", ()), said], fields.get("later", ()))
            if asked is not None:
                _keep(found, tally, f"row {number}", self._fitted, asked)
        if tally.dropped:
            report(f"later turns: {tally}")
        return self._numbered(found, before)

    def _numbered(self, found: Iterable[Fields], before: int) -> list[Fields]:
        """Give each row a seed of its own."""
        first = self._settings.seed + before
        return [{**fields, "seed": first + number} for number, fields in enumerate(found)]

    def _of_sample(
        self,
        sample: Sequence[tuple[str, Text | Chat | Tokens]],
        share: int,
        rng: np.random.Generator,
        tally: Tally,
    ) -> list[Fields]:
        """Take rows in random order until they make `share` answers; then more of each text."""
        found: list[Fields] = []
        texts: list[np.ndarray] = []
        count = 0
        for place in rng.permutation(len(sample)):
            where, row = sample[int(place)]
            if count >= share:
                break
            if isinstance(row, Text):
                is_kept = _keep(found, tally, where, self._beginning, row.text, texts)
            else:
                is_kept = _keep(found, tally, where, self._first_turn, row)
            turns = num_turns(row.messages) if isinstance(row, Chat) else 1
            count += turns if is_kept else 0
        for ids in windows(texts, self._settings.prompt_tokens, share - count, rng):
            _keep(found, tally, "a later part of a text", self._window, ids)
        return found

    def _beginning(self, text: str, texts: list[np.ndarray]) -> Fields:
        """Return the row of a text; its tokens are added to `texts`."""
        try:
            ids = np.array(self._masker.tokenizer.encode(text, special=False), np.int32)
        except ConfigError as error:
            raise Dropped(MALFORMED, str(error)) from error
        fields = self._window(ids[: self._settings.prompt_tokens])
        texts.append(ids)
        return fields

    def _window(self, ids: np.ndarray) -> Fields:
        """Return the row of some tokens of a text, without a character that was cut in two."""
        text = self._masker.tokenizer.decode(ids.tolist(), special=True)
        return self._fitted({"prompt": text.strip(REPLACEMENT)})

    def _first_turn(self, row: Chat | Tokens) -> Fields:
        """Return the row of what comes before the first answer.

        Raises:
          Dropped: there is no answer to anything, or no room for one.
          ConfigError: there is no template for a conversation.
        """
        if isinstance(row, Tokens):
            raise Dropped(MALFORMED, "tokens are taken as they are: set regenerate.rows=0 for them")
        if self._masker.template is None:
            (marked,) = self._masker.mark(row)
            return self._fitted({"prompt": marked.text[: marked.spans[0][0]]})
        asked = next_turn([], row.messages)
        if asked is None:
            raise Dropped(NO_ANSWER, "the assistant answers no message")
        return self._fitted(asked)

    def _fitted(self, fields: Fields) -> Fields:
        """Limit the answer to the room there is.

        Raises:
          Dropped: there is none, or the target cannot read the prompt.
        """
        try:
            if "messages" in fields:
                assert self._masker.template is not None
                text = self._masker.template.prompts(fields["messages"])[0]
                ids = self.engine.encode(text, special=False)
            else:
                ids = self.engine.encode(fields["prompt"]) if fields["prompt"] else []
        except ConfigError as error:
            raise Dropped(MALFORMED, str(error)) from error
        if not ids:
            raise Dropped(MALFORMED, "the prompt is empty")
        if len(ids) >= self._room:
            raise Dropped(
                TOO_LONG, f"a prompt of {len(ids):,} tokens, with room for {self._room:,}"
            )
        most = min(self._settings.max_new_tokens, self._room - len(ids))
        return {**fields, "max_new_tokens": most}


def next_turn(history: Sequence[dict], later: Sequence[dict]) -> Fields | None:
    """Return a conversation up to its next answer, and apart what comes after; None if none comes.

    A second answer in a row is left out: nothing asks for it.
    """
    messages = list(history)
    for place, message in enumerate(later):
        if message["role"] != _ASSISTANT or not messages:
            messages.append(message)
        elif messages[-1]["role"] != _ASSISTANT:
            return {"messages": messages, "later": list(later[place + 1 :])}
    return None


def num_turns(messages: Sequence[dict]) -> int:
    """Return how many answers a conversation has that something asks for."""
    return sum(a["role"] != _ASSISTANT == b["role"] for a, b in pairwise(messages))


def windows(
    texts: Sequence[np.ndarray], size: int, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return different pieces of `size` tokens, evenly through the texts but for their beginnings.

    Returns:
      `count` of them, or all if there are fewer.
    """
    starts = np.cumsum([0, *(max(len(ids) - size, 0) for ids in texts)])
    total = int(starts[-1])
    count = min(max(count, 0), total)
    places = np.floor((np.arange(count) + rng.random()) * (total / max(count, 1))).astype(int)
    found = []
    for place in places:
        number = int(np.searchsorted(starts, place, side="right")) - 1
        start = int(place - starts[number]) + 1
        found.append(texts[number][start : start + size])
    return found


def _sample(
    name: str, source: SourceConfig, size: int, rng: np.random.Generator, report: Report
) -> list[tuple[str, Text | Chat | Tokens]]:
    """Read a source; return so many of its rows, any as likely as any other, and where they are."""
    found: list[tuple[str, Text | Chat | Tokens]] = []
    tally = Tally()
    with Progress(f"read {name}", report) as progress:
        for row in read_rows(source):
            progress.advance()
            try:
                parsed = parse_row(row.fields, source.format)
            except Dropped as why:
                tally.drop(row.where, why)
                continue
            tally.kept += 1
            if len(found) < size:
                found.append((row.where, parsed))
            elif (place := int(rng.integers(tally.kept))) < size:
                found[place] = (row.where, parsed)
    _check(name, tally, report, "rows")
    return found


def _keep(
    found: list[Fields], tally: Tally, where: str, make: Callable[..., Fields], *given: Any
) -> bool:
    """Add the row that `make` makes of what is given, or count why it makes none."""
    try:
        found.append(make(*given))
    except Dropped as why:
        tally.drop(where, why)
        return False
    tally.kept += 1
    return True


def _different(found: Iterable[Fields], report: Report) -> list[Fields]:
    """Leave out what was asked before: the likeliest answer would be the same."""
    kept, count = {}, 0
    for fields in found:
        count += 1
        kept.setdefault(json.dumps(fields, sort_keys=True), fields)
    if count > len(kept):
        report(f"{count - len(kept):,} of {count:,} prompts were there before and are left out")
    return list(kept.values())


def _check(name: str, tally: Tally, report: Report, what: str) -> None:
    if not tally.total:
        raise ConfigError(f"source {name} has no rows")
    if tally.is_mostly_dropped:
        raise ConfigError(f"source {name}: more than half of its {what} cannot be used: {tally}")
    if tally.dropped:
        report(f"{name}, {what}: {tally}")
