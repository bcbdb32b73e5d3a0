"""Compare trees that adapt with fixed ones, on prompts of several kinds.

    python benchmarks/auto_tree.py --target DIR --draft DIR --prompts code.jsonl prose.jsonl
    python benchmarks/auto_tree.py --small      # generated models: does it run, and cost nothing?

Without any argument it is small, as in `make bench`.

Every setting decodes every row of every file, all settings in turn, several times; medians. Tokens
per second count decoding alone, not the reading of the prompt, and no run that compiles. The second
figure of each setting is free of the machine's mood: tokens over the seconds that the measured
costs say its rounds take. `key=value` arguments are those of `decode.py`, such as dtype=int8.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from eagle3.cli.engine import Engine, build
from eagle3.cli.rows import read_rows
from eagle3.config import DecodeConfig, TreeConfig
from eagle3.config_reader import read_config
from eagle3.decoding.auto import AutoDrafter
from eagle3.decoding.costs import Costs
from eagle3.decoding.drafter import Eagle3Drafter
from eagle3.decoding.generate import make_drafter
from eagle3.decoding.request import Request
from eagle3.decoding.session import Session
from eagle3.decoding.tree import TreePlan, chain_plan, dynamic_plan
from eagle3.draft import draft_for
from eagle3.draft_config import DraftConfig
from eagle3.machine import Compilations, keep_compiled_programs

FIXED: dict[str, TreePlan] = {
    **{f"chain of {n}": chain_plan(n) for n in range(1, 6)},
    "4 nodes": dynamic_plan(3, 3, 4),
    "8 nodes": dynamic_plan(3, 4, 8),
    "16 nodes": dynamic_plan(3, 5, 16),
}


class Run(NamedTuple):
    """All rows of a file, decoded once."""

    tokens: int
    rounds: int
    seconds: float  # of decoding
    modelled: float  # as the costs say
    sizes: dict[int, int]


def small_engine(overrides: Sequence[str]) -> tuple[Engine, dict[str, list[Request]]]:
    """Make an engine of random weights, whose draft is as wrong as can be."""
    fixed = ["generated.num_hidden_layers=8", "generated.hidden_size=128", "native=off"]
    engine = build(read_config(DecodeConfig, None, [*fixed, *overrides]))
    cfg = engine.target.cfg
    draft_cfg = DraftConfig(
        hidden_size=cfg.hidden_size, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=cfg.vocab_size, draft_vocab_size=128,
        target_hidden_size=cfg.hidden_size, aux_layers=cfg.default_aux_layers,
        max_position_embeddings=cfg.max_position_embeddings,
    )  # fmt: skip
    draft = draft_for(engine.target, draft_cfg, np.arange(128), rngs=nnx.Rngs(0))
    engine = engine._replace(drafter=make_drafter("eagle3", draft, engine.config.tree.plan()))
    return engine, {"random bytes": [engine.request([1, 2, 3, n]) for n in range(2)]}


def modelled_seconds(session: Session, plan: TreePlan | None, costs: Costs, rounds: int) -> float:
    """Return what the costs say of so many rounds of a setting; `plan` None: plain.

    NaN where they say nothing: of a tree larger than all that were measured.
    """
    if session.chosen is not None:
        return session.chosen.seconds
    known = dict(costs.rounds)
    if plan is None:
        return rounds * known[1]
    if plan.size > max(known):
        return math.nan
    nodes = np.interp(plan.size, list(known), list(known.values()))
    passes = (plan.depth - 1) * costs.levels[0 if plan.width == 1 else 1]
    return rounds * (float(nodes) + passes + costs.absorb)


def decode(session: Session, requests: list[Request], plan, costs: Costs) -> Run | None:
    """Decode row by row; None if anything was compiled."""
    compiled, seconds, tokens, rounds, modelled = Compilations.count, 0.0, 0, 0, 0.0
    sizes: dict[int, int] = {}
    for request in requests:
        session.start([request])
        start = time.perf_counter()
        while session.is_running:
            session.advance()
        seconds += time.perf_counter() - start
        answer = session.answers[0]
        tokens, rounds = tokens + len(answer.tokens), rounds + answer.rounds
        modelled += modelled_seconds(session, plan, costs, answer.rounds)
        for nodes, count in (session.chosen.sizes if session.chosen else {}).items():
            sizes[nodes] = sizes.get(nodes, 0) + count
    if Compilations.count > compiled:
        return None
    return Run(tokens, rounds, seconds, modelled, sizes)


def measure(
    engine: Engine, files: dict[str, list[Request]], fixed: list[str], repeats: int
) -> dict[str, Any]:
    """Return the runs of each setting on each file."""
    auto = engine.drafter
    assert isinstance(auto, AutoDrafter) and auto.book is not None
    plans: dict[str, TreePlan | None] = {
        "plain": None,
        **{n: FIXED[n] for n in fixed},
        "auto": None,
    }
    drafters = {n: Eagle3Drafter(auto.inner.draft, FIXED[n]) for n in fixed}
    sessions = {n: engine.session(auto if n == "auto" else drafters.get(n)) for n in plans}
    costs = auto.book.measured(engine.target, auto, 1, 1024)
    print("seconds of a round:", {n: round(s, 5) for n, s in costs.rounds}, flush=True)
    print(f"of a draft pass {costs.levels[0]:.5f} and {costs.levels[1]:.5f}, absorbing",
          f"{costs.absorb:.5f}", flush=True)  # fmt: skip
    found: dict[str, Any] = {name: {n: [] for n in plans} for name in files}
    Compilations.listen()
    for number in range(repeats + 2):
        for name, requests in files.items():
            for setting, session in sessions.items():
                run = decode(session, requests, plans[setting], costs)
                if run is not None and number > 0:
                    found[name][setting].append(run)
    return found


def report(name: str, runs: dict[str, list[Run]], as_json: bool) -> None:
    """Print one file's figures."""
    speed = {n: statistics.median(r.tokens / r.seconds for r in found) for n, found in runs.items()}
    modelled = {
        n: statistics.median(r.tokens / r.modelled for r in found) for n, found in runs.items()
    }
    best, best_modelled = (
        max(x[n] for n in FIXED if n in x and not math.isnan(x[n])) for x in (speed, modelled)
    )
    ratios = {
        "auto / best fixed": speed["auto"] / best,
        "auto / plain": speed["auto"] / speed["plain"],
        "auto / best fixed, modelled": modelled["auto"] / best_modelled,
        "auto / plain, modelled": modelled["auto"] / modelled["plain"],
    }
    if as_json:
        print(
            json.dumps({"file": name, "tokens_per_second": speed, "modelled": modelled, **ratios})
        )
        return
    print(f"\n{name}: tokens/s, as modelled, tokens a round")
    for setting, found in runs.items():
        tau = found[-1].tokens / found[-1].rounds
        print(f"  {setting:<12}{speed[setting]:9.1f}{modelled[setting]:9.1f}{tau:7.2f}")
    total = max(sum(runs["auto"][-1].sizes.values()), 1)
    shares = sorted(runs["auto"][-1].sizes.items())
    print("  auto verified", ", ".join(f"{n} nodes {x / total:.0%}" for n, x in shares))
    for what, ratio in ratios.items():
        print(f"  {what}: {ratio:.3f}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", nargs="+", default=[], help="JSON lines, as for decode.py")
    parser.add_argument("--fixed", nargs="+", choices=FIXED, default=list(FIXED))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true", help="one object per file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    keep_compiled_programs()
    overrides = ["tree.kind=auto", *args.overrides]
    if args.small or not (args.target or args.draft or args.prompts):
        engine, files = small_engine(overrides)
    elif args.target and args.draft and args.prompts:
        config = read_config(DecodeConfig, None, overrides, target=args.target, draft=args.draft)
        if config.tree.top_k != TreeConfig.top_k:
            raise SystemExit("the grid's trees are as wide as usual: leave tree.top_k away")
        engine = build(config)
        files = {path: [row.request for row in read_rows(path, engine)] for path in args.prompts}
    else:
        raise SystemExit("give --target DIR, --draft DIR and --prompts FILE... together, or none")
    for name, runs in measure(engine, files, args.fixed, args.repeats).items():
        report(name, runs, args.json)
    print(f"\njax {jax.__version__}, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
