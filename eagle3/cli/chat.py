"""`--chat`: a conversation that keeps the caches between turns."""

import sys
from collections.abc import Iterator

from eagle3.cli.answers import Interrupt
from eagle3.cli.arguments import Options
from eagle3.cli.console import Console, note, print_json
from eagle3.cli.conversation import Conversation
from eagle3.cli.engine import Engine

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C ends an answer"


def run_chat(engine: Engine, options: Options) -> bool:
    """Talk until the input ends; returns False if Ctrl-C ended it.

    An answer that was cut short stays in the conversation as far as it came. Input that does not
    come from a terminal is taken line by line, one message each.
    """
    template = engine.chat_template()
    session = engine.session(engine.drafter, is_long=True)
    console = None if options.json else Console(options.show_acceptance, options.color)
    conversation = Conversation(engine, session, template)
    note(HELP)
    try:
        for line in _lines(is_shown=console is not None):
            if line == "/exit":
                return True
            if line == "/reset":
                conversation = Conversation(engine, session, template)
                note("the conversation starts anew")
                continue
            if line.startswith("/"):
                note(f"there is no command {line.split()[0]}: {HELP}")
                continue
            try:
                with Interrupt() as interrupt:
                    result = conversation.ask(line, interrupt, console).result
            except ValueError as error:  # this message is refused, the conversation goes on
                note(f"not answered: {error}; /reset starts anew")
                continue
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
