"""`--trace`: continue one text, and write a page that replays it round by round.

The page is `trace.html` with the rounds as JSON in it. It needs no other file and no network. What
models wrote is data to it: it is put on the page as text, never as markup.
"""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.cli.answers import Event
from eagle3.cli.arguments import Options
from eagle3.cli.console import note
from eagle3.cli.engine import Engine
from eagle3.cli.single import continue_prompt
from eagle3.config import DecodeConfig
from eagle3.decoding.trace import Round, TracedSession
from eagle3.files import write_whole
from eagle3.text import Piece, Tokenizer

_DATA = "TRACE_DATA"  # the place of the JSON in the template


def run_trace(engine: Engine, options: Options) -> bool:
    """Continue the prompt as without a trace, then write the page; returns False if interrupted."""
    assert options.trace is not None
    config, pieces = engine.config, []
    session = TracedSession(engine.target, engine.drafter, prefill_chunk=config.prefill_chunk)

    def keep(event: Event) -> None:
        pieces.append(event.pieces)

    result = continue_prompt(engine, options, session, keep)
    if session.rounds:
        data = page_data(config, engine.tokenizer, session.rounds, pieces)
        write_whole(Path(options.trace), page(data))
        note(f"{len(session.rounds)} rounds in {options.trace}: open it in a browser")
    else:
        note(f"nothing was decoded, so {options.trace} was not written")
    return result.answer.finish_reason != "cancelled"


def page(data: dict[str, Any]) -> str:
    """Return the page that replays `data`.

    JSON in a script element ends at the first "</script", and "<!--" changes how it is read: so
    there is no "<" in it. All but ASCII is escaped, so no character can be anything but itself.
    """
    template = resources.files("eagle3.cli").joinpath("trace.html").read_text(encoding="utf-8")
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    before, after = template.split(_DATA)
    return before + text + after


def page_data(
    config: DecodeConfig,
    tokenizer: Tokenizer,
    rounds: Sequence[Round],
    pieces: Sequence[Sequence[Piece]],
) -> dict[str, Any]:
    """Return what the page needs to know.

    Args:
      pieces: text that became certain in each round; what comes later belongs to the last one.
    """
    ids = {int(token) for one in rounds for token in (*one.tokens, *one.emitted)}
    texts = [list(part) for part in pieces[: len(rounds)]]
    for part in pieces[len(rounds) :]:
        texts[-1] += part
    return {
        "prompt": config.prompt,
        "settings": _settings(config),
        "words": {token: token_text(tokenizer, token) for token in sorted(ids)},
        "rounds": [_round(one, part) for one, part in zip(rounds, texts, strict=True)],
    }


def _settings(config: DecodeConfig) -> str:
    temperature = config.sampling.temperature
    sampled = f"temperature {temperature:g}, seed {config.sampling.seed}"
    return f"{config.tree.kind} tree, {sampled if temperature else 'greedy'}, {config.dtype}"


def _round(one: Round, pieces: Sequence[Piece]) -> dict[str, Any]:
    chances = None
    if one.log_probs is not None:
        chances = [float(f"{x:.3g}") for x in np.exp(np.float64(one.log_probs))]
    return {
        "tokens": one.tokens.tolist(),
        "parents": one.parents.tolist(),
        "chances": chances,
        "path": one.path.tolist(),
        "emitted": one.emitted.tolist(),
        "target": [float(f"{x:.3g}") for x in np.exp(np.float64(one.target_log_probs))],
        "seconds": round(one.seconds, 6),
        "compiled": one.is_compiled,
        "text": [[piece.text, piece.is_drafted] for piece in pieces],
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token as it stands behind another one, its leading space included."""
    alone, twice = (tokenizer.decode([token] * n, special=True) for n in (1, 2))
    return twice[len(alone) :] if twice.startswith(alone) else alone
