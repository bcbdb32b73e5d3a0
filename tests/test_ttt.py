"""Claims about training-time test: what each step is fed, taught, weighted by and counted as."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import HYBRID, assert_close, float32, float64, forward, random_draft

from eagle3.training.data.batches import Batch
from eagle3.training.features import (
    FeaturedBatch,
    head_rows,
    most_likely_next,
    target_features,
    teach,
)
from eagle3.training.losses import LOSSES
from eagle3.training.ttt import Teaching, draft_loss, slot_weights, unroll

STEPS, LENGTH = 3, 24
# Two documents and padding; one document; three short ones, of which one has a single token.
SEGMENTS = np.array(
    [[1] * 11 + [2] * 9 + [0] * 4, [1] * LENGTH, [1] * 4 + [2] + [3] * 15 + [4] * 4], np.int32
)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, HYBRID.vocab_size, SEGMENTS.shape).astype(np.int32)
    return tokens, (rng.random(SEGMENTS.shape) < 0.7) & (SEGMENTS > 0), SEGMENTS


@pytest.fixture(scope="module")
def draft(hybrid):
    return random_draft(hybrid)


def taught(target, draft, batch) -> Teaching:
    """Run the target over a batch, and make of it what the draft is taught."""
    graph, params = nnx.split(target)
    pieces = Batch(*(x[None] for x in batch))
    features = target_features(graph, nnx.to_pure_dict(params), draft.cfg.aux_layers, pieces)
    featured = FeaturedBatch(Batch(*batch), jax.tree.map(lambda x: x[0], features))
    return jax.jit(teach)(featured, head_rows(target, draft.target_ids[...]))


@pytest.fixture(scope="module")
def teaching(hybrid, draft, batch) -> Teaching:
    return taught(hybrid, draft, batch)


@jax.jit
def sums_of(draft, teaching):
    return draft_loss(draft, teaching, STEPS, LOSSES["soft_cross_entropy"])


def log_softmax(x):
    x = float64(x)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def counted_slots(mask, segments, step):
    """Return the slots of a step, by going through them."""
    found = np.zeros(mask.shape, bool)
    for row, slot in np.ndindex(*mask.shape):
        predicted = slot + 2 + step
        if predicted < mask.shape[1]:
            found[row, slot] = (
                mask[row, predicted] and len(set(segments[row, slot : predicted + 1])) == 1
            )
    return found


def test_a_slot_counts_if_the_token_it_predicts_is_to_be_predicted_in_its_document(batch):
    _, mask, segments = batch
    found = np.asarray(jax.jit(slot_weights, static_argnums=2)(mask, segments, STEPS))
    for step in range(STEPS):
        np.testing.assert_array_equal(found[step], counted_slots(mask, segments, step))
    assert found.any(axis=(1, 2)).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_are_their_definitions(name):
    rng = np.random.default_rng(1)
    logits, teacher = (float32(rng.normal(size=(5, 17)) * 3) for _ in range(2))
    log_q, log_p = log_softmax(logits), log_softmax(teacher)
    p, q = np.exp(log_p), np.exp(log_q)
    overlap = np.minimum(p, q).sum(-1)
    divergence = (p * (log_p - log_q)).sum(-1)
    weight = np.exp(-3 * overlap)
    expected = {
        "soft_cross_entropy": -(p * log_q).sum(-1),
        "kl": divergence,
        "lk_hybrid": weight * divergence + (1 - weight) * (1 - overlap),
    }
    found = LOSSES[name](jnp.asarray(logits), jnp.asarray(teacher))
    assert_close(found, (expected[name], overlap))


def test_the_weight_of_the_hybrid_loss_has_no_gradient():
    rng = np.random.default_rng(2)
    logits, teacher = (jnp.asarray(rng.normal(size=9), jnp.float32) for _ in range(2))

    def with_weight(x):
        divergence, overlap = LOSSES["kl"](x, teacher)
        weight = np.exp(-3 * float(LOSSES["kl"](logits, teacher)[1]))
        return weight * divergence + (1 - weight) * (1 - overlap)

    found = jax.grad(lambda x: LOSSES["lk_hybrid"](x, teacher)[0])(logits)
    assert_close(found, jax.grad(with_weight)(logits))


def test_the_target_is_the_heads_rows_and_its_most_likely_token(hybrid, draft, batch, teaching):
    tokens, _, segments = batch
    out = forward(hybrid, tokens, segments, draft.cfg.aux_layers)
    logits = np.asarray(hybrid.logits(out.hidden))
    assert_close(teaching.logits, logits[..., np.asarray(draft.target_ids[...])])
    assert_close(teaching.aux_hidden, out.aux_hidden)
    np.testing.assert_array_equal(teaching.best, logits.argmax(-1))
    np.testing.assert_array_equal(most_likely_next(hybrid, out.hidden, rows=7), logits.argmax(-1))


def test_sums_are_those_of_going_through_every_slot(draft, teaching):
    """Row 1 is one document, where `unroll` knows no borders."""
    row = Teaching(*(x[1:2] for x in teaching))
    following = jnp.pad(row.tokens, ((0, 0), (0, 1)))[:, 1:]
    logits = np.asarray(jax.jit(unroll, static_argnums=3)(draft, row.aux_hidden, following, STEPS))
    sums = sums_of(draft, row)
    ids = np.asarray(draft.target_ids[...])
    best, mask = np.asarray(row.best)[0], np.asarray(row.loss_mask)[0]
    was_right = np.ones(LENGTH, bool)
    for step, found in enumerate(sums):
        expected = dict.fromkeys(found._fields, 0.0)
        right = np.zeros(LENGTH, bool)
        for slot in range(LENGTH - 2 - step):
            taught = slot + 1 + step
            log_q = log_softmax(logits[step, 0, slot])
            log_p = log_softmax(np.asarray(row.logits)[0, taught])
            right[slot] = ids[log_q.argmax()] == best[taught]
            # A chain starts where its first token is to be predicted.
            starts = was_right[slot] if step else mask[slot + 2]
            if mask[taught + 1]:
                expected["slots"] += 1
                expected["hit"] += right[slot]
                expected["chains"] += mask[slot + 2 : taught + 2].all()
                expected["reached"] += starts
                expected["run"] += starts and right[slot]
                expected["overlap"] += np.exp(np.minimum(log_p, log_q)).sum()
                if best[taught] in ids:
                    expected["weight"] += 1
                    expected["loss"] -= (np.exp(log_p) * log_q).sum()
            was_right[slot] = starts and right[slot] and mask[taught + 1]
        assert 0 < expected["weight"] < expected["slots"]
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name), value, rtol=1e-4, err_msg=name)


def test_packed_documents_are_trained_as_if_each_had_a_row_of_its_own(
    draft, teaching, hybrid, batch
):
    tokens, mask, segments = batch
    alone = [np.zeros((6, LENGTH), dtype) for dtype in (np.int32, bool, np.int32)]
    row = 0
    for packed, document in [(0, 1), (0, 2), (1, 1), (2, 1), (2, 3), (2, 4)]:
        here = segments[packed] == document
        size = here.sum()
        for out, values in zip(alone, (tokens, mask, segments), strict=True):
            out[row, :size] = values[packed, here]
        row += 1
    apart = taught(hybrid, draft, alone)
    for found, expected in zip(sums_of(draft, apart), sums_of(draft, teaching), strict=True):
        for name, value in found._asdict().items():
            np.testing.assert_allclose(value, getattr(expected, name), rtol=1e-4, err_msg=name)


def test_the_gradient_is_that_of_the_logits_of_every_step_at_once(draft, teaching):
    """Steps that are computed again in the backward pass, or not, against one plain expression."""
    graph, params, rest = nnx.split(draft, nnx.Param, ...)
    row = Teaching(*(x[1:2] for x in teaching))
    following = jnp.pad(row.tokens, ((0, 0), (0, 1)))[:, 1:]

    def ours(params, remat=True):
        draft = nnx.merge(graph, params, rest)
        sums = draft_loss(draft, row, STEPS, LOSSES["kl"], True, remat=remat)
        return sum(s.loss for s in sums)

    def plain(params):
        logits = unroll(nnx.merge(graph, params, rest), row.aux_hidden, following, STEPS)
        total = 0.0
        for step in range(STEPS):
            end = LENGTH - 2 - step
            loss, _ = LOSSES["kl"](logits[step, :, :end], row.logits[:, 1 + step : LENGTH - 1])
            total += jnp.sum(jnp.where(row.loss_mask[:, 2 + step :], loss, 0.0))
        return total

    expected = jax.jit(jax.grad(plain))(params)
    for remat in (True, False):
        found = jax.jit(jax.grad(partial(ours, remat=remat)))(params)
        assert_close(found, expected, "float32")
