"""`--prompt`: continue one text."""

from eagle3.cli.answers import Interrupt, decode_one
from eagle3.cli.arguments import Options
from eagle3.cli.console import Console, note, print_json
from eagle3.cli.engine import Engine


def run_single(engine: Engine, options: Options) -> bool:
    """Continue the prompt on the terminal, or as one JSON object; returns False if interrupted."""
    config = engine.config
    request = engine.request(engine.encode(config.prompt))
    session = engine.session(engine.drafter)
    console = None if options.json else Console(options.show_acceptance, options.color)
    stops = config.stop_strings
    with Interrupt() as interrupt:
        result = decode_one(
            session, request, engine.tokenizer, stops, interrupt, console, echo=config.prompt
        )
    if console is None:
        print_json(result.to_json())
    else:
        note(result.summary())
    return result.answer.finish_reason != "cancelled"
