"""Claims about whole generations: speculation changes how fast a text comes, and nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FITTED,
    HYBRID,
    PROMPTS,
    RTOL,
    assert_close,
    assert_same_text,
    eagle3,
    expected_probabilities,
    finish,
    forward,
    greedy_requests,
    open_session,
    random_draft,
    random_model,
    serve,
)

from eagle3.decoding.accept import Limits
from eagle3.decoding.drafter import Eagle3Drafter
from eagle3.decoding.generate import generate
from eagle3.decoding.request import Request
from eagle3.decoding.sampling import SamplingParams, batch_sampling
from eagle3.decoding.speculate import DecodeState, Requests, run_rounds, split
from eagle3.decoding.tree import EAGLE1_PATHS, chain_plan, dynamic_plan, static_plan
from gdn import HybridLM, init_cache

PLANS = {
    "chain": chain_plan(4),
    "static": static_plan(EAGLE1_PATHS),
    "dynamic": dynamic_plan(top_k=3, depth=5, total_tokens=12),
}
STREAM = dict(stream_every=8)


def test_plain_decoding_equals_full_recomputation(model, text_of):
    text = text_of(model)
    log_p = jax.nn.log_softmax(text.logits, axis=-1)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, text.answers, strict=True)):
        assert answer.finish_reason == "length" and len(answer.tokens) == 500
        assert answer.rounds == 500 and not any(answer.is_drafted)
        before = slice(len(prompt) - 1, len(prompt) + 499)
        logits, tokens = text.logits[row, before], np.array(answer.tokens)
        chosen = logits[np.arange(500), tokens]
        short = logits.max(axis=1) - chosen  # of the maximum: 0 but for ties
        assert (short <= RTOL["float32"] * np.abs(logits).max()).all()
        assert (short == 0).mean() > 0.99
        assert_close(
            np.array(answer.logprobs), np.asarray(log_p)[row, before][np.arange(500), tokens]
        )
    assert len(set(text.answers[2].tokens)) > 20, "a text of a few words proves little"


@pytest.mark.parametrize(
    ("name", "kind", "who", "count"),
    [
        ("hybrid", "chain", "random", 60), ("hybrid", "chain", "fitted", 60),
        ("hybrid", "static", "random", 60), ("hybrid", "static", "fitted", 60),
        ("hybrid", "dynamic", "random", 60), ("hybrid", "dynamic", "fitted", 500),
        ("llama", "dynamic", "random", 60), ("llama", "dynamic", "fitted", 200),
    ],
)  # fmt: skip
def test_greedy_text_and_its_log_probabilities_are_those_of_plain_decoding(
    request, text_of, fitted_for, name, kind, who, count
):
    target = request.getfixturevalue(name)
    draft = random_draft(target) if who == "random" else fitted_for(target)
    answers = serve(target, eagle3(draft, PLANS[kind]), greedy_requests(count), **STREAM)
    assert_same_text(answers, text_of(target), count)
    if who == "fitted":
        assert all(answer.rounds < count for answer in answers)


LARGEST = dynamic_plan(top_k=8, depth=12, total_tokens=64)


@pytest.mark.parametrize("size", [1, 2, 17, 64, 130])
def test_alone_and_with_the_largest_tree_the_text_is_that_of_the_batch(
    hybrid, text_of, fitted_for, size
):
    row = [len(prompt) for prompt in PROMPTS].index(size)
    drafter = eagle3(fitted_for(hybrid), LARGEST)
    answers = serve(hybrid, drafter, greedy_requests(30, [PROMPTS[row]]), **STREAM)
    text = text_of(hybrid)
    alone = text._replace(answers=text.answers[row : row + 1], logits=text.logits[row : row + 1])
    assert_same_text(answers, alone, 30)


def test_a_fitted_draft_is_accepted_nearly_always_and_a_random_one_hardly_ever(hybrid, fitted_for):
    drafts = fitted_for(hybrid), random_draft(hybrid)
    fitted, random = (
        serve(hybrid, eagle3(draft, PLANS["chain"]), greedy_requests(60), **STREAM)
        for draft in drafts
    )
    for row in range(FITTED):
        assert fitted[row].acceptance_length > 3.0
        assert random[row].acceptance_length < 1.3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_draft_changes_no_text(hybrid, text_of, value):
    draft = random_draft(hybrid)
    draft.lm_head[...] = draft.lm_head[...].at[3:9].set(value)
    draft.o_proj[...] = draft.o_proj[...].at[0, 0].set(value)
    answers = serve(hybrid, eagle3(draft, PLANS["dynamic"]), greedy_requests(40), **STREAM)
    assert_same_text(answers, text_of(hybrid), 40)


def test_the_draft_remembers_what_one_pass_over_the_whole_text_would_tell_it(
    hybrid, text_of, fitted_for
):
    text, drafter = text_of(hybrid), Eagle3Drafter(fitted_for(hybrid), PLANS["dynamic"])
    session = open_session(hybrid, drafter, **STREAM)
    session.start(greedy_requests(60))
    finish(session)
    assert session._state is not None
    found = session._state.draft
    count = jnp.array([len(prompt) + 59 for prompt in PROMPTS])
    whole = jax.jit(Eagle3Drafter.absorb)(
        drafter, drafter.init_state(len(PROMPTS), 1024), jnp.asarray(text.aux_hidden),
        jnp.asarray(np.roll(text.tokens, -1, axis=1)), count,
    )  # fmt: skip
    assert found.lengths.tolist() == count.tolist()
    for row, length in enumerate(count.tolist()):
        for x, y in zip(found.cache, whole.cache, strict=True):
            assert_close(np.asarray(x)[row, :, :length], np.asarray(y)[row, :, :length])
    assert_close((found.hidden, found.logits), (whole.hidden, whole.logits))


EVERYTHING = SamplingParams(
    temperature=1.1, top_k=40, top_p=0.97, min_p=0.01, repetition_penalty=1.2,
    presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((5, 1.0),), seed=11,
)  # fmt: skip
# A batch in which every row has its own parameters, seed, end and stop tokens.
MIXED = [
    Request(prompt=PROMPTS[0], max_new_tokens=41, sampling=EVERYTHING),
    Request(prompt=PROMPTS[1], max_new_tokens=60),
    Request(prompt=PROMPTS[2], max_new_tokens=33, sampling=SamplingParams(temperature=0.6, seed=1)),
    Request(
        prompt=PROMPTS[3], max_new_tokens=50, stop_ids=(9, 17),
        sampling=SamplingParams(temperature=1.0, top_p=0.8, frequency_penalty=0.5, seed=2),
    ),
    Request(prompt=PROMPTS[4], max_new_tokens=1, sampling=SamplingParams(repetition_penalty=1.5)),
]  # fmt: skip


def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(hybrid, text_of, fitted_for):
    """In a batch of greedy and sampled rows, twice, and alone, with other trees."""
    expected = serve(hybrid, None, MIXED)
    drafter = eagle3(fitted_for(hybrid), PLANS["dynamic"])
    for _ in range(2):
        found = serve(hybrid, drafter, MIXED, **STREAM)
        for request, answer, wanted in zip(MIXED, found, expected, strict=True):
            assert answer.tokens == wanted.tokens
            assert answer.finish_reason == wanted.finish_reason
            assert_close(np.array(answer.logprobs), np.array(wanted.logprobs))
            assert len(answer.tokens) <= request.max_new_tokens
        assert sum(answer.rounds for answer in found) < sum(a.rounds for a in expected)
    assert found[1].tokens == text_of(hybrid).answers[1].tokens[:60]
    assert len(found[4].tokens) == 1
    alone = serve(hybrid, eagle3(random_draft(hybrid), LARGEST), MIXED[:1], **STREAM)
    assert alone[0].tokens == expected[0].tokens
    other = dataclasses.replace(MIXED[0], sampling=dataclasses.replace(EVERYTHING, seed=12))
    assert serve(hybrid, None, [other, *MIXED[1:]])[0].tokens != expected[0].tokens


# On eight tokens the distribution of the first three can be counted.

SMALL, ROWS, START = 8, 1200, 3
GROUPS = [
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.8, top_k=4),
    SamplingParams(temperature=1.2, top_p=0.75),
    SamplingParams(temperature=1.0, min_p=0.15),
    SamplingParams(
        temperature=1.0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.7
    ),
]


@pytest.fixture(scope="module")
def eight():
    return random_model(dataclasses.replace(HYBRID, vocab_size=SMALL), seed=5)


@pytest.fixture(scope="module")
def sampled(eight):
    """Return three tokens [groups, ROWS, 3], a seed for each row, and which were drafted."""
    draft = random_draft(eight, draft_vocab_size=5)
    drafter = Eagle3Drafter(draft, dynamic_plan(top_k=2, depth=3, total_tokens=6))
    batch = ROWS * len(GROUPS)
    few = batch_sampling(GROUPS, [[START]] * len(GROUPS), SMALL)
    keys = jax.vmap(jax.random.key)(jnp.arange(batch))
    rows = jax.tree.map(lambda x: jnp.repeat(x, ROWS, axis=0), few)._replace(keys=keys)
    limits = Limits(jnp.full((batch, 1), -1), jnp.full(batch, 3))
    nothing = jnp.zeros(batch, jnp.int32)
    state = DecodeState(
        init_cache(eight.cfg, batch, 4), drafter.init_state(batch, 4),
        nothing + START, nothing, jnp.ones(batch, bool), jnp.zeros((batch, SMALL), jnp.int32),
    )  # fmt: skip
    graph, params = split(eight, drafter)
    state, out = run_rounds(graph, params, state, Requests(rows, limits), 3, 3)
    assert (np.asarray(out.count) == 3).all() and not np.asarray(state.is_running).any()
    tokens = np.asarray(out.tokens)[:, :3]
    counted = (tokens[..., None] == np.arange(SMALL)).sum(axis=1)
    np.testing.assert_array_equal(state.counts, counted)
    shape = (len(GROUPS), ROWS, 3)
    return tokens.reshape(shape), np.asarray(out.is_drafted)[:, :3].reshape(shape)


def joint_distribution(target: HybridLM, params: SamplingParams) -> np.ndarray:
    """Return the probability of every three tokens after START, from full forwards."""
    pairs = np.stack(np.meshgrid(np.arange(SMALL), np.arange(SMALL), indexing="ij"), -1)
    tokens = np.concatenate([np.full((SMALL**2, 1), START), pairs.reshape(-1, 2)], axis=1)
    out = forward(target, jnp.asarray(tokens, jnp.int32))
    logits = np.asarray(target.logits(out.hidden)).reshape(SMALL, SMALL, 3, SMALL)
    first = expected_probabilities(logits[0, 0, 0], params, [START])
    joint = np.zeros((SMALL,) * 3)
    for a in range(SMALL):
        second = expected_probabilities(logits[a, 0, 1], params, [START], [a])
        for b in range(SMALL):
            third = expected_probabilities(logits[a, b, 2], params, [START], [a, b])
            joint[a, b] = first[a] * second[b] * third
    return joint


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_the_first_three_tokens_have_the_distribution_of_the_target(eight, sampled, group):
    """Chi-square, with a draft that knows five of the eight tokens."""
    tokens, is_drafted = (x[group] for x in sampled)
    assert 0.1 < is_drafted.mean() < 0.9
    expected = ROWS * joint_distribution(eight, GROUPS[group]).ravel()
    found = np.bincount(tokens @ [SMALL**2, SMALL, 1], minlength=SMALL**3)
    assert (found[expected == 0] == 0).all()
    rare = expected < 5
    found, expected = (np.append(x[~rare], x[rare].sum()) for x in (found, expected))
    found, expected = found[expected > 0], expected[expected > 0]
    assert len(found) > 10
    chi_square, freedom = ((found - expected) ** 2 / expected).sum(), len(found) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_generate_hands_on_chunks_as_they_come_and_names_what_it_lacks(hybrid, text_of):
    chunks = []
    options: dict[str, Any] = dict(min_capacity=1024, prefill_chunk=16, stream_every=1)
    answers = generate(hybrid, greedy_requests(9), on_chunk=chunks.append, **options)
    assert_same_text(answers, text_of(hybrid), 9)
    assert len(chunks) == 9 * len(PROMPTS)
    assert [t for c in chunks if c.row == 3 for t in c.tokens] == answers[3].tokens
    with pytest.raises(ValueError, match="eagle3 needs a draft"):
        generate(hybrid, greedy_requests(9), method="eagle3")
    with pytest.raises(
        ValueError, match="method is 'eagle', it must be one of: autoregressive, eagle3"
    ):
        generate(hybrid, greedy_requests(9), method="eagle")
