"""Claims about the model on its own: one function however the tokens are cut, batched or packed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    BATCH,
    CAPACITY,
    HYBRID,
    PROMPT,
    QWEN3_NEXT,
    all_taps,
    assert_close,
    assert_same_bits,
    committed,
    decode,
    float32,
    float64,
    forward,
    int32,
    parameters,
    prefill,
    random_model,
    start_cache,
    take_rows,
)

from gdn import init_cache
from gdn.context import packed_context
from gdn.layers import embed, linear, rms_norm

LENGTHS = (40, 17, 0, 1)  # of the prompts in a batch


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(0)
    return rng.integers(0, HYBRID.vocab_size, (BATCH, PROMPT)).astype(np.int32)


def empty(model, capacity=CAPACITY, dtype=jnp.float32):
    return init_cache(model.cfg, BATCH, capacity, dtype)


@pytest.fixture(scope="module")
def whole(model, tokens):
    """Logits and residual streams of every token, by the forward pass without a cache."""
    out = forward(model, tokens, aux_layers=all_taps(model))
    return np.asarray(model.logits(out.hidden)), np.asarray(out.aux_hidden)


@pytest.fixture(scope="module")
def prefilled(model, tokens):
    """All rows at full length."""
    return prefill(model, tokens, np.full(BATCH, PROMPT, np.int32), empty(model), all_taps(model))


def test_prefill_equals_the_forward_pass(model, whole, prefilled):
    logits, aux_hidden = whole
    assert 0.5 < logits.std() < 5 and prefilled.logits.dtype == jnp.float32
    assert_close((prefilled.logits, prefilled.aux_hidden), (logits[:, -1], aux_hidden))


def test_stepwise_decode_equals_the_forward_pass_and_leaves_the_same_cache(
    model, tokens, whole, prefilled
):
    *found, cache = decode(model, tokens, np.full(BATCH, PROMPT, np.int32), empty(model))
    assert_close(found, whole)
    assert_close(committed(cache), committed(prefilled.cache))
    assert_same_bits(cache.lengths, prefilled.cache.lengths)


def real_tokens(aux_hidden, lengths=LENGTHS):
    """Cut the padding off each row."""
    return [row[:length] for row, length in zip(np.asarray(aux_hidden), lengths, strict=True)]


def test_prefill_does_not_depend_on_the_chunk_size(model, tokens):
    arguments = model, tokens, int32(LENGTHS), empty(model), all_taps(model)
    expected, found = prefill(*arguments), prefill(*arguments, 7)  # 7 divides nothing here
    assert_close(found.logits, expected.logits)
    assert_close(real_tokens(found.aux_hidden), real_tokens(expected.aux_hidden))
    assert_close(committed(found.cache), committed(expected.cache))


def test_prefill_split_into_calls_equals_one(model, tokens, whole, prefilled):
    cache, done = empty(model), np.zeros(BATCH, np.int32)
    for counts in ((13, 1, 40, 2), (0, 31, 0, 1), (27, 8, 0, 37)):  # the rows at different places
        counts = int32(counts)
        rest = np.stack([np.roll(row, -n) for row, n in zip(tokens, done, strict=True)])
        out = prefill(model, rest, counts, cache, all_taps(model))
        for row in np.flatnonzero(counts):
            start, stop = done[row], done[row] + counts[row]
            assert_close(out.logits[row], whole[0][row, stop - 1])
            assert_close(out.aux_hidden[row, : stop - start], whole[1][row, start:stop])
        cache, done = out.cache, done + counts
    assert_same_bits(cache.lengths, prefilled.cache.lengths)
    assert_close(committed(cache), committed(prefilled.cache))


def test_prompts_of_different_lengths_equal_each_alone(model, tokens):
    batched = prefill(model, tokens, int32(LENGTHS), empty(model), all_taps(model))
    assert_same_bits(batched.cache.lengths, int32(LENGTHS))
    assert not np.asarray(batched.logits)[2].any()
    for row, length in enumerate(LENGTHS):
        if length == 0:
            continue
        alone = start_cache(model, [tokens[row, :length]])
        assert_close(batched.logits[row], alone.logits[0])
        assert_close(batched.aux_hidden[row, :length], alone.aux_hidden[0, :length])
        assert_close(committed(batched.cache)[row], committed(alone.cache)[0])


def test_a_row_given_no_tokens_keeps_its_cache_bit_for_bit(model, tokens):
    before = prefill(model, tokens, int32((5, 17, 40, 1)), empty(model), all_taps(model)).cache
    after = prefill(model, tokens, int32((3, 0, 0, 0)), before, all_taps(model)).cache
    assert_same_bits(take_rows(after, [1, 2, 3]), take_rows(before, [1, 2, 3]))
    assert after.lengths[0] == 8


def test_a_cache_of_several_attention_blocks_changes_nothing(llama, tokens):
    steps, results = np.full(BATCH, 20, np.int32), []
    for capacity in (CAPACITY, 520):
        cache = empty(llama, capacity)
        out = prefill(llama, tokens, int32(LENGTHS), cache, all_taps(llama))
        logits, _, cache = decode(llama, tokens, steps, out.cache)
        results.append((out.logits, np.asarray(logits)[:, :20], committed(cache)))
    assert_close(*results)


def test_aux_layer_k_is_the_residual_stream_after_k_layers(model, tokens, whole):
    aux_hidden = whole[1]
    embedding = np.asarray(model.embed_tokens[...])[tokens]
    assert_same_bits(aux_hidden[:, :, 0], embedding)
    context = packed_context(model.cfg, tokens.shape, None)
    after_one = jax.jit(lambda layer, x: layer(x, context, None)[0])(model.layers[0], embedding)
    assert_close(aux_hidden[:, :, 1], after_one)
    cfg, weight = model.cfg, parameters(model)["norm.weight"]
    last = jnp.asarray(aux_hidden[:, :, -1])
    hidden = rms_norm(last, weight, cfg.rms_norm_eps, cfg.norm_unit_offset)
    assert_close(model.logits(hidden), whole[0])


def test_aux_layers_come_in_the_order_asked_for(llama, tokens):
    every = forward(llama, tokens, aux_layers=all_taps(llama)).aux_hidden
    some = forward(llama, tokens, aux_layers=(2, 0, 1, 2)).aux_hidden
    assert_close(some, np.asarray(every)[:, :, [2, 0, 1, 2]])


def shapes(model, aux_layers):
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(lambda x: model(x, aux_layers=aux_layers), tokens)


@pytest.mark.parametrize("aux_layers", [(-1,), (0, 3)])
def test_an_aux_layer_that_does_not_exist_is_refused(hybrid, aux_layers):
    with pytest.raises(ValueError, match=r"ids in 0\.\.2, got \(.*\)"):
        shapes(hybrid, aux_layers)


def test_no_aux_layers_give_an_empty_axis(llama):
    assert shapes(llama, ()).aux_hidden.shape == (1, 2, 0, llama.cfg.hidden_size)


@jax.jit
def gradients(model, tokens, segment_ids, weights):
    """Return hidden states and the gradient of their weighted sum with respect to the model."""

    def loss(model):
        hidden = model(tokens, segment_ids).hidden
        return jnp.sum(weights * hidden), hidden

    grads, hidden = jax.grad(loss, has_aux=True)(model)
    return hidden, nnx.state(grads)


def flat(grads):
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(grads)}


def test_packed_documents_equal_separate_rows_in_hidden_states_and_gradients(model, tokens):
    lengths = (11, 1, 19, 5)
    starts = np.cumsum((0, *lengths))[:-1]
    packed, segments = tokens.copy(), np.zeros_like(tokens)
    segments[0] = np.repeat([2, 3, 5, 6, 9], (*lengths, 4))  # ends with four tokens of padding
    separate = np.zeros_like(tokens)
    rng = np.random.default_rng(1)
    dim = model.cfg.hidden_size
    weights = np.zeros((2, BATCH, PROMPT, dim), np.float32)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        here = slice(start, start + length)
        separate[row, :length] = tokens[0, here]
        weights[0, 0, here] = rng.standard_normal((length, dim))
        weights[1, row, :length] = weights[0, 0, here]
    found, found_grads = gradients(model, packed, segments, weights[0])
    expected, expected_grads = gradients(model, separate, np.zeros_like(segments), weights[1])
    found, expected = np.asarray(found), np.asarray(expected)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert_close(found[0, start : start + length], expected[row, :length])
    assert_close(found_grads, expected_grads)


def test_an_id_that_comes_back_is_a_new_document(model, tokens):
    lengths, none = (9, 3, 20, 8), np.zeros((BATCH, PROMPT, model.cfg.hidden_size), np.float32)
    back, fresh = (
        np.repeat([ids] * BATCH, lengths, axis=1).astype(np.int32)
        for ids in ([0, 1, 0, 1], [0, 1, 2, 3])
    )
    found, expected = (gradients(model, tokens, ids, none)[0] for ids in (back, fresh))
    assert_close(found, expected)


@pytest.mark.parametrize("at", [0, 20, 31, 32, 39])
def test_a_token_depends_on_all_tokens_before_it_and_none_after(model, at):
    # Every position has a token, hence a row of the embedding, of its own.
    tokens = np.arange(BATCH * PROMPT, dtype=np.int32).reshape(BATCH, PROMPT) % 64
    weights = np.zeros((BATCH, PROMPT, model.cfg.hidden_size), np.float32)
    weights[0, at] = np.random.default_rng(at).standard_normal(model.cfg.hidden_size)
    _, grads = gradients(model, tokens, np.zeros_like(tokens), weights)
    reached = np.abs(flat(grads)["embed_tokens"]).max(axis=1)[:PROMPT]
    assert (reached[: at + 1] > 0).all()
    assert (reached[at + 1 :] == 0).all()


def test_rows_of_zeros_have_finite_gradients(model, tokens):
    tokens = np.where(np.arange(PROMPT) < 25, tokens, 0).astype(np.int32)
    tokens[2] = 0
    padded = nnx.clone(model)
    padded.embed_tokens.set_value(model.embed_tokens[...].at[0].set(0.0))
    weights = np.ones((BATCH, PROMPT, model.cfg.hidden_size), np.float32)
    hidden, grads = gradients(padded, tokens, np.zeros_like(tokens), weights)
    assert not np.asarray(hidden)[2].any()
    assert all(np.isfinite(x).all() for x in flat(grads).values())


def experts_in_numpy(moe, x):
    """Send every row through all experts, then weigh them: float64."""
    p = {name: float64(value) for name, value in parameters(moe).items()}

    def mlp(gate, up, down):
        gate = x @ gate.T
        return (gate / (1 + np.exp(-gate)) * (x @ up.T)) @ down.T

    scores = x @ p["gate"].T
    probability = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    chosen = np.argsort(-probability, axis=-1)[:, : moe.cfg.num_experts_per_tok]
    total = np.take_along_axis(probability, chosen, -1).sum(-1) if moe.cfg.norm_topk_prob else 1.0
    out = np.zeros_like(x)
    for expert in range(moe.cfg.num_experts):
        gate, up = np.split(p["experts.gate_up_proj"][expert], 2)
        share = probability[:, expert] * (chosen == expert).any(-1) / total
        out += share[:, None] * mlp(gate, up, p["experts.down_proj"][expert])
    shared = mlp(*(p[f"shared_expert.{name}_proj"] for name in ("gate", "up", "down")))
    return out + shared / (1 + np.exp(-x @ p["shared_expert_gate"].T))


# Up to 3 rows, each of the pairs is a block of its own; then blocks have 16 rows.
@pytest.mark.parametrize("rows, norm_topk_prob", [(3, True), (4, True), (50, True), (50, False)])
def test_experts_equal_a_dense_computation_over_all_of_them(rows, norm_topk_prob):
    cfg = dataclasses.replace(QWEN3_NEXT, norm_topk_prob=norm_topk_prob)
    moe = random_model(cfg).layers[0].mlp
    x = np.random.default_rng(rows).standard_normal((1, rows, cfg.hidden_size))
    x[0, rows // 2 :] = x[0, :1]  # half of the rows choose the same experts
    x = float32(x)
    found = jax.jit(lambda moe, x: moe(x))(moe, x)
    assert_close(found[0], experts_in_numpy(moe, float64(x[0])))


def test_gradients_through_experts_are_finite_and_reach_every_part():
    moe = random_model(QWEN3_NEXT).layers[0].mlp
    x = float32(np.random.default_rng(0).standard_normal((1, 50, QWEN3_NEXT.hidden_size)))
    grads = jax.jit(jax.grad(lambda moe, x: jnp.sum(moe(x) ** 2)))(moe, x)
    for name, grad in flat(nnx.state(grads)).items():
        assert np.isfinite(grad).all() and np.any(grad), name


def test_a_bfloat16_model_stays_close_to_float32(hybrid, tokens):
    low = random_model(HYBRID, dtype=jnp.bfloat16)
    kept = {name for name, x in parameters(low).items() if x.dtype == jnp.float32}
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "dt_bias", "norm"}
    results = []
    for model, dtype in ((hybrid, jnp.float32), (low, jnp.bfloat16)):
        before = empty(model, dtype=dtype)
        out = prefill(model, tokens, int32(LENGTHS), before, all_taps(model))
        next_logits, _, cache = decode(model, tokens, np.full(BATCH, 3, np.int32), out.cache)
        for entries in (before, out.cache, cache):
            dtypes = [x.dtype for x in jax.tree.leaves(entries.layers)]
            assert dtypes == [jnp.float32, dtype, dtype, dtype]  # state, window, k, v
        next_logits = np.asarray(next_logits)[:, :3]
        results.append((out.logits, real_tokens(out.aux_hidden), next_logits, committed(cache)))
    expected, found = results
    assert_close(found, expected, "bfloat16 model")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_of_few_rows_equals_one_of_many(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((33, 24)), dtype)
    weight = jnp.asarray(rng.standard_normal((40, 24)), dtype)
    product = jax.jit(lambda x: linear(x, weight, jnp.float32))
    expected = float64(x) @ float64(weight).T
    for rows in (1, 3, 8, 32, 33):  # 33 rows and more take another form
        assert_close(product(x[:rows]), expected[:rows])
    assert linear(x[:2, None], weight).shape == (2, 1, 40)
    assert linear(x[:2], weight).dtype == dtype


@pytest.mark.parametrize("rows", [3, 33])
def test_gradients_of_a_product_are_those_of_the_formula(rows):
    rng = np.random.default_rng(0)
    x, out = (float32(rng.standard_normal((rows, 1, size))) for size in (24, 40))
    weight = float32(rng.standard_normal((40, 24)))

    def loss(x, weight):
        return jnp.sum(linear(x, weight) * out)

    found = jax.jit(jax.grad(loss, (0, 1)))(x, weight)
    assert_close(found, (out @ weight, out[:, 0].T @ x[:, 0]))


def test_embedding_rows_are_copied_bit_for_bit():
    table = random_model(HYBRID, dtype=jnp.bfloat16).embed_tokens[...]
    tokens = jnp.asarray([[3, 0, 63], [5, 5, 1]])
    for differentiable in (True, False):
        found = embed(table, tokens, differentiable)
        assert_same_bits(found, np.asarray(table)[np.asarray(tokens)])
