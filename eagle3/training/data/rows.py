"""The shapes a row may have, and the count of those that cannot be used.

Every format becomes one of three things: plain text, a conversation, or token ids that are taken
as they are. A row that is none of them is never passed over in silence: `Dropped` says why, and
`Tally` counts and reports it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNREADABLE = "unreadable"
MALFORMED = "malformed"
REFUSED = "refused by the chat template"
STRADDLED = "tokens across the border of an answer"
NO_ANSWER = "nothing to train on"
TOO_LONG = "too long"

ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT has no standard; these are the speakers that its files have.
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_SPEAKERS |= {"model": "assistant", "function_response": "tool", "observation": "tool"}
# What single-turn files call a prompt and its answer: no standard, GSM8K's names, and Alpaca's.
_PAIRS = (("prompt", "response"), ("question", "answer"), ("instruction", "output"))
_THINKING = "reasoning_content"  # what templates call thoughts that are not in the content


class Dropped(ValueError):
    """A row, or an example made of it, that cannot be trained on."""

    def __init__(self, reason: str, detail: str):
        """Keep the reason, one of the few above, and what it is in this row."""
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Unreadable(NamedTuple):
    """What a file has in place of a row: bytes that are no UTF-8, or no JSON."""

    problem: str


class Text(NamedTuple):
    """Plain text, all of which is trained on."""

    text: str


class Chat(NamedTuple):
    """A conversation, of which the assistant's answers are trained on."""

    messages: list[dict[str, str]]
    is_prompt: bool = False  # from prompt and response, which also make sense without a template


class Tokens(NamedTuple):
    """What is tokenised already: a text, or a prompt and its answer."""

    ids: list[int]
    prompt_tokens: int  # of the beginning, which is not trained on
    tokenizer: str  # that made them: the beginning of its fingerprint; empty: not said


def parse_row(row: Any, form: str) -> Text | Chat | Tokens:
    """Read one row.

    Args:
      form: one of `FORMATS`; `auto` takes the first of the others whose field the row has.

    Raises:
      Dropped: the row does not have this form.
    """
    if isinstance(row, Unreadable):
        raise Dropped(UNREADABLE, row.problem)
    if not isinstance(row, Mapping):
        raise Dropped(MALFORMED, f"the row is {type(row).__name__}, expected an object")
    if form == "auto":
        known = [name for name in _PARSERS if _is_of_form(row, name)]
        if not known:
            has = ", ".join(map(str, row)) or "nothing"
            raise Dropped(MALFORMED, f"has {has}; expected one of {', '.join(_PARSERS)}")
        form = known[0]
    if not _is_of_form(row, form):
        raise Dropped(MALFORMED, f"has no {form}")
    return _PARSERS[form](row)


def _is_of_form(row: Mapping[str, Any], form: str) -> bool:
    return form in row or (form == "prompt" and any(asked in row for asked, _ in _PAIRS))


def _text(row: Mapping[str, Any]) -> Text:
    text = checked_text(row["text"], "text")
    if not text.strip():
        raise Dropped(NO_ANSWER, "the text is empty")
    return Text(text)


def checked_text(value: Any, name: str) -> str:
    """Return a value that is text.

    Raises:
      Dropped: it is none, or has halves of characters, which JSON can write and UTF-8 cannot.
    """
    if not isinstance(value, str):
        raise Dropped(MALFORMED, f"{name} is {type(value).__name__}, expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        detail = f"{name} is not valid UTF-8 at character {error.start}"
        raise Dropped(MALFORMED, detail) from error
    return value


def _prompt(row: Mapping[str, Any]) -> Chat:
    asked, answered = next(pair for pair in _PAIRS if pair[0] in row)
    parts = [("system", "system")] if row.get("system") else []
    parts += [("user", asked), ("assistant", answered)]
    if asked == "instruction" and row.get("input"):  # what Alpaca's instruction is about
        parts.insert(-1, ("user", "input"))
    messages: list[dict[str, str]] = []
    for role, name in parts:
        text = checked_text(row.get(name), name)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})
    chat = _checked(messages)
    return chat._replace(is_prompt=True)


def _messages(row: Mapping[str, Any]) -> Chat:
    messages = _list_of_objects(row, "messages")
    return _checked([_message(message, "role", "content") for message in messages])


def _conversations(row: Mapping[str, Any]) -> Chat:
    messages = []
    for turn in _list_of_objects(row, "conversations"):
        is_sharegpt = "from" in turn
        message = _message(turn, *(("from", "value") if is_sharegpt else ("role", "content")))
        message["role"] = _SPEAKERS.get(message["role"], message["role"])
        messages.append(message)
    return _checked(messages)


def _tokens(row: Mapping[str, Any]) -> Tokens:
    ids, given, tokenizer = row["tokens"], row.get("prompt_tokens", 0), row.get("tokenizer", "")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise Dropped(MALFORMED, "tokens must be a list of ids, integers of at least 0")
    if type(given) is not int or not 0 <= given <= len(ids):
        raise Dropped(MALFORMED, f"prompt_tokens is {given!r}, expected 0 to {len(ids)}")
    if not isinstance(tokenizer, str):
        raise Dropped(MALFORMED, f"tokenizer is {type(tokenizer).__name__}, expected a string")
    if given == len(ids):
        raise Dropped(NO_ANSWER, "no tokens after the prompt")
    return Tokens(ids, given, tokenizer)


_PARSERS = {
    "messages": _messages,
    "conversations": _conversations,
    "prompt": _prompt,
    "text": _text,
    "tokens": _tokens,  # last: rows of other formats may have a field of that name, a count
}


def _list_of_objects(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = row[name]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Dropped(MALFORMED, f"{name} must be a list of objects")
    return value


def _message(fields: dict[str, Any], role: str, content: str) -> dict[str, str]:
    """Return the fields that templates read; tool calls would be lost, so they are refused."""
    if fields.get("tool_calls"):
        raise Dropped(MALFORMED, "a message has tool_calls, which are not supported")
    message = {"role": fields.get(role), "content": fields.get(content)}
    if fields.get(_THINKING):
        message[_THINKING] = fields[_THINKING]
    return {
        name: checked_text(value, f"the {name} of a message") for name, value in message.items()
    }


def _checked(messages: list[dict[str, str]]) -> Chat:
    for message in messages:
        if message["role"] not in ROLES:
            raise Dropped(MALFORMED, f"role {message['role']!r}, expected one of {ROLES}")
    if not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
        raise Dropped(NO_ANSWER, "the assistant says nothing")
    return Chat(messages)


@dataclass
class Tally:
    """How many examples rows gave, and why others gave none."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    first: dict[str, str] = field(default_factory=dict)  # by reason, an example

    @property
    def total(self) -> int:
        """Return the examples and what could not become one."""
        return self.kept + self.dropped.total()

    @property
    def is_mostly_dropped(self) -> bool:
        """Tell whether more than half is lost."""
        return self.dropped.total() > self.kept

    def drop(self, where: str, why: Dropped) -> None:
        """Count what is lost."""
        self.dropped[why.reason] += 1
        self.first.setdefault(why.reason, f"{where}: {why.detail}")

    def __str__(self) -> str:
        """Return one line with every reason, the most frequent first."""
        line = f"{self.kept:,} of {self.total:,} examples kept"
        for reason, count in self.dropped.most_common():
            line += f"; {count:,} {reason} (first: {self.first[reason]})"
        return line
