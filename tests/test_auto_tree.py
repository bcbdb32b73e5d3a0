"""Claims about trees that adapt: what is chosen for which costs, and that the text stays the same.

Costs are made up. They are arrays to the compiled loop, so one compilation serves all of them.
"""

import itertools
import json
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    PROMPTS,
    assert_close,
    assert_same_text,
    eagle3,
    finish,
    float32,
    greedy_requests,
    open_session,
    random_draft,
    serve,
)

from eagle3.config import ConfigError, DecodeConfig
from eagle3.config_reader import read_config
from eagle3.decoding.auto import AutoDrafter
from eagle3.decoding.choice import (
    CELLS,
    EXTRA,
    LOOK,
    MAX_REST,
    MIN_REST,
    Prices,
    after_look,
    best_size,
    calibrated,
    cell_of,
    expected_tokens,
    first_pace,
    forget,
    learn,
    next_width,
    no_knowledge,
    saw_level,
)
from eagle3.decoding.costs import CostBook, Costs, sizes_of, worth_offering
from eagle3.decoding.drafter import Eagle3State, NoDraft
from eagle3.decoding.generate import make_drafter
from eagle3.decoding.measure import measure_costs
from eagle3.decoding.pending import BLOCK, read_all
from eagle3.decoding.request import Request
from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.tree import Pool, auto_plan, best_first, chain_plan, path_sums

PLAN = auto_plan(top_k=2, max_depth=3, max_nodes=4)
SIZES = (1, 2, 4)
FLAT = Costs(((1, 1.0), (2, 1.0), (4, 1.0)), (1e-6, 1e-6), 1e-6)
LINEAR = Costs(((1, 1.0), (2, 2.0), (4, 4.0)), (0.1, 0.1), 0.1)
USUAL = Costs(((1, 1.0), (2, 1.1), (4, 1.4)), (0.1, 0.12), 0.05)
TOKENS = 100


@pytest.fixture(scope="module")
def text(text_of, hybrid):
    return text_of(hybrid)


@pytest.fixture(scope="module")
def decoded(hybrid, fitted_for, text):
    """Decode with made-up costs and a draft that knows three of five texts; the ended session."""

    def run(costs, requests=None, draft=None):
        drafter = AutoDrafter(draft or fitted_for(hybrid), PLAN, costs)
        session = open_session(hybrid, drafter)
        session.start(greedy_requests(TOKENS) if requests is None else requests)
        finish(session)
        return session

    return run


def state_of(session):
    """Return the drafter's state."""
    assert session._state is not None
    return session._state.draft


# What is chosen


def test_if_nodes_cost_nothing_the_largest_tree_is_verified_in_every_round(decoded, text):
    session = decoded(FLAT)
    rounds = max(answer.rounds for answer in session.answers)
    assert session.chosen[:3] == ({4: rounds}, {3: rounds}, rounds)
    assert_same_text(session.answers, text, TOKENS)
    assert max(answer.acceptance_length for answer in session.answers) > 2


def test_if_nodes_cost_as_much_as_tokens_nothing_is_drafted(decoded, text):
    session = decoded(LINEAR)
    looks = EXTRA + 3 * LOOK  # in rounds 0-9, 26-31 and 64-69
    assert session.chosen[:3] == ({1: TOKENS}, {0: TOKENS}, looks)
    assert session.chosen.seconds == pytest.approx(TOKENS * 1.0 + looks * LINEAR.absorb)
    assert_same_text(session.answers, text, TOKENS)


def test_trees_adapt_to_usual_costs_and_the_text_stays_the_same(decoded, text):
    session = decoded(USUAL)
    assert len(session.chosen.sizes) > 1 and len(session.chosen.depths) > 1
    assert session.chosen.asked > 30
    assert_same_text(session.answers, text, TOKENS)


def test_a_draft_that_is_wrong_is_given_up_after_some_rounds(decoded, text, hybrid, fitted_for):
    draft = random_draft(hybrid, draft_vocab_size=fitted_for(hybrid).cfg.draft_vocab_size)
    session = decoded(USUAL, draft=draft)
    assert session.chosen.sizes[1] > 0.7 * TOKENS  # the first look believes what it says
    assert_same_text(session.answers, text, TOKENS)


def test_sampled_text_is_that_of_plain_decoding(decoded, hybrid):
    params = [
        SamplingParams(temperature=0.8 + 0.1 * row, top_k=8 * (row % 2), seed=row)
        for row in range(len(PROMPTS))
    ]
    requests = [
        Request(prompt=prompt, max_new_tokens=40 + row, sampling=p)
        for row, (prompt, p) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    session, plain = decoded(USUAL, requests), serve(hybrid, None, requests)
    assert session.chosen.sizes.keys() - {1}
    for answer, expected in zip(session.answers, plain, strict=True):
        assert answer.tokens == expected.tokens
        assert_close(np.array(answer.logprobs), np.array(expected.logprobs))


def test_the_same_batch_again_starts_from_what_was_learned(decoded, text):
    session = decoded(USUAL)
    before = jax.device_get(state_of(session).knowledge)
    session.start(greedy_requests(20))
    auto = state_of(session)
    assert auto.tally.asked == 0 and auto.pace.rest == 0
    np.testing.assert_array_equal(auto.knowledge.claimed, before.claimed)
    finish(session)
    assert_same_text(session.answers, text, 20)


def test_what_waits_to_be_absorbed_ends_where_absorbing_at_once_does(decoded, hybrid, fitted_for):
    """Also over the border of a block, and with rows of different lengths."""
    requests = [
        Request(prompt=prompt, max_new_tokens=BLOCK + 2 + 3 * row)
        for row, prompt in enumerate(PROMPTS)
    ]
    eager = open_session(hybrid, eagle3(fitted_for(hybrid), chain_plan(4)))
    eager.start(requests)
    finish(eager)
    lengths = [len(p) + BLOCK + 1 + 3 * row for row, p in enumerate(PROMPTS)]
    for costs in (LINEAR, USUAL):
        session = decoded(costs, requests)
        auto, drafter = state_of(session), session._active
        if costs is LINEAR:
            assert (np.asarray(auto.pending.count) > 0).any()
            assert (np.asarray(auto.draft.lengths) > [len(p) for p in PROMPTS]).all()
        state, pending = jax.jit(read_all)(drafter.inner, auto.draft, auto.pending)
        assert not np.asarray(pending.count).any() and state.lengths.tolist() == lengths
        assert_close(readable(state, lengths), readable(state_of(eager), lengths))


def readable(state: Eagle3State, lengths):
    """Return what later passes read: committed keys and values, and the last output."""
    keys = [np.asarray(x)[row, :, :n] for x in state.cache for row, n in enumerate(lengths)]
    return keys, state.hidden, state.logits


# Pace and calibration


def test_probes_come_after_rests_that_double_up_to_a_limit_and_start_anew_when_one_pays():
    prices = Prices(jnp.array([1.0, 2.0]), jnp.zeros(2), jnp.float32(0))
    look = jax.jit(after_look)

    def rests(tokens, pace):
        found = []
        for _ in range(7):
            for number in range(LOOK):
                assert pace.rest == 0 and pace.looked == number
                pace = look(prices, pace, jnp.float32(tokens), jnp.float32(1.0))
            found.append(int(pace.rest))
            pace = pace._replace(rest=jnp.int32(0))
            if not found[-1]:
                break
        return found, pace

    found, pace = rests(1.0, first_pace()._replace(looked=jnp.int32(0)))
    assert found == [MIN_REST * 2**n for n in range(5)] + [MAX_REST] * 2 and MAX_REST == 256
    found, pace = rests(1.2, pace)
    assert found == [0] and pace.looked == LOOK and pace.next_rest == MIN_REST
    for _ in range(30):
        pace = look(prices, pace, jnp.float32(0.9), jnp.float32(1.0))
        if pace.rest:
            break
    assert pace.rest == MIN_REST and pace.looked == 0


def test_calibration_moves_from_what_the_draft_says_to_what_is_measured():
    rng = np.random.default_rng(0)
    knowledge, step = no_knowledge(3, SIZES), jax.jit(learn)
    said = np.array([0.95, 0.6, 0.3, 0.05])
    claims = jnp.asarray(float32(np.log(said)))[None]
    cells = cell_of(claims, jnp.arange(4), jnp.array([1, 1, 2, 2]), jnp.zeros(1, bool))

    def believed():
        return np.exp(np.asarray(calibrated(knowledge, claims, cells)[0]))

    np.testing.assert_allclose(believed(), said, rtol=1e-6)
    real = np.array([0.7, 0.2, 0.3, 0.01])
    errors = []
    for _ in range(400):
        accepted = jnp.asarray(rng.random(4) < real)[None]
        knowledge = step(forget(knowledge, 1), claims, cells, jnp.ones((1, 4), bool), accepted)
        errors.append(np.abs(believed() - real))
    errors = np.array(errors)
    assert (np.mean(errors[20:40], axis=0) < 0.6 * np.abs(said - real) + 0.1).all()
    assert (np.mean(errors[100:], axis=0) < 0.1).all()


def test_nodes_that_were_not_verified_teach_nothing():
    knowledge = no_knowledge(3, SIZES)
    claims, none = jnp.log(jnp.full((2, 5), 0.5)), jnp.zeros((2, 5), bool)
    cells = cell_of(claims, jnp.arange(5), 1, jnp.zeros(2, bool))
    assert not np.asarray(learn(knowledge, claims, cells, none, none).claimed).any()
    padded = learn(knowledge, jnp.full((2, 5), -jnp.inf), cells, ~none, none)
    assert not np.asarray(padded.claimed).any() and not np.asarray(padded.accepted).any()


def test_tokens_of_other_ranks_depths_and_rows_that_draw_are_judged_apart():
    claims = jnp.log(jnp.array([[[0.9, 0.5, 0.2, 0.05]] * 2] * 2))  # [rows, nodes, ranks]
    draws = jnp.array([False, True])
    found = [np.asarray(cell_of(claims, jnp.arange(4), depth, draws)) for depth in (1, 2, 3, 4)]
    assert np.array_equal(found[2], found[3])  # three and deeper are one kind
    cells = np.stack(found[:3])[:, :, 0]
    assert len(set(cells[..., :3].ravel())) == 3 * 2 * 3 and cells.max() < CELLS
    low = cell_of(jnp.full((1, 4), -jnp.inf), jnp.arange(4), 1, draws[:1])
    high = cell_of(jnp.zeros((1, 4)), jnp.arange(4), 9, draws[1:])
    assert low[0, 2] == low[0, 3] and 0 <= int(low.min()) and int(high.max()) == CELLS - 1


# The best choice


def random_pool(rng, depth=2, k=2):
    """Return candidates of `depth` levels, each child of a random node of the level above."""
    ids, scores, parents = [], [], []
    above = [(-1, 0.0)]
    for _ in range(depth):
        level = []
        for parent, score in above[:2]:
            for log_q in -rng.exponential(1.0, k):
                level.append((len(ids), score + log_q))
                ids.append(int(rng.integers(64)))
                scores.append(score + log_q)
                parents.append(parent)
        above = sorted(level, key=lambda node: -node[1])
    return np.array(ids), np.array(scores), np.array(parents)


def brute_force(scores, parents, rate, costs):
    """Return the largest tokens - rate * seconds of all trees of the sizes there are."""
    best = -np.inf
    for size, seconds in costs.items():
        for nodes in itertools.combinations(range(len(scores)), size - 1):
            if all(parents[n] < 0 or parents[n] in nodes for n in nodes):
                best = max(best, 1 + np.exp(scores[list(nodes)]).sum() - rate * seconds)
    return best


def test_the_chosen_size_is_the_best_of_all_trees():
    rng = np.random.default_rng(1)
    running = jnp.ones(1, bool)
    for _ in range(20):
        _, scores, parents = random_pool(rng)
        seconds = np.cumsum(rng.random(3) * [1, 0.3, 0.3]) + 0.5
        costs = dict(zip((1, 2, 4), seconds, strict=True))
        rate = float(rng.random() * 2)
        prices = Prices(jnp.asarray(float32(seconds)), jnp.zeros(2), jnp.float32(0))
        pool = jnp.asarray(float32(scores))[None]
        tokens = expected_tokens(pool, running, (1, 2, 4))
        size, value = best_size(prices, jnp.float32(rate), tokens, jnp.float32(0))
        assert value == pytest.approx(brute_force(scores, parents, rate, costs), abs=1e-5)
        assert value == pytest.approx(float(tokens[size]) - rate * seconds[size], abs=1e-5)


def test_at_its_own_rate_no_other_choice_of_sizes_brings_more_tokens_a_second():
    rng = np.random.default_rng(2)
    seconds = np.array([1.0, 1.3, 1.5, 2.2])
    tokens = 1 + np.sort(rng.random((5, 4)), axis=1) * [0, 0.8, 2, 3]  # of five kinds of rounds
    prices = Prices(jnp.asarray(float32(seconds)), jnp.zeros(2), jnp.float32(0))
    rate = 1.0
    for _ in range(10):
        picks = [
            int(best_size(prices, jnp.float32(rate), jnp.asarray(float32(t)), jnp.float32(0))[0])
            for t in tokens
        ]
        rate = tokens[np.arange(5), picks].sum() / seconds[picks].sum()
    others = itertools.product(range(4), repeat=5)
    best = max(tokens[np.arange(5), list(p)].sum() / seconds[list(p)].sum() for p in others)
    assert rate == pytest.approx(best)


def test_a_level_is_drafted_if_what_such_levels_bring_is_worth_its_time():
    sizes = (1, 2, 4, 8)
    knowledge, index = no_knowledge(3, sizes), jnp.int32(1)
    prices = Prices(jnp.ones(4), jnp.array([0.2, 0.3]), jnp.float32(0))
    tokens, most = jnp.array([1.0, 1.4, 1.5, 1.5]), jnp.array(sizes, jnp.float32)

    def width(knowledge, narrow, wide, rate=1.0):
        offer = jnp.array([narrow, wide], jnp.float32)
        rest = (jnp.float32(rate), index, offer, tokens, jnp.float32(0), most)
        return int(next_width(knowledge, prices, *rest))

    assert [width(knowledge, *x) for x in ((0.1, 0.15), (0.3, 0.35), (0.3, 0.6))] == [0, 1, 2]
    assert width(knowledge, 0.3, 0.35, rate=2.0) == 0
    gain, offer = jnp.array([0, 0, 0.1, 0.1]), jnp.array([0.5, 0.8])
    for _ in range(20):  # narrow ones have brought a fifth of what was hoped
        knowledge = saw_level(knowledge, index, 1, offer, gain)
    assert width(knowledge, 0.5, 0.55) == 2 and width(knowledge, 0.3, 0.25) == 0


def test_the_first_nodes_by_score_are_a_tree_whose_parents_come_first():
    rng = np.random.default_rng(3)
    arrays = [np.stack(x) for x in zip(*(random_pool(rng, 4) for _ in range(3)), strict=True)]
    arrays[1][2, 5:] = -np.inf  # this row was drafted less deep
    ids, scores, parents = arrays
    pool = Pool(*map(jnp.asarray, (ids, float32(scores), parents, float32(scores))))
    nodes, chosen = best_first(pool, jnp.array([1, 2, 3]), 9)
    found = np.asarray(nodes.scores)
    for row in range(3):
        order = np.argsort(-scores[row], kind="stable")[:8]
        place = {-1: 0} | {int(n): i + 1 for i, n in enumerate(order)}
        real = np.isfinite(scores[row][order])
        expected = [
            place[int(parents[row][n])] if ok else -1 for n, ok in zip(order, real, strict=True)
        ]
        assert nodes.parents[row].tolist() == [-1, *expected]
        assert (np.asarray(nodes.parents[row]) < np.arange(9)).all()
        assert nodes.tokens[row, 0] == row + 1
        assert nodes.tokens[row, 1:].tolist() == ids[row][order].tolist()
        assert chosen[row].tolist() == order.tolist()
        np.testing.assert_allclose(found[row, 1:], scores[row][order], rtol=1e-6)


def test_what_is_believed_of_a_path_is_the_sum_of_its_tokens():
    rng = np.random.default_rng(4)
    ids, scores, parents = (x[None] for x in random_pool(rng, 4))
    values = float32(rng.normal(size=scores.shape))
    sums = path_sums(
        Pool(*map(jnp.asarray, (ids, scores, parents, scores))), jnp.asarray(values), 4
    )
    for node in range(scores.size):
        expected, above = 0.0, node
        while above >= 0:
            expected, above = expected + values[0, above], int(parents[0, above])
        assert float(sums[0, node]) == pytest.approx(expected, rel=1e-5)


# Costs


def test_sizes_that_cannot_pay_and_sizes_that_a_larger_one_replaces_are_not_offered():
    rounds = ((1, 1.0), (2, 2.1), (4, 2.5), (8, 2.51), (16, 3.0), (32, 6.5))
    found = worth_offering(Costs(rounds, (0.1, 0.1), 0.1), depth=5)
    assert found.rounds == ((1, 1.0), (8, 2.51), (16, 3.0))
    assert worth_offering(Costs(rounds, (1.0, 1.0), 0.1), depth=5).rounds == ((1, 1.0),)
    assert worth_offering(LINEAR, depth=3).rounds == ((1, 1.0),)
    assert sizes_of(auto_plan(1, 5, 64)) == (1, 2, 3, 4, 6)


class Measured:
    """Stands for measuring; counts how often it was asked."""

    def __init__(self, costs=USUAL):
        self.asked, self.costs = [], costs

    def __call__(self, target, drafter, rows, slots):
        self.asked.append((rows, slots))
        return self.costs


def test_costs_are_measured_once_per_range_of_rows_and_tokens(hybrid, fitted_for, tmp_path):
    measure, draft = Measured(), AutoDrafter(fitted_for(hybrid), PLAN)
    book = CostBook(measure, folder=tmp_path / "costs")
    for batch, capacity in ((1, 256), (1, 1024), (3, 512), (4, 700), (4, 1025), (4, 4096)):
        assert book.costs(hybrid, draft, batch, capacity) == worth_offering(USUAL, 3)
    assert measure.asked == [(1, 1024), (4, 1024), (4, 4096)]
    CostBook(measure, folder=tmp_path / "costs").costs(hybrid, draft, 1, 1)
    assert len(measure.asked) == 3 and len(list((tmp_path / "costs").iterdir())) == 3
    again = CostBook(measure, recalibrate=True, folder=tmp_path / "costs")
    for _ in range(2):
        again.costs(hybrid, draft, 1, 1)
    assert len(measure.asked) == 4


def test_a_text_that_outgrows_its_caches_does_not_wait_for_measurements(
    hybrid, fitted_for, tmp_path
):
    measure = Measured()
    book = CostBook(measure, folder=tmp_path)
    drafter = AutoDrafter(fitted_for(hybrid), PLAN, book=book)
    session = open_session(hybrid, drafter)
    session.start(greedy_requests(3))
    first, rows = session._active, len(PROMPTS)
    session._make_room(1025)
    assert session._capacity == 1025  # more than the target has positions: no more than asked for
    assert session._active is first and measure.asked == [(8, 1024)]
    book.measured(hybrid, drafter, rows, 4096)
    session._make_room(1100)  # known by now
    assert isinstance(session._active, AutoDrafter) and session._active is not first
    assert measure.asked == [(8, 1024), (8, 4096)]
    recalibrating = CostBook(measure, recalibrate=True, folder=tmp_path)
    assert recalibrating.known(hybrid, drafter, rows, 4096) is None
    drafter = AutoDrafter(fitted_for(hybrid), PLAN, book=recalibrating)
    session = open_session(hybrid, drafter, is_conversation=True)
    session.start(greedy_requests(3))
    first = session._active
    recalibrating._known.clear()
    session.start([Request(prompt=[5, 6, 7], max_new_tokens=2)] * rows)  # nor do new caches wait
    assert session._active is first and measure.asked[2:] == [(8, 1024)]
    dear = Measured(LINEAR)
    CostBook(dear, recalibrate=True, folder=tmp_path).measured(hybrid, drafter, rows, 16384)
    assert isinstance(CostBook(dear, folder=tmp_path).known(hybrid, drafter, rows, 16384), Costs)
    session._drafter = AutoDrafter(fitted_for(hybrid), PLAN, book=CostBook(dear, folder=tmp_path))
    session._refit(16384)
    assert isinstance(session._active, NoDraft)


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", '{"fingerprint": 1}', "[" * 100_000, b"\xff", "no seconds", "negative",
        "infinite", "odd",
    ],
)  # fmt: skip
def test_a_file_that_is_broken_or_foreign_is_measured_anew_with_one_line(
    hybrid, fitted_for, tmp_path, caplog, content
):
    measure, draft = Measured(), AutoDrafter(fitted_for(hybrid), PLAN)
    CostBook(measure, folder=tmp_path).costs(hybrid, draft, 1, 256)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    value = json.loads(good)
    rounds: dict[Any, list] = {
        "no seconds": [[1, "x"]],
        "negative": [[1, -1.0], [2, 1.0]],
        "infinite": [[1, 1.0], [math.inf, 1.0]],
        "odd": [[1, 1.0], [7777, 1.0]],  # a size that no round has
    }
    if content in rounds:
        content = json.dumps(value | {"rounds": rounds[content]})
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING):
        CostBook(measure, folder=tmp_path).costs(hybrid, draft, 1, 256)
    lines = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    assert len(lines) == 1 and path.name in lines[0] and "\n" not in lines[0]
    assert len(measure.asked) == 2 and path.read_bytes() == good


def test_another_model_jax_or_processor_is_measured_for_itself(
    hybrid, fitted_for, tmp_path, monkeypatch
):
    measure, draft = Measured(), AutoDrafter(fitted_for(hybrid), PLAN)

    def ask(drafter=draft):
        CostBook(measure, folder=tmp_path).costs(hybrid, drafter, 1, 256)
        return len(measure.asked)

    assert (ask(), ask()) == (1, 1)
    assert ask(AutoDrafter(random_draft(hybrid, intermediate_size=32), PLAN)) == 2
    assert ask(AutoDrafter(fitted_for(hybrid), auto_plan(2, 4, 4))) == 3
    monkeypatch.setattr("eagle3.decoding.costs.processor", lambda: "another")
    assert (ask(), ask()) == (4, 4)
    monkeypatch.setattr(jax, "__version__", "0.0")
    assert ask() == 5


def test_a_folder_that_cannot_be_written_is_a_line_and_no_error(
    hybrid, fitted_for, tmp_path, caplog
):
    (tmp_path / "file").write_text("")
    book = CostBook(Measured(), folder=tmp_path / "file" / "costs")
    with caplog.at_level(logging.WARNING):
        assert book.costs(hybrid, AutoDrafter(fitted_for(hybrid), PLAN), 1, 1).rounds
    assert "not kept" in caplog.text


def test_costs_come_from_the_rounds_themselves_and_decide_what_a_session_does(
    hybrid, fitted_for, text, tmp_path
):
    plan = auto_plan(top_k=2, max_depth=2, max_nodes=2)
    drafter = AutoDrafter(fitted_for(hybrid), plan)
    costs = measure_costs(hybrid, drafter, 1, 64)
    assert [n for n, _ in costs.rounds] == [1, 2]
    assert 0 < costs.rounds[0][1] <= costs.rounds[1][1] < 1
    assert 0 < costs.levels[0] <= costs.levels[1] < 1 and 0 < costs.absorb < 1

    def book(costs):
        return CostBook(lambda *_: costs, folder=tmp_path / str(costs.absorb))

    dear = AutoDrafter(fitted_for(hybrid), PLAN, book=book(LINEAR))
    session = open_session(hybrid, dear)
    session.start(greedy_requests(3))
    assert isinstance(session._active, NoDraft) and session.chosen is None
    assert_same_text(finish(session), text, 3)
    cheap = AutoDrafter(fitted_for(hybrid), PLAN, book=book(USUAL))
    assert isinstance(cheap.fitted(hybrid, 5, 256), AutoDrafter)


def test_a_plan_that_adapts_makes_a_drafter_that_does(hybrid, fitted_for):
    draft = fitted_for(hybrid)
    drafter = make_drafter("eagle3", draft, PLAN)
    assert isinstance(drafter, AutoDrafter) and drafter.depth == 3
    proposal = drafter.propose(drafter.init_state(2, 16), jnp.array([1, 2]))
    assert proposal.tokens.shape == (2, 4)
    wrong: Any = Costs(((1, 1.0), (5, 1.0)), (0.1, 0.1), 0.1)
    with pytest.raises(ValueError, match="costs of .* 5"):
        AutoDrafter(draft, PLAN, wrong)
    config = read_config(DecodeConfig, None, ["tree={kind: auto, max_nodes: 6, max_depth: 4}"])
    assert config.tree.plan() == auto_plan(3, 4, 6) and config.tree.plan().adapts
    for field in ("max_depth", "max_nodes"):
        with pytest.raises(ConfigError, match=f"{field} is 1"):
            read_config(DecodeConfig, None, [f"tree={{kind: auto, {field}: 1}}"])
