"""Measure the memory of a step of training-time test against length and number of steps K.

    python benchmarks/memory.py                      # about three minutes on two cores
    python benchmarks/memory.py --dtype bfloat16 --draft-vocab 32000 --cases 4096:7 --measure 0

Planned is what XLA sets aside beyond weights, optimiser and batch: nothing need be run for that.
Measured is how far one step of one row raised the resident memory of this process, on Linux. Both
are those of a CPU, where computing a layer again (`jax.checkpoint`) was seen to save a tenth only.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3.draft import Eagle3Draft
from eagle3.draft_config import DraftConfig
from eagle3.training.data.batches import Batch
from eagle3.training.features import FeaturedBatch, Features
from eagle3.training.optim import OptimConfig, make_optimizer
from eagle3.training.step import DraftTask, TrainState, train_step

PEAK = Path("/proc/self/clear_refs")  # where it can be written, peaks can be measured


def abstract_step(cfg: DraftConfig, dtype, length: int, steps: int, pieces: int):
    """Return the task, the optimiser and the arguments of a step, as shapes without values."""

    def make():
        table = jnp.zeros((cfg.vocab_size, cfg.hidden_size), dtype)
        ids = np.arange(cfg.draft_vocab_size)
        return Eagle3Draft(cfg, table, ids, dtype=dtype, rngs=nnx.Rngs(0))

    def array(*shape, dtype) -> jax.Array:
        made: object = jax.ShapeDtypeStruct((pieces, 1, length, *shape), dtype)
        return made  # pyright: ignore[reportReturnType]

    graph, params, tables = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    params, tables = nnx.to_pure_dict(params), nnx.to_pure_dict(tables)
    dtypes = tuple(x.dtype for x in jax.tree.leaves(params))
    optimizer = make_optimizer(OptimConfig(), 1000)

    def start():
        values = jax.tree.map(lambda x: jnp.zeros(x.shape), params)
        return TrainState(jnp.int32(0), values, optimizer.init(values), None)

    width, tokens = cfg.target_hidden_size, array(dtype=jnp.int32)
    batch = Batch(tokens, array(dtype=jnp.bool_), tokens)
    streams = array(cfg.num_aux, width, dtype=dtype)
    features = Features(streams, array(width, dtype=dtype), tokens)
    frozen = (tables, jax.ShapeDtypeStruct((cfg.draft_vocab_size, width), dtype))
    task = DraftTask(graph, dtypes, steps)
    return task, optimizer, (jax.eval_shape(start), frozen, FeaturedBatch(batch, features))


def memory(
    cfg: DraftConfig, dtype, length: int, steps: int, pieces: int, run: bool
) -> tuple[int, int | None]:
    """Return bytes: planned, and if `run`, measured."""
    task, optimizer, shapes = abstract_step(cfg, dtype, length, steps, pieces)
    compiled = train_step.lower(task, optimizer, *shapes).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    planned = analysis.temp_size_in_bytes
    if not run or not PEAK.exists():
        return planned, None
    arguments = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    jax.block_until_ready(arguments)
    PEAK.write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    jax.block_until_ready(compiled(*arguments))
    return planned, resident("VmHWM") - before


def resident(field: str) -> int:
    """Return a memory figure of this process, on Linux, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def growth(planned: dict[tuple[int, int], int]) -> list[str]:
    """Say what one more token takes, and one more step for each token."""
    found = []
    for (length, steps), size in sorted(planned.items()):
        longer = [t for t, k in planned if k == steps and t > length]
        deeper = [k for t, k in planned if t == length and k > steps]
        if longer:
            more = (planned[min(longer), steps] - size) / (min(longer) - length) / 1e3
            found.append(
                f"- K = {steps}, {length:,} to {min(longer):,} tokens: {more:.1f} kB a token"
            )
        if deeper:
            more = (planned[length, min(deeper)] - size) / (min(deeper) - steps) / length / 1e3
            found.append(
                f"- {length:,} tokens, K = {steps} to {min(deeper)}: {more:.1f} kB a token and step"
            )
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    cases = ["1024:4", "4096:4", "16384:4", "4096:2", "4096:7"]
    parser.add_argument("--cases", nargs="+", default=cases, metavar="TOKENS:K")
    parser.add_argument("--measure", type=int, default=4096, help="also run, up to so many tokens")
    sizes = {"width": 256, "inner": 768, "heads": 4, "key-heads": 2, "head-dim": 64}
    for name, value in (sizes | {"vocab": 4096, "draft-vocab": 4096}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--accumulate", type=int, default=1, help="batches, one after the other")
    args = parser.parse_args()
    cfg = DraftConfig(
        hidden_size=args.width, intermediate_size=args.inner, num_attention_heads=args.heads,
        num_key_value_heads=args.key_heads, head_dim=args.head_dim,
        vocab_size=max(args.vocab, args.draft_vocab), draft_vocab_size=args.draft_vocab,
        target_hidden_size=args.width, aux_layers=(2, 4, 5),
    )  # fmt: skip
    print("| tokens | K | planned | per token | measured |\n| --- | --- | --- | --- | --- |")
    planned = {}
    for case in args.cases:
        length, steps = map(int, case.split(":"))
        run = length <= args.measure
        plan, seen = memory(cfg, jnp.dtype(args.dtype), length, steps, args.accumulate, run)
        planned[length, steps] = plan
        cell = "-" if seen is None else f"{seen / 1e6:,.0f} MB"
        each = f"{plan / length / 1e3:.1f} kB"
        print(f"| {length:,} | {steps} | {plan / 1e6:,.0f} MB | {each} | {cell} |", flush=True)
    print("\n" + "\n".join(growth(planned)))


if __name__ == "__main__":
    main()
