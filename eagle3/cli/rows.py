"""`--prompts FILE.jsonl`: one JSON object a line, all checked before anything is decoded.

A row has `prompt` (text to continue) or `messages` (a conversation, for the chat template). It may
have `id`, copied to its answer, and `max_new_tokens` and `seed` of its own. Other settings in a row
are refused, as they would have no effect; fields that are not settings are left alone.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from eagle3.chat_template import ChatTemplate
from eagle3.cli.engine import Engine
from eagle3.config import ConfigError, SamplingConfig
from eagle3.decoding.request import Request, request_problem

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN = 20  # problems in one message
_DEPTH = 100  # levels of lists and objects in a row; what writes them again has a limit too
_FIXED = {f.name for f in dataclasses.fields(SamplingConfig)} - {"seed"} | {"stop", "max_tokens"}


class Row(NamedTuple):
    """A checked row."""

    index: int  # from 0, lines without content not counted
    fields: dict[str, Any]  # as they are in the file
    request: Request


def read_rows(path: str, engine: Engine) -> list[Row]:
    """Read and check a file of prompts.

    Raises:
      ConfigError: the file cannot be read, or rows are bad; one message for all of them.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path} cannot be read: {error}") from error
    rows, problems, templates = [], [], []
    # Not splitlines: JSON strings may contain the other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            problem = row_problem(fields)
            if problem is not None:
                raise ConfigError(problem)
            if "messages" in fields and not templates:
                templates.append(engine.chat_template())
            rows.append(Row(len(rows), fields, _request(fields, engine, *templates)))
        except (ValueError, RecursionError) as error:
            is_json = not isinstance(error, json.JSONDecodeError | RecursionError)
            what = str(error) if is_json else f"not JSON that can be read: {error}"
            problems.append(f"line {number}: {what}")
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        listed = "\n  ".join(problems[:_SHOWN] + more)
        raise ConfigError(f"{path} has rows that cannot be answered:\n  {listed}")
    if not rows:
        raise ConfigError(f"{path} has no rows: write JSON objects with prompt or messages")
    return rows


def row_problem(fields: Any) -> str | None:
    """Return what is wrong with the shape of a row; None if nothing is."""
    if not isinstance(fields, dict):
        return f"found {type(fields).__name__}, expected an object with prompt or messages"
    if ("prompt" in fields) == ("messages" in fields):
        found = "both prompt and messages" if "prompt" in fields else "neither prompt nor messages"
        return f"{found}; expected one of them"
    fixed = sorted(_FIXED & fields.keys())
    if fixed:
        return f"{fixed[0]} cannot be set for one row; only max_new_tokens and seed can"
    if _is_deeper(fields, _DEPTH):
        return f"lists and objects are more than {_DEPTH} levels deep"
    try:  # as it will be in the answers
        json.dumps(fields.get("id"), ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        return f"id cannot be written as JSON: {error}"
    for name, low in (("max_new_tokens", 1), ("seed", 0)):
        value = fields.get(name, low)
        if type(value) is not int or value < low:
            return f"{name} is {value!r}, it must be an integer of at least {low}"
    if "prompt" in fields:
        prompt = fields["prompt"]
        return None if isinstance(prompt, str) and prompt else "prompt must be text, not empty"
    return _messages_problem(fields["messages"])


def _is_deeper(value: Any, levels: int) -> bool:
    """Tell whether lists and objects are nested more than so many levels."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(part, levels - 1) for part in parts)


def _messages_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "messages must be a list of objects with role and content, not empty"
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"messages[{place}] must be an object with role and content"
        if message["role"] not in ROLES:
            return f"messages[{place}] has role {message['role']!r}, it must be one of {ROLES}"
        if not isinstance(message["content"], str):
            return f"messages[{place}] has content that is not text"
    return "the last message is the assistant's own" if messages[-1]["role"] == ROLES[3] else None


def _request(
    fields: dict[str, Any], engine: Engine, template: ChatTemplate | None = None
) -> Request:
    changes = {name: fields[name] for name in ("max_new_tokens", "seed") if name in fields}
    if "prompt" in fields:
        ids = engine.encode(fields["prompt"])
    else:
        assert template is not None
        ids = engine.encode(template.render(fields["messages"]), special=False)
    request = engine.request(ids, **changes)
    if problem := request_problem(engine.target.cfg, request):
        raise ConfigError(problem)
    return request
