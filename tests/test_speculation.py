"""Claims about verify and commit: trees score like plain decoding, rejected nodes leave no trace.

The oracle is plain decoding: every root-to-node path of every tree, one token at a time, on a copy
of the row it hangs on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    BATCH,
    CAPACITY,
    all_taps,
    assert_close,
    assert_same_bits,
    commit_path,
    committed,
    decode,
    int32,
    prefill,
    start_cache,
    take_rows,
    verify,
)

from gdn import Cache, HybridLM, chain_tree, grow_cache, init_cache, tree_from_parents
from gdn.cache import KVUpdate, RecurrentState
from gdn.model import VerifyOutput

NODES = 20
PROMPTS = (9, 2, 17, 5)  # the second is shorter than the taps of the convolution
REAL = 7  # of the third tree's nodes, those from REAL on are padding
# A bushy tree; two roots with fans and a long arm; a small one and padding; a chain.
PARENTS = np.array(
    [
        [-1, 0, 0, 1, 1, 2, 4, 4, 6, 3, 9, 8, 11, 12, 12, 13, 15, 5, 17, 5],
        [-1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 5, 5, 10, 10, 12, 12, 14, 3, 17, 18],
        [-1, 0, 1, 1, 0, 4, 3] + [-1] * (NODES - REAL),
        list(range(-1, NODES - 1)),
    ],
    np.int32,
)
SECOND_SIBLING = 7  # of the first tree: path 0, 1, 4, 7, where 4 and 7 are second children


def path_to(row, node):
    """Return the nodes from a root of that row's tree down to `node`."""
    path = [node]
    while PARENTS[row, path[0]] >= 0:
        path.insert(0, int(PARENTS[row, path[0]]))
    return path


def paths(*nodes):
    """Return the path to one node of each row, -1 at the end; None accepts nothing."""
    out = np.full((BATCH, NODES), -1, np.int32)
    for row, node in enumerate(nodes):
        if node is not None:
            path = path_to(row, node)
            out[row, : len(path)] = path
    return out


class Round(NamedTuple):
    """One round of speculation, and what plain decoding says about each node of each tree."""

    model: HybridLM
    cache: Cache
    tokens: np.ndarray  # [B, M]
    out: VerifyOutput
    logits: np.ndarray  # [B, M, V]
    aux_hidden: np.ndarray  # [B, M, L + 1, D]
    after: Cache  # [B * M] rows: the cache once the path to that node is decoded


def play(model, prompts, tokens) -> Round:
    """Verify the trees on the prompts, and decode every path alone."""
    cache = start_cache(model, prompts).cache
    out = verify(model, tokens, tree_from_parents(jnp.asarray(PARENTS)), cache, all_taps(model))
    lines, steps = np.zeros((BATCH * NODES, NODES), np.int32), np.zeros(BATCH * NODES, np.int32)
    for line, (row, node) in enumerate(np.ndindex(BATCH, NODES)):
        path = path_to(row, node)
        lines[line, : len(path)], steps[line] = tokens[row, path], len(path)
    each_row = take_rows(cache, np.repeat(np.arange(BATCH), NODES))
    logits, aux_hidden, after = decode(model, lines, steps, each_row)
    last = np.arange(len(steps)), steps - 1
    logits, aux_hidden = (np.asarray(x)[last] for x in (logits, aux_hidden))
    shape = (BATCH, NODES)
    logits, aux_hidden = (x.reshape(*shape, *x.shape[1:]) for x in (logits, aux_hidden))
    return Round(model, cache, tokens, out, logits, aux_hidden, after)


@pytest.fixture(scope="module")
def round_(model):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, size).astype(np.int32) for size in PROMPTS]
    return play(model, prompts, rng.integers(0, 64, (BATCH, NODES)).astype(np.int32))


def expect_accepted(round_, path):
    """Commit, and compare every row with plain decoding of its accepted tokens."""
    cache = commit_path(round_.cache, round_.out.updates, path)
    counts = (path >= 0).sum(axis=1)
    assert_same_bits(cache.lengths, np.asarray(round_.cache.lengths) + counts.astype(np.int32))
    found = committed(cache)
    for row in range(BATCH):
        if counts[row]:
            leaf = path[row, counts[row] - 1]
            alone = take_rows(round_.after, [row * NODES + leaf])
            assert_close(found[row], committed(alone)[0])
        else:
            assert_same_bits(take_rows(cache, [row]), take_rows(round_.cache, [row]))
    return cache


def next_logits(round_, cache):
    """Verify the same candidates once more, now on `cache`."""
    tree = tree_from_parents(jnp.asarray(PARENTS))
    return np.asarray(
        verify(round_.model, round_.tokens, tree, cache, all_taps(round_.model)).logits
    )


def test_verify_of_a_tree_equals_each_path_alone(round_):
    assert 0.5 < round_.logits.std() < 5
    assert_close((round_.out.logits, round_.out.aux_hidden), (round_.logits, round_.aux_hidden))


def test_commit_of_any_path_leaves_the_cache_of_plain_decoding(round_):
    for node in range(NODES):
        expect_accepted(round_, paths(*[node] * BATCH))


def test_rows_of_a_batch_accept_different_paths_or_nothing(round_):
    accepted = [
        (SECOND_SIBLING, None, REAL - 1, 15),
        (None, 16, None, 0),
        (16, 0, 3, NODES - 1),
    ]
    for nodes in accepted:
        cache = expect_accepted(round_, paths(*nodes))
        logits = next_logits(round_, cache)
        decoded = [row * NODES + (node or 0) for row, node in enumerate(nodes)]
        plain = take_rows(round_.after, decoded)
        expected = next_logits(round_, plain)
        for row, node in enumerate(nodes):
            wanted = expected if node is not None else np.asarray(round_.out.logits)
            assert_close(logits[row], wanted[row])


def test_path_may_be_as_short_as_it_is(round_):
    nodes = (SECOND_SIBLING, None, REAL - 1, 3)
    short = commit_path(round_.cache, round_.out.updates, paths(*nodes)[:, :4])
    assert_close(short, commit_path(round_.cache, round_.out.updates, paths(*nodes)))


def test_nothing_accepted_and_nothing_verified_change_no_bit(round_):
    before = jax.tree.map(lambda x: np.array(x, copy=True), round_.cache)
    tree = tree_from_parents(jnp.asarray(PARENTS))
    out = verify(round_.model, round_.tokens, tree, round_.cache, all_taps(round_.model))
    assert_same_bits(round_.cache, before)
    assert_same_bits(commit_path(round_.cache, out.updates, paths(*[None] * BATCH)), before)


def test_order_of_the_batch_does_not_matter(round_):
    order, nodes = [2, 0, 3, 1], (SECOND_SIBLING, 16, None, 15)
    tree = tree_from_parents(jnp.asarray(PARENTS[order]))
    cache = take_rows(round_.cache, order)
    found = verify(round_.model, round_.tokens[order], tree, cache, all_taps(round_.model))
    assert_close(found.logits, np.asarray(round_.out.logits)[order])
    found = commit_path(cache, found.updates, paths(*nodes)[order])
    expected = commit_path(round_.cache, round_.out.updates, paths(*nodes))
    assert_close(committed(found), committed(take_rows(expected, order)))


def test_nan_in_rejected_nodes_reaches_neither_cache_nor_logits(round_):
    path = paths(SECOND_SIBLING, None, REAL - 1, 9)
    rejected = np.ones((BATCH, NODES), bool)
    for row, nodes in enumerate(path):
        rejected[row, nodes[nodes >= 0]] = False

    def poison(update):
        axis = 2 if isinstance(update, KVUpdate) else 1
        arrays = []
        for x in update:
            x = np.moveaxis(np.array(x, copy=True), axis, 1)
            x[rejected] = np.nan
            arrays.append(np.moveaxis(x, 1, axis))
        return type(update)(*arrays)

    updates = tuple(poison(update) for update in round_.out.updates)
    assert not any(np.isfinite(x).all() for x in jax.tree.leaves(updates))
    found = commit_path(round_.cache, updates, path)
    expected = commit_path(round_.cache, round_.out.updates, path)
    assert_same_bits(found, expected)
    assert_same_bits(next_logits(round_, found), next_logits(round_, expected))


def test_one_repeated_token_down_a_deep_chain_equals_plain_decoding(model):
    # The chain is beside shallow trees in the batch, and every row repeats one token throughout.
    words = int32((5, 5, 17, 40))
    prompts = [np.full(size, word, np.int32) for size, word in zip(PROMPTS, words, strict=True)]
    round_ = play(model, prompts, np.repeat(words[:, None], NODES, axis=1))
    assert_close((round_.out.logits, round_.out.aux_hidden), (round_.logits, round_.aux_hidden))
    expect_accepted(round_, paths(SECOND_SIBLING, 16, REAL - 1, NODES - 1))


def test_a_chain_is_verified_like_the_tree_of_a_chain(round_):
    chain = np.tile(np.arange(-1, NODES - 1, dtype=np.int32), (BATCH, 1))
    trees = chain_tree(BATCH, NODES), tree_from_parents(jnp.asarray(chain))
    found, expected = (
        verify(round_.model, round_.tokens, tree, round_.cache, all_taps(round_.model)).logits
        for tree in trees
    )
    assert_same_bits(found, expected)
    assert_close(found[3], round_.logits[3])  # the row whose tree is a chain


def test_commit_at_the_end_of_the_capacity_keeps_every_older_slot(round_):
    model = round_.model
    rng = np.random.default_rng(1)
    # Slots for some of the path, for none of it, for more, and for exactly all.
    cache, full = init_cache(model.cfg, BATCH, CAPACITY), (CAPACITY - 2, CAPACITY, 44, CAPACITY - 4)
    for counts in ((40, 40, 40, 40), tuple(n - 40 for n in full)):
        tokens = rng.integers(0, 64, (BATCH, 40)).astype(np.int32)
        cache = prefill(model, tokens, int32(counts), cache, all_taps(model)).cache
    tree = tree_from_parents(jnp.asarray(PARENTS))
    out = verify(model, round_.tokens, tree, cache, all_taps(model))
    path = paths(SECOND_SIBLING, 16, REAL - 1, 3)
    after = commit_path(cache, out.updates, path)
    counts = (path >= 0).sum(axis=1)
    assert_same_bits(after.lengths, int32(full) + counts.astype(np.int32))
    for old, update, new in zip(cache.layers, out.updates, after.layers, strict=True):
        if isinstance(old, RecurrentState):
            assert (np.asarray(old.state) != np.asarray(new.state)).any(axis=(1, 2, 3)).all()
            continue
        for was, nodes, now in zip(old, update, new, strict=True):
            was, nodes, now = np.asarray(was), np.asarray(nodes), np.asarray(now)
            for row, length in enumerate(full):
                stop = min(length + counts[row], CAPACITY)
                assert_same_bits(now[row, :, :length], was[row, :, :length])
                written = nodes[row][:, path[row, : stop - length]]
                assert_same_bits(now[row, :, length:stop], written)
                assert_same_bits(now[row, :, stop:], was[row, :, stop:])


def test_a_grown_cache_goes_on_where_it_was(round_):
    grown = grow_cache(round_.cache, CAPACITY + 7)
    assert_same_bits(committed(grown), committed(round_.cache))
    path = paths(SECOND_SIBLING, 16, REAL - 1, NODES - 1)
    found = committed(commit_path(grown, round_.out.updates, path))
    assert_same_bits(found, committed(commit_path(round_.cache, round_.out.updates, path)))
    kv = {
        x.shape[2] for entry in grown.layers if not isinstance(entry, RecurrentState) for x in entry
    }
    assert kv == {CAPACITY + 7}


def test_caches_of_impossible_sizes_are_refused(hybrid):
    with pytest.raises(ValueError, match="batch >= 1 and capacity >= 1, got 2 and 0"):
        init_cache(hybrid.cfg, 2, 0)
    with pytest.raises(ValueError, match="got 0 and 8"):
        init_cache(hybrid.cfg, 0, 8)
    with pytest.raises(ValueError, match="already holds 8 tokens, more than 7"):
        grow_cache(init_cache(hybrid.cfg, 1, 8), 7)
