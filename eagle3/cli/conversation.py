"""A conversation that keeps the caches of a session between turns."""

from typing import NamedTuple

from eagle3.chat_template import ChatTemplate
from eagle3.cli.answers import Interrupt, Result, decode_one
from eagle3.cli.console import Console
from eagle3.cli.engine import Engine
from eagle3.decoding.request import Request
from eagle3.decoding.session import Session
from eagle3.text import Tokenizer


class Turn(NamedTuple):
    """What the model was given, and what it said."""

    request: Request
    result: Result


class Conversation:
    """What was said so far, as messages and as the tokens that the session has read and made."""

    def __init__(self, engine: Engine, session: Session, template: ChatTemplate):
        """Start without a word; the session is one of this engine's."""
        self._engine, self._session, self._template = engine, session, template
        self._messages: list[dict[str, str]] = []
        self._held: list[int] = []

    def request(self, text: str) -> Request:
        """Return what asks for an answer to `text`, after all that was said.

        Raises:
          ConfigError: the template refuses it, or it is no text.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        ids = continued_ids(self._engine.tokenizer, self._held, self._template.render(asked))
        return self._engine.request(ids)

    def ask(self, text: str, interrupt: Interrupt, console: Console | None = None) -> Turn:
        """Let the model answer; an answer that is cut short stays as far as it came.

        Raises:
          ValueError: it cannot be answered; the conversation is as it was.
        """
        engine, request = self._engine, self.request(text)
        stops = engine.config.stop_strings
        result = decode_one(self._session, request, engine.tokenizer, stops, interrupt, console)
        self._messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": result.text},
        ]
        self._held = [*request.prompt, *result.answer.tokens]
        return Turn(request, result)


def continued_ids(tokenizer: Tokenizer, held: list[int], text: str) -> list[int]:
    """Return the tokens of a conversation, which begin with those that caches hold if they can.

    Text that a model made need not be split again as it was made. So where `held` reads as the
    beginning of `text`, only the rest is encoded.
    """
    if held:
        before = tokenizer.decode(held, special=True)
        if text.startswith(before):
            ids = [*held, *tokenizer.encode(text[len(before) :], special=False)]
            if tokenizer.decode(ids, special=True) == text:
                return ids
    return tokenizer.encode(text, special=False)
