"""Live comparison with transformers on torch: `make parity`. `make test` reads golden files only.

Four directions: the golden files are what transformers computes today; models that it saves here
and now compute the same in `gdn`; models that `gdn` saves compute the same in transformers; and the
sampling parameters mean what its logits processors make of them.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from golden.make_golden import (  # noqa: E402
    MIN_ROUTER_GAP,
    MODELS,
    golden_arrays,
    load_checkpoint,
    make_model,
    router_gap,
)

from eagle3.decoding.sampling import SamplingParams, batch_sampling, choose  # noqa: E402
from gdn import load_pretrained, save_pretrained  # noqa: E402

pytestmark = pytest.mark.parity
torch.set_num_threads(1)  # as make_golden does; and these matrices are too small to share

GOLDEN = Path(__file__).parent / "golden"
SAME_CODE_ATOL = 1e-4  # transformers against itself, other order of summation
LOGITS_ATOL = 1e-3  # gdn against transformers, at a standard deviation near 3

# Sizes unlike the golden ones: deeper, three value heads per key head, whole-head RoPE in llama.
LINEAR = dict(
    linear_num_key_heads=3,
    linear_num_value_heads=9,
    linear_key_head_dim=8,
    linear_value_head_dim=20,
)
SIZES = dict(
    num_hidden_layers=8,
    hidden_size=60,
    vocab_size=300,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=24,
    intermediate_size=72,
)
EXPERTS = dict(
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=10,
    shared_expert_intermediate_size=14,
)
ROPE = dict(
    rope_type="default",
    rope_theta=3e4,
    partial_rotary_factor=0.5,
    mrope_section=[2, 2, 2],
    mrope_interleaved=True,
)
NEXT_ROPE = dict(rope_type="default", rope_theta=3e4, partial_rotary_factor=0.5)
FRESH = {
    "qwen3_5": dict(SIZES, **LINEAR, rope_parameters=ROPE, tie_word_embeddings=True),
    "qwen3_next": dict(
        SIZES,
        strength=1.3,
        **LINEAR,
        **EXPERTS,
        rope_parameters=NEXT_ROPE,
        mlp_only_layers=[0, 3, 6],
    ),
    "qwen3_5_moe": dict(SIZES, **LINEAR, **EXPERTS, rope_parameters=ROPE),
    "llama": dict(SIZES, rms_norm_eps=1e-4, tie_word_embeddings=True),
    "qwen3": dict(SIZES, rms_norm_eps=1e-4, tie_word_embeddings=False),
}
del FRESH["qwen3_5_moe"]["intermediate_size"]  # every layer is sparse


def our_logits(model, prompt):
    """Return float32 [T, V] for `prompt` [T]."""
    forward = jax.jit(lambda model, tokens: model.logits(model(tokens).hidden))
    return np.asarray(forward(model, jnp.asarray(prompt)[None]))[0]


@torch.no_grad()
def their_logits(model, prompt):
    """Return float32 [T, V] for `prompt` [T]."""
    return model(torch.from_numpy(prompt).long()[None], use_cache=False).logits[0].numpy()


def draw_prompt(model, length):
    """Draw a prompt [length] for which rounding cannot turn the choice of an expert."""
    rng = np.random.default_rng(length)
    for _ in range(100):
        prompt = rng.integers(0, model.config.vocab_size, size=length).astype(np.int32)
        if router_gap(model, torch.from_numpy(prompt).long()[None]) >= MIN_ROUTER_GAP:
            return prompt
    raise RuntimeError(f"no prompt of length {length} is free of near-ties between experts")


@pytest.mark.parametrize("name", MODELS)
def test_golden_arrays_are_what_transformers_computes_today(name):
    """Integers must be equal; so must be the set of arrays."""
    arrays = golden_arrays(*make_model(name))
    with np.load(GOLDEN / name / "golden.npz") as stored:
        assert set(stored) == set(arrays)
        for key, value in arrays.items():
            assert (stored[key].dtype, stored[key].shape) == (value.dtype, value.shape), key
            atol = 0 if value.dtype == np.int32 else SAME_CODE_ATOL
            np.testing.assert_allclose(value, stored[key], rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_golden_checkpoints_hold_the_weights_of_the_golden_arrays(name):
    """Loading refuses missing and unexpected tensors; the values must be equal."""
    stored, made = load_checkpoint(GOLDEN / name)[0].state_dict(), make_model(name)[0].state_dict()
    assert set(stored) == set(made)
    for key, value in made.items():
        assert torch.equal(stored[key], value), key


@pytest.mark.parametrize("name", FRESH)
def test_models_saved_by_transformers_compute_the_same_here(name, tmp_path):
    """Fresh weights and other sizes than the golden files; two chunks and a bit of prompt."""
    theirs, _ = make_model(name, seed=7, **FRESH[name])
    theirs.save_pretrained(tmp_path)
    prompt = draw_prompt(theirs, 130)
    ours = load_pretrained(tmp_path, dtype=jnp.float32)
    np.testing.assert_allclose(
        our_logits(ours, prompt), their_logits(theirs, prompt), rtol=0, atol=LOGITS_ATOL
    )


@pytest.mark.parametrize("name", MODELS)
def test_models_saved_here_compute_the_same_in_transformers(name, tmp_path):
    """`load_checkpoint` also refuses missing and unexpected tensors."""
    ours = load_pretrained(GOLDEN / name, dtype=jnp.float32)
    save_pretrained(ours, tmp_path)
    theirs, _ = load_checkpoint(tmp_path)
    with np.load(GOLDEN / name / "golden.npz") as stored:
        prompt = stored["ids_65"]
    np.testing.assert_allclose(
        their_logits(theirs, prompt), our_logits(ours, prompt), rtol=0, atol=LOGITS_ATOL
    )


def their_probabilities(logits, params, prompt):
    """Return what the logits processors leave of one row, in their usual order."""
    steps = [transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    steps.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(transformers.MinPLogitsWarper(params.min_p))
    scores = torch.from_numpy(logits)[None]
    for step in steps:
        scores = step(torch.tensor([prompt]), scores)
    return torch.softmax(scores[0].double(), -1).numpy()


def test_sampling_parameters_mean_what_they_mean_in_transformers(monkeypatch):
    rng = np.random.default_rng(0)
    caught = []
    monkeypatch.setattr(
        "eagle3.decoding.sampling.draw",
        lambda weights, noise: caught.append(weights) or jnp.argmax(weights, axis=-1),
    )
    for _ in range(40):
        params = SamplingParams(
            temperature=float(rng.choice([0.4, 1.0, 1.7])),
            top_k=int(rng.choice([0, 1, 7, 50])),
            top_p=float(rng.choice([1.0, 0.9, 0.4])),
            min_p=float(rng.choice([0.0, 0.05, 0.3])),
            repetition_penalty=float(rng.choice([1.0, 0.8, 1.5])),
        )
        prompt = rng.integers(0, 90, 12).tolist()
        logits = (3 * rng.standard_normal(90)).astype(np.float32)
        rows = batch_sampling([params], [prompt], 90)
        nothing = jnp.zeros((1, 90), jnp.int32)
        choose(jnp.asarray(logits)[None], rows, nothing, jnp.zeros(1, jnp.int32))
        weights = np.asarray(caught.pop())[0]
        expected = their_probabilities(logits, params, prompt)
        np.testing.assert_array_equal(weights > 0, expected > 0, err_msg=str(params))
        np.testing.assert_allclose(weights / weights.sum(), expected, atol=1e-6)
