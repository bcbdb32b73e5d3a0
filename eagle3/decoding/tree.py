"""Which draft tokens are verified together: chain, static and dynamic trees, with static shapes.

A `TreePlan` holds the sizes (what XLA compiles), a `Proposal` one round's tree (data). All three
kinds are one procedure, level by level: take the `branching` best children of each of `width`
frontier nodes, choose the next frontier among them, at the end choose the nodes to verify. A
dynamic tree chooses by cumulative log-probability (EAGLE-2, arXiv 2406.16858, section 4), a static
one by tables. Scores are the draft's own, at temperature 1, or where the target draws those of its
logits with the noise that decides the draw (`Foresight` in `sampling.py`).
`auto.py` runs the same steps one by one and decides in between how far to go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle3.decoding.sampling import best

# By child rank, the 25 paths of EAGLE-1 (arXiv 2401.15077): five levels, wider at likelier nodes.
EAGLE1_PATHS = tuple(
    tuple(int(rank) for rank in path)
    for path in (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ).split()
)
_WORST = -1e30  # a log-probability below any real one, still finite when a dozen are added


class Proposal(NamedTuple):
    """A tree of candidates: node 0 is the last committed token, `parents[i] < i`, -1 for node 0."""

    tokens: Int[Array, "B M"]
    parents: Int[Array, "B M"]
    # Log-probability of the path to each node, 0 for node 0; None: the drafter has none to tell.
    scores: Float[Array, "B M"] | None = None


@dataclass(frozen=True)
class TreePlan:
    """Sizes of a tree. Make it with `chain_plan`, `static_plan` or `dynamic_plan`."""

    depth: int  # drafted tokens on the longest path; needs depth - 1 draft passes beyond the first
    width: int  # nodes that each of those passes expands
    branching: int  # children considered of each
    size: int  # nodes to verify, the root included
    # Of a static tree: per pass, which candidates of the level before to expand; and of all
    # candidates in the order of levels, which to verify.
    frontier: tuple[tuple[int, ...], ...] | None = None
    nodes: tuple[int, ...] | None = None
    adapts: bool = False  # depth, width and size are the most: each round takes what pays


def chain_plan(depth: int) -> TreePlan:
    """Draft the likeliest token `depth` times: a tree without branches."""
    return dynamic_plan(top_k=1, depth=depth, total_tokens=depth + 1)


def dynamic_plan(top_k: int, depth: int, total_tokens: int) -> TreePlan:
    """Expand the `top_k` likeliest nodes of each level, verify the likeliest of all.

    Args:
      top_k: beam, and children of each node; also of the root.
      depth: levels below the root, the `num_steps` of SGLang, SafeAILab's `depth` plus 1.
      total_tokens: nodes to verify, the root included, as in both; fewer if there are not so many.
    """
    sizes = (("top_k", top_k, 1), ("depth", depth, 1), ("total_tokens", total_tokens, 2))
    for name, value, low in sizes:
        if value < low:
            raise ValueError(f"tree: {name} is {value}, it must be at least {low}")
    candidates = top_k + (depth - 1) * top_k**2
    return TreePlan(depth, top_k, top_k, min(total_tokens, candidates + 1))


def auto_plan(top_k: int, max_depth: int, max_nodes: int) -> TreePlan:
    """Let every round choose among dynamic trees of at most these sizes, by what they cost."""
    for name, value, low in (("max_depth", max_depth, 2), ("max_nodes", max_nodes, 2)):
        if value < low:
            raise ValueError(f"tree: {name} is {value}, it must be at least {low}")
    return replace(dynamic_plan(top_k, max_depth, max_nodes), adapts=True)


def static_plan(paths: Sequence[Sequence[int]]) -> TreePlan:
    """Verify the same tree in every round.

    Args:
      paths: of each node but the root, the ranks from the root down to it: (0, 2) is the third
        likeliest child of the likeliest child. In any order.

    Raises:
      ValueError: a path is empty, given twice, or lacks the node above it.
    """
    wanted = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
    known = set(wanted)
    if not wanted or () in known or len(known) < len(wanted) or min(map(min, wanted)) < 0:
        raise ValueError("tree: paths must be distinct, not empty, and of ranks from 0 on")
    orphans = [path for path in wanted if len(path) > 1 and path[:-1] not in known]
    if orphans:
        raise ValueError(f"tree: path {orphans[0]} is given without the node above it")
    depth = len(wanted[-1])
    inner = sorted({path[:-1] for path in wanted if len(path) > 1}, key=lambda p: (len(p), p))
    levels = [[path for path in inner if len(path) == level] for level in range(1, depth)]
    width = max((len(level) for level in levels), default=1)
    branching = max(map(max, wanted)) + 1
    place = {(): 0}  # of an expanded node in its frontier
    for level in levels:
        place |= {path: i for i, path in enumerate(level)}

    def candidate(path):  # among those of its own level
        return place[path[:-1]] * branching + path[-1]

    frontier = tuple(
        tuple(candidate(path) for path in level) + (0,) * (width - len(level)) for level in levels
    )
    nodes = tuple((len(path) - 1) * width * branching + candidate(path) for path in wanted)
    return TreePlan(depth, width, branching, len(wanted) + 1, frontier, tuple(sorted(nodes)))


# A draft pass: (pass 1.., tokens [B, w], hidden [B, w, H], visible [B, w, slots], its own carry)
# -> logits [B, w, Vd], hidden [B, w, H], carry. `visible` are the node's ancestors and itself among
# the slots of all passes, `width` a pass.
DraftPass = Callable[[Any, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array, Any]]
# (log-probabilities [B, w, k] that the draft gives to each node's best tokens, depth below the root
# from 1) -> what to believe of them, at most 0: a score is the sum along a path.
Judge = Callable[[jax.Array, Any], jax.Array]


class Pool(NamedTuple):
    """All candidates so far in the order of levels; places not filled yet score -inf."""

    ids: Int[Array, "B N"]  # in the target's vocabulary
    scores: Float[Array, "B N"]  # log-probability of the whole path
    parents: Int[Array, "B N"]  # among the candidates; -1: the root
    claims: Float[
        Array, "B N"
    ]  # log-probability that the draft gives to the token after its parent


class Growth(NamedTuple):
    """A tree between two draft passes."""

    ids: Int[Array, "B n"]  # the newest level: width * branching candidates
    scores: Float[Array, "B n"]
    hidden: Float[Array, "B w H"]  # of the nodes above it, to be fed back
    visible: Bool[Array, "B w slots"]  # what they see of the slots of all passes
    pool: Pool
    carry: Any  # of the draft pass: its keys and values


def draft_tree(
    plan: TreePlan,
    root: Int[Array, " B"],
    logits: Float[Array, "B Vd"],
    hidden: Float[Array, "B H"],
    target_ids: Int[Array, " Vd"],
    draft_pass: DraftPass,
    carry: Any,
    kernels: bool = False,
) -> Proposal:
    """Draft a tree on `root`.

    Args:
      logits: of the draft after the root; `hidden` is what it feeds back beside them.
      target_ids: of each entry of the draft vocabulary.
      carry: first state of `draft_pass`: its keys and values.
      kernels: as in `peak` of `sampling.py`.
    """
    growth = first_level(plan, logits, hidden, target_ids, carry, kernels=kernels)
    if plan.depth > 1:

        def expand(index, growth):
            return next_level(
                plan, index, growth, target_ids, draft_pass, plan.width, kernels=kernels
            )

        growth = jax.lax.fori_loop(1, plan.depth, expand, growth)
    return _select(plan, root, growth.pool)


def first_level(
    plan: TreePlan,
    logits,
    hidden,
    target_ids,
    carry: Any,
    judge: Judge | None = None,
    kernels: bool = False,
) -> Growth:
    """Take the children of the root, which need no pass of their own."""
    batch, width, level = logits.shape[0], plan.width, plan.width * plan.branching
    nothing = jnp.zeros((batch, 1))
    ids, scores, claims = _best_children(
        plan, target_ids, logits[:, None], nothing, 1, judge, kernels
    )
    rest = ((0, 0), (0, (plan.depth - 1) * level))
    none = jnp.full((batch, plan.depth * level), -1, jnp.int32)
    unknown = (jnp.pad(x, rest, constant_values=-jnp.inf) for x in (scores, claims))
    pool = Pool(jnp.pad(ids, rest), next(unknown), none, next(unknown))
    hidden = jnp.broadcast_to(hidden[:, None], (batch, width, hidden.shape[-1]))
    visible = jnp.zeros((batch, width, (plan.depth - 1) * width), bool)
    return Growth(ids, scores, hidden, visible, pool, carry)


def next_level(
    plan: TreePlan,
    index,
    growth: Growth,
    target_ids,
    draft_pass: DraftPass,
    width: int,
    judge: Judge | None = None,
    kernels: bool = False,
) -> Growth:
    """Expand `width` nodes of the newest level, at most `plan.width`, in draft pass `index`."""
    batch, k, level = growth.ids.shape[0], plan.branching, plan.width * plan.branching
    if plan.frontier is None:
        _, chosen = jax.lax.top_k(growth.scores, width)
    else:
        chosen = jnp.broadcast_to(jnp.array(plan.frontier)[index - 1], (batch, width))
    above = chosen // k
    tokens, scores = (jnp.take_along_axis(x, chosen, axis=1) for x in growth[:2])
    hidden = jnp.take_along_axis(growth.hidden, above[..., None], axis=1)
    visible = jnp.take_along_axis(growth.visible, above[..., None], axis=1)
    own = (index - 1) * plan.width + jnp.arange(width)
    visible = visible | (jnp.arange(visible.shape[2]) == own[:, None])
    logits, hidden, carry = draft_pass(index, tokens, hidden, visible, growth.carry)
    ids, scores, claims = _best_children(
        plan, target_ids, logits, scores, index + 1, judge, kernels
    )
    parents = jnp.repeat((index - 1) * level + chosen, k, axis=1).astype(jnp.int32)
    spare = plan.width - width
    parents = jnp.pad(parents, ((0, 0), (0, spare * k)), constant_values=-1)
    hidden, visible = (jnp.pad(x, ((0, 0), (0, spare), (0, 0))) for x in (hidden, visible))
    pool = Pool(
        *(
            jax.lax.dynamic_update_slice_in_dim(x, new, index * level, axis=1)
            for x, new in zip(growth.pool, (ids, scores, parents, claims), strict=True)
        )
    )
    return Growth(ids, scores, hidden, visible, pool, carry)


def _best_children(
    plan: TreePlan, target_ids, logits, scores, depth, judge: Judge | None, kernels: bool
):
    """Return ids, scores, claims [B, level] of each node's best; -inf where there are not so many.

    Args:
      depth: of the children, below the root.
    """
    size = plan.width * plan.branching
    top, ids, log_total = best(logits, plan.branching, _WORST, kernels)
    log_q = top - log_total[..., None]
    # A broken draft must still give a tree: each node after its parent, no NaN in the order.
    log_q = jnp.clip(jnp.where(jnp.isnan(log_q), _WORST, log_q), _WORST, 0.0)
    believed = log_q if judge is None else judge(log_q, depth)
    found = (target_ids[ids], scores[..., None] + believed, log_q)
    ids, scores, claims = (x.reshape(x.shape[0], -1) for x in found)
    missing = ((0, 0), (0, size - ids.shape[1]))
    scores, claims = (jnp.pad(x, missing, constant_values=-jnp.inf) for x in (scores, claims))
    return jnp.pad(ids, missing), scores, claims


def _select(plan: TreePlan, root, pool: Pool) -> Proposal:
    """Choose the nodes to verify; candidates are in level order, so parents come first."""
    if plan.nodes is None:
        # The parent of a chosen candidate scores no lower and comes earlier: it is chosen as well.
        _, chosen = jax.lax.top_k(pool.scores, plan.size - 1)
        chosen = jnp.sort(chosen, axis=1)
    else:
        chosen = jnp.broadcast_to(np.array(plan.nodes), (root.shape[0], plan.size - 1))
    tokens, scores, above = (jnp.take_along_axis(x, chosen, axis=1) for x in pool[:3])
    rank = jnp.sum(chosen[:, None] < above[..., None], axis=-1, dtype=jnp.int32)
    above = jnp.where(above < 0, 0, rank + 1)
    tokens = jnp.concatenate([root[:, None], tokens], axis=1)
    above = jnp.pad(above, ((0, 0), (1, 0)), constant_values=-1)
    return Proposal(tokens, above, jnp.pad(scores, ((0, 0), (1, 0))))


def best_first(pool: Pool, root: Int[Array, " B"], size: int) -> tuple[Proposal, jax.Array]:
    """Return the `size` best nodes in the order of their scores, and which they are [B, size - 1].

    A parent scores no lower than its children and comes first, so the first n nodes are the best
    tree of n. Where there are not so many, nodes are padded: score -inf, parent -1.
    """
    scores, chosen = jax.lax.top_k(pool.scores, size - 1)
    tokens, above = (jnp.take_along_axis(x, chosen, axis=1) for x in (pool.ids, pool.parents))
    is_parent = chosen[:, None] == above[..., None]
    parents = jnp.where(above < 0, 0, jnp.argmax(is_parent, axis=-1) + 1)
    parents = jnp.where(jnp.isfinite(scores), parents, -1).astype(jnp.int32)
    tokens = jnp.concatenate([root[:, None], tokens], axis=1)
    parents, scores = (
        jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
        for x, value in ((parents, -1), (scores, 0.0))
    )
    return Proposal(tokens, parents, scores), chosen


def path_sums(pool: Pool, values: Float[Array, "B N"], depth: int) -> Float[Array, "B N"]:
    """Return the sum of `values` along the path to each candidate, itself included."""

    def step(_, sums):  # right for one level more
        above = jnp.take_along_axis(sums, jnp.maximum(pool.parents, 0), axis=1)
        return values + jnp.where(pool.parents < 0, 0.0, above)

    return jax.lax.fori_loop(1, depth, step, values)
