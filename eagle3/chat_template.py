"""A checkpoint's own chat template: messages to the text that the model was trained to continue.

Templates are programs that come with a download, so they run in jinja2's sandbox. The surroundings
are those that transformers gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagle3.config import ConfigError
from gdn.hf_config import read_json

Message = Mapping[str, str]  # role and content
_TOKENS = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training: here only what is in it."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node | list[nodes.Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders messages as a checkpoint wants them."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None):
        """Compile a template.

        Args:
          tokens: by name (`bos_token`, `eos_token`, ...), the texts of special tokens.

        Raises:
          ConfigError: it is not a template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._tokens = dict(tokens or {})
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # not jinja2's alone: deep nesting exhausts Python's compiler
            raise ConfigError(f"the chat template cannot be read: {_line(error)}") from error

    @classmethod
    def load(cls, directory: str | Path) -> "ChatTemplate":
        """Read `chat_template.jinja`, or else what `tokenizer_config.json` has.

        Raises:
          ConfigError: there is no template, or it cannot be used.
        """
        directory = Path(directory)
        config = _read_json(directory / "tokenizer_config.json")
        names = {**_read_json(directory / "special_tokens_map.json"), **config}
        tokens = _token_texts(directory, names)
        path = directory / "chat_template.jinja"
        if path.exists():
            try:
                return cls(path.read_text(encoding="utf-8"), tokens)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            entries = [entry for entry in source if isinstance(entry, dict)]
            named = {str(entry.get("name")): entry.get("template") for entry in entries}
            source = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        if not isinstance(source, str):
            raise ConfigError(
                f"{directory} has no chat template: no chat_template.jinja, and no chat_template in"
                " tokenizer_config.json; take a chat model, or continue plain text with --prompt"
            )
        return cls(source, tokens)

    def render(
        self,
        messages: Sequence[Message],
        asks: bool = True,
        template: jinja2.Template | None = None,
        **flags: bool,
    ) -> str:
        """Return the conversation as text, up to where the next answer begins.

        Args:
          asks: end with the header of an answer; False for a conversation that is finished.
          template: another compilation of the same source.
          flags: variables of this template, such as `enable_thinking`.

        Raises:
          ConfigError: the template refuses the messages, or fails on them.
        """
        try:
            return (template or self._template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=asks,
                tools=None,
                documents=None,
                **flags,
                **self._tokens,
            )
        except Exception as error:  # a template is a program: it may end with any error
            raise ConfigError(
                f"the chat template refuses these messages: {_line(error)}"
            ) from error


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Write plain JSON; jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read_json(path: Path) -> dict[str, Any]:
    """Read a file that need not be there."""
    try:
        return read_json(path) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _token_texts(directory: Path, names: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens; what else ends in `_token` may be a switch or a number."""
    texts = {}
    for name, value in names.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
        elif name in _TOKENS and value is not None:
            raise ConfigError(
                f"{directory}: {name} in tokenizer_config.json or special_tokens_map.json is"
                f" {value!r}, it must be a text"
            )
    return texts
