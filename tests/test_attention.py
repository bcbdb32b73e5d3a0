"""Claims about softmax attention: dense, blockwise, merged: one function, in bounded memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, float32, float64, int32

from gdn.ops.attention import attention, masked_attention, merge_attention

QUERIES, KEYS = 45, 77  # neither is a multiple of a block
HEADS, KV_HEADS, DIM = 4, 2, 8
DENSE, BLOCKWISE = 512, 16  # below and above KEYS
by_block = pytest.mark.parametrize("block", [DENSE, BLOCKWISE], ids=["dense", "blockwise"])

attend = jax.jit(attention, static_argnames="block")


def draw():
    """Draw q [B, T, N, H] and k, v [B, K, S, H]."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, QUERIES, HEADS, DIM))
    k, v = rng.standard_normal((2, 2, KV_HEADS, KEYS, DIM))
    return float32(3 * q), float32(k), float32(v)


def visible():
    """Return `last` and segment ids: a row over a cache, a row of documents, some see nothing."""
    last = np.arange(QUERIES) + np.array([[KEYS - QUERIES], [0]])
    last[0, 5:8], last[1, 20] = -1, -1
    of_keys = np.zeros((2, KEYS), np.int32)
    of_keys[1] = np.repeat([4, 5, 6, 9], (7, 16, 3, KEYS - 26))
    of_queries = of_keys[:, :QUERIES].copy()
    of_queries[1, 40] = 7  # a document that no key is of
    return int32(last), of_queries, of_keys


def mask_of(last, of_queries, of_keys):
    return (np.arange(KEYS) <= last[..., None]) & (of_queries[..., None] == of_keys[:, None])


def plain(q, k, v, mask):
    """Return attention and log-sum-exp as the formula has them, heads repeated, all in `jnp`."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = jnp.einsum("btnh,bnsh->btns", q, k) / jnp.sqrt(1.0 * DIM)
    weights = jnp.exp(scores) * mask[:, :, None]
    total = weights.sum(-1)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("btns,bnsh->btnh", weights, v) / safe[..., None]
    return out, jnp.where(total > 0, jnp.log(safe), -jnp.inf)


def test_plain_is_the_softmax_written_in_numpy():
    q, k, v = (float64(x) for x in draw())
    mask = mask_of(*visible())
    out, lse = plain(*draw(), mask)
    for b, t, n in ((0, 0, 0), (0, 44, 3), (1, 6, 1), (1, 25, 2)):
        scores = k[b, n // 2, mask[b, t]] @ q[b, t, n] / np.sqrt(DIM)
        weights = np.exp(scores - scores.max())
        expected = weights / weights.sum() @ v[b, n // 2, mask[b, t]]
        assert_close((out[b, t, n], lse[b, t, n]), (expected, np.log(np.exp(scores).sum())))


@by_block
def test_attention_is_the_softmax_over_what_is_visible(block):
    mask = mask_of(*visible())
    found, lse = (np.asarray(x) for x in attend(*draw(), *visible(), block=block))
    expected, expected_lse = (np.asarray(x) for x in plain(*draw(), mask))
    sees = mask.any(-1)
    assert (~sees).sum() == 5
    assert_close((found[sees], lse[sees]), (expected[sees], expected_lse[sees]))
    assert not found[~sees].any() and (lse[~sees] == -np.inf).all()


@by_block
def test_without_segments_only_last_counts(block):
    last, *_ = visible()
    zeros = np.zeros((2, QUERIES), np.int32), np.zeros((2, KEYS), np.int32)
    expected, _ = plain(*draw(), mask_of(last, *zeros))
    assert_close(attend(*draw(), last, block=block)[0], expected)


@by_block
def test_gradients_are_those_of_the_softmax(block):
    last, of_queries, of_keys = visible()
    rng = np.random.default_rng(1)
    shape = (2, QUERIES, HEADS, DIM)
    weights = float32(rng.standard_normal(shape)), float32(rng.standard_normal(shape[:3]))
    mask = mask_of(last, of_queries, of_keys)
    inputs = tuple(jnp.asarray(x) for x in (last, of_queries, of_keys))

    def gradients(function):
        def scalar(q, k, v):
            out, lse = function(q, k, v)
            seen = jnp.where(mask.any(-1)[..., None], lse, 0.0)
            return jnp.sum(weights[0] * out) + jnp.sum(weights[1] * seen)

        return jax.jit(jax.grad(scalar, (0, 1, 2)))(*draw())

    found = gradients(lambda q, k, v: attention(q, k, v, *inputs, block=block))
    wanted = gradients(lambda q, k, v: plain(q, k, v, mask))
    assert_close(found, wanted)


@by_block
@pytest.mark.parametrize("few", [1, 3])
def test_few_queries_see_what_they_see_among_many(block, few):
    q, k, v = draw()
    last, of_queries, of_keys = visible()
    rows = slice(30, 30 + few)  # few rows take another order of the operands
    found = attend(q[:, rows], k, v, last[:, rows], of_queries[:, rows], of_keys, block=block)
    expected, lse = plain(q, k, v, mask_of(last, of_queries, of_keys))
    assert_close(found, (expected[:, rows], lse[:, rows]))


@by_block
def test_scores_of_a_thousand_do_not_overflow(block):
    q, k, v = draw()
    found, lse = attend(100 * q, k, v, *visible(), block=block)
    assert np.isfinite(found).all() and np.abs(lse).max(where=np.isfinite(lse), initial=0) > 1000


@by_block
def test_masked_and_merged_attention_is_attention_over_the_union(block):
    # A committed prefix, of which the first row of the batch has nothing, and the nodes of a tree.
    q, k, v = draw()
    nodes, committed = q.shape[1], KEYS - QUERIES
    tree = np.random.default_rng(2).random((2, nodes, nodes)) < 0.3
    tree |= np.eye(nodes, dtype=bool)
    last = np.repeat(int32([[-1], [20]]), nodes, axis=1)
    old = np.zeros((2, nodes, committed), bool)
    old[1, :, :21] = True
    expected, _ = plain(q, k, v, np.concatenate([old, tree], axis=-1))

    @jax.jit
    def merged(q, k, v):
        first = attention(
            q, k[:, :, :committed], v[:, :, :committed], jnp.asarray(last), block=block
        )
        new = masked_attention(q, k[:, :, committed:], v[:, :, committed:], jnp.asarray(tree))
        return merge_attention(first, new)

    assert_close(merged(q, k, v), expected)


def test_bfloat16_keys_are_scored_and_summed_in_float32():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in draw())
    for block in (DENSE, BLOCKWISE):
        out, lse = attend(q, k, v, *visible(), block=block)
        assert out.dtype == lse.dtype == jnp.float32
        mask = mask_of(*visible())
        expected = plain(float32(q), float32(k), float32(v), mask)
        # The log-sum-exp has no rounding but that of the inputs, the output that of the weights.
        sees = mask.any(-1)
        assert_close(np.asarray(lse)[sees], np.asarray(expected[1])[sees])
        assert_close(np.asarray(out)[sees], np.asarray(expected[0])[sees], "bfloat16")


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_long_attention_never_holds_all_scores(gradient):
    length = 2048
    q = jax.ShapeDtypeStruct((1, length, 1, DIM), jnp.float32)
    kv = jax.ShapeDtypeStruct((1, 1, length, DIM), jnp.float32)
    last = jnp.arange(length)[None]

    def temporary_bytes(block):
        def run(q, k, v):
            return attention(q, k, v, last, block=block)[0].sum()

        function = jax.grad(run, (0, 1, 2)) if gradient else run
        analysis = jax.jit(function).lower(q, kv, kv).compile().memory_analysis()
        assert analysis is not None  # the CPU backend has one
        return analysis.temp_size_in_bytes

    scores = 4 * length * length
    assert temporary_bytes(length) >= scores  # dense: what this measures is what it should measure
    assert temporary_bytes(256) < scores / 4
