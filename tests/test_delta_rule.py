"""Claims about the gated delta rule over a sequence: the chunked form is the recurrence.

Almost everything has LENGTH tokens, so that few programs are compiled; shorter texts are padded
with tokens of g = beta = 0, which are not there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, float32, float64, int32, relative_error

from gdn.deltanet import l2_normalize
from gdn.ops.chunked import gated_delta_rule_chunked, unit_lower_inverse
from gdn.ops.delta_rule import gated_delta_rule
from gdn.ops.reference import gated_delta_rule_reference

LENGTH = 130  # four whole chunks and a rest of two
HK, DK, DV = 2, 8, 12
ODD_LENGTHS = (1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)

chunked = jax.jit(gated_delta_rule_chunked, static_argnames="chunk_size")
reference = jax.jit(gated_delta_rule_reference)
both_rules = pytest.mark.parametrize("rule", [chunked, reference], ids=["chunked", "reference"])


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw(groups=2):
    """Draw q, k, v, g, beta and an entering state, float32 numpy."""
    rng = np.random.default_rng(0)
    heads = groups * HK
    q, k = unit(rng.standard_normal((2, 2, LENGTH, HK, DK)))
    v = rng.standard_normal((2, LENGTH, heads, DV))
    g = -np.exp(rng.uniform(np.log(1e-3), np.log(3), (2, LENGTH, heads)))
    beta = rng.uniform(0.02, 0.98, (2, LENGTH, heads))
    state = rng.standard_normal((2, heads, DK, DV))
    return tuple(np.asarray(x, np.float32) for x in (q * DK**-0.5, k, v, g, beta, state))


def correlated(cosine):
    """Draw inputs with keys that share a direction, next to no decay, and the strongest writes."""
    q, k, v, g, beta, state = draw()
    common, own = np.zeros(DK), k.copy()
    common[0], own[..., 0] = 1.0, 0.0
    # Two keys agree in the common part only: its weight squared is the mean cosine.
    k = np.sqrt(cosine) * common + np.sqrt(1 - cosine) * unit(own)
    return q, float32(k), v, np.full_like(g, -1e-4), np.full_like(beta, 0.999), state


def uneven():
    """Draw inputs whose decay is fast for most of each chunk and slow at its end."""
    q, k, v, g, beta, state = draw()
    fast = (np.arange(LENGTH) % 32 < 24)[:, None]
    return q, k, v, float32(np.where(fast, -60.0, 1e-2 * g)), beta, state


def cut(inputs, start, stop):
    """Take tokens start..stop-1 of q, k, v, g and beta."""
    return tuple(x[:, start:stop] for x in inputs[:5])


def moved_to_the_front(inputs, start, stop):
    """Return LENGTH tokens of which the first are start..stop-1 and the rest are not there."""
    q, k, v, g, beta = (np.roll(x, -start, axis=1) for x in inputs[:5])
    g[:, stop - start :], beta[:, stop - start :] = 0.0, 0.0
    return q, k, v, g, beta


def documents(ids, lengths):
    """Return segment ids [2, LENGTH], the same in both rows."""
    return np.repeat(int32(ids), lengths)[None].repeat(2, axis=0)


@pytest.fixture(scope="module")
def prefixes():
    """Return the reads [2, LENGTH, ...] and the state after each token [LENGTH, 2, ...]."""
    *tokens, state = map(jnp.asarray, draw())

    def step(S, t):
        q, k, v, g, beta = (jax.lax.dynamic_slice_in_dim(x, t, 1, 1) for x in tokens)
        out, S = gated_delta_rule_reference(q, k, v, g, beta, S)
        return S, (out[:, 0], S)

    out, states = jax.jit(lambda S: jax.lax.scan(step, S, jnp.arange(LENGTH))[1])(state)
    return np.moveaxis(np.asarray(out), 0, 1), np.asarray(states)


def test_reference_is_the_recurrence_written_in_numpy():
    q, k, v, g, beta, state = (float64(x) for x in draw())
    expected, S = np.zeros(v.shape), state.copy()
    for b, t, h in np.ndindex(*v.shape[:3]):
        key, query = k[b, t, h // 2], q[b, t, h // 2]
        S[b, h] *= np.exp(g[b, t, h])
        S[b, h] += np.outer(key, beta[b, t, h] * (v[b, t, h] - S[b, h].T @ key))
        expected[b, t, h] = S[b, h].T @ query
    assert_close(reference(*draw()), (expected, S))


def test_chunked_equals_reference_at_every_length_with_a_carried_state(prefixes):
    q, k, v, g, beta, state = map(jnp.asarray, draw())

    @jax.jit
    def first_tokens(length):
        real = (jnp.arange(LENGTH) < length)[None, :, None]
        return gated_delta_rule_chunked(q, k, v, g * real, beta * real, state)

    for length in range(1, LENGTH + 1):
        out, last = first_tokens(length)
        assert_close(
            (np.asarray(out)[:, :length], last), (prefixes[0][:, :length], prefixes[1][length - 1])
        )


@pytest.mark.parametrize("length", ODD_LENGTHS)
def test_chunked_equals_reference_on_an_unpadded_length(length, prefixes):
    found = chunked(*cut(draw(), 0, length), draw()[5])
    assert_close(found, (prefixes[0][:, :length], prefixes[1][length - 1]))


@pytest.mark.parametrize("chunk_size", [8, 64])
def test_result_does_not_depend_on_the_chunk_size(chunk_size):
    assert_close(chunked(*draw(), chunk_size=chunk_size), reference(*draw()))


@pytest.mark.parametrize("groups", [1, 3])  # 2 in all the other tests
def test_each_key_head_serves_its_group_of_value_heads(groups):
    assert_close(chunked(*draw(groups)), reference(*draw(groups)))


@pytest.mark.parametrize("cosine", [0.9, 1.0])
def test_correlated_keys_with_full_writes_lose_no_digits(cosine):
    inputs = correlated(cosine)
    key = inputs[1][0, :, 0]
    assert abs((key @ key.T)[np.tril_indices(LENGTH, -1)].mean() - cosine) < 0.02
    assert_close(chunked(*inputs), reference(*inputs))


def test_unit_lower_inverse_on_correlated_keys_matches_float64():
    # The matrix of a chunk of 64: a power series would be wrong by 1e9 here.
    k = correlated(0.9)[1][0, :64, 0]
    A = np.tril(k @ k.T, -1)
    expected = np.linalg.inv(np.eye(64) + float64(A))
    assert_close(jax.jit(unit_lower_inverse)(A), expected)


def gradients_of(rule):
    """Return a function giving the gradients of all six inputs, q and k before their norm."""

    def loss(inputs, segments):
        q, k, *rest = inputs
        out, state = rule(l2_normalize(q), l2_normalize(k), *rest, segments)
        # Every read and every entry of the state has a weight of its own.
        weights = (jnp.cos(7.0 * jnp.arange(x.size).reshape(x.shape)) for x in (out, state))
        return sum(jnp.sum(w * x) for w, x in zip(weights, (out, state), strict=True))

    return jax.jit(jax.grad(loss))


chunked_gradients = gradients_of(gated_delta_rule_chunked)
reference_gradients = gradients_of(gated_delta_rule_reference)


def test_gradients_of_all_six_inputs_match_across_segments():
    # Borders inside a chunk and between chunks. The second row is one document: only there does
    # the entering state count in the last one.
    segments = documents([0, 1, 2], (20, 12, 98))
    segments[1] = 5
    found, expected = (f(draw(), segments) for f in (chunked_gradients, reference_gradients))
    assert all(np.abs(x).max() > 1e-2 for x in expected)
    assert_close(found, expected)


def test_strong_decay_keeps_outputs_and_gradients_finite():
    q, k, v, g, beta, state = draw()
    inputs = (q, k, v, np.full_like(g, -20.0), beta, state)
    assert_close(chunked(*inputs), reference(*inputs))
    segments = documents([0], [LENGTH])
    found, expected = (
        # On one scale: the gradient of g is 1e-8, less than the last digit of what makes it up.
        np.concatenate([np.ravel(x) for x in gradients(inputs, segments)])
        for gradients in (chunked_gradients, reference_gradients)
    )
    assert_close(found, expected)


def test_zero_rows_have_finite_gradients_and_none_through_the_norm():
    q, k, v, g, beta, state = draw()
    zero = slice(5, 9)
    q[:, zero], k[:, zero], v[:, zero] = 0.0, 0.0, 0.0
    grads = chunked_gradients((q, k, v, g, beta, state), documents([0], [LENGTH]))
    assert all(np.isfinite(x).all() for x in grads)
    assert not np.any(grads[0][:, zero]) and not np.any(grads[1][:, zero])
    assert np.all(np.any(grads[0][:, 9:], axis=-1)) and np.all(np.any(grads[1][:, 9:], axis=-1))


@both_rules
def test_segments_equal_separate_runs(rule):
    inputs, entering = draw(), draw()[5]
    lengths = (7, 25, 1, 67, 30)  # inside a chunk, to its border, one token, over two borders
    out, state = rule(*inputs, documents([3, 4, 6, 7, 9], lengths))
    out, start = np.asarray(out), 0
    for length in lengths:
        expected, last = reference(*moved_to_the_front(inputs, start, start + length), entering)
        assert_close(out[:, start : start + length], np.asarray(expected)[:, :length])
        start, entering = start + length, np.zeros_like(entering)
    assert_close(state, last)


@both_rules
def test_an_id_that_comes_back_is_a_new_document(rule):
    lengths = (10, 5, 30, 20, 65)
    back, fresh = documents([0, 1, 0, 1, 0], lengths), documents([0, 1, 2, 3, 4], lengths)
    assert_close(rule(*draw(), back), reference(*draw(), fresh))


def test_two_runs_with_a_carried_state_equal_one():
    inputs = draw()
    first, state = chunked(*cut(inputs, 0, 65), inputs[5])
    second, state = chunked(*cut(inputs, 65, LENGTH), state)
    assert_close((np.concatenate([first, second], axis=1), state), reference(*inputs))


def test_l2_normalize_divides_by_the_norm_with_the_epsilon_of_the_model():
    x = draw()[2] * float32([[[1.0], [1e-3], [1e3], [1e-5]]])
    square = np.sum(float64(x) ** 2, axis=-1, keepdims=True)
    expected = x / np.sqrt(square + 1e-6)
    found = np.asarray(l2_normalize(jnp.asarray(x)))
    assert all(relative_error(found[:, :, i], expected[:, :, i]) < 1e-6 for i in range(4))


def test_dispatcher_runs_what_it_is_told_and_refuses_other_names():
    def program(rule, **options):
        return str(jax.make_jaxpr(lambda *x: rule(*x, **options))(*draw()))

    assert program(gated_delta_rule) == program(gated_delta_rule_chunked)
    named = program(gated_delta_rule, implementation="reference")
    assert named == program(gated_delta_rule_reference) != program(gated_delta_rule)
    with pytest.raises(ValueError, match="'chunky' is not one of.*chunked.*reference"):
        program(gated_delta_rule, implementation="chunky")


def test_a_slow_decay_keeps_its_digits_after_a_fast_one():
    assert_close(chunked(*uneven()), reference(*uneven()))
