"""The loop every mode runs: visit the device, turn tokens into text, look for a reason to stop."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eagle3.cli.console import Console
from eagle3.decoding.request import Answer, Request, request_problem
from eagle3.decoding.session import Session
from eagle3.interrupt import Interrupt
from eagle3.machine import Compilations
from eagle3.text import AnswerText, Piece, Tokenizer

_REASONS = {
    "stop": "ended by the model or a stop string",
    "length": "max_new_tokens reached",
    "cancelled": "interrupted",
}


@dataclass(frozen=True)
class Result:
    """An answer that has ended, as text and in numbers."""

    text: str  # without what was asked, stop string and special tokens
    answer: Answer
    prompt_tokens: int
    reused_tokens: int  # of the prompt (in a batch: of all prompts) that caches still held
    seconds: float  # from the prompt to the end of this answer
    is_compiled: bool  # the time contains compilation

    @property
    def tokens_per_second(self) -> float:
        """Return how fast the answer came, the reading of the prompt included."""
        return len(self.answer.tokens) / max(self.seconds, 1e-9)

    def summary(self) -> str:
        """Say how it went, in a line."""
        answer = self.answer
        compiled = ", compilation included" if self.is_compiled else ""
        return (
            f"{len(answer.tokens)} tokens in {self.seconds:.1f} s{compiled}:"
            f" {self.tokens_per_second:.1f} tokens/s, tau {answer.acceptance_length:.2f} in"
            f" {answer.rounds} rounds; {_REASONS[str(answer.finish_reason)]}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        answer = self.answer
        return {
            "text": self.text,
            "tokens": answer.tokens,
            "logprobs": [round(x, 6) for x in answer.logprobs],
            "finish_reason": answer.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "rounds": answer.rounds,
            "acceptance_length": round(answer.acceptance_length, 4),
            "acceptance_by_depth": [round(x, 4) for x in answer.acceptance_by_depth],
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "includes_compilation": self.is_compiled,
        }


class Event(NamedTuple):
    """Text of one answer; with `result` it has ended."""

    number: int  # of the request
    pieces: list[Piece]
    result: Result | None


def decode(
    session: Session,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    stops: Sequence[str],
    interrupt: Interrupt,
    size: int | None = None,
) -> Iterator[Event]:
    """Read the prompts, and return what comes of them: text as it is made, a result for each.

    After an interrupt all that have begun end where they are, with the finish reason "cancelled".

    Args:
      size: how many are decoded at once, the next in the place of one that has ended, if the
        session can; default: all.

    Raises:
      ValueError: a request cannot be served; nothing was computed.
    """
    Compilations.listen()
    for request in requests:
        if problem := request_problem(session.cfg, request):
            raise ValueError(problem)
    waiting = deque(range(len(requests)))

    def start() -> list[_Begun]:
        compiled, began = Compilations.count, time.perf_counter()
        numbers = [waiting.popleft() for _ in range(min(size or len(waiting), len(waiting)))]
        reused = session.start([requests[number] for number in numbers])
        return [_Begun(n, AnswerText(tokenizer, stops), reused, began, compiled) for n in numbers]

    def admit(row: int) -> _Begun:
        compiled, began, number = Compilations.count, time.perf_counter(), waiting.popleft()
        session.admit(row, requests[number])
        return _Begun(number, AnswerText(tokenizer, stops), 0, began, compiled)

    def events(begun: list[_Begun]) -> Iterator[Event]:
        while session.is_running:
            for row, tokens, drafted in _visit(session, interrupt):
                now, answer, result = begun[row], session.answers[row], None
                pieces = _read(session, row, now.text, tokens, drafted)
                if answer.finish_reason is not None:
                    result = Result(
                        now.text.text, answer, len(requests[now.number].prompt), now.reused,
                        time.perf_counter() - now.began, Compilations.count > now.compiled,
                    )  # fmt: skip
                yield Event(now.number, pieces, result)
            for row, answer in enumerate(session.answers):
                if interrupt.is_set or not waiting or not session.can_admit(requests[waiting[0]]):
                    break
                if answer.finish_reason is not None:
                    begun[row] = admit(row)
            if waiting and not session.is_running and not interrupt.is_set:
                begun = start()

    return events(start())


class _Begun(NamedTuple):
    """A request that a row of the session is at."""

    number: int
    text: AnswerText
    reused: int  # see `Result`
    began: float
    compiled: int  # programs before it


def _visit(
    session: Session, interrupt: Interrupt
) -> list[tuple[int, Sequence[int], Sequence[bool]]]:
    """Return rows with their new tokens, and which were drafted; an interrupt ends all rows."""
    if not interrupt.is_set:
        return [(chunk.row, chunk.tokens, chunk.is_drafted) for chunk in session.advance()]
    running = [i for i, answer in enumerate(session.answers) if answer.finish_reason is None]
    for row in running:
        session.stop(row, reason="cancelled")
    return [(row, (), ()) for row in running]


def _read(
    session: Session, row: int, text: AnswerText, tokens: Sequence[int], drafted: Sequence[bool]
) -> list[Piece]:
    """Turn new tokens into text; ends the row at a stop string."""
    answer, pieces = session.answers[row], []
    is_text = len(tokens) - (answer.finish_reason == "stop")  # the last one ended the text
    for token, is_drafted in list(zip(tokens, drafted, strict=True))[: max(is_text, 0)]:
        pieces += text.push(token, is_drafted)
    if answer.finish_reason is not None:
        pieces += text.finish()
    if text.is_stopped:
        session.stop(row, keep=text.num_tokens)
    return pieces


def decode_one(
    session: Session,
    request: Request,
    tokenizer: Tokenizer,
    stops: Sequence[str],
    interrupt: Interrupt,
    console: Console | None,
    echo: str = "",
    on_event: Callable[[Event], None] = lambda event: None,
) -> Result:
    """Answer one request; what is made goes to the console, if there is one.

    Args:
      echo: shown before the answer.
      on_event: called after each visit to the device.

    Raises:
      ValueError: the request cannot be served; nothing was shown.
    """
    result = None
    with contextlib.ExitStack() as stack:
        events = decode(session, [request], tokenizer, stops, interrupt)
        if console is not None:
            stack.callback(console.end)  # colours end even if the loop is broken off
            console.show(echo)
        for event in events:
            if console is not None:
                console.write(event.pieces)
            on_event(event)
            result = event.result or result
    assert result is not None
    return result
