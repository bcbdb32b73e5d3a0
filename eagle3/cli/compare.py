"""`--compare`: the same prompts plainly and with the draft, how fast, and whether the text agrees.

Both go through the same loop in turn. Runs in which anything was compiled are not counted, and of
short ones several are made, of which the median counts. Where greedy texts part, the target's
logits there tell a tie in rounding from an error; of sampled ones they do not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle3.cli.answers import Interrupt, Result, decode_one
from eagle3.cli.arguments import Options
from eagle3.cli.console import note, print_json
from eagle3.cli.engine import Engine
from eagle3.cli.rows import read_rows
from eagle3.decoding.request import Request, total_acceptance
from eagle3.decoding.session import Session
from eagle3.decoding.speculate import Chosen
from gdn import HybridLM

_SECONDS, _MOST_RUNS = 1.0, 7  # a prompt is decoded again until it took this long, or so often


class Difference(NamedTuple):
    """Where two answers part."""

    position: int  # tokens they share
    tokens: tuple[int | None, int | None]  # plain and speculative; None: that answer has ended
    margin: float | None = None  # logit of the first minus that of the second, if greedy
    top_margin: float | None = None  # highest logit minus the second highest, if greedy

    def describe(self) -> str:
        """Say it in a line."""
        if None in self.tokens:
            return f"one ends after {self.position} tokens, the other does not"
        where = f"tokens {self.tokens[0]} and {self.tokens[1]} after {self.position} equal ones"
        if self.margin is None:
            return f"{where}, sampled"
        return f"{where}: logits {self.margin:.2g} apart (the two highest: {self.top_margin:.2g})"


class Pair(NamedTuple):
    """A prompt decoded both ways."""

    plain: Result
    drafted: Result
    difference: Difference | None
    chosen: Chosen | None = None  # of the last run with the draft, if its trees adapt

    @property
    def ratio(self) -> float:
        """Return how many times faster the draft makes it; NaN if there are no tokens."""
        return _ratio(self.drafted.tokens_per_second, self.plain.tokens_per_second)


def run_compare(engine: Engine, options: Options) -> bool:
    """Compare on each prompt, and in total; returns False if interrupted."""
    if options.prompts is None:
        requests = [engine.request(engine.encode(engine.config.prompt))]
    else:
        requests = [row.request for row in read_rows(options.prompts, engine)]
    sessions = (engine.session(None), engine.session(engine.drafter))
    note("times include reading the prompt; runs that compile anything are not counted")
    if not options.json:
        print("prompt  tokens   plain/s   draft/s  ratio   tau  text")
    pairs: list[Pair] = []
    with Interrupt() as interrupt:
        for number, request in enumerate(requests):
            pair = _pair(engine, sessions, request, number % 2 == 1, interrupt)
            if pair is None:
                break
            pairs.append(pair)
            print_json(_to_json(number, pair)) if options.json else print(_row(number, pair))
    if pairs:
        _print_totals(pairs, options.json)
    if interrupt.is_set:
        note(f"interrupted: {len(pairs)} of {len(requests)} prompts were compared")
    return not interrupt.is_set


def _pair(
    engine: Engine,
    sessions: tuple[Session, Session],
    request: Request,
    is_swapped: bool,
    interrupt: Interrupt,
) -> Pair | None:
    """Decode both ways in turn, every second time the draft first; None if interrupted."""
    runs: tuple[list[Result], list[Result]] = ([], [])
    while not all(_is_enough(side) for side in runs):
        for side in (1, 0) if is_swapped else (0, 1):
            # The prompt is read anew each time: the caches of the run before hold more than it.
            stops = engine.config.stop_strings
            runs[side].append(
                decode_one(sessions[side], request, engine.tokenizer, stops, interrupt, None)
            )
            if interrupt.is_set:
                return None
        is_swapped = not is_swapped
    plain, drafted = (_typical(side) for side in runs)
    tokens = plain.answer.tokens, drafted.answer.tokens
    difference = first_difference(engine.target, request, *tokens)
    return Pair(plain, drafted, difference, sessions[1].chosen)


def _is_enough(runs: list[Result]) -> bool:
    """Tell whether the runs without compilation say how long this takes."""
    seconds = [run.seconds for run in runs if not run.is_compiled]
    return len(runs) >= _MOST_RUNS or sum(seconds) >= _SECONDS


def _typical(runs: list[Result]) -> Result:
    """Return the run of median time among those without compilation."""
    runs = [run for run in runs if not run.is_compiled] or runs
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def _ratio(drafted: float, plain: float) -> float:
    return drafted / plain if plain else math.nan


def first_difference(
    target: HybridLM, request: Request, plain: Sequence[int], drafted: Sequence[int]
) -> Difference | None:
    """Return where two answers to a request part, and the target's logits there; or None."""
    if list(plain) == list(drafted):
        return None
    pairs = list(zip(plain, drafted, strict=False))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if position == len(pairs):
        ended = tuple(side[position] if len(side) > position else None for side in (plain, drafted))
        return Difference(position, (ended[0], ended[1]))
    if request.sampling.temperature > 0:  # the tokens were not chosen by their logits alone
        return Difference(position, pairs[position])
    ids = [*request.prompt, *plain[:position]]
    # Padding at the end changes nothing before it, and few lengths are compiled.
    tokens = np.zeros((1, -(-len(ids) // 64) * 64), np.int32)
    tokens[0, : len(ids)] = ids
    logits = np.asarray(_logits_at(target, tokens, len(ids) - 1))
    first, second = pairs[position]
    top = np.sort(logits)[-2:]
    return Difference(
        position, (first, second), float(logits[first] - logits[second]), float(top[1] - top[0])
    )


@jax.jit
def _logits_at(target: HybridLM, tokens, index):
    return target.logits(target(tokens).hidden[0, index])


def _to_json(number: int, pair: Pair) -> dict[str, Any]:
    difference = None if pair.difference is None else pair.difference._asdict()
    return {
        "prompt": number,
        "plain": pair.plain.to_json(),
        "speculative": pair.drafted.to_json(),
        "ratio": round(pair.ratio, 4),
        "identical": pair.difference is None,
        "first_difference": difference,
    }


def _row(number: int, pair: Pair) -> str:
    text = "identical" if pair.difference is None else f"differs: {pair.difference.describe()}"
    return (
        f"{number:>6} {len(pair.drafted.answer.tokens):>7} {pair.plain.tokens_per_second:>9.1f}"
        f" {pair.drafted.tokens_per_second:>9.1f} {pair.ratio:>6.2f}"
        f" {pair.drafted.answer.acceptance_length:>5.2f}  {text}"
    )


def _print_totals(pairs: Sequence[Pair], as_json: bool) -> None:
    """Print the whole as if it were one answer: sums of tokens, times and rounds."""
    plain, drafted = (
        sum(len(r.answer.tokens) for r in side) / max(sum(r.seconds for r in side), 1e-9)
        for side in ([p.plain for p in pairs], [p.drafted for p in pairs])
    )
    tau, by_depth = total_acceptance([pair.drafted.answer for pair in pairs])
    ratio, trees = _ratio(drafted, plain), _trees(pairs)
    identical = sum(pair.difference is None for pair in pairs)
    totals = {
        "prompts": len(pairs),
        "plain_tokens_per_second": round(plain, 2),
        "speculative_tokens_per_second": round(drafted, 2),
        "ratio": round(ratio, 4),
        "acceptance_length": round(tau, 4),
        "acceptance_by_depth": [round(x, 4) for x in by_depth],
        "identical": identical,
    } | trees
    if as_json:
        print_json({"totals": totals})
        return
    depths = ", ".join(f"{x:.2f}" for x in by_depth) or "none"
    print(
        f"total: plain {plain:.1f} tokens/s, with the draft {drafted:.1f}, ratio"
        f" {ratio:.2f}; {identical} of {len(pairs)} texts identical"
    )
    print(f"tau {tau:.2f} tokens a round, the bonus token included")
    print(f"accepted at depth 1, 2, ... if reached: {depths}")
    for name, counts in trees.items():
        shares = ", ".join(f"{n}: {x / sum(counts.values()):.0%}" for n, x in counts.items())
        print(f"rounds by {name.removeprefix('rounds_by_').replace('_', ' ')}: {shares}")
    if math.isfinite(ratio) and ratio > 0:
        gained = "so time is gained" if ratio > 1 else "so no time is gained"
        print(f"a round takes the time of {tau / ratio:.2f} plain tokens, {gained}")


def _trees(pairs: Sequence[Pair]) -> dict[str, dict[str, int]]:
    """Return how many rounds verified trees of each size and depth; empty for fixed trees."""
    found = [pair.chosen for pair in pairs if pair.chosen is not None]
    totals = {
        "rounds_by_nodes_verified": sum((Counter(x.sizes) for x in found), Counter()),
        "rounds_by_levels_drafted": sum((Counter(x.depths) for x in found), Counter()),
    }
    return {
        name: {str(n): counts[n] for n in sorted(counts)}
        for name, counts in totals.items()
        if counts
    }
