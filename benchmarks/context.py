"""Measure decoding at long contexts: a hybrid beside full attention of the same size.

    python benchmarks/context.py          # tiny models: does it run
    python benchmarks/context.py --width 512 --layers 12 --vocab 16384 \\
        --lengths 1024 4096 16384 65536 --figure context.png

Two generated models of the same width, depth and number of parameters: in the hybrid every fourth
layer is attention, in the other all are, and its MLP makes up for the difference. Both decode
plainly in `run_rounds`, the compiled loop of every session, in turn; medians. Their caches are not
prefilled but hold random numbers, as if a text had been read: what is in them changes neither time
nor memory. The last token is decoded where the context has `length` tokens and the cache is full.

Cached is what keys, values and states take; peak, by how much the resident memory of this process
rose above what it was with the weights alone, once the caches were filled (Linux; what the
allocator keeps moves it by some 25 MB). Figures need the `plots` extra.
"""

import argparse
import ctypes
import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from memory import PEAK, resident

from eagle3.config import GeneratedTarget
from eagle3.decoding.accept import Limits
from eagle3.decoding.drafter import NoDraft
from eagle3.decoding.sampling import SamplingParams, batch_sampling
from eagle3.decoding.speculate import DecodeState, Requests, run_rounds, split
from eagle3.generated import generated_target
from gdn import Cache, HybridLM, TargetConfig, init_cache
from gdn.config import LINEAR_SIZES
from gdn.ops import native
from gdn.packing import DTYPES, Packer, finish

NAMES = ("hybrid", "attention")
LABELS = ("hybrid, 3 of 4 layers DeltaNet", "attention only")


class Side(NamedTuple):
    """One of the two models, ready for `run_rounds`."""

    cfg: TargetConfig
    graph: Any
    params: Any
    dtype: Any  # of keys and values
    requests: Requests


class Point(NamedTuple):
    """What one model takes at one length."""

    seconds: float  # a token
    cached: int  # bytes
    peak: int | None  # bytes; None: not measured on this system


def attention_only(cfg: TargetConfig) -> TargetConfig:
    """Return the architecture with attention in every layer and as many parameters."""
    sizes: dict[str, Any] = dict.fromkeys(LINEAR_SIZES, 0)
    layers = ("full_attention",) * cfg.num_hidden_layers
    full = dataclasses.replace(cfg, layer_types=layers, **sizes)
    spare = cfg.num_parameters() - full.num_parameters()
    inner = cfg.intermediate_size + round(spare / (3 * cfg.hidden_size * cfg.num_hidden_layers))
    return dataclasses.replace(full, intermediate_size=inner)


def make_sides(shape: GeneratedTarget, dtype: str) -> dict[str, Side]:
    """Make both with random weights, kept as `decode.py` keeps them."""
    is_native = jax.default_backend() == "cpu" and native.problem() is None
    packer = Packer(dtype, is_native)
    hybrid = generated_target(shape, packer.load_dtype)
    cfg = attention_only(hybrid.cfg)
    full = HybridLM(cfg, dtype=packer.load_dtype, rngs=nnx.Rngs(shape.seed))
    finish((hybrid, packer), (full, packer))
    limits = Limits(jnp.full((1, 1), -1, jnp.int32), jnp.array([2**30], jnp.int32))
    requests = Requests(batch_sampling([SamplingParams()], [[0]], cfg.vocab_size), limits)
    sides = {}
    for name, model in zip(NAMES, (hybrid, full), strict=True):
        graph, params = split(model, NoDraft())
        kept = model.embed_tokens[...].dtype
        sides[name] = Side(model.cfg, graph, params, kept, requests)
    return sides


def started(side: Side, length: int, used: int) -> DecodeState:
    """Return a state with caches of `length` slots, the first `used` of which count as read."""
    shapes = jax.eval_shape(lambda: init_cache(side.cfg, 1, length, side.dtype))
    leaves, tree = jax.tree.flatten(shapes.layers)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    numbers = [_normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    cache = Cache(jax.tree.unflatten(tree, numbers), jnp.array([used], jnp.int32))
    zero = jnp.zeros(1, jnp.int32)
    state = DecodeState(cache, (), zero, jnp.zeros(1, jnp.int32), jnp.ones(1, bool), None)
    return jax.block_until_ready(state)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return 0.1 * jax.random.normal(key, shape, dtype)


def visit(side: Side, state: DecodeState, tokens: int) -> tuple[DecodeState, float]:
    """Decode some tokens; returns the seconds of each as well."""
    start = time.perf_counter()
    state, out = run_rounds(side.graph, side.params, state, side.requests, tokens, tokens)
    count = int(out.count[0])
    seconds = time.perf_counter() - start
    if count != tokens:
        raise SystemExit(f"found {count} tokens, expected {tokens}: a bug in the decode loop")
    return state, seconds / tokens


def cache_bytes(cache: Cache) -> int:
    """Return what keys, values and states take."""
    return sum(x.nbytes for x in jax.tree.leaves(cache.layers))


def settled_memory() -> int:
    """Return this process's resident bytes once the allocator gave back what it keeps for later."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)
    return resident("VmRSS")


def measure(sides: dict[str, Side], length: int, tokens: int, repeats: int) -> dict[str, Point]:
    """Measure both models at one length; memory one after the other, time in turn."""
    used, states, peaks = length - (repeats + 1) * tokens, {}, {}
    if used < 1:
        raise SystemExit(f"length {length} has no room for {repeats} + 1 times {tokens} tokens")
    for name, side in sides.items():
        visit(side, started(side, length, used), tokens)  # compiles
        before = settled_memory() if PEAK.exists() else 0
        state = started(side, length, used)
        if PEAK.exists():
            settled_memory()  # without what making the numbers took
            PEAK.write_text("5")  # the peak starts again from here
        states[name], _ = visit(side, state, tokens)
        peaks[name] = resident("VmHWM") - before if PEAK.exists() else None
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            states[name], seconds = visit(side, states[name], tokens)
            samples[name].append(seconds)
    return {
        name: Point(statistics.median(samples[name]), cache_bytes(state.cache), peaks[name])
        for name, state in states.items()
    }


def table_row(length: int, points: dict[str, Point]) -> str:
    """Return a row of the table."""
    both = [points[name] for name in NAMES]
    ratio = both[1].seconds / both[0].seconds
    cells = [f"{length:,}", *(f"{p.seconds * 1e3:.1f} ms" for p in both), f"{ratio:.2f}"]
    cells += [f"{p.cached / 1e6:,.1f} MB" for p in both]
    cells += ["-" if p.peak is None else f"{p.peak / 1e6:,.1f} MB" for p in both]
    return f"| {' | '.join(cells)} |"


def draw(found: dict[int, dict[str, Point]], path: str) -> None:
    """Write the figure of all that was measured."""
    from eagle3 import plots

    scaling = {
        label: plots.Scaling(
            [found[length][name].seconds * 1e3 for length in found],
            [found[length][name].cached / 1e6 for length in found],
        )
        for name, label in zip(NAMES, LABELS, strict=True)
    }
    axes = plots.context_scaling(list(found), scaling)
    Path(path).write_bytes(plots.png(axes[0], dpi=160))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--width", type=int, default=64, help="hidden size, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tokens", type=int, default=16, help="decoded in one call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--figure", metavar="FILE.png")
    args = parser.parse_args(arguments)
    if args.figure and find_spec("matplotlib") is None:  # before an hour of measuring
        parser.error("--figure needs matplotlib: pip install -e '.[plots]'")
    shape = GeneratedTarget(
        vocab_size=args.vocab, hidden_size=args.width, num_hidden_layers=args.layers,
        max_position_embeddings=max(args.lengths), initializer_range=0.02,
    )  # fmt: skip
    sides = make_sides(shape, args.dtype)
    counts = [f"{name} {sides[name].cfg.num_parameters() / 1e6:.2f}M" for name in NAMES]
    print(f"parameters: {', '.join(counts)}; {args.dtype}; caches of random numbers\n")
    print("| context | hybrid | attention | ratio | cached: hybrid | attention"
          " | peak: hybrid | attention |")  # fmt: skip
    print("| --- " * 8 + "|")
    found = {}
    for length in sorted(args.lengths):
        found[length] = measure(sides, length, args.tokens, args.repeats)
        print(table_row(length, found[length]), flush=True)
    first, last = min(found), max(found)
    for name in NAMES:
        grown = found[last][name].seconds / found[first][name].seconds
        print(f"\n{name}: {grown:.2f} times the time at {last:,} as at {first:,} tokens", end="")
    print(f"\n\njax {jax.__version__}, {jax.devices()[0].device_kind}")
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
