"""Claims about six released layouts: every number is that of transformers, see `make_golden.py`."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_taps, int32

from gdn import chain_tree, commit, init_cache, load_pretrained

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("llama", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_wrapped", "qwen3_next")
LENGTHS = (1, 5, 63, 64, 65, 200)
PADDED = 256
# Absolute, between two float32 implementations; logits and streams have a deviation of about 3.
LOGITS_ATOL, STREAM_ATOL, CACHE_ATOL = 1e-3, 1e-4, 1e-4


@jax.jit
def run(model, tokens, lengths):
    """Prefill, read the logits of every position off the last tap, decode 24 tokens greedily."""
    batch = len(lengths)
    cache = init_cache(model.cfg, batch, PADDED)
    prompt = model.prefill(tokens, lengths, cache, all_taps(model))

    def step(carry, _):
        token, cache = carry
        out = model.verify(token[:, None], chain_tree(batch, 1), cache)
        cache = commit(cache, out.updates, jnp.zeros((batch, 1), jnp.int32))
        return (jnp.argmax(out.logits[:, 0], -1), cache), token

    first = jnp.argmax(prompt.logits, axis=-1)
    _, greedy = jax.lax.scan(step, (first, prompt.cache), length=24)
    logits = model.logits(model.norm(prompt.aux_hidden[:, :, -1]))
    return prompt, logits, greedy.T


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """The golden arrays of a model, and what it computes for all six prompts at once."""
    golden = np.load(GOLDEN / request.param / "golden.npz")
    model = load_pretrained(GOLDEN / request.param)
    tokens = np.zeros((len(LENGTHS), PADDED), np.int32)
    for row, length in zip(tokens, LENGTHS, strict=True):
        row[:length] = golden[f"ids_{length}"]
    prompt, logits, greedy = run(model, tokens, int32(LENGTHS))
    logits, greedy = np.asarray(logits), np.asarray(greedy)
    return SimpleNamespace(model=model, golden=golden, prompt=prompt, logits=logits, greedy=greedy)


def largest_error(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    return np.abs(found - expected).max()


def test_the_six_models_are_all_there_is():
    folders = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
    assert tuple(name for name in folders if not name.startswith("draft_")) == NAMES


def test_logits_are_those_of_transformers(case):
    assert tuple(case.golden["lengths"]) == LENGTHS
    for row, length in enumerate(LENGTHS):
        expected = case.golden[f"logits_{length}"]  # every position, or the last four
        found = case.logits[row, length - len(expected) : length]
        assert largest_error(found, expected) < LOGITS_ATOL, length
        assert largest_error(case.prompt.logits[row], expected[-1]) < LOGITS_ATOL, length


def test_residual_stream_is_that_of_transformers_after_every_layer(case):
    found = np.moveaxis(np.asarray(case.prompt.aux_hidden), 2, 1)[LENGTHS.index(65), :, :65]
    assert largest_error(found, case.golden["hidden_65"]) < STREAM_ATOL


def test_cache_is_that_of_transformers(case):
    row, golden = LENGTHS.index(65), case.golden
    assert tuple(np.asarray(case.prompt.cache.lengths)) == LENGTHS
    layer_types = case.model.cfg.layer_types
    for i, (kind, entry) in enumerate(zip(layer_types, case.prompt.cache.layers, strict=True)):
        if kind == "linear_attention":
            assert largest_error(entry.state[row], golden[f"state_65_{i}"]) < CACHE_ATOL
            assert largest_error(entry.conv[row], golden[f"conv_65_{i}"]) < CACHE_ATOL
        else:
            k, v = (np.swapaxes(np.asarray(x)[row, :, :65], 0, 1) for x in entry)
            assert largest_error(k, golden[f"key_65_{i}"]) < CACHE_ATOL
            assert largest_error(v, golden[f"value_65_{i}"]) < CACHE_ATOL
    arrays = sum(name.startswith(("state_", "conv_", "key_", "value_")) for name in golden.files)
    assert arrays == 2 * len(layer_types)


def test_greedy_tokens_are_those_of_transformers(case):
    for row, length in enumerate(LENGTHS):
        assert (case.greedy[row] == case.golden[f"greedy_{length}"]).all(), length
