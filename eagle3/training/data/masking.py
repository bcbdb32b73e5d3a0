"""Text to token ids and a loss mask: True for what the model itself has to produce.

In a conversation that is the text of the assistant's answers and the end-of-turn token after each;
not the header that the model is given (nor an empty `<think>` block, where the template gives it
when thinking is off), and not what the template writes after the end of the turn.

Borders are found in the text: an answer begins where the rendering that asks for it ends, and ends
with the end-of-turn token; `{% generation %}` tags, if the template has them, narrow that down.
Templates that strip the thoughts of earlier turns render a turn differently once it is history:
such a conversation becomes several examples, each with the history that the model had.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension

from eagle3.chat_template import ChatTemplate
from eagle3.config import ConfigError
from eagle3.training.data.rows import (
    MALFORMED,
    NO_ANSWER,
    REFUSED,
    STRADDLED,
    Chat,
    Dropped,
    Text,
    Tokens,
)
from eagle3.training.data.tokens import TrainingTokenizer, has_template

# Noncharacters: Unicode keeps them for uses such as this, so no text has them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_NO_MARKS = {ord(_OPEN): None, ord(_CLOSE): None}
Span = tuple[int, int]  # the end not included


class Marked(NamedTuple):
    """A text and the parts of it that are trained on."""

    text: str
    spans: tuple[Span, ...]  # of characters, ascending, apart from each other
    is_plain: bool = False  # no template: begin and end of the text are added as tokens
    ids: tuple[int, ...] = ()  # in place of the text, from a row that has them: spans of these

    @property
    def size(self) -> int:
        """Return how much there is to tokenise or to copy."""
        return len(self.text) + len(self.ids)


class Example(NamedTuple):
    """Token ids and, for each, whether the model has to produce it."""

    tokens: np.ndarray  # int32
    mask: np.ndarray  # bool


class _Marks(Extension):
    """`{% generation %}` that leaves a mark at either end of what is in it."""

    tags = {"generation"}
    priority = 101  # after the extension that ignores the tag, and therefore instead of it

    def parse(self, parser) -> list[nodes.Node]:
        """Return the body between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (
            nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_OPEN, _CLOSE)
        )
        return [first, *body, last]


class TrainingTemplate(ChatTemplate):
    """A chat template that also renders finished answers, and where its tags say they are."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None):
        """Compile a template; arguments and errors are those of ChatTemplate."""
        super().__init__(source, tokens)
        content = repr((source, sorted(self._tokens.items())))
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self._marking = None
        if re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source):
            environment = self._template.environment.overlay(extensions=[_Marks])
            self._marking = environment.from_string(source)
        # Ways to ask for an answer: as decoding does, and with thinking switched off.
        self._ways = [{}, {"enable_thinking": False}] if "enable_thinking" in source else [{}]

    def prompts(self, messages: Sequence[dict[str, str]]) -> list[str]:
        """Return what the model may be given to answer these messages."""
        return [self._text(self._template, messages, True, way) for way in self._ways]

    def finished(self, messages: Sequence[dict[str, str]]) -> tuple[str, list[Span] | None]:
        """Render messages that end with an answer.

        Returns:
          The text, and what is within generation tags; None for a template without tags.

        Raises:
          Dropped: the template refuses the messages.
        """
        text = self._text(self._template, messages, False)
        if self._marking is None:
            return text, None
        marked = self._text(self._marking, messages, False)
        if _OPEN in text or _CLOSE in text or marked.translate(_NO_MARKS) != text:
            raise Dropped(REFUSED, "its generation tags do not enclose a part of the text")
        spans, place = [], 0
        for number, part in enumerate(re.split(f"[{_OPEN}{_CLOSE}]", marked)):
            if number % 2 and part:
                spans.append((place, place + len(part)))
            place += len(part)
        return text, spans

    def _text(self, template, messages, asks: bool, way: dict[str, bool] | None = None) -> str:
        try:
            return self.render(messages, asks, template, **(way or {}))
        except ConfigError as error:
            raise Dropped(REFUSED, " ".join(str(error.__cause__).split())) from error


class Masker:
    """Makes examples of texts and conversations, with a tokenizer and perhaps a template."""

    def __init__(
        self,
        tokenizer: TrainingTokenizer,
        template: TrainingTemplate | None = None,
        vocab_size: int = 1 << 31,
    ):
        """Take all from the target; without a template, conversations are limited to a prompt.

        Args:
          vocab_size: token ids that rows bring are below it.
        """
        self.tokenizer, self.template, self._vocab_size = tokenizer, template, vocab_size
        ends = (tokenizer.decode([token], special=True) for token in tokenizer.end_ids)
        self._ends, self._specials = tuple(filter(None, ends)), tokenizer.special_texts

    @classmethod
    def load(cls, directory: str | None, vocab_size: int) -> "Masker":
        """Read what the directory of a target has; not all targets have a chat template.

        Raises:
          ConfigError: there is no tokenizer, or a file cannot be used.
        """
        tokenizer, template = TrainingTokenizer.load(directory, vocab_size), None
        if directory is not None and has_template(directory):
            template = TrainingTemplate.load(directory)
            assert isinstance(template, TrainingTemplate)
        return cls(tokenizer, template, vocab_size)

    @property
    def fingerprint(self) -> str:
        """Return a hash of all that decides tokens and masks."""
        template = self.template.fingerprint if self.template is not None else ""
        content = f"{self.tokenizer.fingerprint} {template} {self._vocab_size}"
        return hashlib.sha256(content.encode()).hexdigest()

    def mark(self, row: Text | Chat | Tokens) -> list[Marked]:
        """Return the examples that a row gives, as text unless it has tokens.

        Raises:
          Dropped: it gives none.
          ConfigError: it is a conversation, and there is no template for it; or it has the tokens
            of another tokenizer.
        """
        if isinstance(row, Tokens):
            return [self._given(row)]
        if isinstance(row, Text):
            return [Marked(row.text, ((0, len(row.text)),), is_plain=True)]
        if self.template is None:
            return [_continuation(row)]
        messages = row.messages
        groups: list[Marked] = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            turn = self._turn(messages[: place + 1])
            if groups and turn.text.startswith(groups[-1].text):
                turn = turn._replace(spans=groups.pop().spans + turn.spans)
            groups.append(turn)
        if not any(group.spans for group in groups):
            raise Dropped(NO_ANSWER, "the template's generation tags enclose no answer")
        return [group for group in groups if group.spans]

    def encode(self, marked: Sequence[Marked]) -> list["Example | Dropped"]:
        """Tokenise; what cannot be masked exactly comes back as the error that says so."""
        written = iter(self._encode([item for item in marked if not item.ids]))
        return [_taken(item) if item.ids else next(written) for item in marked]

    def _encode(self, marked: Sequence[Marked]) -> list["Example | Dropped"]:
        parts = [_cut(item) for item in marked]
        texts = [item.text for item in marked]
        texts += [text for cut in parts if len(cut) > 1 for text, _ in cut]
        ids = self.tokenizer.encode_batch(texts)
        wholes, pieces = ids[: len(marked)], iter(ids[len(marked) :])
        examples = []
        for item, cut, whole in zip(marked, parts, wholes, strict=True):
            found = [next(pieces) for _ in cut] if len(cut) > 1 else [whole]
            examples.append(self._example(item, cut, whole, found))
        return examples

    def _given(self, row: Tokens) -> Marked:
        known = self.tokenizer.fingerprint
        if not known.startswith(row.tokenizer):
            raise ConfigError(
                f"the data has tokens of another tokenizer ({row.tokenizer}, the target has"
                f" {known[: len(row.tokenizer)]}): make them again for this target"
            )
        if (largest := max(row.ids)) >= self._vocab_size:
            raise Dropped(
                MALFORMED,
                f"token {largest} is outside the vocabulary of {self._vocab_size}; are these the"
                " target's tokens?",
            )
        return Marked("", ((row.prompt_tokens, len(row.ids)),), ids=tuple(row.ids))

    def _turn(self, messages: Sequence[dict[str, str]]) -> Marked:
        """Return the text up to the end of the last answer, with that answer as its spans."""
        assert self.template is not None
        if any(end in value for end in self._ends for value in messages[-1].values()):
            raise Dropped(REFUSED, "an answer contains the token that ends answers")
        text, tagged = self.template.finished(messages)
        prompts = [p for p in self.template.prompts(messages[:-1]) if text.startswith(p)]
        if not prompts:
            raise Dropped(REFUSED, "what it asks for an answer with is not what an answer follows")
        start = max(map(len, prompts))
        stop, end = self._end_of_turn(text, start, messages[-1]["content"])
        spans: list[Span] = [(start, end)]
        if tagged is not None:
            clipped = [(max(a, start), min(b, stop)) for a, b in tagged]
            spans = [(a, b) for a, b in clipped if a < b]
            spans = _joined([*spans, (stop, end)]) if spans else []
        return Marked(text[:end], tuple(spans))

    def _end_of_turn(self, text: str, start: int, content: str) -> Span:
        """Find the first token after `start` that the target stops at, or else a special one.

        Special tokens may be in answers (`</think>` is one in some vocabularies), so of those it is
        the first after the content. Without any, the turn ends where its text does.
        """
        found = [(text.find(end, start), end) for end in self._ends if end in text[start:]]
        if not found and self._specials:
            pattern = "|".join(map(re.escape, self._specials))
            matches = list(re.compile(pattern).finditer(text, start))
            answer = content.rpartition("</think>")[2].strip()
            last = matches[-1].start() if matches else start
            place = text.rfind(answer, start, last)
            if place < 0 and answer in text[start:]:
                matches = []  # the last one is part of the answer
            after = place + len(answer)
            found = [(match.start(), match[0]) for match in matches if match.start() >= after]
        if not found:
            return len(text), len(text)
        place, token = min(found)
        return place, place + len(token)

    def _example(
        self,
        item: Marked,
        cut: list[tuple[str, bool]],
        whole: list[int],
        pieces: list[list[int]],
    ) -> "Example | Dropped":
        """Give every token of the whole text the flag of the part that it came from."""
        if list(chain.from_iterable(pieces)) == whole:
            counts = [len(piece) for piece in pieces]
        else:
            # Some tokenizers treat the beginning of a text differently: they need the whole prefix.
            counts, done, text = [], 0, ""
            for part, _ in cut:
                text += part
                ids = whole if text == item.text else self.tokenizer.encode(text, special=False)
                if whole[: len(ids)] != ids:
                    return Dropped(STRADDLED, f"one spans {text[-12:]!r} and what follows it")
                counts.append(len(ids) - done)
                done = len(ids)
        mask = np.repeat([flag for _, flag in cut], counts)
        if item.is_plain:
            before, after = self.tokenizer.first_ids, self.tokenizer.last_ids
            whole = [*before, *whole, *after]
            mask = np.pad(mask, (len(before), 0))
            mask = np.pad(mask, (0, len(after)), constant_values=True)
        if not mask.any():
            return Dropped(NO_ANSWER, "no token is to be produced by the model")
        return Example(np.array(whole, np.int32), mask)


def _taken(item: Marked) -> Example:
    """Mask tokens that a row has brought."""
    mask = np.zeros(len(item.ids), bool)
    for start, end in item.spans:
        mask[start:end] = True
    return Example(np.array(item.ids, np.int32), mask)


def _continuation(chat: Chat) -> Marked:
    """Without a template, a prompt and its response are one text."""
    if not chat.is_prompt or len(chat.messages) != 2:
        raise ConfigError(
            "the data has conversations, and the target has no chat template: take a chat model as"
            " target, or data with text, or with prompt and response"
        )
    prompt, response = (message["content"] for message in chat.messages)
    return Marked(prompt + response, ((len(prompt), len(prompt + response)),), is_plain=True)


def _cut(item: Marked) -> list[tuple[str, bool]]:
    """Cut the text at the borders of its spans; with each part, whether it is in one."""
    parts, place = [], 0
    for start, end in item.spans:
        parts += [(item.text[place:start], False), (item.text[start:end], True)]
        place = end
    parts.append((item.text[place:], False))
    return [(text, flag) for text, flag in parts if text]


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Make one of spans that touch."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif start < end:
            joined.append((start, end))
    return joined
