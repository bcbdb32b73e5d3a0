"""What a draft owes to its data and to its parts: the same run, changed in one thing at a time.

    python benchmarks/studies.py data --config FILE.yaml --out runs/study
    python benchmarks/studies.py tokens --config FILE.yaml --out runs/study
    python benchmarks/studies.py parts --config FILE.yaml --out runs/study
    python benchmarks/studies.py     # a generated target, all studies: does it run?

`data` trains on 1/8, 1/4, 1/2 and all of the rows of batches (`data.share`), with as many passes
over each: the scaling curve of arXiv 2503.01840, figure 1. The draft vocabulary is that of all.
`tokens` is that curve at a fraction of the time, for `optim.schedule=wsd`: runs of 1/8, 1/4, 1/2
and all of the steps, each of which goes on from where the rate of the one before began to fall. As
long as there is one pass over the data at most, shares of the steps are shares of the data.
`parts` leaves away the unrolling of training-time test, the lower layers, and both (its table 2),
and adds the norms of EAGLE-3.1 (arXiv 2605.09992).

Every draft is a run in a directory of its own below `--out`, as `train.py` makes them: one that is
done is passed over, an interrupted one goes on. Answers, tokens and features are shared. Tau is
that of the real engine on the held-out prompts of the configuration, after the best evaluation. The
curves are also drawn, `data.png` or `tokens.png`, if matplotlib is there.
`key=value` arguments change all runs.
"""

import argparse
import dataclasses
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax

from eagle3.config import ConfigError
from eagle3.config_reader import OneLineParser, read_stages
from eagle3.files import write_whole
from eagle3.machine import keep_compiled_programs, processor
from eagle3.training.config import RegenerateConfig, TrainConfig
from eagle3.training.data.masking import Masker
from eagle3.training.optim import hold_end, warmup_steps
from eagle3.training.regenerate import regenerate
from eagle3.training.trainer import CHECKPOINTS, train
from gdn import TargetConfig

STUDIES = ("data", "tokens", "parts")
SHARES = ((1, 8), (1, 4), (1, 2), (1, 1))
_SMALL = Path(__file__).parent.parent / "configs" / "tiny.yaml"


class Run(NamedTuple):
    """One draft."""

    name: str
    folder: str
    config: TrainConfig
    before: "Run | None" = None  # goes on from where the rate of this one begins to fall


class Found(NamedTuple):
    """What became of it."""

    name: str
    positions: int  # of all batches, the padding of rows included
    step: int  # of the best evaluation
    tau: float  # there


def with_answers(config: TrainConfig) -> TrainConfig:
    """Let the target answer once for all runs; returns what they train on.

    Raises:
      ConfigError: the configuration is not of a draft.
    """
    if config.task != "draft" or config.target is None:
        raise ConfigError("the configuration trains no draft: give one with task: draft")
    if not config.eval.prompts:
        raise ConfigError("eval.prompts is 0: drafts are compared by what they bring on prompts")
    if not config.regenerate.rows:
        return config
    vocab_size = TargetConfig.from_hf(config.target).vocab_size
    data = regenerate(config, Masker.load(config.target, vocab_size), _say)
    return dataclasses.replace(config, data=data, regenerate=RegenerateConfig())


def runs_of_data(config: TrainConfig) -> list[Run]:
    """Return a run for each share of the data.

    Raises:
      ConfigError: there are too few steps.
    """
    runs = []
    for name, folder, share, steps in _shares("data", config):
        data = dataclasses.replace(config.data, share=config.data.share * share)
        runs.append(Run(name, folder, dataclasses.replace(config, data=data, steps=steps)))
    return runs


def runs_of_tokens(config: TrainConfig) -> list[Run]:
    """Return a run for each share of the steps.

    Raises:
      ConfigError: there are too few steps, the schedule is not wsd, or its parts overlap.
    """
    if config.optim.schedule != "wsd":
        raise ConfigError("the study of tokens is for optim.schedule=wsd: set that")
    warmup = warmup_steps(config.optim, config.steps)  # the same for all
    optim = dataclasses.replace(config.optim, warmup=float(warmup))
    shortest = _shares("tokens", config)[0][3]
    if warmup > hold_end(optim, shortest):
        raise ConfigError(
            f"optim.warmup is {warmup} steps, and the rate of a run of {shortest} begins to fall"
            f" after {hold_end(optim, shortest)}: lower optim.warmup or optim.decay"
        )
    runs: list[Run] = []
    for name, folder, _, steps in _shares("tokens", config):
        share = dataclasses.replace(config, steps=steps, optim=optim)
        runs.append(Run(name, folder, share, runs[-1] if runs else None))
    return runs


def _shares(kind: str, config: TrainConfig) -> list[tuple[str, str, float, int]]:
    """Return name, folder, share and steps of each run."""
    if not config.steps * SHARES[0][0] // SHARES[0][1]:
        raise ConfigError(f"{config.steps} steps have no {SHARES[0][1]}th: raise steps")
    return [
        (
            "all" if part == parts else f"{part}/{parts}",
            f"{kind}_{part}_of_{parts}",
            part / parts,
            config.steps * part // parts,
        )
        for part, parts in SHARES
    ]


def runs_of_parts(config: TrainConfig) -> list[Run]:
    """Return a run for each thing left away or added."""
    assert config.target is not None
    top = {"aux_layers": (TargetConfig.from_hf(config.target).num_hidden_layers,)}
    norms = {"fc_norm": True, "norm_output": True}
    plain = dict.fromkeys(norms, False)
    one = {"steps": 1}
    variants: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("EAGLE-3", "whole", plain, {}),
        ("without training-time test (K = 1)", "one_step", plain, one),
        ("top layer only", "top_layer", plain | top, {}),
        ("both left away", "neither", plain | top, one),
        ("with EAGLE-3.1's norms", "norms", norms, {}),
    ]
    return [
        Run(
            name,
            folder,
            dataclasses.replace(
                config,
                draft=dataclasses.replace(config.draft, **shape),
                ttt=dataclasses.replace(config.ttt, **ttt),
            ),
        )
        for name, folder, shape, ttt in variants
    ]


def finish(run: Run, out: Path) -> Found | None:
    """Train it, or what is left of it; returns None if that was interrupted.

    Raises:
      ConfigError: there is no held-out text, or another configuration was trained there.
    """
    place = out / run.folder
    config = dataclasses.replace(run.config, out=str(place))
    _say(f"{run.name}: {place}")
    if run.before is not None and not (place / CHECKPOINTS).exists():
        _begin(place, out / run.before.folder, run.before.config)
    if not train(config, _say):
        return None
    best = place / "best.json"
    if not best.exists():
        raise ConfigError("nothing was measured: the configuration needs eval.sources")
    found = json.loads(best.read_text(encoding="utf-8"))
    jax.clear_caches()  # another draft, other programs
    positions = config.steps * config.accumulate * config.data.batch_size * config.data.length
    return Found(run.name, positions, found["step"], found["score"])


def _begin(place: Path, earlier: Path, config: TrainConfig) -> None:
    """Copy the checkpoint of an earlier run at which its rate had not begun to fall."""
    step = str(hold_end(config.optim, config.steps))
    if not (earlier / CHECKPOINTS / step).exists():  # of a run so short that it fell at once
        _say(f"{earlier} has no checkpoint {step}: from the beginning")
        return
    partial = place / f"{CHECKPOINTS}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(earlier / CHECKPOINTS / step, partial / step)
    partial.rename(place / CHECKPOINTS)


def table(kind: str, config: TrainConfig, found: Sequence[Found]) -> str:
    """Return the study as a markdown table, with what it was measured on."""
    sizes = config.eval
    rows = [f"| {x.name} | {x.positions:,} | {x.step} | {x.tau:.2f} |" for x in found]
    about = (
        f"target {config.target}; {sizes.prompts} held-out prompts, {sizes.max_new_tokens} tokens"
        f" of each, trees: {sizes.tree.kind}, {sizes.tree.plan().size} nodes; {processor()}, jax"
        f" {jax.__version__}"
    )
    head = f"| {kind} | tokens read | best step | tau |"
    return "\n".join([about, "", head, "| --- | --- | --- | --- |", *rows, ""])


def study(kind: str, config: TrainConfig, out: Path) -> bool:
    """Run a study, and leave its table in `out`; returns False if interrupted.

    Raises:
      ConfigError: the configuration does not suit it.
    """
    config = with_answers(config)
    runs = {"data": runs_of_data, "tokens": runs_of_tokens, "parts": runs_of_parts}[kind](config)
    found = []
    for run in runs:
        result = finish(run, out)
        if result is None:
            _say("stopped; the same command goes on")
            return False
        found.append(result)
        text = table(kind, config, found)
        write_whole(out / f"{kind}.md", text)
    if kind != "parts" and find_spec("matplotlib") is not None:
        draw(found, out / f"{kind}.png", "training data" if kind == "data" else "steps")
    print(text, end="", flush=True)
    return True


def draw(found: Sequence[Found], path: Path, of: str) -> None:
    """Write the figure of a study of shares."""
    from eagle3 import plots  # matplotlib is not for everyone

    shares = [part / parts for part, parts in SHARES]
    taus = {"draft": [x.tau for x in found]}
    path.write_bytes(plots.png(plots.data_scaling(shares, taus, of=of)))


def small(folder: Path) -> TrainConfig:
    """Train the smallest target and return a draft's configuration, for `make bench`."""
    path = folder / "fox.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 9)
    places = [f"stages.{x}.out={folder / x}" for x in ("target", "draft")]
    texts = [f"{x}.sources.fox.files={path}" for x in ("data", "eval")]
    more = ["steps=8", f"data.cache={folder / 'cache'}", f"stages.draft.target={folder / 'target'}"]
    stages = read_stages(TrainConfig, str(_SMALL), [*places, *texts, *more], None)
    train(stages["target"], _say)
    answers = RegenerateConfig(rows=8, prompt_tokens=4, max_new_tokens=24)
    optim = dataclasses.replace(stages["draft"].optim, schedule="wsd")
    return dataclasses.replace(stages["draft"], regenerate=answers, optim=optim)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
      ConfigError: one line that says what to change.
    """
    parser = OneLineParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", metavar="DIR", help="where the runs and the table go")
    parser.add_argument("--only", metavar="STAGE", help="stage of the draft, if there are several")
    args = parser.parse_intermixed_args(argv)
    args.studies = [x for x in args.overrides if "=" not in x]
    args.settings = [x for x in args.overrides if "=" in x]
    if unknown := [x for x in args.studies if x not in STUDIES]:
        raise ConfigError(f"{unknown[0]!r} is no study: data, tokens or parts")
    if bool(args.config) != bool(args.out) or bool(args.config) != bool(args.studies):
        raise ConfigError(
            "give a study (data, tokens, parts), --config FILE and --out DIR together, or none of"
            " them"
        )
    return args


def run(argv: Sequence[str] | None) -> int:
    """Train and print; returns the exit status."""
    args = parse(argv)
    keep_compiled_programs()
    if args.config is None:
        with tempfile.TemporaryDirectory() as folder:
            config = small(Path(folder))
            is_whole = all(study(kind, config, Path(folder)) for kind in STUDIES)
        return 0 if is_whole else 130
    stages = read_stages(TrainConfig, args.config, args.settings, args.only)
    config = list(stages.values())[-1]
    is_whole = all(study(kind, config, Path(args.out)) for kind in args.studies)
    return 0 if is_whole else 130  # after a stop, the others wait as well


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; bad input, or a file that fails, is one message on stderr and exit status 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        return run(argv)
    except (ValueError, OSError) as error:
        print(f"studies.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
