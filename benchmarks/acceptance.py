"""Compare rules of acceptance by expected tokens a round: drafts that are picks, and draws.

    python benchmarks/acceptance.py --target DIR --draft DIR --prompts FILE.jsonl
    python benchmarks/acceptance.py     # generated models of random weights: does it run

Picks are a draft's likeliest tokens; the engine drafts them where the target is greedy, and looks
whether the target's token is among them (`eagle3/decoding/accept.py`). Others draw the drafts from
q, what the draft believes, and accept with a rule that knows q: token by token (arXiv 2211.17192;
in a tree the recursive rejection of SpecInfer, arXiv 2305.09781), as a block (arXiv 2403.10444), or
from the leaves of a tree to its root (traversal verification, arXiv 2505.12398). Here all of them
see the same contexts.

For picks no rule can do better than the engine's, see `acceptance_rules.py`. Draws are another
matter: a draw is accepted with probability sum min(p, q), the overlap of the two, a pick with max p
at best. A draft that knows the target's spread gains by drawing; one that only knows the likeliest
token does not. A tree of picks has the sum of p over its children instead, and spends its nodes
where q is high; a tree of draws has to settle how many children a node gets before it draws them.
And with draws from q the text depends on the draft, even for the same seed. Noise that is shared
avoids that, and is what the engine does where the target draws: draft and target add the same
Gumbel noise to their log-probabilities, one vector a place, and take the maximum (arXiv
2408.07978). The target's draw is then what it is whatever was drafted, the engine's rule checks it
as it stands, and the draft may grow its tree by what it knows of the noise.

Contexts are all places of texts that the target drew, every few tokens. Given a drafted tree the
expected tokens are exact, a sum over where the path may end; what is left to chance is the tree
(and, with shared noise, the noise). Errors are two standard errors, each prompt taken as one
observation; differences are taken context by context.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from acceptance_rules import (
    Drafted,
    Ending,
    Rule,
    Shape,
    block,
    depths,
    expected_tokens,
    picks,
    recursive,
    same_noise,
    shape,
    traversal,
)
from flax import nnx

from eagle3.cli.engine import build
from eagle3.cli.rows import read_rows
from eagle3.config import DecodeConfig
from eagle3.config_reader import read_config
from eagle3.decoding.drafter import Eagle3Drafter, Eagle3State, NoDraft
from eagle3.decoding.request import Request
from eagle3.decoding.session import Session
from eagle3.decoding.speculate import DecodeState, Requests, score, settle
from eagle3.decoding.tree import (
    EAGLE1_PATHS,
    Proposal,
    TreePlan,
    chain_plan,
    draft_tree,
    dynamic_plan,
    static_plan,
)
from eagle3.draft import Eagle3Draft, draft_for
from eagle3.draft_config import DraftConfig
from gdn import HybridLM, tree_from_parents


@partial(jax.jit, static_argnames=("graph", "form"))
def draft_shape(
    graph, params, form: Shape, state: Eagle3State, root, noise, source, rank, temperature
):
    """Draft a tree in which node i is the `rank[i]`-th greatest of log q + noise[source[i]].

    Gumbel noise makes that a draw: independent ones if each node has noise of its own, and without
    replacement if siblings share it (arXiv 1903.06059). No noise makes it a pick.

    Args:
      noise: [B, M, Vd].

    Returns:
      tokens [B, M] and log q after each node, [B, M, Vd], -inf where nothing was drafted.
    """
    _, draft = nnx.merge(graph, params)
    drafter = Eagle3Drafter(draft, static_plan(form.paths))
    one_pass, keys, width = drafter.draft_pass(state), drafter.no_keys(state), drafter.plan.width
    parents, most = form.parents, max(form.ranks) + 1
    log_q = {0: jax.nn.log_softmax(state.logits / temperature)}
    hidden, tokens = {0: state.hidden}, {0: root}
    seen = {0: np.zeros((drafter.depth - 1) * width, bool)}
    for depth in range(1, drafter.depth + 1):
        level = [i for i, path in enumerate(form.paths, start=1) if len(path) == depth]
        for i in level:
            _, order = jax.lax.top_k(log_q[parents[i]] + noise[:, source[i]], most)
            tokens[i] = draft.target_ids[...][order[:, rank[i]]]
        inner = [i for i in level if i in parents]
        for place, i in enumerate(inner):
            own = np.arange(len(seen[0])) == (depth - 1) * width + place
            seen[i] = seen[parents[i]] | own
        if inner:
            visible = np.broadcast_to(
                np.stack([seen[i] for i in inner]), (len(root), len(inner), len(seen[0]))
            )
            logits, fed, keys = one_pass(
                depth,
                jnp.stack([tokens[i] for i in inner], axis=1),
                jnp.stack([hidden[parents[i]] for i in inner], axis=1),
                jnp.asarray(visible),
                keys,
            )
            for place, i in enumerate(inner):
                log_q[i] = jax.nn.log_softmax(logits[:, place] / temperature)
                hidden[i] = fed[:, place]
    nothing = jnp.full_like(log_q[0], -jnp.inf)
    every = range(len(parents))
    return (
        jnp.stack([tokens[i] for i in every], axis=1),
        jnp.stack([log_q.get(i, nothing) for i in every], axis=1),
    )


@partial(jax.jit, static_argnames=("graph", "plan"))
def draft_dynamic(
    graph, params, plan: TreePlan, state: Eagle3State, root, noise, temperature
) -> Proposal:
    """Draft as the engine does, with `noise` [B, depth, Vd] on the draft's logits."""
    _, draft = nnx.merge(graph, params)
    drafter = Eagle3Drafter(draft, plan)
    one_pass = drafter.draft_pass(state)

    def noisy_pass(index, *rest):
        logits, hidden, keys = one_pass(index, *rest)
        return logits / temperature + noise[:, index, None], hidden, keys

    return draft_tree(
        plan, root, state.logits / temperature + noise[:, 0], state.hidden,
        draft.target_ids[...], noisy_pass, drafter.no_keys(state),
    )  # fmt: skip


@partial(jax.jit, static_argnames="graph")
def judge(graph, params, tokens, parents, cache):
    """Return the target's logits after each node."""
    target, _ = nnx.merge(graph, params)
    return target.verify(tokens, tree_from_parents(parents), cache).logits


@partial(jax.jit, static_argnames="graph", donate_argnames="state")
def advance(graph, params, state: DecodeState, requests: Requests) -> DecodeState:
    """Decode a token a row plainly; the draft hears of it."""
    target, draft = nnx.merge(graph, params)
    drafter = Eagle3Drafter(draft, chain_plan(1))
    root = NoDraft().propose((), state.root)
    scored = score(target, root, 0, drafter.aux_layers, state, requests)
    told = (scored.aux_hidden, scored.accepted.tokens, scored.accepted.count)
    return settle(state, scored)._replace(draft=drafter.absorb(state.draft, *told))


class Method(NamedTuple):
    """A way to draft and a rule for it."""

    name: str
    draft: str  # "dynamic" or "static", picks or with "noise", or draws: "replace", "without"
    rule: Rule | None  # None: `same_noise`


def _keep(rule: Callable[..., Ending]) -> Rule:
    return partial(rule, replace=False)


CHAIN = (
    Method("picks", "static picks", picks),
    Method("draws, token by token", "replace", recursive),
    Method("draws, block verification", "replace", block),
    Method("the target's noise (the engine)", "static noise", None),
)
TREE = (
    Method("picks, dynamic", "dynamic picks", picks),
    Method("picks, static", "static picks", picks),
    Method("draws with replacement, recursive", "replace", recursive),
    Method("draws with replacement, traversal", "replace", traversal),
    Method("draws without, recursive", "without", _keep(recursive)),
    Method("draws without, traversal", "without", _keep(traversal)),
    Method("the target's noise, static (the engine)", "static noise", None),
    Method("the target's noise, dynamic (the engine)", "dynamic noise", None),
)


class Group(NamedTuple):
    """Methods that have as many nodes verified; the first is what the others are compared with."""

    name: str
    form: Shape
    dynamic: TreePlan
    methods: tuple[Method, ...]


GROUPS = (
    Group("chain of 4", shape("0 00 000 0000"), chain_plan(4), CHAIN),
    Group("chain of 7", shape("0 00 000 0000 00000 000000 0000000"), chain_plan(7), CHAIN),
    Group("7 drafted nodes", shape("0 1 00 01 10 000 0000"), dynamic_plan(3, 4, 8), TREE),
    Group("25 drafted nodes", Shape(EAGLE1_PATHS), dynamic_plan(4, 5, 26), TREE),
)


class Bench:
    """Two models and a batch of texts under way."""

    def __init__(self, target: HybridLM, draft: Eagle3Draft, requests: Sequence[Request]):
        """Read the prompts."""
        most = max(len(r.prompt) + r.max_new_tokens for r in requests)
        # Room for the whole text: nobody is there to let these caches grow.
        session = Session(target, Eagle3Drafter(draft, chain_plan(1)), min_capacity=most)
        session.start(requests)
        assert session._state is not None
        self.state, self.requests = session._state, session._requests
        graph, params = nnx.split((target, draft))
        self.models = graph, nnx.to_pure_dict(params)
        self.ids = np.asarray(draft.target_ids[...])
        self.vocab, self.batch = target.cfg.vocab_size, len(requests)

    def advance(self) -> None:
        """Decode a token."""
        self.state = advance(*self.models, self.state, self.requests)

    def draft(
        self, group: Group, how: str, rng: np.random.Generator, temperature: float
    ) -> tuple[list[Drafted], np.ndarray]:
        """Draft a tree a row; returns the noise that it shares with the target as well."""
        kind, _, source = how.rpartition(" ")
        depth = group.dynamic.depth
        shared = rng.gumbel(size=(self.batch, depth, self.vocab)).astype(np.float32)
        seen = shared[..., self.ids] * (source == "noise")
        if kind == "dynamic":
            # Picks are scored at temperature 1, as for a greedy target.
            tree = draft_dynamic(
                *self.models, group.dynamic, self.state.draft, self.state.root, seen,
                temperature if source == "noise" else 1.0,
            )  # fmt: skip
            return self._judged(tree.tokens, tree.parents, None, temperature), shared
        parents, ranks = np.array(group.form.parents), np.array(group.form.ranks)
        noise = seen[:, np.minimum(depths(parents), depth - 1)]
        if source in ("replace", "without"):
            noise = rng.gumbel(size=noise.shape).astype(np.float32)
        by_node, first = np.arange(len(parents)), np.zeros_like(ranks)
        places = (by_node, first) if source == "replace" else (parents, ranks)
        tokens, log_q = draft_shape(
            *self.models, group.form, self.state.draft, self.state.root, noise, *places,
            temperature,
        )  # fmt: skip
        q = np.zeros((*noise.shape[:2], self.vocab))
        q[..., self.ids] = np.exp(np.asarray(log_q, np.float64))
        above = np.broadcast_to(parents.astype(np.int32), noise.shape[:2])
        return self._judged(tokens, above, q, temperature), shared

    def _judged(self, tokens, parents, q, temperature: float) -> list[Drafted]:
        logits = judge(*self.models, tokens, parents, self.state.cache)
        p = np.asarray(logits, np.float64) / temperature
        p = np.exp(p - p.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        rows = zip(np.asarray(parents), np.asarray(tokens), p, p if q is None else q, strict=True)
        return [Drafted(*row) for row in rows]

    def look(self, group: Group, rng, temperature: float, draws: int) -> dict[str, np.ndarray]:
        """Return the expected tokens of a round of each row here, by method."""
        found = {method.name: np.zeros(self.batch) for method in group.methods}
        for how in dict.fromkeys(method.draft for method in group.methods):
            repeats = 1 if how.endswith("picks") else draws
            for _ in range(repeats):
                trees, noise = self.draft(group, how, rng, temperature)
                for name, _, rule in (m for m in group.methods if m.draft == how):
                    for row, tree in enumerate(trees):
                        tokens = (
                            expected_tokens(tree, rule(tree))
                            if rule is not None
                            else same_noise(tree, noise[row])
                        )
                        found[name][row] += tokens / repeats
        return found


def agreement(trees: Sequence[Drafted]) -> np.ndarray:
    """Return [3, B] of the roots: p of the draft's pick, the overlap of p and q, the largest p."""
    roots = [(tree.p[0], tree.q[0]) for tree in trees]
    return np.array([(p[q.argmax()], np.minimum(p, q).sum(), p.max()) for p, q in roots]).T


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Return the mean of [contexts, prompts] and two standard errors, by prompts."""
    by_prompt = values.mean(0)
    return by_prompt.mean(), 2 * by_prompt.std(ddof=1) / np.sqrt(len(by_prompt))


def report(values: dict[tuple[str, str], np.ndarray]) -> None:
    """Print a table."""
    print("| nodes | drafts and rule | tokens a round | against the first |")
    print("| --- | --- | --- | --- |")
    first: dict[str, np.ndarray] = {}
    for (group, name), found in values.items():
        (mean, error), base = mean_and_error(found), first.setdefault(group, found)
        more, doubt = mean_and_error(found - base)
        against = "" if base is found else f"{more:+.3f} ± {doubt:.3f} ({more / base.mean():+.1%})"
        print(f"| {group} | {name} | {mean:.3f} ± {error:.3f} | {against} |")


def small_pair(
    overrides: Sequence[str], tokens: int
) -> tuple[HybridLM, Eagle3Draft, list[Request]]:
    """Make models of random weights; their figures mean nothing."""
    engine = build(read_config(DecodeConfig, None, overrides))
    cfg = engine.target.cfg
    draft_cfg = DraftConfig(
        hidden_size=cfg.hidden_size, intermediate_size=128, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, vocab_size=cfg.vocab_size, draft_vocab_size=64,
        target_hidden_size=cfg.hidden_size, aux_layers=cfg.default_aux_layers,
        max_position_embeddings=cfg.max_position_embeddings,
    )  # fmt: skip
    draft = draft_for(engine.target, draft_cfg, np.arange(64), rngs=nnx.Rngs(0))
    prompts = [[n, 2, 3] for n in range(4)]
    return engine.target, draft, [engine.request(p, max_new_tokens=tokens) for p in prompts]


def prepare(args: argparse.Namespace) -> tuple[HybridLM, Eagle3Draft, list[Request]]:
    """Load the models and the prompts, or make some."""
    tokens = args.contexts * args.every + 1
    overrides = ["native=off", "ignore_eos=true", f"sampling.temperature={args.temperature}"]
    given = [x for x in (args.target, args.draft, args.prompts) if x]
    if not given:
        return small_pair(overrides, tokens)
    if len(given) < 3:
        raise SystemExit("give --target DIR, --draft DIR and --prompts FILE together, or none")
    config = read_config(DecodeConfig, None, overrides, target=args.target, draft=args.draft)
    engine = build(config)
    assert isinstance(engine.drafter, Eagle3Drafter)
    prompts = [row.request.prompt for row in read_rows(args.prompts, engine)][: args.rows]
    # Seeds differ, or rows that begin alike would go on alike.
    requests = [
        engine.request(prompt, max_new_tokens=tokens, seed=args.seed + number)
        for number, prompt in enumerate(prompts)
    ]
    if len(requests) < 2:
        raise SystemExit(f"found {len(requests)} prompt; errors need at least two")
    return engine.target, engine.drafter.draft, requests


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", help="JSON lines, as for decode.py")
    parser.add_argument("--rows", type=int, default=16, help="prompts at most, at least two")
    parser.add_argument("--contexts", type=int, default=24, help="of each prompt")
    parser.add_argument("--every", type=int, default=4, help="tokens from one to the next")
    parser.add_argument("--draws", type=int, default=3, help="trees drawn in each context")
    parser.add_argument("--temperature", type=float, default=1.0, help="of both models")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    groups = GROUPS
    if not (args.target or args.draft or args.prompts):
        args.contexts, args.draws, groups = min(args.contexts, 4), 1, (GROUPS[0], GROUPS[2])
    target, draft, requests = prepare(args)
    bench, rng = Bench(target, draft, requests), np.random.default_rng(args.seed)
    values: dict[tuple[str, str], list[np.ndarray]] = {}
    agreements = []
    for _ in range(args.contexts):
        for group in groups:
            for name, row in bench.look(group, rng, args.temperature, args.draws).items():
                values.setdefault((group.name, name), []).append(row)
        trees, _ = bench.draft(GROUPS[0], "static picks", rng, args.temperature)
        agreements.append(agreement(trees))
        for _ in range(args.every):
            bench.advance()
    report({name: np.stack(rows) for name, rows in values.items()})
    pick, overlap, largest = np.mean(agreements, axis=(0, 2))
    print(f"\nfirst token: the draft's pick has p = {pick:.3f}, the likeliest {largest:.3f};",
          f"a draw is accepted with probability {overlap:.3f}")  # fmt: skip
    print(f"{args.contexts} contexts of {len(requests)} prompts, temperature {args.temperature},",
          f"draws: {args.draws} in each")  # fmt: skip


if __name__ == "__main__":
    main()
