"""Claims about which candidates become text: against the accept-or-resample rule, written plainly.

`sequential_rule` is the specification, from SpecInfer and EAGLE: children one after another, each
accepted with its probability in what the ones before have left.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, expected_probabilities, float32

from eagle3.decoding import sampling
from eagle3.decoding.accept import Accepted, Limits, accept
from eagle3.decoding.sampling import SamplingParams, batch_sampling
from eagle3.decoding.tree import Proposal

VOCAB, DEPTH = 5, 3
# Node by node: the parent, and the token. Siblings are distinct; depth 3 is reached twice.
PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 6)
TOKENS = (2, 1, 4, 0, 1, 3, 4, 2, 1, 0)
PROMPT, ANSWER = [2, 0, 2], [2, 4]  # the root is the last of the answer so far


def sequential_rule(logits, params, answer=(), node=0):
    """Return {tokens of the round: probability} by the rule that is applied child after child."""
    rest = expected_probabilities(logits[node], params, PROMPT, [*ANSWER, *answer])
    reached, outcomes = 1.0, defaultdict(float)
    for child in np.flatnonzero(np.array(PARENTS) == node).tolist():
        token = TOKENS[child]
        accepted = rest[token] / rest.sum()
        if accepted > 0:
            further = sequential_rule(logits, params, (*answer, token), child)
            for tokens, probability in further.items():
                outcomes[tokens] += reached * accepted * probability
        reached *= 1 - accepted
        rest[token] = 0
        if rest.sum() == 0:
            return outcomes
    for token in np.flatnonzero(rest):
        outcomes[(*answer, int(token))] += reached * rest[token] / rest.sum()
    return outcomes


compiled: Callable[..., Accepted] = jax.jit(accept, static_argnames=("depth",))


def accept_rows(logits, params, answers=None, run: Callable = compiled, **limits):
    """Run `accept` on the tree above for rows that differ in `params`, or in the limits."""
    batch = len(params)
    answers = [ANSWER] * batch if answers is None else answers
    counts = np.zeros((batch, VOCAB), np.int32)
    for row, answer in zip(counts, answers, strict=True):
        np.add.at(row, answer, 1)
    stops = limits.get("stop_ids", [[-1]] * batch)
    most = limits.get("max_new_tokens", [99] * batch)
    running = limits.get("is_running", [True] * batch)
    proposal = Proposal(*(jnp.tile(jnp.array(x), (batch, 1)) for x in (TOKENS, PARENTS)))
    return run(
        jnp.broadcast_to(jnp.asarray(logits), (batch, len(TOKENS), VOCAB)),
        proposal, DEPTH, batch_sampling(params, [PROMPT] * batch, VOCAB),
        Limits(jnp.array(stops), jnp.array(most)), jnp.array(running),
        jnp.array([len(answer) for answer in answers]), jnp.asarray(counts),
    )  # fmt: skip


def python_loop(more, step, state):
    """Stand in for `jax.lax.while_loop`."""
    while more(state):
        state = step(state)
    return state


def implemented(logits, params, monkeypatch):
    """Return {tokens of the round: probability} of `accept`, exactly.

    Every possible sequence of draws is played, a row each; its probability is the product of what
    the draws were made from.
    """
    scripts = np.array(list(itertools.product(range(VOCAB), repeat=DEPTH + 1)), np.int32)
    shares = []

    def scripted(weights, noise):
        weights = np.asarray(weights, np.float64)
        step = len(shares)
        p = weights / weights.sum(axis=1, keepdims=True)
        shares.append(p[np.arange(len(scripts)), scripts[:, step]])
        return jnp.asarray(scripts[:, step])

    rows = batch_sampling([params], [PROMPT], VOCAB)
    same = jax.tree.map(lambda x: jnp.repeat(x, len(scripts), axis=0), rows)
    monkeypatch.setattr("test_accept.batch_sampling", lambda *_: same)
    monkeypatch.setattr(sampling, "draw", scripted)
    monkeypatch.setattr(jax.lax, "while_loop", python_loop)  # so that the shares are numbers
    out = accept_rows(logits, [params] * len(scripts), run=accept)
    outcomes = {}
    for row, count in enumerate(np.asarray(out.count)):
        tokens = tuple(np.asarray(out.tokens)[row, :count].tolist())
        probability = float(np.prod([share[row] for share in shares[:count]]))
        assert outcomes.setdefault(tokens, probability) == pytest.approx(probability)
    return {tokens: p for tokens, p in outcomes.items() if p > 0}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.0, repetition_penalty=1.8),
        SamplingParams(temperature=1.0, presence_penalty=0.9, frequency_penalty=0.6),
        SamplingParams(
            temperature=0.9, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=0.7,
            presence_penalty=-0.5, frequency_penalty=0.8, logit_bias=((1, 1.5), (3, -0.5)),
        ),
    ],
)  # fmt: skip
def test_a_round_has_the_joint_distribution_of_accepting_and_resampling_child_by_child(
    params, monkeypatch
):
    logits = float32(1.5 * np.random.default_rng(2).standard_normal((len(TOKENS), VOCAB)))
    expected = sequential_rule(logits, params)
    found = implemented(logits, params, monkeypatch)
    assert sum(expected.values()) == pytest.approx(1) and len(expected) > 6
    assert max(map(len, expected)) == DEPTH + 1
    assert set(found) == set(expected)
    for tokens, probability in expected.items():
        assert found[tokens] == pytest.approx(probability, rel=1e-4), tokens


def likely(path):
    """Return logits that make greedy decoding take `path`, a token after each node it visits."""
    logits = float32(np.random.default_rng(1).standard_normal((len(TOKENS), VOCAB)))
    node = 0
    for token in path:
        logits[node, token] = 5.0
        children = [
            n
            for n, (p, t) in enumerate(zip(PARENTS, TOKENS, strict=True))
            if (p, t) == (node, token)
        ]
        node = children[0] if children else -1
    return logits


GREEDY = SamplingParams()
FULL = (4, 4, 0, 3)  # three drafted tokens, down nodes 2, 6, 9, and a bonus


def test_greedy_accepts_the_path_of_the_most_likely_tokens_and_adds_one():
    for path, nodes in (
        (FULL, [0, 2, 6, 9]),
        ((1, 1, 2, 2), [0, 1, 4, 7]),
        ((1, 3, 0), [0, 1, 5]),
        ((0, 0), [0, 3]),
        ((3,), [0]),
    ):
        out = accept_rows(likely(path), [GREEDY])
        count = len(path)
        assert out.count.tolist() == [count] and out.tokens[0, :count].tolist() == list(path)
        assert out.path[0].tolist() == nodes + [-1] * (DEPTH + 1 - count)
        assert out.is_drafted[0].tolist() == [True] * (count - 1) + [False] * (DEPTH + 2 - count)
        assert out.is_running.tolist() == [True]
        logits = likely(path)[nodes]
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = log_p[np.arange(count), path]
        assert_close(out.logprobs[0, :count], expected)


def test_the_round_ends_with_a_stop_token_or_the_last_token_asked_for_wherever_it_is():
    logits = likely(FULL)
    for place, stop in ((1, 4), (3, 0), (4, 3)):  # tokens of the round, and the stop among them
        out = accept_rows(logits, [GREEDY] * 2, stop_ids=[[-1, stop], [-1, -1]])
        assert out.count.tolist() == [place, 4] and out.is_running.tolist() == [False, True]
        assert (np.asarray(out.path)[0] >= 0).sum() == place
        assert out.tokens[0].tolist() == list(FULL[:place]) + [0] * (4 - place)
    most = [len(ANSWER) + n for n in (1, 2, 3, 4, 5)]
    out = accept_rows(logits, [GREEDY] * 5, max_new_tokens=most)
    assert out.count.tolist() == [1, 2, 3, 4, 4]
    assert out.is_running.tolist() == [False] * 4 + [True]
    # The token that ends the row was drafted all the same, unless it is the bonus.
    assert np.asarray(out.is_drafted).sum(axis=1).tolist() == [1, 2, 3, 3, 3]


def test_a_row_that_waits_for_the_others_of_its_round_does_not_end_meanwhile():
    logits = np.stack([likely((3,)), likely(FULL)])
    out = accept_rows(logits, [GREEDY] * 2, max_new_tokens=[len(ANSWER) + 2, 99])
    assert out.count.tolist() == [1, 4] and out.is_running.tolist() == [True, True]


def test_a_stop_token_that_is_drafted_but_not_chosen_ends_nothing():
    out = accept_rows(likely(FULL), [GREEDY], stop_ids=[[1]])  # nodes 1, 4 and 8
    assert out.count.tolist() == [4] and out.is_running.tolist() == [True]


def test_a_row_that_has_ended_gets_nothing_and_counts_nothing():
    sampled = SamplingParams(temperature=1.0, frequency_penalty=0.5)
    out = accept_rows(likely(FULL), [sampled, GREEDY], is_running=[False, True])
    assert out.count.tolist() == [0, 4] and out.is_running.tolist() == [False, True]
    assert (np.asarray(out.path)[0] == -1).all()
    before, after = np.bincount(ANSWER, minlength=VOCAB), np.asarray(out.counts)
    np.testing.assert_array_equal(after[0], before)
    np.testing.assert_array_equal(after[1], before + np.bincount(FULL, minlength=VOCAB))


def test_rows_with_their_own_parameters_do_as_each_alone():
    rng = np.random.default_rng(3)
    logits = float32(rng.standard_normal((len(TOKENS), VOCAB)))
    params = [
        GREEDY,
        SamplingParams(temperature=1.5, seed=3),
        SamplingParams(frequency_penalty=2.0),
        SamplingParams(temperature=0.8, top_p=0.7, repetition_penalty=1.4, seed=4),
        SamplingParams(temperature=2.0, top_k=2, min_p=0.3, presence_penalty=1.0, seed=5),
        SamplingParams(logit_bias=((3, 4.0),)),
    ]
    answers = [ANSWER, [3], [], [0, 1, 1, 2, 3], ANSWER, [4, 4, 4]]
    together = accept_rows(logits, params, answers)
    for row, p in enumerate(params):
        alone = accept_rows(logits, [p], [answers[row]])
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_allclose(np.asarray(x)[row], np.asarray(y)[0], rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_that_contains_another_accepts_all_that_the_other_does(temperature):
    """Also a chain in a tree, and also when sampling, as both look at the same draws."""
    rng, batch, size, vocab = np.random.default_rng(4), 300, 12, 4
    parents = np.full((batch, size), -1, np.int32)
    tokens = np.zeros((batch, size), np.int32)
    for row in range(batch):
        free = [(0, t) for t in range(vocab)]
        for node in range(1, size):
            parents[row, node], tokens[row, node] = free.pop(rng.integers(len(free)))
            free += [(node, t) for t in range(vocab)]
    # Parents come first, so the first nodes of a tree are a tree; the rest hang on nothing.
    counts = []
    logits = float32(rng.standard_normal((batch, size, vocab)))
    params = [SamplingParams(temperature=temperature, seed=row) for row in range(batch)]
    rows = batch_sampling(params, [[0]] * batch, vocab)
    limits = Limits(jnp.full((batch, 1), -1), jnp.full(batch, 99))
    texts = []
    for nodes in (1, 3, 7, size):
        smaller = np.where(np.arange(size) < nodes, parents, -1)
        proposal = Proposal(jnp.asarray(tokens), jnp.asarray(smaller))
        out = compiled(
            jnp.asarray(logits), proposal, size - 1, rows, limits,
            jnp.ones(batch, bool), jnp.zeros(batch, jnp.int32), None,
        )  # fmt: skip
        counts.append(np.asarray(out.count))
        texts.append(np.asarray(out.tokens))
    assert (counts[0] == 1).all() and counts[-1].mean() > counts[1].mean() + 0.2
    for less, more, text, longer in zip(counts, counts[1:], texts, texts[1:], strict=False):
        assert (less <= more).all()
        for row in range(batch):
            np.testing.assert_array_equal(text[row, : less[row]], longer[row, : less[row]])
