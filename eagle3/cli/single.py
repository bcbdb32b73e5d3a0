"""`--prompt`: continue one text."""

from collections.abc import Callable

from eagle3.cli.answers import Event, Interrupt, Result, decode_one
from eagle3.cli.arguments import Options
from eagle3.cli.console import Console, note, print_json
from eagle3.cli.engine import Engine
from eagle3.decoding.session import Session


def run_single(engine: Engine, options: Options) -> bool:
    """Continue the prompt on the terminal, or as one JSON object; returns False if interrupted."""
    result = continue_prompt(engine, options, engine.session(engine.drafter, is_long=True))
    return result.answer.finish_reason != "cancelled"


def continue_prompt(
    engine: Engine,
    options: Options,
    session: Session,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Result:
    """Continue the prompt in a session, and print what comes of it."""
    config = engine.config
    request = engine.request(engine.encode(config.prompt))
    console = None if options.json else Console(options.show_acceptance, options.color)
    stops = config.stop_strings
    with Interrupt() as interrupt:
        result = decode_one(
            session, request, engine.tokenizer, stops, interrupt, console, config.prompt, on_event
        )
    if console is None:
        print_json(result.to_json())
    else:
        note(result.summary())
    return result
