"""What several test files need: tolerances, tiny configurations, random weights, compiled steps.

The steps are compiled once per shape and session, so the files agree on one shape where they can:
BATCH rows, prompts padded to PROMPT tokens, caches of CAPACITY slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn import Cache, HybridLM, TargetConfig, chain_tree, commit, init_cache
from gdn.cache import KVCache

# Largest error allowed, relative to the largest expected value; see `assert_close`.
# The last is loose: two layers round 8-bit mantissas some twenty times (0.06 was measured).
RTOL = {"float32": 1e-5, "bfloat16": 1e-2, "bfloat16 model": 1e-1}

BATCH, PROMPT, CAPACITY = 4, 40, 64  # PROMPT is longer than a chunk of the delta rule

LINEAR: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    shared_expert_intermediate_size=14,
)
HYBRID = TargetConfig(
    model_type="qwen3_5_text",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=("linear_attention", "full_attention"),
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-6,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    norm_unit_offset=True,
    qk_norm=True,
    attn_output_gate=True,
    bos_token_id=None,
    pad_token_id=None,
    **LINEAR,
)
LLAMA = TargetConfig(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    layer_types=("full_attention",) * 2,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    norm_unit_offset=False,
    qk_norm=False,
    attn_output_gate=False,
    bos_token_id=None,
    pad_token_id=None,
)
QWEN3 = dataclasses.replace(LLAMA, model_type="qwen3", qk_norm=True, tie_word_embeddings=True)
TIED_HYBRID = dataclasses.replace(HYBRID, tie_word_embeddings=True)
QWEN3_5_MOE = dataclasses.replace(
    HYBRID, model_type="qwen3_5_moe_text", moe_layers=(True,) * 2, **EXPERTS
)
QWEN3_NEXT = dataclasses.replace(
    HYBRID, model_type="qwen3_next", moe_layers=(True, False), **EXPERTS
)


def float32(x) -> np.ndarray:
    """Copy to float32; called like this, numpy's own type would be a scalar to pyright."""
    return np.array(x, np.float32)


def float64(x) -> np.ndarray:
    """Copy to float64."""
    return np.array(x, np.float64)


def int32(x) -> np.ndarray:
    """Copy to int32."""
    return np.array(x, np.int32)


def relative_error(actual, expected) -> float:
    """Return the largest difference over the largest expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    if not expected.size:
        return 0.0
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def assert_close(actual, expected, dtype="float32"):
    """Check every pair of leaves of two pytrees against the tolerance of `dtype`."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    errors = [relative_error(x, y) for x, y in pairs]
    # Not `max(errors) < ...`: a NaN has to fail.
    assert all(error < RTOL[dtype] for error in errors), f"relative errors {errors}"


def assert_same_bits(actual, expected):
    """Check that two pytrees are equal bit for bit, which tells -0 from 0 and compares NaN."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def random_model(cfg: TargetConfig, seed: int = 0, dtype=jnp.float32) -> HybridLM:
    """Draw every parameter away from its initial value, so that each term of the model counts."""
    abstract = nnx.eval_shape(lambda: HybridLM(cfg, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    rng = np.random.default_rng(seed)
    leaves = [
        (path, leaf.replace(jnp.asarray(_draw(cfg, path, leaf.shape, rng), leaf.dtype)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def _draw(cfg: TargetConfig, path: tuple, shape: tuple[int, ...], rng) -> np.ndarray:
    noise, names = rng.standard_normal(shape), "/".join(map(str, path))
    if names.endswith("A_log"):  # from slow to fast forgetting over the heads
        return np.linspace(np.log(0.02), np.log(8.0), shape[0]) + 0.1 * noise
    if names.endswith("dt_bias"):
        return 1.5 * noise - 1.5
    if names.endswith("linear_attn/norm"):
        return 1 + 0.3 * noise
    if "norm" in names:
        return (0.0 if cfg.norm_unit_offset else 1.0) + 0.3 * noise
    if names.endswith("conv1d"):
        return 0.5 * noise
    return noise * (1.0 if "embed_tokens" in names else 1.2 * shape[-1] ** -0.5)


def parameters(model: HybridLM) -> dict[str, jax.Array]:
    """Return the parameters by dotted path."""
    return {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))
    }


def all_taps(model: HybridLM) -> tuple[int, ...]:
    """Return every aux layer id."""
    return tuple(range(model.cfg.num_hidden_layers + 1))


forward = jax.jit(HybridLM.__call__, static_argnames=("aux_layers",))
prefill = jax.jit(HybridLM.prefill, static_argnames=("aux_layers", "chunk_size"))
verify = jax.jit(HybridLM.verify, static_argnames=("aux_layers",))
commit_path = jax.jit(commit)


@jax.jit
def decode(model: HybridLM, tokens, steps, cache: Cache):
    """Append the first `steps` [B] of `tokens` [B, T] one at a time.

    Returns:
      Logits [B, T, V] and all residual streams [B, T, L + 1, D] at each token, and the cache.
    """
    batch, length = tokens.shape

    def step(cache, inputs):
        token, index = inputs
        out = model.verify(token[:, None], chain_tree(batch, 1), cache, all_taps(model))
        cache = commit(cache, out.updates, jnp.where(index < steps, 0, -1)[:, None])
        return cache, (out.logits[:, 0], out.aux_hidden[:, 0])

    cache, outputs = jax.lax.scan(step, cache, (tokens.T, jnp.arange(length)))
    logits, aux_hidden = (jnp.moveaxis(x, 0, 1) for x in outputs)
    return logits, aux_hidden, cache


def start_cache(model: HybridLM, prompts: list[np.ndarray], capacity: int = CAPACITY):
    """Prefill `prompts`, each of at most PROMPT tokens, into a new cache; returns the output."""
    tokens = np.zeros((len(prompts), PROMPT), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = init_cache(model.cfg, len(prompts), capacity)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    return prefill(model, tokens, lengths, cache, all_taps(model))


def take_rows(cache: Cache, rows) -> Cache:
    """Pick rows of the batch."""
    rows = np.asarray(rows)
    return jax.tree.map(lambda x: np.asarray(x)[rows], cache)


def committed(cache: Cache) -> list[list[np.ndarray]]:
    """Return what may be read of each row: slots below its length, and recurrent entries."""
    entries = [(np.asarray(x), isinstance(entry, KVCache)) for entry in cache.layers for x in entry]
    return [
        [x[row, :, :length] if is_kv else x[row] for x, is_kv in entries]
        for row, length in enumerate(np.asarray(cache.lengths))
    ]
