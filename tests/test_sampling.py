"""Claims about picking one token: the distribution, the draw, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, expected_probabilities, float32, float64

from eagle3.decoding import sampling
from eagle3.decoding.sampling import (
    SamplingParams,
    batch_sampling,
    choose,
    draw,
    gumbel_noise,
    most_likely,
    token_weights,
)

VOCAB = 37
ROWS = jnp.arange(8)


def random_params(rng) -> SamplingParams:
    """Draw every parameter, each switched off now and then."""

    def some(value, off):
        return value if rng.random() < 0.6 else off

    return SamplingParams(
        temperature=float(rng.choice([0.3, 1.0, 2.5])),
        top_k=some(int(rng.integers(1, VOCAB + 9)), 0),
        top_p=some(float(rng.uniform(0.05, 0.99)), 1.0),
        min_p=some(float(rng.uniform(0.01, 0.4)), 0.0),
        repetition_penalty=some(float(rng.uniform(0.5, 2.0)), 1.0),
        presence_penalty=some(float(rng.uniform(-1, 1)), 0.0),
        frequency_penalty=some(float(rng.uniform(-1, 1)), 0.0),
        logit_bias=some(((3, 1.5), (int(rng.integers(VOCAB)), -2.0)), ()),
    )


def weights_of(logits, params, prompts=None, answers=None):
    """Return what `choose` draws from, [B, V]: its weights, caught on the way to the draw."""
    batch, vocab = np.shape(logits)
    prompts = prompts or [[0]] * batch
    rows = batch_sampling(params, prompts, vocab)
    counts = np.zeros((batch, vocab), np.int32)
    for row, answer in zip(counts, answers or [[]] * batch, strict=True):
        np.add.at(row, np.array(answer, int), 1)
    caught = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "draw", lambda w, noise: caught.append(w) or most_likely(w))
        choose(jnp.asarray(logits), rows, jnp.asarray(counts), jnp.zeros(batch, jnp.int32))
    return np.asarray(caught[0])


def assert_expected(logits, params, prompts=None, answers=None):
    """Compare with the definition, row by row; what has no weight there has none here."""
    batch = len(params)
    prompts, answers = prompts or [[0]] * batch, answers or [[]] * batch
    weights = weights_of(logits, params, prompts, answers)
    for row, p in enumerate(params):
        expected = expected_probabilities(logits[row], p, prompts[row], answers[row])
        np.testing.assert_array_equal(weights[row] > 0, expected > 0, str(p))
        assert_close(weights[row] / weights[row].sum(), expected)


def test_every_combination_of_parameters_gives_the_distribution_of_its_definition():
    rng = np.random.default_rng(0)
    params = [random_params(rng) for _ in range(48)]
    logits = float32(3 * rng.standard_normal((48, VOCAB)))
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in params]
    answers = [rng.integers(0, VOCAB, rng.integers(0, 12)).tolist() for _ in params]
    assert_expected(logits, params, prompts, answers)


def test_ties_at_a_border_are_all_kept():
    rng = np.random.default_rng(1)
    params = [
        dataclasses.replace(random_params(rng), repetition_penalty=1.0, logit_bias=())
        for _ in range(48)
    ]
    assert_expected(float32(rng.integers(-3, 4, (48, VOCAB))), params)
    equal = np.zeros((3, VOCAB), np.float32)
    few = [
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.1),
        SamplingParams(temperature=1.0, min_p=1.0),
    ]
    assert (weights_of(equal, few) == 1).all()


def test_tokens_ruled_out_by_the_logits_never_come_back():
    rng = np.random.default_rng(2)
    params = [random_params(rng) for _ in range(48)]
    logits = float32(3 * rng.standard_normal((48, VOCAB)))
    logits[rng.random(logits.shape) < 0.7] = -np.inf
    logits[:, 0] = 0.5  # one is left
    assert_expected(logits, params)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(scale):
    logits = float32(scale * np.random.default_rng(3).standard_normal((50, VOCAB)))
    logits[0, :2] = logits[0].max() + 1  # a tie
    weights = weights_of(logits, [SamplingParams(temperature=1e-6)] * 50)
    np.testing.assert_array_equal(weights, logits == logits.max(axis=1, keepdims=True))


def test_filters_at_their_limits_keep_everything_or_the_best_alone():
    logits = float32(np.random.default_rng(4).permutation(VOCAB))[None]
    for kept, one in (
        (VOCAB, {"top_k": VOCAB + 5}), (VOCAB, {"top_k": 10**9}), (VOCAB, {"min_p": 1e-30}),
        (1, {"top_k": 1}), (1, {"top_p": 1e-9}), (1, {"min_p": 1.0}),
    ):  # fmt: skip
        params = dataclasses.replace(SamplingParams(temperature=1.0), **one)
        weights = weights_of(logits, [params])
        assert (weights > 0).sum() == kept, one
        assert weights.argmax() == logits.argmax()


def test_a_parameter_that_no_row_uses_costs_nothing_and_rows_keep_their_own():
    prompts = [[1, 2], [3], [4]]
    assert all(x is None for x in batch_sampling([SamplingParams()] * 3, prompts, VOCAB))
    mixed = [SamplingParams(top_k=3), SamplingParams(temperature=0.5), SamplingParams()]
    rows = batch_sampling(mixed, prompts, VOCAB)
    assert rows.temperature is not None and rows.temperature.tolist() == [0, 0.5, 0]
    assert rows.top_p is rows.repetition is rows.bias is rows.prompt is None
    assert not rows.counts_tokens
    penal = batch_sampling([SamplingParams(repetition_penalty=1.5), *mixed[1:]], prompts, VOCAB)
    assert penal.counts_tokens and penal.prompt is not None
    assert [np.flatnonzero(row).tolist() for row in np.asarray(penal.prompt)] == prompts


def test_the_draw_depends_on_seed_and_place_alone():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(float32(rng.standard_normal((1, VOCAB))))

    def draw(seeds, places):
        params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
        rows = batch_sampling(params, [[0]] * len(seeds), VOCAB)
        return choose(jnp.repeat(logits, len(seeds), 0), rows, None, jnp.array(places)).tolist()

    many = draw([7] * 12 + [8] * 12, [*range(12)] * 2)
    assert draw([8, 7, 7], [3, 0, 11]) == [many[15], many[0], many[11]]
    assert len(set(many[:12])) > 5 and many[:12] != many[12:]
    assert draw([2**32 - 1], [0]) == draw([2**32 - 1], [0])


def test_a_greedy_row_beside_a_sampled_one_takes_the_most_likely_token():
    logits = float32(np.random.default_rng(6).standard_normal((16, VOCAB)))
    params = [SamplingParams(temperature=t, top_k=9) for t in (0.0, 5.0)] * 8
    rows = batch_sampling(params, [[0]] * 16, VOCAB)
    tokens = np.asarray(choose(jnp.asarray(logits), rows, None, jnp.arange(16)))
    best = logits.argmax(axis=1)
    np.testing.assert_array_equal(tokens[::2], best[::2])
    assert (tokens[1::2] != best[1::2]).mean() > 0.5


def test_most_likely_takes_the_lowest_of_equal_maxima():
    assert most_likely(jnp.array([[0.0, 3.0, 3.0, -1.0]])).tolist() == [1]


def test_tokens_are_drawn_in_proportion_to_their_weights_and_never_one_without():
    rng = np.random.default_rng(3)
    weights = float32(rng.exponential(size=VOCAB) * (rng.random(VOCAB) < 0.6))
    seeds = [SamplingParams(temperature=1.0, seed=seed) for seed in range(8)]
    keys = batch_sampling(seeds, [[0]] * 8, VOCAB).keys
    assert keys is not None
    places = 4000
    one = jax.jit(
        lambda n: draw(jnp.tile(weights, (8, 1)), gumbel_noise(keys, n + 0 * ROWS, VOCAB))
    )
    tokens = np.asarray(jax.lax.map(one, jnp.arange(places)))
    counts = np.bincount(tokens.ravel(), minlength=VOCAB)
    expected = 8 * places * float64(weights) / float64(weights).sum()
    assert not counts[weights == 0].any()
    some = weights > 0
    chi2 = ((counts - expected)[some] ** 2 / expected[some]).sum()
    assert chi2 < 2 * some.sum()  # mean some.sum() - 1, deviation its root of two


def test_a_draft_that_knows_what_the_target_knows_foresees_its_draws():
    rng = np.random.default_rng(4)
    logits = jnp.asarray(float32(2 * rng.standard_normal((8, VOCAB))))
    params = [SamplingParams(temperature=t, seed=n) for n, t in enumerate([0.0, 0.5, 1.0, 2.0] * 2)]
    rows, ids = batch_sampling(params, [[0]] * 8, VOCAB), jnp.arange(VOCAB)[::-1]
    foresight = rows.foresight(jnp.arange(8), VOCAB)
    assert foresight is not None
    for depth in range(3):
        ranked = foresight.on(logits[:, None, ::-1], depth, ids)[:, 0]
        drafted = ids[jnp.argmax(ranked, axis=-1)]
        drawn = choose(logits, rows, None, jnp.arange(8) + depth)
        np.testing.assert_array_equal(drafted, drawn)
    assert batch_sampling([SamplingParams()], [[0]], VOCAB).foresight(jnp.arange(1), VOCAB) is None


def test_weights_are_finite_where_everything_but_one_token_is_ruled_out():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 5] = -1e30
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.5, min_p=0.1)
    rows = batch_sampling([params], [[0]], VOCAB)
    weights = np.asarray(token_weights(jnp.asarray(logits), rows))
    np.testing.assert_array_equal(weights, np.eye(VOCAB, dtype=np.float32)[[5]])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.5),
        ("repetition_penalty", 0.0), ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")), ("seed", -1), ("seed", 2**32),
        ("logit_bias", ((-1, 1.0),)), ("logit_bias", ((1, float("nan")),)),
        # Fine in float64, no number or 0 in float32.
        ("temperature", 1e-40), ("top_p", 1e-46), ("repetition_penalty", 1e-40),
        ("frequency_penalty", 1e39), ("presence_penalty", -1e39), ("logit_bias", ((1, 1e39),)),
    ],
)  # fmt: skip
def test_a_value_that_no_run_can_use_is_an_error_that_names_it(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*must be"):
        SamplingParams(**{field: value})


def test_a_top_k_beyond_any_vocabulary_keeps_everything():
    params = SamplingParams(temperature=1.0, top_k=3_000_000_000)
    rows = batch_sampling([params], [[0]], VOCAB)
    assert (np.asarray(token_weights(jnp.zeros((1, VOCAB)), rows)) == 1).all()


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=f"token {VOCAB}, the vocabulary ends at {VOCAB - 1}"):
        batch_sampling([SamplingParams(logit_bias=((VOCAB, 1.0),))], [[0]], VOCAB)
