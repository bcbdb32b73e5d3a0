"""Claims about candidate trees: masks, the delta rule and the short convolution over them.

All trees have NODES nodes and one batch of ROWS rows: bushy ones, a chain, one with padded nodes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, float64

from gdn.ops.conv import advance_window, short_conv, short_conv_tree
from gdn.ops.reference import tree_delta_rule_reference
from gdn.ops.tree import Tree, chain_tree, commit_state, tree_delta_rule, tree_from_parents

NODES, REAL = 32, 20  # of the last row's nodes, those from REAL on are padding
HK, DK, DV = 2, 8, 12
WIDTH, CHANNELS = 4, 6

tree_rule = jax.jit(tree_delta_rule)
per_node = jax.jit(tree_delta_rule_reference)
commit = jax.jit(commit_state)
make_tree = jax.jit(tree_from_parents)
conv = jax.jit(short_conv)
conv_tree = jax.jit(short_conv_tree)
advance = jax.jit(advance_window)


def draw_parents():
    """Return parents [4, NODES]: two random forests, a chain, and REAL nodes before padding."""
    rng = np.random.default_rng(0)
    near = [int(rng.integers(max(-1, i - 6), i)) for i in range(NODES)]
    far = [int(rng.integers(-1, i)) for i in range(NODES)]
    chain = list(range(-1, NODES - 1))
    return np.array([near, far, chain, near[:REAL] + [-1] * (NODES - REAL)], np.int32)


PARENTS = draw_parents()
ROWS = len(PARENTS)


def path_to(parents, node):
    """Return the nodes from the root down to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def padded_paths(nodes):
    """Return the path to one node of each row, padded with -1 to [ROWS, NODES]."""
    paths = np.full((ROWS, NODES), -1, np.int32)
    for row, node in enumerate(nodes):
        path = path_to(PARENTS[row], node)
        paths[row, : len(path)] = path
    return paths


def draw(seed=0):
    """Draw q, k, v, g, beta of every node and a committed state; two value heads per key head."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, ROWS, NODES, HK, DK))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((ROWS, NODES, 2 * HK, DV))
    g = -np.exp(rng.uniform(np.log(1e-3), np.log(3), (ROWS, NODES, 2 * HK)))
    beta = rng.uniform(0.02, 0.98, (ROWS, NODES, 2 * HK))
    state = rng.standard_normal((ROWS, 2 * HK, DK, DV))
    return tuple(np.asarray(x, np.float32) for x in (q * 0.3, k, v, g, beta, state))


@pytest.fixture(scope="module")
def tree():
    return make_tree(PARENTS)


def test_tree_from_parents_is_a_walk_to_the_root(tree):
    for row, node in np.ndindex(ROWS, NODES):
        path = path_to(PARENTS[row], node)
        expected = np.zeros(NODES, bool)
        expected[path] = True
        assert (np.asarray(tree.ancestors)[row, node] == expected).all()
        assert np.asarray(tree.depth)[row, node] == len(path) - 1


def test_chain_tree_is_the_tree_of_a_chain(tree):
    chain = chain_tree(2, NODES)
    assert_same_bits(jax.tree.map(lambda x: x[1], chain), jax.tree.map(lambda x: x[2], tree))
    assert chain_tree(2, 1).ancestors.all() and not chain_tree(2, 1).depth.any()


def test_tree_rule_reads_what_the_recurrence_reads_along_every_path(tree):
    assert_close(tree_rule(*draw(), tree)[0], per_node(*draw(), PARENTS)[0])


def test_a_slow_decay_keeps_its_digits_after_a_fast_one(tree):
    q, k, v, g, beta, state = draw()
    g = np.where(tree.depth[..., None] < 3, -60.0, 1e-3 * g).astype(np.float32)
    out, u = tree_rule(q, k, v, g, beta, state, tree)
    expected, states = per_node(q, k, v, g, beta, state, PARENTS)
    assert_close(out, expected)
    for node in (5, NODES - 1):
        found = commit(state, k, u, g, padded_paths([node] * ROWS))
        assert_close(found, np.asarray(states)[:, node])


def test_commit_state_is_the_state_after_each_node(tree):
    *inputs, state = draw()
    _, states = per_node(*inputs, state, PARENTS)
    _, u = tree_rule(*inputs, state, tree)
    for node in range(NODES):
        found = commit(state, inputs[1], u, inputs[3], padded_paths([node] * ROWS))
        assert_close(found, np.asarray(states)[:, node])


@pytest.mark.parametrize("beta", [0.9, 0.999])
def test_a_deep_chain_of_one_repeated_token_loses_no_digits(tree, beta):
    # Powers of A would be wrong by a factor of ten here; see tree_verify.md, section 2.3.
    q, k, v, _, _, state = draw()
    k = np.broadcast_to(k[:, :1], k.shape)
    g, beta = np.full(v.shape[:3], -1e-4, np.float32), np.full(v.shape[:3], beta, np.float32)
    out, u = tree_rule(q, k, v, g, beta, state, tree)
    expected, states = per_node(q, k, v, g, beta, state, PARENTS)
    assert_close(out, expected)
    leaves = [NODES - 1] * 3 + [REAL - 1]
    found = commit(state, k, u, g, padded_paths(leaves))
    assert_close(found, np.asarray(states)[np.arange(ROWS), leaves])


def test_node_order_is_free(tree):
    order = np.stack([np.random.default_rng(row).permutation(NODES) for row in range(ROWS)])
    rows = np.arange(ROWS)[:, None]
    *inputs, state = draw()
    moved = [x[rows, order] for x in inputs]
    ancestors = np.asarray(tree.ancestors)[rows[:, :, None], order[:, :, None], order[:, None]]
    moved_tree = Tree(jnp.asarray(ancestors), jnp.asarray(tree.depth)[rows, order])
    assert (moved_tree.depth[2] != np.arange(NODES)).any()
    expected = tree_rule(*inputs, state, tree)
    found = tree_rule(*moved, state, moved_tree)
    assert_close(found, [np.asarray(x)[rows, order] for x in expected])
    # The convolution finds ancestors by depth, not by position.
    x, weight, window = draw_conv()
    found = conv_tree(x[rows, order], weight, window, moved_tree)
    assert_close(found, np.asarray(conv_tree(x, weight, window, tree))[rows, order])


def test_padded_nodes_change_nothing(tree):
    *inputs, state = draw()
    other = [np.copy(x) for x in inputs]
    for x, y in zip(other, draw(seed=1), strict=False):
        x[3, REAL:] = 10 * y[3, REAL:]
    found, expected = (
        [np.asarray(x)[3, :REAL] for x in tree_rule(*tokens, state, tree)]
        for tokens in (other, inputs)
    )
    assert_same_bits(found, expected)
    x, weight, window = draw_conv()
    other = np.copy(x)
    other[3, REAL:] = 7.0
    found, expected = (conv_tree(y, weight, window, tree)[3, :REAL] for y in (other, x))
    assert_same_bits(found, expected)


def test_nan_in_a_rejected_node_never_enters_the_state(tree):
    *inputs, state = draw()
    _, u = tree_rule(*inputs, state, tree)
    path = padded_paths([17, 30, 12, 8])
    path[1] = -1
    rejected = np.ones((ROWS, NODES), bool)
    for row, nodes in enumerate(path):
        rejected[row, nodes[nodes >= 0]] = False
    stash = [np.asarray(x) for x in (inputs[1], u, inputs[3])]
    poisoned = [np.copy(x) for x in stash]
    for x in poisoned:
        x[rejected] = np.nan
    found = commit(state, *poisoned, path)
    assert np.isfinite(found).all()
    assert_same_bits(found, commit(state, *stash, path))
    assert_same_bits(np.asarray(found)[1], state[1])


def test_an_empty_path_keeps_the_state_bit_for_bit(tree):
    *inputs, state = draw()
    state[0, 0, 0, :3] = 1e30, -1e-30, 0.0
    _, u = tree_rule(*inputs, state, tree)
    nothing = np.full((ROWS, NODES), -1, np.int32)
    assert_same_bits(commit(state, inputs[1], u, inputs[3], nothing), state)


def draw_conv():
    """Draw inputs of every node, the taps and a committed window."""
    rng = np.random.default_rng(2)
    shapes = (ROWS, NODES, CHANNELS), (CHANNELS, WIDTH), (ROWS, WIDTH - 1, CHANNELS)
    return tuple(np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes)


def test_short_conv_is_a_sum_over_taps():
    x, weight, window = (float64(y) for y in draw_conv())
    extended = np.concatenate([window, x], axis=1)
    expected = sum(extended[:, tap : tap + NODES] * weight[:, tap] for tap in range(WIDTH))
    assert_close(conv(*draw_conv()), expected)


def test_short_conv_tree_equals_short_conv_along_every_path(tree):
    x, weight, window = draw_conv()
    # Fewer committed tokens than taps: one, then none, then two. Zeros stand for what is not there.
    window[0, :2], window[1], window[3, :1] = 0.0, 0.0, 0.0
    found = np.asarray(conv_tree(x, weight, window, tree))
    rows = np.arange(ROWS)[:, None]
    for node in range(NODES):
        path = padded_paths([node] * ROWS)
        along = np.asarray(conv(x[rows, path], weight, window))  # causal: the padding is later
        last = (path >= 0).sum(axis=1) - 1
        assert_close(found[:, node], along[np.arange(ROWS), last])


def test_short_conv_restarts_at_every_segment():
    x, weight, window = draw_conv()
    lengths = (5, 1, 2, 24)
    found = np.asarray(conv(x, weight, window, np.repeat([[4, 5, 6, 4]] * ROWS, lengths, axis=1)))
    start = 0
    for length in lengths:
        moved = np.roll(x, -start, axis=1)
        expected = np.asarray(conv(moved, weight, window))[:, :length]
        assert_close(found[:, start : start + length], expected)
        start, window = start + length, np.zeros_like(window)


def test_advance_window_takes_the_last_inputs_of_window_and_path():
    x, _, window = draw_conv()
    x[:, 20:] = np.nan  # never read: no count reaches it
    for count in range(0, 20, ROWS - 1):
        counts = np.arange(count, count + ROWS, dtype=np.int32).clip(max=20)
        expected = [
            np.concatenate([window[row], x[row, :n]])[-(WIDTH - 1) :]
            for row, n in enumerate(counts)
        ]
        assert_same_bits(advance(window, x, counts), np.stack(expected))
