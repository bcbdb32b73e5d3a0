"""Measure a round of speculative decoding, piece by piece, beside plain decoding.

    python benchmarks/decode.py                     # about five minutes on two cores
    python benchmarks/decode.py --trees chain:4 dynamic:3,4,8 static --accepted 3 --repeats 9

The target is the 99.7M-parameter hybrid of benchmarks/target.py, the draft one layer of the same
width with 8,192 entries; both have random weights. A random draft would never be right, so what it
proposes is overwritten, after all its work is done, by the target's own next `--accepted` tokens
along one path of the tree: every round accepts that many and the bonus. How good a real draft is
decides that number; what a round costs does not depend on it, and is what is measured here.

Per tree: milliseconds of a whole round on the device, of each piece run alone in a device loop, of
the matrix products alone, and of the host per round. All run in turn, several times; medians.
It also checks that nothing was compiled after the warm-up and that no buffer of the size of a
key/value cache is copied inside the device loop.
"""

import argparse
import json
import math
import re
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from target import benchmark_config

from eagle3.decoding.accept import accept
from eagle3.decoding.drafter import Eagle3Drafter
from eagle3.decoding.request import Request
from eagle3.decoding.session import Session
from eagle3.decoding.speculate import merge, run_rounds
from eagle3.decoding.tree import (
    EAGLE1_PATHS,
    Proposal,
    TreePlan,
    chain_plan,
    dynamic_plan,
    static_plan,
)
from eagle3.draft import Eagle3Draft, draft_for
from eagle3.draft_config import DraftConfig
from gdn import HybridLM, commit, tree_from_parents
from gdn.layers import linear

PROMPT, ROUNDS, CAPACITY = 64, 16, 2048
COMPILED: Any = run_rounds  # with what `jax.jit` adds to a function


class Replay(Eagle3Drafter):
    """Drafts as it should, then writes known tokens over the first nodes of one path."""

    def __init__(self, draft: Eagle3Draft, plan: TreePlan, known: jax.Array, accepted: int):
        super().__init__(draft, plan)
        self.known, self.accepted = nnx.Variable(known), min(accepted, plan.depth)

    def propose(self, state, root, foresight=None):
        """Overwrite the path to the first of the deepest nodes."""
        tokens, parents, _ = super().propose(state, root, foresight)
        tree = tree_from_parents(parents)
        leaf = jnp.argmax(tree.depth, axis=1)
        on_path = jnp.take_along_axis(tree.ancestors, leaf[:, None, None], axis=1)[:, 0]
        # Pairs absorbed = position of the root; `known` counts from the token after the prompt.
        place = state.lengths[:, None] + tree.depth - PROMPT
        truth = self.known[...][jnp.clip(place, 0, self.known[...].shape[0] - 1)]
        wanted = on_path & (tree.depth > 0) & (tree.depth <= self.accepted)
        # No other child of the same parent may hold the token as well.
        tokens = jnp.where((tokens == truth) & (tree.depth > 0), 0, tokens)
        return Proposal(jnp.where(wanted, truth, tokens), parents)


class Models(NamedTuple):
    """What is measured."""

    target: HybridLM
    draft: Eagle3Draft
    known: jax.Array  # the target's own greedy continuation of the prompt


def make_models(draft_vocab: int, tokens: int) -> Models:
    """Make both with random weights, and decode `tokens` plainly once."""
    cfg = benchmark_config()
    target = HybridLM(cfg, rngs=nnx.Rngs(0))
    draft_cfg = DraftConfig(
        hidden_size=cfg.hidden_size, intermediate_size=cfg.intermediate_size,
        num_attention_heads=10, num_key_value_heads=2, head_dim=64, vocab_size=cfg.vocab_size,
        draft_vocab_size=draft_vocab, target_hidden_size=cfg.hidden_size,
        aux_layers=cfg.default_aux_layers, max_position_embeddings=CAPACITY,
    )  # fmt: skip
    ids = np.arange(draft_vocab) * (cfg.vocab_size // draft_vocab)
    draft = draft_for(target, draft_cfg, ids, rngs=nnx.Rngs(1))
    session = started(target, None)
    while len(session.answers[0].tokens) < tokens:
        session.advance()
    return Models(target, draft, jnp.array(session.answers[0].tokens, jnp.int32))


def started(target: HybridLM, drafter) -> Session:
    """Return a session that has read the prompt."""
    session = Session(
        target, drafter, stream_every=ROUNDS, visit_seconds=math.inf, min_capacity=CAPACITY
    )
    request = Request(prompt=list(range(PROMPT)), max_new_tokens=CAPACITY - 2 * PROMPT)
    session.start([request])
    return session


def parse_tree(text: str) -> TreePlan:
    """Read chain:DEPTH, dynamic:TOP_K,DEPTH,TOTAL or static."""
    kind, _, numbers = text.partition(":")
    try:
        values = [int(n) for n in numbers.split(",")] if numbers else []
        plans = {"chain": chain_plan, "dynamic": dynamic_plan}
        return static_plan(EAGLE1_PATHS) if kind == "static" else plans[kind](*values)
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"--trees {text!r}: use chain:4, dynamic:3,4,8 or static") from error


class Pieces:
    """Device loops of the pieces of a round, each fed with what it returned the time before."""

    def __init__(self, session: Session):
        graph, params = session._graph, session._params
        state, requests = session._state, session._requests
        # A copy: the session gives its own away at every step.
        state = jax.tree.map(jnp.copy, state)
        assert state is not None
        self.state, self.params, depth = state, params, session._active.depth

        def repeat(step):
            """Return a function that runs `step` ROUNDS times on the device and waits."""

            def loop(params, carry):
                modules = merge(graph, params)
                return jax.lax.fori_loop(0, ROUNDS, lambda i, c: step(*modules, i, c), carry)

            compiled = jax.jit(loop)
            return lambda carry: jax.block_until_ready(compiled(self.params, carry))

        def draft(target, drafter, i, carry):
            draft, proposal = carry
            # Changed by what came before, or XLA would lift the whole draft out of the loop.
            nudge = proposal.tokens[:, -1:] * 1e-9
            draft = draft._replace(logits=draft.logits + nudge, hidden=draft.hidden + nudge)
            return draft, drafter.propose(draft, proposal.tokens[:, -1])

        def verify(target, drafter, i, carry):
            proposal, scored = carry
            tokens = proposal.tokens + jnp.argmax(scored.logits[:, :, :8], -1).astype(jnp.int32)
            proposal = proposal._replace(tokens=tokens % target.cfg.vocab_size)
            tree = tree_from_parents(proposal.parents)
            return proposal, target.verify(proposal.tokens, tree, state.cache, drafter.aux_layers)

        def accept_(target, drafter, i, carry):
            logits, proposal, accepted = carry
            logits = logits.at[:, 0, 0].add(accepted.count * 1e-9)
            return logits, proposal, accept(
                logits, proposal, depth, requests.sampling, requests.limits,
                state.is_running, state.emitted + i, None,
            )  # fmt: skip

        def commit_(target, drafter, i, carry):
            cache, updates, path = carry
            path = jnp.where(cache.lengths[:, None] >= 0, path, -1)
            return commit(cache, updates, path), updates, path

        def absorb(target, drafter, i, carry):
            draft, aux_hidden, accepted = carry
            aux_hidden = aux_hidden.at[:, 0, 0, 0].add(draft.hidden[:, 0] * 1e-9)
            draft = drafter.absorb(draft, aux_hidden, accepted.tokens, accepted.count)
            return draft, aux_hidden, accepted

        self.loops = {
            "draft": repeat(draft), "verify": repeat(verify), "accept": repeat(accept_),
            "commit": repeat(commit_), "absorb": repeat(absorb),
        }  # fmt: skip
        self.carries = self._prepare(graph, params, requests, depth)

    def _prepare(self, graph, params, requests, depth):
        """Run one round by hand, for realistic inputs of every piece."""
        state = self.state
        target, drafter = merge(graph, params)

        @jax.jit
        def first(state):
            proposal = drafter.propose(state.draft, state.root)
            tree = tree_from_parents(proposal.parents)
            scored = target.verify(proposal.tokens, tree, state.cache, drafter.aux_layers)
            accepted = accept(
                scored.logits, proposal, depth, requests.sampling, requests.limits,
                state.is_running, state.emitted, None,
            )  # fmt: skip
            nodes = jnp.maximum(accepted.path, 0)[:, :, None, None]
            return proposal, scored, accepted, jnp.take_along_axis(scored.aux_hidden, nodes, 1)

        proposal, scored, accepted, aux_hidden = first(state)
        return {
            "draft": (state.draft, proposal),
            "verify": (proposal, scored),
            "accept": (scored.logits, proposal, accepted),
            "commit": (state.cache, scored.updates, accepted.path),
            "absorb": (state.draft, aux_hidden, accepted),
        }

    def measure(self) -> dict[str, float]:
        """Return milliseconds per round of each piece."""
        times = {}
        for name, loop in self.loops.items():
            start = time.perf_counter()
            loop(self.carries[name])
            times[name] = (time.perf_counter() - start) / ROUNDS * 1e3
        return times


def product_loop(models: Models, plan: TreePlan):
    """Return a function that runs the matrix products of a round and nothing else."""
    weights, rows = [], []

    def add(module, count, skip=()):
        for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            if leaf[...].ndim == 2 and path[-1] not in skip:
                weights.append(leaf[...])
                rows.append(count)

    # The tied embedding is the head. Convolutions have a matrix of weights but no product.
    add(models.target, plan.size, skip=("conv1d",))
    for _ in range(plan.depth - 1):
        add(models.draft, plan.width, skip=("fc",))
    add(models.draft, plan.depth + 1, skip=("lm_head",))
    head = models.draft.lm_head[...]

    @jax.jit
    def loop(weights, x):
        def step(_, x):
            for weight, count in zip(weights, rows, strict=True):
                y = linear(jnp.full((count, weight.shape[1]), x), weight)
                x = x + y[0, 0] * 1e-6  # the next product needs this one
            return x + linear(jnp.full((1, head.shape[1]), x), head)[0, 0] * 1e-6

        return jax.lax.fori_loop(0, ROUNDS, step, x)

    x = jnp.float32(1)
    return lambda: jax.block_until_ready(loop(weights, x))


def cache_copies(session: Session) -> int:
    """Count copies of whole key/value buffers inside the compiled device loop."""
    assert session._state is not None
    state = session._state
    compiled = COMPILED.lower(
        session._graph, session._params, state, session._requests, ROUNDS, ROUNDS
    ).compile()
    buffers = [
        x for x in jax.tree.leaves(state.cache.layers) if x.ndim == 4 and CAPACITY in x.shape
    ]
    shapes = {",".join(map(str, x.shape)) for x in buffers}
    count, inside = 0, False
    for line in str(compiled.as_text()).splitlines():
        if line.endswith("{"):
            inside = not line.startswith("ENTRY")
        found = re.search(r"= \w+\[([\d,]+)\]\S* copy\(", line)
        count += bool(inside and found and found.group(1) in shapes)
    return count


def timed_rounds(session: Session) -> tuple[float, float]:
    """Return milliseconds per round of a visit as a whole, and of the device part alone."""
    device = 0.0
    compiled = run_rounds

    def watched(*arguments):
        nonlocal device
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        device += time.perf_counter() - start
        return result

    import eagle3.decoding.session as module

    module.run_rounds = watched
    before = session.answers[0].rounds
    start = time.perf_counter()
    try:
        session.advance()
    finally:
        module.run_rounds = compiled
    rounds = session.answers[0].rounds - before
    return (time.perf_counter() - start) / rounds * 1e3, device / rounds * 1e3


def run_tree(models: Models, name: str, accepted: int, repeats: int) -> dict:
    """Measure one tree against plain decoding, in turn."""
    plan = parse_tree(name)
    plain = started(models.target, None)
    session = started(models.target, Replay(models.draft, plan, models.known, accepted))
    for each in (plain, session):
        each.advance()  # compiles, in fewer rounds
    pieces, products = Pieces(session), product_loop(models, plan)
    pieces.measure()
    products()
    compiled = COMPILED._cache_size()
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        start = time.perf_counter()
        products()
        row = {"products": (time.perf_counter() - start) / ROUNDS * 1e3, **pieces.measure()}
        row["plain"], _ = timed_rounds(plain)
        whole, device = timed_rounds(session)
        row |= {"round": whole, "device": device, "host": whole - device}
        for key, value in row.items():
            samples.setdefault(key, []).append(value)
    if COMPILED._cache_size() != compiled:
        raise SystemExit("the decode loop was compiled again after the warm-up")
    result = {key: statistics.median(values) for key, values in samples.items()}
    result |= {
        "tree": name,
        "nodes": plan.size,
        "acceptance_length": session.answers[0].acceptance_length,
        "cache_copies": cache_copies(session),
    }
    return result


def report(r: dict) -> None:
    """Print one tree's figures."""
    whole, models = r["round"], r["draft"] + r["verify"] + r["absorb"]
    print(f"\n{r['tree']}: {r['nodes']} nodes, {r['acceptance_length']:.2f} tokens a round")
    for name in ("draft", "absorb", "verify", "accept", "commit", "host"):
        print(f"  {name:<34}{r[name]:8.2f} ms {r[name] / whole:6.1%}")
    print(f"  {'whole round':<34}{whole:8.2f} ms")
    rest = whole - models
    print(f"  {'outside the two models':<34}{rest:8.2f} ms {rest / whole:6.1%}")
    rest = whole - r["products"]
    print(f"  {'outside their matrix products':<34}{rest:8.2f} ms {rest / whole:6.1%}")
    speed = r["acceptance_length"] * r["plain"] / whole
    print(f"  plain decoding {r['plain']:.2f} ms a token: {speed:.2f} times as fast")
    print(f"  copies of a cache buffer in the device loop: {r['cache_copies']}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trees", nargs="+", default=["chain:4", "dynamic:3,4,8"])
    parser.add_argument(
        "--accepted", type=int, default=2, help="drafted tokens right in each round"
    )
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one object per tree")
    args = parser.parse_args()
    tokens = (args.repeats + 2) * ROUNDS * (args.accepted + 1)
    if tokens > CAPACITY - 3 * PROMPT:
        raise SystemExit(f"{tokens} tokens would be decoded: lower --repeats or --accepted")
    models = make_models(args.draft_vocab, tokens)
    for name in args.trees:
        result = run_tree(models, name, args.accepted, args.repeats)
        print(json.dumps(result)) if args.json else report(result)


if __name__ == "__main__":
    main()
