"""`--chat`: a conversation that keeps the caches between turns."""

import sys
from collections.abc import Iterator

from eagle3.cli.answers import Interrupt, decode_one
from eagle3.cli.arguments import Options
from eagle3.cli.console import Console, note, print_json
from eagle3.cli.engine import Engine
from eagle3.text import Tokenizer

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C ends an answer"


def run_chat(engine: Engine, options: Options) -> bool:
    """Talk until the input ends; returns False if Ctrl-C ended it.

    An answer that was cut short stays in the conversation as far as it came. Input that does not
    come from a terminal is taken line by line, one message each.
    """
    template = engine.chat_template()
    session = engine.session(engine.drafter)
    console = None if options.json else Console(options.show_acceptance, options.color)
    messages: list[dict[str, str]] = []
    held: list[int] = []  # the conversation so far, in tokens
    note(HELP)
    try:
        for line in _lines(is_shown=console is not None):
            if line == "/exit":
                return True
            if line == "/reset":
                messages, held = [], []
                note("the conversation starts anew")
                continue
            if line.startswith("/"):
                note(f"there is no command {line.split()[0]}: {HELP}")
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                with Interrupt() as interrupt:
                    ids = continued_ids(engine.tokenizer, held, template.render(asked))
                    result = decode_one(
                        session, engine.request(ids), engine.tokenizer,
                        engine.config.stop_strings, interrupt, console,
                    )  # fmt: skip
            except ValueError as error:  # this message is refused, the conversation goes on
                note(f"not answered: {error}; /reset starts anew")
                continue
            messages = [*asked, {"role": "assistant", "content": result.text}]
            held = [*ids, *result.answer.tokens]
            if console is None:
                print_json(result.to_json())
            else:
                note(result.summary())
    except KeyboardInterrupt:
        note("")
        return False
    return True


def _lines(is_shown: bool) -> Iterator[str]:
    """Yield what is typed, line by line, without empty lines; on a terminal, with a prompt."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and is_shown
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except EOFError:
            note("")
            return
        if not line and not is_terminal:
            return
        if line.strip():
            yield line.strip()


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
