"""Models with packed or int8 weights: the same model, and speculation lossless to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    HYBRID,
    LLAMA,
    PROMPTS,
    QWEN3_NEXT,
    draft_config,
    eagle3,
    float32,
    greedy_requests,
    random_model,
    relative_error,
    serve,
)

from eagle3.decoding.request import Request
from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.tree import dynamic_plan
from eagle3.draft import draft_for
from gdn import load_pretrained, save_pretrained
from gdn.ops import native
from gdn.ops.packed import PackedWeight
from gdn.packing import DTYPES, Packer, finish

KINDS = [(dtype, native) for dtype in DTYPES for native in (True, False)]
# Of the logits, in norm. Weights and activations lose 2^-9 in bfloat16, and half of 1/127 of the
# largest in int8: of a row of weights, of 64 activations.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 5e-2}


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{'native' if kind[1] else 'xla'}")
def packer(request):
    if request.param[1] and (why := native.problem()):
        pytest.skip(why)
    return Packer(*request.param)


def packed_pair(packer: Packer):
    """Return a target and a draft for it, packed."""
    target = random_model(HYBRID)
    ids = np.arange(0, target.cfg.vocab_size, 2)
    draft = draft_for(
        target, draft_config(target.cfg, draft_vocab_size=len(ids)), ids, rngs=nnx.Rngs(0)
    )
    finish((target, packer), (draft, packer))
    return target, draft


@pytest.mark.parametrize("cfg", [HYBRID, LLAMA, QWEN3_NEXT], ids=["hybrid", "llama", "mixture"])
def test_logits_are_those_of_the_plain_model_up_to_the_precision(packer, cfg):
    tokens = jnp.array([PROMPTS[0][:9]])
    model = random_model(cfg)
    wanted = model.logits(model(tokens).hidden)
    finish((model, packer))
    found = model.logits(model(tokens).hidden)
    # A mixture multiplies what experts say, rounded, with their shares, rounded.
    tolerance = TOLERANCE[packer.dtype] * (1.5 if any(cfg.moe_layers) else 1)
    assert relative_error(found, wanted) < tolerance


def test_converting_while_loading_is_converting_afterwards(packer, tmp_path):
    model = random_model(QWEN3_NEXT)
    save_pretrained(model, tmp_path)
    finish((model, packer))
    loaded = load_pretrained(tmp_path, jnp.float32, packer)
    finish((loaded, packer))
    pairs = zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(loaded)), strict=True)
    for expected, actual in pairs:
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


@pytest.mark.parametrize("packer", KINDS[4:], indirect=True)
def test_streams_of_very_different_sizes_survive_a_draft_in_int8(packer):
    """With a scale in common, that of the largest, the smallest would be nothing in int8."""
    target = random_model(HYBRID)
    cfg = draft_config(target.cfg, draft_vocab_size=8)
    draft = draft_for(target, cfg, np.arange(8), rngs=nnx.Rngs(0))
    streams = jax.random.normal(jax.random.key(1), (2, 3, cfg.num_aux, cfg.target_hidden_size))
    low = streams.at[:, :, 1:].set(0.0) * 0.03
    streams = low + streams.at[:, :, :1].set(0.0) * 30.0
    wanted = draft.fuse(streams) - draft.fuse(streams - low)  # what the smallest adds
    finish((target, packer), (draft, packer))
    assert relative_error(draft.fuse(streams) - draft.fuse(streams - low), wanted) < 0.05


def test_an_embedding_that_models_share_stays_shared(packer):
    target, draft = packed_pair(packer)
    pair = (jax.tree.leaves(model.embed_tokens[...])[0] for model in (target, draft))
    assert next(pair) is next(pair)
    assert isinstance(draft.fc[...], PackedWeight) == packer.native


@pytest.mark.parametrize("packer", KINDS[2::2] + KINDS[5:], indirect=True)
def test_speculation_says_what_plain_decoding_of_the_packed_model_says(packer, hybrid, fitted_for):
    target, draft = nnx.clone(hybrid), nnx.clone(fitted_for(hybrid))
    finish((target, packer), (draft, packer))
    sampling = SamplingParams(temperature=0.8, seed=7)
    requests = greedy_requests(24, PROMPTS[:2])
    requests += [Request(prompt=p, max_new_tokens=24, sampling=sampling) for p in PROMPTS[:2]]
    plain = serve(target, None, requests)
    drafted = serve(target, eagle3(draft, dynamic_plan(2, 3, 6)), requests)
    assert [a.tokens for a in drafted] == [a.tokens for a in plain]
    assert sum(a.rounds for a in drafted) < sum(a.rounds for a in plain)


def test_the_kernels_and_xla_agree_about_int8():
    if why := native.problem():
        pytest.skip(why)
    tokens, found = jnp.array([PROMPTS[0][:9]]), []
    for is_native in (True, False):
        model = random_model(HYBRID)
        finish((model, Packer("int8", is_native)))
        found.append(float32(model.logits(model(tokens).hidden)))
    assert relative_error(*found) < 2e-2  # the kernels round activations more than XLA does
