"""Claims about the draft: the numbers are those of speculators, `golden/make_draft_golden.py`."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import LLAMA, float32, random_model

from eagle3.draft_config import DraftConfig, RopeScaling
from eagle3.interop import load_draft
from eagle3.training.ttt import unroll

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = ("base", "eagle31", "qk_norm", "speculators_default")
TARGET = replace(
    LLAMA, vocab_size=80, hidden_size=16, num_hidden_layers=4, layer_types=("full_attention",) * 4
)
# Absolute, between two float32 implementations; logits have a deviation of about 3.
ATOL = 2e-4

run = jax.jit(unroll, static_argnames="steps")


@pytest.fixture(scope="module")
def target():
    """A target of the right sizes; its embedding is not the one in the files."""
    return random_model(TARGET)


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, target):
    """The golden arrays of a draft, and the logits of all its steps."""
    directory = GOLDEN / f"draft_{request.param}"
    golden = dict(np.load(directory / "golden.npz"))
    draft = load_draft(directory, target)
    aux = float32(golden["aux"])[None, :-1]
    logits = run(draft, aux, golden["tokens"][None, 1:], steps=len(golden["step_logits"]))
    return SimpleNamespace(draft=draft, golden=golden, aux=aux, logits=np.asarray(logits[:, 0]))


def test_the_four_drafts_are_all_there_is():
    assert tuple(sorted(path.name for path in GOLDEN.glob("draft_*"))) == tuple(
        f"draft_{variant}" for variant in VARIANTS
    )


def test_logits_of_every_step_are_those_of_speculators(case):
    expected = case.golden["step_logits"]
    assert case.logits.shape == expected.shape
    for step, (found, wanted) in enumerate(zip(case.logits, expected, strict=True)):
        valid = len(wanted) - step
        assert np.abs(found[:valid] - wanted[:valid]).max() < ATOL, step


def test_unrolling_over_its_own_tokens_is_the_chain_drafted_with_a_cache(case):
    golden, prompt = case.golden, int(case.golden["chain_prompt"])
    target_ids = np.asarray(case.draft.target_ids[...])
    tokens = golden["tokens"][1:].copy()
    drafted = target_ids[golden["chain_ids"]]
    tokens[prompt:] = 0
    tokens[prompt : prompt + len(drafted)] = drafted
    aux = case.aux.copy()
    aux[:, prompt:] = 0
    logits = np.asarray(run(case.draft, aux, tokens[None], steps=len(drafted)))[:, 0, prompt - 1]
    assert np.abs(logits - golden["chain_logits"]).max() < ATOL
    assert (logits.argmax(-1) == golden["chain_ids"]).all()


LLAMA3 = [
    1.0,
    0.193922758,
    0.0376060307,
    7.29266508e-3,
    5.24846022e-4,
    3.42810235e-5,
    6.64786967e-6,
]
LLAMA3 += [1.28917316e-6]
LINEAR = [0.25, 0.0484806895, 9.40150768e-3, 1.82316627e-3, 3.53553361e-4, 6.85620471e-5]
LINEAR += [1.32957393e-5, 2.57834631e-6]


@pytest.mark.parametrize(
    "scaling, expected",
    [
        (RopeScaling(kind="llama3", factor=8.0), LLAMA3),  # the settings of Llama 3.1
        (RopeScaling(kind="linear", factor=4.0), LINEAR),
    ],
    ids=["llama3", "linear"],
)
def test_scaled_frequencies_are_those_of_transformers(scaling, expected):
    """Computed by transformers 5.24."""
    cfg = DraftConfig(
        hidden_size=64,
        intermediate_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        draft_vocab_size=8,
        target_hidden_size=64,
        aux_layers=(1, 2, 3),
        rope_theta=5e5,
        rope_scaling=scaling,
    )
    np.testing.assert_allclose(cfg.rope_frequencies(), expected, rtol=1e-6)
