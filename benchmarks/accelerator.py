"""Measure what decides on an accelerator: cost of n nodes, states copied or not, a draft's step.

    python benchmarks/accelerator.py --out accelerator.json              # 0.8b on an accelerator
    python benchmarks/accelerator.py --size 4b --context 32768 --out accelerator_4b.json
    python benchmarks/accelerator.py --small                             # does it run: any CPU

Random weights in published shapes, made on the device; bfloat16, one device. Three measurements,
all in turn in every round, the first time (compilation) apart; medians, lowest and highest:

- decode: seconds to verify n nodes of each row at a context and commit one, c(n) = those of n
  nodes over those of one. Several passes in a device loop, the cache is donated.
- verify: the delta rule of all layers over a tree, and its commit, in closed form (`gdn.ops.tree`)
  and, as engines do today, node by node with a copy of the state for each, in buffers that are
  there already. Both in XLA; a fused kernel needs less time for copies, and as many bytes. Their
  results are compared.
- train: features of the target, and one step of training-time test. Utilisation compares the
  operations of `eagle3.training.flops` with `--peak-tflops`, or with a large matrix product here.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from roofline import draft_of, shape, state_traffic

from eagle3.draft import draft_for
from eagle3.files import write_whole
from eagle3.training.config import DraftShape
from eagle3.training.data.batches import Batch
from eagle3.training.features import FeaturedBatch, head_rows, target_features
from eagle3.training.flops import draft_flops, measured_peak, target_flops
from eagle3.training.optim import OptimConfig, make_optimizer
from eagle3.training.step import DraftTask, TrainState, train_step
from gdn import HybridLM, TargetConfig, chain_tree, commit, init_cache, tree_from_parents
from gdn.ops.tree import commit_state, tree_delta_rule

SIZES = {x.lower(): f"Qwen3.5-{x}" for x in ("0.8B", "2B", "4B", "9B")}
DTYPE = jnp.bfloat16
SLACK = 512  # slots after the context: a block of attention, so that no cache is padded
TOLERANCE = 1e-3  # of the largest entry, between the two ways to verify
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_HIGHEST = jax.lax.Precision.HIGHEST


class Plan(NamedTuple):
    """How much is measured."""

    nodes: tuple[int, ...]  # of each row, in decode
    trees: tuple[int, ...]  # nodes, in verify
    batch: int  # rows, in decode
    rows: int  # in verify
    context: int  # tokens of each row
    length: int  # tokens of the row that is trained on
    steps: int  # K, of the training-time test
    passes: int  # in a device loop
    product: int  # side of the matrix product that the peak is measured with


FULL = Plan((1, 2, 4, 8, 16, 32, 64), (8, 32), 1, 8, 4096, 2048, 7, 8, 8192)
SMALL = Plan((1, 2), (4,), 1, 2, 512, 16, 2, 2, 256)


def small_target() -> TargetConfig:
    """Return one layer of each kind, quick to compile."""
    kinds = ("linear_attention", "full_attention")
    return dataclasses.replace(shape(SIZES["0.8b"]), num_hidden_layers=2, layer_types=kinds, **TINY)


class Decoding:
    """The target over a full cache."""

    def __init__(self, target: HybridLM, plan: Plan):
        graph, params = nnx.split(target)
        self.params, self.batch = nnx.to_pure_dict(params), plan.batch
        lengths = jnp.full(plan.batch, plan.context, jnp.int32)
        cache = init_cache(target.cfg, plan.batch, plan.context + SLACK, DTYPE)
        self.cache = cache._replace(lengths=lengths)  # what is in it changes no time

        @partial(jax.jit, donate_argnames="cache")
        def loop(params, cache, tokens):
            model, tree = nnx.merge(graph, params), chain_tree(*tokens.shape)

            def one_pass(_, carry):
                cache, tokens = carry
                out = model.verify(tokens, tree, cache)
                token = jnp.argmax(out.logits[:, :1], axis=-1).astype(jnp.int32)
                # Made from the token, so that the cache is updated after its last reading.
                path = jnp.where((jnp.arange(tokens.shape[1]) == 0) & (token >= 0), 0, -1)
                cache = commit(cache, out.updates, path)._replace(lengths=cache.lengths)
                return cache, jnp.broadcast_to(token, tokens.shape)

            return jax.lax.fori_loop(0, plan.passes, one_pass, (cache, tokens))

        self.loop = loop

    def run(self, nodes: int) -> Any:
        """Run some passes over `nodes` nodes a row."""
        tokens = jnp.zeros((self.batch, nodes), jnp.int32)
        self.cache, tokens = self.loop(self.params, self.cache, tokens)
        return tokens


class RuleInputs(NamedTuple):
    """What a DeltaNet layer makes of the nodes, before the delta rule; see `tree_delta_rule`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def random_inputs(cfg: TargetConfig, rows: int, nodes: int, seed: int) -> RuleInputs:
    """Draw keys and queries of length one, and decays from slow to fast."""
    keys = jax.random.split(jax.random.key(seed), 5)
    few = (rows, nodes, cfg.linear_num_key_heads, cfg.linear_key_head_dim)
    many = (rows, nodes, cfg.linear_num_value_heads)
    q, k = (jax.random.normal(key, few) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (*many, cfg.linear_value_head_dim))
    return RuleInputs(
        q, k, v, -jax.random.uniform(keys[3], many), jax.random.uniform(keys[4], many)
    )


def copied_states(inputs: RuleInputs, states: jax.Array, parents: jax.Array):
    """Run the delta rule node by node, with a state for each.

    Args:
      states: [M + 1, B, HV, DK, DV]; the first is the committed one, the rest are overwritten.
      parents: [M], of all rows; -1 is the committed state.

    Returns:
      The read of each node [B, M, HV, DV], and the states after each.
    """
    groups = inputs.v.shape[2] // inputs.k.shape[2]
    q, k = (jnp.repeat(x, groups, axis=2) for x in inputs[:2])
    by_node = [jnp.swapaxes(x, 0, 1) for x in (q, k, *inputs[2:])]

    def node(states, now):
        index, parent, q, k, v, g, beta = now
        before = states[parent + 1] * jnp.exp(g)[..., None, None]
        u = jnp.einsum("bhk,bhkv->bhv", k, before, precision=_HIGHEST)
        after = before + k[..., None] * (beta[..., None] * (v - u))[..., None, :]
        out = jnp.einsum("bhk,bhkv->bhv", q, after, precision=_HIGHEST)
        return states.at[index + 1].set(after), out

    order = jnp.arange(parents.shape[0])
    states, out = jax.lax.scan(node, states, (order, parents, *by_node))
    return jnp.swapaxes(out, 0, 1), states


class Verification:
    """The delta rule of all layers over one tree, both ways, from the same states."""

    def __init__(self, cfg: TargetConfig, nodes: int, rows: int):
        parents = [(i - 1) // 2 for i in range(nodes)]  # of a heap: two children a node
        parents[0] = -1
        path = [nodes - 1]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        layers = range(cfg.layer_types.count("linear_attention"))
        self.inputs = [random_inputs(cfg, rows, nodes, i) for i in layers]
        state = (rows, cfg.linear_num_value_heads)
        state = (*state, cfg.linear_key_head_dim, cfg.linear_value_head_dim)
        draws = [jax.random.normal(jax.random.key(100 + i), state) for i in layers]
        self.states = draws
        self.copies = [jnp.zeros((nodes + 1, *state)).at[0].set(x) for x in draws]
        every = jnp.asarray([parents] * rows, jnp.int32)
        accepted = jnp.asarray([path] * rows, jnp.int32)

        @partial(jax.jit, donate_argnames="states")
        def closed(inputs, states):
            tree, outs, after = tree_from_parents(every), [], []
            for (q, k, v, g, beta), state in zip(inputs, states, strict=True):
                out, u = tree_delta_rule(q, k, v, g, beta, state, tree)
                outs.append(out)
                after.append(commit_state(state, k, u, g, accepted))
            return outs, after

        @partial(jax.jit, donate_argnames="copies")
        def copied(inputs, copies):
            outs, after = [], []
            for x, states in zip(inputs, copies, strict=True):
                out, states = copied_states(x, states, every[0])
                outs.append(out)
                after.append(states.at[0].set(states[nodes]))  # the last node is accepted
            return outs, after

        self._closed, self._copied = closed, copied

    def closed(self) -> Any:
        """Verify and commit with no state for a node."""
        outs, self.states = self._closed(self.inputs, self.states)
        return outs, self.states

    def copied(self) -> Any:
        """Verify and commit with a state for each."""
        outs, self.copies = self._copied(self.inputs, self.copies)
        return outs, self.copies

    def difference(self) -> float:
        """Run both once; return the largest difference over the largest entry.

        Raises:
          SystemExit: it is more than rounding.
        """
        (a, states), (b, copies) = self.closed(), self.copied()
        pairs = [*zip(a, b, strict=True), *zip(states, [x[0] for x in copies], strict=True)]
        found = max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs)
        if not found < TOLERANCE:
            raise SystemExit(f"the two ways to verify differ by {found:.1e} of the largest entry")
        return found


class Training:
    """A draft of the target, and one row of random tokens."""

    def __init__(self, target: HybridLM, plan: Plan, is_small: bool):
        cfg = target.cfg
        half = DraftShape(vocab_size=cfg.vocab_size // 2)
        self.cfg = half.for_target(cfg) if is_small else draft_of(cfg)
        entries = self.cfg.draft_vocab_size
        ids = np.arange(entries) * (cfg.vocab_size // entries)
        draft = draft_for(target, self.cfg, ids, rngs=nnx.Rngs(1))
        tokens = jax.random.randint(jax.random.key(2), (1, 1, plan.length), 0, cfg.vocab_size)
        some = jnp.zeros(tokens.shape, jnp.int32)
        self.batch = Batch(tokens, jnp.ones(tokens.shape, bool), some)
        self.target_graph, self.target = nnx.split(target)
        self.target = nnx.to_pure_dict(self.target)
        graph, params, tables = nnx.split(draft, nnx.Param, ...)
        params = nnx.to_pure_dict(params)
        dtypes = tuple(x.dtype for x in jax.tree.leaves(params))
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        self.optimizer = make_optimizer(OptimConfig(), 1000)
        self.state = TrainState(jnp.int32(0), params, self.optimizer.init(params), None)
        self.frozen = nnx.to_pure_dict(tables), head_rows(target, draft.target_ids[...])
        self.task = DraftTask(graph, dtypes, plan.steps)
        self.found = self.features()

    def features(self) -> Any:
        """Ask the target."""
        return target_features(self.target_graph, self.target, self.cfg.aux_layers, self.batch)

    def step(self) -> Any:
        """Take an optimiser's step."""
        featured = FeaturedBatch(self.batch, self.found)
        self.state, metrics = train_step(
            self.task, self.optimizer, self.state, self.frozen, featured
        )
        return metrics


def timed(tasks: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Run all once, then in turn; return the seconds of each."""
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    for task in tasks.values():
        jax.block_until_ready(task())
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.perf_counter()
            jax.block_until_ready(task())
            samples[name].append(time.perf_counter() - start)
    return {
        name: {"median": statistics.median(x), "low": min(x), "high": max(x)}
        for name, x in samples.items()
    }


def measure(target: HybridLM, plan: Plan, rounds: int, peak: float | None, is_small: bool) -> dict:
    """Return all figures."""
    cfg = target.cfg
    decoding, training = Decoding(target, plan), Training(target, plan, is_small)
    trees = {nodes: Verification(cfg, nodes, plan.rows) for nodes in plan.trees}
    differences = {nodes: tree.difference() for nodes, tree in trees.items()}
    tasks: dict[str, Callable[[], Any]] = {
        f"decode {n}": partial(decoding.run, n) for n in plan.nodes
    }
    for nodes, tree in trees.items():
        tasks |= {f"closed {nodes}": tree.closed, f"copies {nodes}": tree.copied}
    tasks |= {"features": training.features, "step": training.step}
    seconds = timed(tasks, rounds)

    def one_pass(nodes: int) -> dict[str, float]:
        return {key: x / plan.passes for key, x in seconds[f"decode {nodes}"].items()}

    first = one_pass(plan.nodes[0])["median"]
    decode = [
        {"nodes": n, "seconds": one_pass(n), "cost": one_pass(n)["median"] / first}
        for n in plan.nodes
    ]
    verify = [_compared(cfg, n, plan.rows, seconds, differences[n]) for n in plan.trees]
    where = {"batch": plan.batch, "context": plan.context}
    return {
        "decode": where | {"curve": decode},
        "verify": verify,
        "train": _trained(cfg, training.cfg, plan, seconds, peak),
    }


def _compared(cfg: TargetConfig, nodes: int, rows: int, seconds: dict, difference: float) -> dict:
    closed, copies = seconds[f"closed {nodes}"], seconds[f"copies {nodes}"]
    moved = {
        f"{name}_bytes": rows * state_traffic(cfg, nodes, name) for name in ("closed", "copies")
    }
    ratio = copies["median"] / closed["median"]
    found = {"nodes": nodes, "rows": rows, "closed": closed, "copies": copies, "ratio": ratio}
    return found | moved | {"difference": difference}


def _trained(cfg: TargetConfig, draft, plan: Plan, seconds: dict, peak: float | None) -> dict:
    measured = measured_peak(DTYPE, plan.product)
    flops = {
        "features": plan.length * target_flops(cfg, plan.length),
        "step": 3 * plan.length * draft_flops(draft, plan.length, plan.steps),
    }
    found: dict[str, Any] = {"tokens": plan.length, "ttt_steps": plan.steps}
    found |= {"peak_flops": peak or measured, "measured_peak_flops": measured}
    for name, operations in flops.items():
        median = seconds[name]["median"]
        found[name] = {
            "seconds": seconds[name], "tokens_per_second": plan.length / median,
            "flops": operations, "utilisation": operations / median / (peak or measured),
        }  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    is_cpu = jax.default_backend() == "cpu"
    parser.add_argument("--size", choices=SIZES, help="published shape (default: 0.8b)")
    parser.add_argument("--small", action="store_true", help="tiny; the default on a CPU")
    for name in ("context", "batch", "rows", "length"):
        parser.add_argument(f"--{name}", type=int, help=f"default: {getattr(FULL, name)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peak-tflops", type=float, help="of the device, in bfloat16")
    parser.add_argument("--out", default="accelerator.json")
    args = parser.parse_args(argv)
    is_small = args.small or (is_cpu and args.size is None)
    if is_small:
        cfg = small_target()
    else:
        cfg = shape(SIZES[args.size or "0.8b"])
    target = HybridLM(cfg, dtype=DTYPE, rngs=nnx.Rngs(0))
    wanted = {x: getattr(args, x) for x in ("context", "batch", "rows", "length")}
    plan = (SMALL if is_small else FULL)._replace(**{k: v for k, v in wanted.items() if v})
    peak = args.peak_tflops and args.peak_tflops * 1e12
    found = measure(target, plan, args.rounds, peak, is_small)
    device = jax.devices()[0]
    about = {
        "device": device.device_kind, "platform": device.platform, "jax": jax.__version__,
        "dtype": jnp.dtype(DTYPE).name, "size": "small" if is_small else args.size or "0.8b",
        "parameters": target.cfg.num_parameters(), "shape": target.cfg.to_hf(),
        "rounds": args.rounds, "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }  # fmt: skip
    write_whole(Path(args.out), json.dumps(about | found, indent=1) + "\n")
    costs = ", ".join(f"c({x['nodes']}) {x['cost']:.2f}" for x in found["decode"]["curve"])
    step = found["train"]["step"]
    print(f"{about['device']}, {about['size']}: {costs}")
    for x in found["verify"]:
        print(f"{x['nodes']} nodes: copies take {x['ratio']:.2f} times the closed form")
    print(f"step: {step['tokens_per_second']:,.0f} tokens/s, {step['utilisation']:.1%} of the peak")


if __name__ == "__main__":
    main()
