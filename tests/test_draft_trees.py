"""Claims about drafted trees and about the draft's own bookkeeping.

The specification grows a tree path by path from a function `path -> log q of its children`. It is
used twice: with a made-up draft, for many plans, and with the EAGLE-3 draft, where `unroll` says
what log q is.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HYBRID, assert_close, assert_same_bits, float32, random_draft, token_paths

from eagle3.decoding.drafter import Eagle3Drafter, Eagle3State, NoDraft
from eagle3.decoding.tree import (
    EAGLE1_PATHS,
    Proposal,
    TreePlan,
    chain_plan,
    draft_tree,
    dynamic_plan,
    static_plan,
)
from eagle3.training.ttt import unroll
from gdn import tree_from_parents

BATCH, WIDTH, VOCAB = 3, 6, 17
IDS = np.sort(np.random.default_rng(9).choice(50, VOCAB, replace=False))  # of the target


def best(log_q, k):
    """Return the k likeliest draft ids."""
    return np.argsort(-log_q, kind="stable")[:k]


def expected_dynamic(log_q_after, top_k, depth, total):
    """Return the paths that EAGLE-2 verifies: the best of all children of every level's beam."""
    beam, pool = [((), 0.0)], []
    for _ in range(depth):
        children = []
        for path, score in beam:
            log_q = log_q_after(path)
            children += [((*path, int(i)), score + log_q[i]) for i in best(log_q, top_k)]
        pool += children
        beam = sorted(children, key=lambda child: -child[1])[:top_k]
    return {path for path, _ in sorted(pool, key=lambda child: -child[1])[: total - 1]}


def expected_static(log_q_after, paths):
    """Return the paths by rank as paths by draft id."""
    found = set()
    for ranks in paths:
        path = ()
        for rank in ranks:
            path = (*path, int(best(log_q_after(path), rank + 1)[rank]))
        found.add(path)
    return found


def assert_tree(proposal, row, root, expected, ids):
    """Check one row: a tree in order, rooted in `root`, whose nodes are exactly the paths."""
    tokens, parents = np.asarray(proposal.tokens)[row], np.asarray(proposal.parents)[row]
    assert tokens[0] == root and parents[0] == -1
    assert ((parents[1:] >= 0) & (parents[1:] < np.arange(1, len(parents)))).all()
    paths = token_paths(tokens, parents)[1:]
    assert len(paths) == len(set(paths)) == len(expected)
    assert set(paths) == {tuple(int(ids[i]) for i in path) for path in expected}


def assert_scores(proposal, row, log_q_after):
    """Check that the score of each node is the log-probability of its path."""
    paths = token_paths(np.asarray(proposal.tokens)[row], np.asarray(proposal.parents)[row])
    expected = []
    for path in paths:
        ids = tuple(int(np.searchsorted(IDS, token)) for token in path)
        expected.append(sum(log_q_after(ids[:n])[i] for n, i in enumerate(ids)))
    assert_close(np.asarray(proposal.scores)[row], np.array(expected))


class MadeUp:
    """A draft whose logits depend on the whole path: on the tokens, their order, and the root.

    The keys of a pass are random vectors of its tokens; the order comes with `hidden`.
    """

    def __init__(self, seed, plan, sharpness=3.0):
        rng = np.random.default_rng(seed)
        self.plan = plan
        self.head = float32(sharpness * rng.standard_normal((2 * WIDTH, VOCAB)))
        self.words = float32(rng.standard_normal((50, WIDTH)))
        self.start = float32(rng.standard_normal((BATCH, WIDTH)))
        self.first = float32(sharpness * rng.standard_normal((BATCH, VOCAB)))

    def propose(self, root) -> Proposal:
        arrays = (self.words, self.head, root, self.first, self.start)
        return _grow(self.plan, *map(jnp.asarray, arrays))

    def log_q_after(self, row, path):
        if not path:
            return log_softmax(self.first[row])
        hidden, seen = self.start[row], np.zeros(WIDTH)
        for i in path:
            word = self.words[IDS[i]]
            hidden, seen = np.tanh(0.5 * hidden + word), seen + word
        return log_softmax(np.concatenate([seen, hidden]) @ self.head)


@partial(jax.jit, static_argnames=("plan",))
def _grow(plan: TreePlan, words, head, root, first, start):
    def draft_pass(index, tokens, hidden, visible, keys):
        new = words[tokens]
        keys = jax.lax.dynamic_update_slice_in_dim(keys, new, (index - 1) * plan.width, axis=1)
        seen = jnp.sum(jnp.where(visible[..., None], keys[:, None], 0.0), axis=2)
        hidden = jnp.tanh(0.5 * hidden + new)
        return jnp.concatenate([seen, hidden], -1) @ head, hidden, keys

    keys = jnp.zeros((BATCH, (plan.depth - 1) * plan.width, WIDTH))
    return draft_tree(plan, root, first, start, jnp.asarray(IDS), draft_pass, keys)


def log_softmax(x):
    """Return float64 log-probabilities."""
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


ROOT = jnp.array([4, 5, 6])


@pytest.mark.parametrize(
    ("top_k", "depth", "total"),
    [
        (1, 1, 2), (4, 1, 64), (3, 2, 2), (10, 4, 60), (1, 5, 6), (3, 6, 24), (8, 7, 64),
        (2, 9, 33), (17, 12, 64),
    ],
)  # fmt: skip
def test_a_dynamic_tree_is_the_best_of_the_children_of_every_beam(top_k, depth, total):
    plan = dynamic_plan(top_k, depth, total)
    draft = MadeUp(depth, plan)
    proposal = draft.propose(ROOT)
    assert proposal.tokens.shape == (BATCH, plan.size) and plan.depth == depth
    assert plan.size == min(total, top_k + (depth - 1) * top_k**2 + 1)
    for row in range(BATCH):
        expected = expected_dynamic(partial(draft.log_q_after, row), top_k, depth, total)
        assert_tree(proposal, row, ROOT[row], expected, IDS)
        assert_scores(proposal, row, partial(draft.log_q_after, row))


@pytest.mark.parametrize(
    "paths",
    [
        EAGLE1_PATHS,
        ((0,),),
        ((16,), (3,)),
        [(0,) * n for n in range(1, 13)],
        ((2, 0, 1), (2,), (0,), (2, 0), (0, 5), (0, 5, 0), (0, 5, 3), (0, 5, 0, 0)),
    ],
)
def test_a_static_tree_has_the_children_of_the_ranks_it_names(paths):
    plan = static_plan(paths)
    assert (plan.size, plan.depth) == (len(paths) + 1, max(map(len, paths)))
    draft = MadeUp(1, plan)
    proposal = draft.propose(ROOT)
    for row in range(BATCH):
        expected = expected_static(partial(draft.log_q_after, row), paths)
        assert_tree(proposal, row, ROOT[row], expected, IDS)
        assert_scores(proposal, row, partial(draft.log_q_after, row))


def test_the_order_in_which_a_static_tree_is_written_does_not_matter():
    assert static_plan(EAGLE1_PATHS[::-1]) == static_plan(EAGLE1_PATHS)


def test_a_chain_is_the_likeliest_token_again_and_again():
    proposal = MadeUp(2, chain_plan(7)).propose(ROOT)
    same = MadeUp(2, static_plan([(0,) * n for n in range(1, 8)])).propose(ROOT)
    assert_same_bits(proposal, same)
    np.testing.assert_array_equal(proposal.parents, np.tile(np.arange(-1, 7), (BATCH, 1)))


def test_a_dynamic_tree_of_more_nodes_contains_the_one_of_fewer():
    previous = [set()] * BATCH
    for total in (2, 3, 9, 20, 64):
        proposal = MadeUp(3, dynamic_plan(6, 5, total)).propose(ROOT)
        rows = zip(*map(np.asarray, proposal[:2]), strict=True)
        trees = [set(token_paths(*row)) for row in rows]
        assert all(less < more for less, more in zip(previous, trees, strict=True))
        previous = trees


@pytest.mark.parametrize("plan", [dynamic_plan(4, 4, 20), static_plan(EAGLE1_PATHS)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_broken_draft_still_gives_a_tree(plan, value):
    for where in (slice(None), slice(2, 5)):
        draft = MadeUp(4, plan)
        draft.first[0, where] = value  # the first pass of one row
        draft.head[:, where] = value  # all later ones of every row
        proposal = draft.propose(ROOT)
        assert np.isfinite(np.asarray(proposal.scores)).all()
        for tokens, parents in zip(*map(np.asarray, proposal[:2]), strict=True):
            assert parents[0] == -1 and (parents[1:] < np.arange(1, plan.size)).all()
            assert (parents[1:] >= 0).all() and np.isin(tokens[1:], IDS).all()
            paths = token_paths(tokens, parents)
            assert len(set(paths)) == plan.size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dynamic_plan(0, 2, 5), "top_k is 0"),
        (lambda: dynamic_plan(2, 0, 5), "depth is 0"),
        (lambda: dynamic_plan(2, 2, 1), "total_tokens is 1"),
        (lambda: chain_plan(0), "depth is 0"),
        (lambda: static_plan([]), "distinct, not empty"),
        (lambda: static_plan([()]), "distinct, not empty"),
        (lambda: static_plan([(0,), (0,)]), "distinct, not empty"),
        (lambda: static_plan([(0,), (-1,)]), "ranks from 0 on"),
        (lambda: static_plan([(0,), (1, 0)]), r"path \(1, 0\) is given without the node above"),
    ],
)
def test_a_plan_that_makes_no_tree_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The EAGLE-3 draft behind trees.

TOKENS, SLOTS, CAPACITY, DRAFT = 40, 13, 24, 24
LENGTHS = (SLOTS, 5, 1)  # absorbed pairs of each row
absorb, propose = (jax.jit(f) for f in (Eagle3Drafter.absorb, Eagle3Drafter.propose))
unrolled = jax.jit(unroll, static_argnames=("steps",))


@pytest.fixture(scope="module")
def drafted(hybrid):
    """Return the draft, and streams and tokens that never saw a target."""
    rng = np.random.default_rng(0)
    draft = random_draft(hybrid, draft_vocab_size=DRAFT, norm_output=True, fc_norm=True)
    shape = (BATCH, SLOTS, HYBRID.num_hidden_layers + 1, HYBRID.hidden_size)
    streams = float32(rng.standard_normal(shape))
    return draft, streams, rng.integers(0, 64, (BATCH, SLOTS)).astype(np.int32)


def take_in(drafted, plan, pieces) -> tuple[Eagle3Drafter, Eagle3State]:
    """Absorb the pairs of each row in pieces; a row that has none left is given 0 of them."""
    draft, streams, tokens = drafted
    drafter = Eagle3Drafter(draft, plan)
    state, start = drafter.init_state(BATCH, CAPACITY), np.zeros(BATCH, int)
    for piece in pieces:
        count = np.clip(np.array(LENGTHS) - start, 0, piece)
        at = np.minimum(start[:, None] + np.arange(SLOTS), SLOTS - 1)
        rows = np.arange(BATCH)[:, None]
        pair = jnp.asarray(streams[rows, at]), jnp.asarray(tokens[rows, at])
        state = absorb(drafter, state, *pair, jnp.asarray(count.astype(np.int32)))
        start += count
    assert state.lengths.tolist() == list(LENGTHS)
    return drafter, state


def readable(state: Eagle3State):
    """Return what later steps may read: slots below each row's length, and the last output."""
    keys = [
        [np.asarray(x)[row, :, :length] for row, length in enumerate(LENGTHS)] for x in state.cache
    ]
    return keys, state.hidden, state.logits


def test_pairs_absorbed_in_pieces_of_any_size_are_those_absorbed_at_once(drafted):
    _, whole = take_in(drafted, chain_plan(2), [SLOTS])
    assert 0.5 < np.std(whole.logits) < 5
    for pieces in ([1] * SLOTS, [4, 1, 0, 6, 2], [12, 1]):
        _, state = take_in(drafted, chain_plan(2), pieces)
        assert_close(readable(state), readable(whole))


def test_a_row_that_absorbs_nothing_keeps_every_readable_bit(drafted):
    drafter, state = take_in(drafted, chain_plan(2), [SLOTS])
    _, streams, tokens = drafted
    nothing = jnp.zeros(BATCH, jnp.int32)
    after = absorb(drafter, state, jnp.asarray(streams), jnp.asarray(tokens), nothing)
    assert_same_bits(readable(after), readable(state))
    assert_same_bits(after.lengths, state.lengths)


def test_a_grown_state_proposes_what_it_did(drafted):
    drafter, state = take_in(drafted, dynamic_plan(3, 4, 12), [SLOTS])
    grown = drafter.grow_state(state, 2 * CAPACITY)
    assert grown.cache.k.shape[2] == 2 * CAPACITY
    assert_same_bits(propose(drafter, grown, ROOT), propose(drafter, state, ROOT))


class Unrolled:
    """What training says about a path after the last absorbed pair of each row."""

    def __init__(self, drafted):
        self.draft, self.streams, self.tokens = drafted
        self.ids = np.asarray(self.draft.target_ids[...])
        self.known = {}

    def log_q_after(self, row, path):
        if (row, path) not in self.known:
            length = LENGTHS[row]
            # Step k of the last slot is fed the k-th token of the path.
            tokens = np.zeros((BATCH, SLOTS + 3), np.int32)
            tokens[row, :length] = self.tokens[row, :length]
            tokens[row, length : length + len(path)] = self.ids[list(path)]
            streams = np.pad(self.streams, ((0, 0), (0, 3), (0, 0), (0, 0)))
            logits = unrolled(self.draft, jnp.asarray(streams), jnp.asarray(tokens), steps=4)
            self.known[row, path] = log_softmax(np.asarray(logits)[len(path), row, length - 1])
        return self.known[row, path]


PLANS = {
    "chain": (chain_plan(4), lambda q: expected_dynamic(q, 1, 4, 5)),
    "dynamic": (dynamic_plan(3, 4, 14), lambda q: expected_dynamic(q, 3, 4, 14)),
    "static": (
        static_plan([p for p in EAGLE1_PATHS if len(p) < 5]),
        lambda q: expected_static(q, [p for p in EAGLE1_PATHS if len(p) < 5]),
    ),
}


@pytest.fixture(scope="module")
def trained(drafted):
    return Unrolled(drafted)


@pytest.mark.parametrize("kind", PLANS)
def test_a_proposal_is_the_tree_of_the_unrolled_draft_fed_with_its_own_tokens(
    drafted, trained, kind
):
    plan, expected = PLANS[kind]
    drafter, state = take_in(drafted, plan, [SLOTS])
    for row in range(BATCH):
        logits = np.asarray(state.logits)[row]
        assert_close(log_softmax(logits), trained.log_q_after(row, ()))
    proposal = propose(drafter, state, ROOT)
    for row in range(BATCH):
        wanted = expected(partial(trained.log_q_after, row))
        assert_tree(proposal, row, ROOT[row], wanted, trained.ids)


def test_logits_along_a_drafted_chain_are_those_of_the_unrolled_steps(
    drafted, trained, monkeypatch
):
    """Not just the choices: the scores of every pass, caught on the way into the tree."""
    caught = []

    def catch(plan, root, logits, hidden, ids, draft_pass, own, kernels):
        tokens = []
        for index in range(1, plan.depth):
            chosen = jnp.argmax(logits, axis=-1)
            tokens.append(chosen)
            visible = jnp.arange(plan.depth - 1) < index
            visible = jnp.broadcast_to(visible, (BATCH, 1, plan.depth - 1))
            logits, hidden, own = draft_pass(
                index, ids[chosen][:, None], hidden.reshape(BATCH, 1, -1), visible, own
            )
            logits = logits[:, 0]
            caught.append((jnp.stack(tokens, axis=1), logits))
        return NoDraft().propose((), root)

    drafter, state = take_in(drafted, chain_plan(4), [SLOTS])
    monkeypatch.setattr("eagle3.decoding.drafter.draft_tree", catch)
    passes = jax.jit(lambda *args: (drafter.propose(*args), caught)[1])(state, ROOT)
    assert len(passes) == 3
    for path, logits in passes:
        path, logits = np.asarray(path), np.asarray(logits)
        for row in range(BATCH):
            wanted = trained.log_q_after(row, tuple(path[row].tolist()))
            assert_close(log_softmax(logits[row]), wanted)


def test_more_children_than_the_draft_has_tokens_are_refused(drafted):
    draft = drafted[0]
    assert Eagle3Drafter(draft, dynamic_plan(DRAFT, 2, 9)).depth == 2
    for plan in (dynamic_plan(DRAFT + 1, 2, 9), static_plan([(DRAFT,)])):
        with pytest.raises(ValueError, match=f"{DRAFT + 1} children .* vocabulary of {DRAFT}"):
            Eagle3Drafter(draft, plan)


def test_a_draft_for_another_target_is_refused(hybrid, drafted):
    drafter = Eagle3Drafter(drafted[0], chain_plan(1))
    assert drafter.problems_with(hybrid.cfg) == []
    other = dataclasses.replace(hybrid.cfg, vocab_size=65, hidden_size=64)
    problems = drafter.problems_with(other)
    assert len(problems) == 2 and "vocab_size is 64 in the draft, the target has 65" in problems


def test_no_draft_proposes_the_root_alone_for_any_target(hybrid):
    proposal = NoDraft().propose((), ROOT)
    assert proposal.tokens.tolist() == [[4], [5], [6]] and proposal.parents.tolist() == [[-1]] * 3
    assert tree_from_parents(proposal.parents).depth.tolist() == [[0]] * 3
    assert NoDraft().problems_with(hybrid.cfg) == [] and NoDraft().max_positions is None
