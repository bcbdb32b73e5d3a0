"""Measure training beside torch: a step of a target, and a step of a draft with its features.

    python benchmarks/training.py                    # about five minutes on two cores
    python benchmarks/training.py --no-torch --rounds 3
    python benchmarks/training.py --peer PYTHON      # an interpreter that has speculators as well

A hybrid of 12M parameters with random weights, batch 8 x 256, vocabulary 4,096, float32. A step is
forward, backward, clipping and AdamW. All run in turn, several times; medians. Peers:

- torch: the target by transformers; for the draft no package can be installed beside it, so its
  training-time test is written here in plain torch: rows in a batch, scores of the causal square
  in full, later steps' keys one product each. It counts no hits, which this package does.
- speculators, with `--peer`: its own model, loss and AdamW on features that lie ready, row by row,
  as it takes one row at a time and would else score all pairs of a packed one.

All start from the same weights, and their first losses have to agree. torch runs as it comes,
without `torch.compile`. Run it on an idle machine: torch's threads wait for each other, so that
other load slows it several times as much. Needs the `parity` extra; with `--no-torch` only jax.
Memory is measured by benchmarks/memory.py.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training_engines import ENGINES, STEPS

FULL = {"width": 320, "inner": 1024, "layers": 8, "vocab": 4096, "batch": 8, "length": 256}
SMALL = {"width": 64, "inner": 96, "layers": 4, "vocab": 256, "batch": 2, "length": 64}
SCALE = 0.06  # of random weights: at the usual 0.02 all distributions are flat, all losses alike
TOLERANCE = 1e-3  # nats, between the losses of the engines


def target_config(width: int, inner: int, layers: int, vocab: int):
    """Return the architecture, shaped like Qwen3.5."""
    from gdn import TargetConfig

    return TargetConfig(
        model_type="qwen3_5_text", vocab_size=vocab, hidden_size=width, num_hidden_layers=layers,
        intermediate_size=inner, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        layer_types=(("linear_attention",) * 3 + ("full_attention",)) * (layers // 4),
        rope_theta=1e7, partial_rotary_factor=0.25, rms_norm_eps=1e-6,
        max_position_embeddings=32768, tie_word_embeddings=True, norm_unit_offset=True,
        qk_norm=True, attn_output_gate=True, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=64, linear_value_head_dim=64, bos_token_id=None, pad_token_id=None,
        initializer_range=SCALE,
    )  # fmt: skip


def write_models(directory: Path, sizes: dict, peer: bool) -> tuple[int, int]:
    """Save a target, a draft, tokens and features; returns both numbers of parameters."""
    import jax
    import numpy as np
    from flax import nnx

    from eagle3.draft import draft_for
    from eagle3.interop import save_draft
    from eagle3.training.config import DraftShape
    from gdn import HybridLM, save_pretrained

    cfg = target_config(*(sizes[key] for key in ("width", "inner", "layers", "vocab")))
    target = HybridLM(cfg, rngs=nnx.Rngs(0))
    draft_cfg = DraftShape(vocab_size=cfg.vocab_size // 2, initializer_range=SCALE).for_target(cfg)
    draft = draft_for(target, draft_cfg, np.arange(0, cfg.vocab_size, 2), rngs=nnx.Rngs(1))
    save_pretrained(target, directory / "target")
    save_draft(draft, directory / "draft")
    shape = (sizes["batch"], sizes["length"])
    tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=shape)
    np.save(directory / "tokens.npy", tokens)
    (directory / "aux_layers.json").write_text(json.dumps(draft_cfg.aux_layers))
    if peer:
        where = str(directory / "target")
        save_draft(draft, directory / "speculators", "speculators", target_name=where)
        out = jax.jit(lambda model, tokens: model(tokens, None, draft_cfg.aux_layers))(
            target, tokens
        )
        np.savez(directory / "features.npz", aux=out.aux_hidden, hidden=out.hidden)
    params = jax.tree.leaves(nnx.state(draft, nnx.Param))
    return cfg.num_parameters(), sum(x.size for x in params)


def serve(name: str, directory: Path) -> None:
    """Answer calls, one JSON line each, with seconds and the result; what is printed is moved."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[name](directory)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        start = time.perf_counter()
        result = getattr(engine, method)(*arguments)
        print(json.dumps([time.perf_counter() - start, result]), file=channel, flush=True)


class Worker:
    """A process with one engine in it."""

    def __init__(self, name: str, directory: str, python: str = sys.executable):
        command = [python, __file__, "--serve", name, directory]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *call):
        """Return seconds and the result of a call."""
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(call), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise SystemExit(f"{self.name} stopped at {call[0]}: its error is above") from None

    def stop(self):
        """Let the process end."""
        self.process.communicate()


def measure(workers: dict[str, Worker], rounds: int) -> dict[tuple[str, str], float]:
    """Run all tasks in turn on all engines; returns medians in seconds, by task and engine."""
    tasks = {name: ENGINES[name].__dict__ for name in workers}
    pairs = [(t, n) for t in ("target", "features", "draft") for n in workers if t in tasks[n]]
    times: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for round_ in range(rounds + 1):  # the first compiles and warms up
        losses: dict[str, dict[str, float]] = {}
        for task, name in pairs:
            seconds, loss = workers[name].ask(task)
            losses.setdefault(task, {})[name] = loss
            if round_:
                times[task, name].append(seconds)
        if not round_:
            check(losses)
    return {pair: statistics.median(values) for pair, values in times.items()}


def check(losses: dict[str, dict[str, float]]) -> None:
    """Compare the losses of the first step."""
    for task in ("target", "draft"):
        values = losses[task]
        print(f"- first loss, {task}:", ", ".join(f"{n} {x:.5f}" for n, x in values.items()))
        if max(values.values()) - min(values.values()) > TOLERANCE:
            raise SystemExit(f"the engines compute different things: {task} losses {values}")


def report(seconds: dict[tuple[str, str], float], names: list[str], tokens: int) -> None:
    """Print a table of tokens per second in markdown, and how many times the peers' they are."""
    rows = {
        "target step": ("target",),
        "features for the draft": ("features",),
        f"draft step, K = {STEPS}": ("draft",),
        "features and draft step": ("features", "draft"),
    }
    peers = names[1:]
    print("\n| tokens/s | this package |" + "".join(f" {name} | ratio |" for name in peers))
    print("| --- | --- |" + " --- | --- |" * len(peers))
    for title, tasks in rows.items():
        took = {n: sum(seconds.get((t, n), float("nan")) for t in tasks) for n in names}
        ours = took[names[0]]
        cells = "".join(
            f" {tokens / took[n]:,.0f} | {took[n] / ours:.2f} |"
            if took[n] == took[n]
            else " - |" * 2
            for n in peers
        )
        print(f"| {title} | {tokens / ours:,.0f} |{cells}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one warm-up")
    parser.add_argument("--no-torch", action="store_true", help="measure this package only")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with torch and speculators")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], Path(args.serve[1]))
    missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if missing and not args.no_torch:
        raise SystemExit(
            f"no {' and no '.join(missing)}: pip install -e '.[parity]', or --no-torch"
        )
    sizes = SMALL if args.small else FULL
    pythons = {"this package": sys.executable}
    pythons |= {} if args.no_torch else {"torch": sys.executable}
    pythons |= {"speculators": args.peer} if args.peer else {}
    print(f"- processes that wanted a core before: {os.getloadavg()[0]:.1f} (0 is an idle machine)")
    with tempfile.TemporaryDirectory() as directory:
        target, draft = write_models(Path(directory), sizes, bool(args.peer))
        print(f"- target {target / 1e6:.1f}M, draft {draft / 1e6:.1f}M trained parameters")
        workers = {name: Worker(name, directory, python) for name, python in pythons.items()}
        seconds = measure(workers, args.rounds)
        for worker in workers.values():
            worker.stop()
        report(seconds, list(workers), sizes["batch"] * sizes["length"])


if __name__ == "__main__":
    main()
