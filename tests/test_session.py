"""Claims about a session: its caches after every round, its ends, its batches, its memory.

Most of it is driven by an oracle, a drafter that is told where to be right: so every pattern of
acceptance is reached on purpose, not by luck.
"""

import dataclasses
import logging
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    LLAMA,
    LONGEST,
    PROMPTS,
    Oracle,
    assert_close,
    assert_same_bits,
    assert_same_text,
    eagle3,
    finish,
    greedy_requests,
    open_session,
    random_draft,
    random_model,
    serve,
    snapshot,
)

from eagle3.decoding.auto import AutoDrafter
from eagle3.decoding.costs import Costs
from eagle3.decoding.request import Request
from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.session import Session
from eagle3.decoding.speculate import run_rounds
from eagle3.decoding.tree import auto_plan, chain_plan
from gdn.cache import KVCache

BATCH, DEPTH = len(PROMPTS), 5
STARTS = np.array([len(prompt) for prompt in PROMPTS])  # place of the first token of each answer


@pytest.fixture(scope="module")
def text(text_of, hybrid):
    return text_of(hybrid)


def oracle(text, is_known=None):
    """Make a drafter that knows `is_known` [B, places of the answer]; None: everything."""
    known = np.ones((BATCH, LONGEST), bool)
    for row, start in enumerate(STARTS):
        if is_known is not None:
            size = min(is_known.shape[1], LONGEST - start)
            known[row, start : start + size] = is_known[row, :size]
    return Oracle(jnp.asarray(text.tokens), jnp.asarray(known), DEPTH)


def known_in_waves():
    """Return known places so that rounds of every length follow each other, other ones each row."""
    return np.random.default_rng(2).random((BATCH, LONGEST)) < 0.8


def rounds_of(session):
    """Advance a session to its end; yields after each round, with how many tokens it brought."""
    while session.is_running:
        yield [len(chunk.tokens) for chunk in session.advance()]


def assert_plain_state(session, text):
    """Compare the caches of every row with plain decoding of as many tokens."""
    found = snapshot(session)
    for row, answer in enumerate(session.answers):
        assert_close(found[row], text.states[len(answer.tokens)][row])
        assert found[row][-1].shape[1] == STARTS[row] + len(answer.tokens) - 1


def test_caches_after_every_round_are_those_of_plain_decoding(hybrid, text):
    session = open_session(hybrid, oracle(text, known_in_waves()))
    session.start(greedy_requests(44))
    assert_plain_state(session, text)
    lengths = set()
    for counts in rounds_of(session):
        lengths.update(counts)
        assert_plain_state(session, text)
    assert lengths == set(range(1, DEPTH + 2))
    assert_same_text(session.answers, text, 44)


def test_rounds_without_a_right_draft_go_on_after_rounds_that_accepted_many(hybrid, text):
    known = np.zeros((BATCH, LONGEST), bool)
    for row in range(BATCH):
        known[row, row : row + DEPTH] = True  # then nothing; then once more
        known[row, 20 + row : 20 + row + DEPTH] = True
    session = open_session(hybrid, oracle(text, known))
    session.start(greedy_requests(40))
    for _ in rounds_of(session):
        assert_plain_state(session, text)
    assert_same_text(session.answers, text, 40)
    for answer in session.answers:
        assert answer.histogram[0] > 20 and answer.histogram[1:].sum() <= 4


@pytest.mark.parametrize("kind", ["eagle3", "auto"])
def test_a_row_that_ended_is_given_another_request_and_the_others_go_on(hybrid, fitted_for, kind):
    """What comes of each is what it comes to alone, penalties and noise included."""
    costs = Costs(((1, 1.0), (2, 1.0), (4, 1.01)), (0.01, 0.01), 0.01)
    drafter: Any = {
        "eagle3": eagle3(fitted_for(hybrid), chain_plan(3)),
        "auto": AutoDrafter(fitted_for(hybrid), auto_plan(1, 3, 4), costs),
    }[kind]
    drawn = SamplingParams(temperature=0.8, presence_penalty=0.5, seed=3)
    requests = [
        Request(prompt=PROMPTS[0], max_new_tokens=4),
        Request(prompt=PROMPTS[1], max_new_tokens=60),
        Request(prompt=PROMPTS[2], max_new_tokens=9, sampling=drawn),
        Request(prompt=[3, 5] * 30, max_new_tokens=12),  # its caches are larger
        Request(prompt=[7], max_new_tokens=5, sampling=drawn),
    ]
    session = open_session(hybrid, drafter, stream_every=2, min_capacity=32)
    session.start(requests[:2])
    with pytest.raises(ValueError, match="row 1 of 2 cannot be given"):
        session.admit(1, requests[2])
    found, number, waiting = {}, [0, 1], [2, 3, 4]
    while session.is_running:
        session.advance()
        for row, answer in enumerate(session.answers):
            if answer.finish_reason is not None:
                found[number[row]] = answer.tokens
                if waiting:
                    number[row] = waiting.pop(0)
                    session.admit(row, requests[number[row]])
    for place, request in enumerate(requests):
        (alone,) = serve(hybrid, None, [request])
        assert found[place] == alone.tokens


@pytest.mark.parametrize("knows", ["everything", "in waves"])
def test_max_new_tokens_is_exact_wherever_in_a_path_it_falls(hybrid, text, knows):
    drafter = oracle(text, None if knows == "everything" else known_in_waves())
    for first in (1, 6, 11):
        counts = [first + row for row in range(BATCH)]
        requests = [
            Request(prompt=prompt, max_new_tokens=count)
            for prompt, count in zip(PROMPTS, counts, strict=True)
        ]
        session = open_session(hybrid, drafter)
        session.start(requests)
        for _ in rounds_of(session):
            pass
        for answer, plain, count in zip(session.answers, text.answers, counts, strict=True):
            assert answer.tokens == plain.tokens[:count] and answer.finish_reason == "length"
        assert_plain_state(session, text)


def stop_request(text, row, place):
    """Ask row `row` to stop at a place, by its token; returns the request and where it will."""
    stop = text.answers[row].tokens[place]
    first = text.answers[row].tokens.index(stop)
    return Request(prompt=PROMPTS[row], max_new_tokens=40, stop_ids=(63, stop)), first + 1


def test_a_stop_token_ends_its_own_row_wherever_in_a_path_it_is(hybrid, text):
    seen = set()
    for place in range(7, 7 + DEPTH + 1):
        requests, ends = zip(
            *(stop_request(text, row, place + row) for row in range(BATCH)), strict=True
        )
        session = open_session(hybrid, oracle(text))
        session.start(requests)
        for _ in rounds_of(session):
            pass
        for row, (answer, end) in enumerate(zip(session.answers, ends, strict=True)):
            plain = text.answers[row].tokens
            if 63 in plain[:end]:
                end = plain.index(63) + 1
            assert answer.tokens == plain[:end] and answer.finish_reason == "stop"
            assert len(answer.is_drafted) == len(answer.logprobs) == end
            seen.add((end - 1) % (DEPTH + 1))  # with everything known, the place in its round
        assert_plain_state(session, text)
    assert seen == set(range(DEPTH + 1))


def test_the_stop_tokens_of_one_row_do_not_stop_another(hybrid, text):
    requests = greedy_requests(30)
    common = text.answers[2].tokens[4]
    requests[2] = dataclasses.replace(requests[2], stop_ids=[common])
    requests[4] = dataclasses.replace(requests[4], stop_ids=range(60, 64))
    answers = serve(hybrid, oracle(text), requests)
    for row in (0, 1, 3):
        assert answers[row].tokens == text.answers[row].tokens[:30]
        assert common in answers[row].tokens or row != 1
    assert answers[2].tokens == text.answers[2].tokens[: text.answers[2].tokens.index(common) + 1]
    assert answers[2].finish_reason == "stop"


def test_a_stop_token_that_is_drafted_and_rejected_ends_nothing(hybrid, text):
    # The wrong siblings, and what stands for the unknown, are the right token plus 1 and plus 2.
    requests = []
    for row, prompt in enumerate(PROMPTS):
        tokens = text.answers[row].tokens[:30]
        drafted = {(t + 1) % 64 for t in tokens} | {(t + 2) % 64 for t in tokens}
        stops = sorted(drafted - set(tokens))
        assert len(stops) >= 1
        requests.append(Request(prompt=prompt, max_new_tokens=30, stop_ids=stops[:4]))
    answers = serve(hybrid, oracle(text, known_in_waves()), requests)
    for answer, plain in zip(answers, text.answers, strict=True):
        assert answer.tokens == plain.tokens[:30] and answer.finish_reason == "length"


def test_chunks_add_up_to_the_answers_and_the_counts_to_the_rounds(hybrid, text):
    session = open_session(hybrid, oracle(text, known_in_waves()))
    session.start(greedy_requests(37))
    tokens, rounds = [[] for _ in PROMPTS], [0] * BATCH
    while session.is_running:
        for chunk in session.advance():
            assert 1 <= len(chunk.tokens) == len(chunk.is_drafted) == len(chunk.logprobs)
            tokens[chunk.row] += chunk.tokens
            rounds[chunk.row] += 1
    assert session.advance() == []
    for row, answer in enumerate(session.answers):
        assert answer.tokens == tokens[row] and answer.rounds == rounds[row]
        assert answer.acceptance_length == 37 / rounds[row]
        accepted = (np.arange(DEPTH + 1) * answer.histogram).sum()
        assert sum(answer.is_drafted) == accepted
        # Each round brings its accepted tokens and one more, unless a drafted one was the last.
        assert 37 - rounds[row] <= accepted <= 37 - rounds[row] + 1
        reached = [answer.histogram[n:].sum() for n in range(DEPTH + 1)]
        expected = [b / a for a, b in zip(reached, reached[1:], strict=False) if a]
        assert answer.acceptance_by_depth == pytest.approx(expected)


def test_an_oracle_needs_as_few_rounds_as_there_can_be(hybrid, text):
    answers = serve(hybrid, oracle(text), greedy_requests(500))
    assert_same_text(answers, text)
    assert [answer.rounds for answer in answers] == [-(-500 // (DEPTH + 1))] * BATCH


@pytest.mark.parametrize("seconds, brought", [(0.0, [8, 1, 1]), (float("inf"), [8, 32, 32])])
def test_visits_come_by_the_clock_and_after_so_many_rounds_at_most(hybrid, seconds, brought):
    session = open_session(hybrid, None, stream_every=32, visit_seconds=seconds)
    session.start(greedy_requests(100))
    found = [{len(chunk.tokens) for chunk in session.advance()} for _ in brought]
    assert found == [{count} for count in brought]


def test_a_visit_in_which_all_rows_end_says_nothing_of_the_pace(hybrid):
    session = open_session(hybrid, None, stream_every=32, visit_seconds=float("inf"))
    session.start(greedy_requests(2))
    finish(session)
    session.start(greedy_requests(20))
    assert {len(chunk.tokens) for chunk in session.advance()} == {8}


def chat(target, drafter, keep):
    """Hold five turns in every row; returns what each turn said and found in the caches."""
    rng = np.random.default_rng(0)
    session = open_session(target, drafter, stream_every=8)
    talk, said = [list(prompt) for prompt in PROMPTS], []
    for turn in range(5):
        if not keep:
            session = open_session(target, drafter, stream_every=8)
        requests = [
            Request(prompt=prompt, max_new_tokens=5 + 3 * row + turn, stop_ids=(7, 42))
            for row, prompt in enumerate(talk)
        ]
        reused = session.start(requests)
        finish(session)
        said.append((reused, session.answers))
        for row, answer in enumerate(session.answers):
            talk[row] += answer.tokens + rng.integers(0, 64, 1 + 4 * row + turn).tolist()
    return said


def test_five_turns_with_the_caches_kept_are_those_from_scratch(hybrid, fitted_for):
    """Also round by round: the draft remembers the same as well."""
    drafter = eagle3(fitted_for(hybrid), chain_plan(4))
    held = 0
    for (kept, found), (none, expected) in zip(
        chat(hybrid, drafter, True), chat(hybrid, drafter, False), strict=True
    ):
        assert none == 0 and (kept > held or held == 0)
        held = kept
        for answer, wanted in zip(found, expected, strict=True):
            assert answer.tokens == wanted.tokens
            assert answer.finish_reason == wanted.finish_reason
            assert answer.histogram.tolist() == wanted.histogram.tolist()
            assert_close(np.array(answer.logprobs), np.array(wanted.logprobs))
    assert held > sum(map(len, PROMPTS))


def test_caches_that_do_not_hold_the_beginning_of_every_prompt_are_left(hybrid, text):
    session = open_session(hybrid, oracle(text))
    assert session.start(greedy_requests(12)) == 0
    finish(session)
    longer = [p + a.tokens[:9] for p, a in zip(PROMPTS, session.answers, strict=True)]
    assert session.start(greedy_requests(6, longer)) == 0  # the caches hold 11 tokens of an answer
    finish(session)
    for answer, plain in zip(session.answers, text.answers, strict=True):
        assert answer.tokens == plain.tokens[9:15]
    held = [p + a.tokens for p, a in zip(longer, session.answers, strict=True)]
    assert session.start(greedy_requests(6, held)) == sum(map(len, held)) - BATCH
    finish(session)
    held = [p + a.tokens for p, a in zip(held, session.answers, strict=True)]
    held[1][-1] = (held[1][-1] + 1) % 64  # the draft has been told of another token
    assert session.start(greedy_requests(6, held)) == 0


def test_an_answer_cut_by_the_host_is_continued_from_what_was_kept(hybrid, text):
    session = open_session(hybrid, oracle(text))
    session.start(greedy_requests(30))
    session.advance()
    session.advance()
    session.stop(3, keep=7, reason="cancelled")
    finish(session)
    cut = session.answers[3]
    assert (cut.finish_reason, cut.tokens) == ("cancelled", text.answers[3].tokens[:7])
    assert len(cut.logprobs) == len(cut.is_drafted) == 7
    for row in (0, 1, 2, 4):
        assert session.answers[row].tokens == text.answers[row].tokens[:30]
    prompts = [p + a.tokens for p, a in zip(PROMPTS, session.answers, strict=True)]
    session.start(greedy_requests(5, prompts))
    finish(session)
    for row, start in enumerate((30, 30, 30, 7, 30)):
        assert session.answers[row].tokens == text.answers[row].tokens[start : start + 5]


def test_the_size_of_a_prefill_chunk_changes_nothing(hybrid, text):
    answers = serve(hybrid, None, greedy_requests(20), prefill_chunk=1000)
    assert_same_text(answers, text, 20)


# Growth and the end of the draft, on a target of one layer: every capacity is compiled for.

DRAFTED = 64  # positions that the draft was made for: its caches are then full to the end


def test_caches_double_and_the_draft_is_left_behind_without_a_trace(caplog):
    """One compilation for each capacity and one without the draft, and none after warm-up."""
    one_layer = dataclasses.replace(LLAMA, num_hidden_layers=1, layer_types=("full_attention",))
    target = random_model(one_layer)
    prompt = np.random.default_rng(1).integers(0, 64, 20).tolist()
    request = Request(prompt=prompt, max_new_tokens=100, stop_ids=range(6))
    drafter = eagle3(random_draft(target, max_position_embeddings=DRAFTED), chain_plan(2))

    def run(drafter, capacity):
        session = open_session(target, drafter, min_capacity=capacity, stream_every=4)
        session.start([request])
        seen, answer = [], session.answers[0]
        while session.is_running:
            rounds, held = answer.rounds, len(prompt) + len(answer.tokens)
            session.advance()
            assert session._state is not None
            cache, draft = session._state.cache.layers[0], session._state.draft
            assert isinstance(cache, KVCache)
            seen.append((cache.k.shape[2], draft != ()))
            if draft != ():
                assert draft.cache.k.shape[2] == cache.k.shape[2]
                # Even if all is accepted, three tokens a round, the draft has room for it.
                assert held + 3 * (answer.rounds - rounds) <= DRAFTED
        return answer, seen

    compiled = cast(Any, run_rounds)._cache_size
    before = compiled()
    with caplog.at_level(logging.WARNING):
        answer, seen = run(drafter, 32)
    notices = [r.getMessage() for r in caplog.records if r.name.startswith("eagle3")]
    assert len(notices) == 1 and f"{DRAFTED} positions" in notices[0] and "120" in notices[0]
    assert list(dict.fromkeys(seen)) == [(32, True), (64, True), (128, False)]
    assert len(answer.tokens) == 100 and compiled() == before + 3
    again, _ = run(drafter, 32)
    assert again.tokens == answer.tokens and compiled() == before + 3
    plain, _ = run(None, 128)
    assert plain.tokens == answer.tokens and compiled() == before + 3
    assert_close(np.array(answer.logprobs), np.array(plain.logprobs))


def test_capacities_are_few_and_end_with_the_positions_of_the_target(hybrid):
    session = open_session(hybrid, None, min_capacity=32, growth=4)
    assert [session._bucket(n) for n in (1, 32, 33, 128, 129)] == [32, 32, 128, 128, 512]
    assert session._bucket(513) == hybrid.cfg.max_position_embeddings == 1024  # not 2048
    with pytest.raises(ValueError, match="growth is 1"):
        open_session(hybrid, None, growth=1)


def test_a_draft_stays_while_no_row_outgrows_it_however_long_another_goes_on(hybrid):
    drafter = eagle3(random_draft(hybrid, max_position_embeddings=20), chain_plan(4))
    session = open_session(hybrid, drafter, stream_every=8, min_capacity=16)
    long, short = Request(prompt=[1] * 16, max_new_tokens=2), Request(prompt=[2] * 3)
    session.start([long, dataclasses.replace(short, max_new_tokens=12)])
    assert session._plan_visit([0, 1]) == 8 and session._active is drafter
    assert session._capacity == 32  # not for 16 tokens and 12 more
    session.start([long, dataclasses.replace(short, max_new_tokens=40)])
    # Three rounds of five tokens fit the shorter row; the longer one ends before it is too long.
    assert session._plan_visit([0, 1]) == 3 and session._active is drafter
    session._held[1] += [2] * 14
    session._plan_visit([1])
    assert session._active is not drafter


def test_a_batch_that_left_its_draft_behind_or_would_is_given_nothing_more(hybrid):
    drafter = eagle3(random_draft(hybrid, max_position_embeddings=20), chain_plan(2))
    session = open_session(hybrid, drafter, min_capacity=16)
    requests = [Request(prompt=[1] * 4, max_new_tokens=n) for n in (2, 40)]
    session.start(requests)
    session.advance()
    assert session.can_admit(requests[0])
    long = Request(prompt=[1] * 21, max_new_tokens=2)
    assert not session.can_admit(long)
    with pytest.raises(ValueError, match="row 0 of 2 cannot be given"):
        session.admit(0, long)
    while session.is_running:
        session.advance()
    assert not session.can_admit(requests[0])  # the second row became too long
    session.start(requests)
    assert session.can_admit(requests[0])
    session.start(requests[:1])
    assert not session.can_admit(requests[0])


def test_an_interrupted_growth_leaves_no_caches_to_go_on_with(hybrid, monkeypatch):
    session = open_session(hybrid, None, min_capacity=16)
    session.start([Request(prompt=[1] * 16, max_new_tokens=20)])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle3.decoding.session._grow_target", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.advance()
    with pytest.raises(ValueError, match="start again"):
        session.advance()


def test_logits_that_are_no_numbers_are_an_error_and_not_a_text(hybrid):
    broken = random_model(hybrid.cfg)
    broken.norm.weight[...] = broken.norm.weight[...].at[3].set(np.nan)
    session = open_session(broken, None)
    session.start(greedy_requests(12))
    with pytest.raises(ValueError, match="logits are not numbers"):
        session.advance()


def test_an_interrupted_round_leaves_no_caches_to_go_on_with(hybrid, text, monkeypatch):
    session = open_session(hybrid, oracle(text))
    session.start(greedy_requests(12))
    session.advance()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("eagle3.decoding.session.run_rounds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.advance()
    with pytest.raises(ValueError, match="start again"):
        session.advance()
    prompts = [p + a.tokens for p, a in zip(PROMPTS, session.answers, strict=True)]
    assert session.start(greedy_requests(6, prompts)) == 0
    finish(session)
    for answer, plain in zip(session.answers, text.answers, strict=True):
        assert answer.tokens == plain.tokens[6:12]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [64]}, "token 64 is outside the vocabulary of 64"),
        ({"prompt": [-1]}, "token -1 is outside"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"stop_ids": [64]}, "token 64 is outside"),
        ({"stop_ids": [-1]}, "token -1 is outside"),
        ({"max_new_tokens": 1025 - 4}, "more than the 1024 positions"),
        ({"sampling": SamplingParams(logit_bias=((64, 1.0),))}, "logit_bias names token 64"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_changes_nothing(hybrid, change, message):
    good = Request(prompt=[1, 2, 3, 4], max_new_tokens=5)
    session = open_session(hybrid, None)
    session.start([good])
    before = jax.tree.map(np.array, session._state)
    bad = dataclasses.replace(good, **change)
    with pytest.raises(ValueError, match=message):
        session.start([bad])
    with pytest.raises(ValueError, match=f"(request 1: )?.*{message}"):
        session.start([good, bad])
    assert_same_bits(session._state, before)
    assert len(session.answers) == 1
    with pytest.raises(ValueError, match="no requests"):
        session.start([])


@pytest.mark.parametrize("option", ["stream_every", "prefill_chunk", "min_capacity"])
def test_an_option_out_of_range_is_refused(hybrid, option):
    with pytest.raises(ValueError, match=f"{option} is 0"):
        Session(hybrid, **cast(Any, {option: 0}))


def test_a_draft_of_another_target_is_refused(hybrid):
    other = random_model(dataclasses.replace(LLAMA, vocab_size=65))
    with pytest.raises(ValueError, match="does not fit the target: vocab_size is 65"):
        Session(hybrid, eagle3(random_draft(other), chain_plan(2)))
