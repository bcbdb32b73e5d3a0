"""The rules compared in benchmarks/acceptance.py: each leaves the target's distribution as it is.

By exact enumeration: every tree that can be drafted over a small vocabulary, weighted with its
probability, and every place where its path may end. And the trees that they are compared on.
"""

import importlib
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, eagle3, random_draft

from benchmarks.acceptance_rules import (
    Drafted,
    Shape,
    block,
    expected_tokens,
    picks,
    recursive,
    same_noise,
    shape,
    traversal,
)
from eagle3.decoding.request import Request
from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.tree import static_plan

VOCAB, LENGTH = 3, 4  # of the texts whose probabilities are compared
FORMS = {
    "chain": shape("0 00 000"),
    "siblings": shape("0 1 2"),
    "wide below": shape("0 1 00 01"),
    "wide above": shape("0 1 00 10"),
    "uneven": shape("0 1 00 10 100"),
}
DRAWS = [
    (name, rule, replace)
    for name in FORMS
    for rule in (recursive, traversal)
    for replace in (True, False)
] + [("chain", block, True)]


class Models:
    """Probabilities of a target and a draft after every text of up to LENGTH tokens, at random."""

    def __init__(self, seed: int, sharpness: float = 1.0):
        rng = np.random.default_rng(seed)
        self.p, self.q = {}, {}
        for length in range(LENGTH + 1):
            for text in itertools.product(range(VOCAB), repeat=length):
                for table in (self.p, self.q):
                    table[text] = rng.dirichlet(np.full(VOCAB, sharpness))

    def going_on(self, text: tuple[int, ...]) -> np.ndarray:
        """Return the target's probabilities of all that can follow, up to LENGTH tokens."""
        if len(text) == LENGTH:
            return np.ones(())
        return np.stack([self.p[text][t] * self.going_on((*text, t)) for t in range(VOCAB)])

    def tree(self, form: Shape, tokens) -> tuple[Drafted, list[tuple[int, ...]]]:
        """Return the tree with these tokens below the root, and the text down to each node."""
        parents = form.parents
        texts: list[tuple[int, ...]] = [()]
        for node in range(1, len(parents)):
            texts.append((*texts[parents[node]], int(tokens[node - 1])))
        p, q = (np.stack([table[text] for text in texts]) for table in (self.p, self.q))
        return Drafted(np.array(parents), np.array([0, *tokens]), p, q), texts

    def chance(self, form: Shape, tokens, replace: bool) -> float:
        """Return the probability that this is the tree that is drawn."""
        tree, chance = self.tree(form, tokens)[0], 1.0
        for node in range(len(tree.parents)):
            q = tree.q[node].copy()
            for token in tree.tokens[tree.children(node)]:
                chance *= q[token] / q.sum()
                if not replace:
                    q[token] = 0.0
        return chance

    def begun_with(self, form: Shape, tokens, rule) -> np.ndarray:
        """Return the probabilities of texts that begin with a round on this tree."""
        tree, texts = self.tree(form, tokens)
        ending = rule(tree)
        assert abs(ending.probability.sum() - 1) < 1e-12
        out = np.zeros((VOCAB,) * LENGTH)
        for node, text in enumerate(texts):
            after = [self.going_on((*text, t)) for t in range(VOCAB)]
            rest = [x * y for x, y in zip(ending.following[node], after, strict=True)]
            out[text] += ending.probability[node] * np.stack(rest)
        return out


@pytest.mark.parametrize("sharpness", [1.0, 0.2], ids=["spread", "sharp"])
@pytest.mark.parametrize(
    "name, rule, replace", DRAWS, ids=[f"{n}-{r.__name__}-{p}" for n, r, p in DRAWS]
)
def test_every_rule_for_draws_leaves_the_targets_distribution(name, rule, replace, sharpness):
    models, form = Models(1, sharpness), FORMS[name]
    rule = rule if replace else partial(rule, replace=False)
    total, chances = np.zeros((VOCAB,) * LENGTH), 0.0
    for tokens in itertools.product(range(VOCAB), repeat=len(form.paths)):
        chance = models.chance(form, tokens, replace)
        if chance > 0:
            total += chance * models.begun_with(form, tokens, rule)
            chances += chance
    assert abs(chances - 1) < 1e-12
    np.testing.assert_allclose(total, models.going_on(()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_the_rule_for_picks_leaves_the_targets_distribution(name):
    models, form = Models(2), FORMS[name]
    found = models.begun_with(form, form.ranks[1:], picks)
    np.testing.assert_allclose(found, models.going_on(()), rtol=0, atol=1e-12)


def test_a_tree_drawn_by_another_draft_does_not_leave_it():
    # So the tests above can fail: the rule is told a q that the tree was not drawn from.
    models, other, form = Models(1), Models(5), FORMS["wide below"]
    total = sum(
        other.chance(form, tokens, True) * models.begun_with(form, tokens, traversal)
        for tokens in itertools.product(range(VOCAB), repeat=len(form.paths))
    )
    assert np.abs(total - models.going_on(())).max() > 1e-2


def test_traversal_of_a_chain_is_block_verification():
    models, form = Models(3), FORMS["chain"]
    for tokens in itertools.product(range(VOCAB), repeat=3):
        tree, _ = models.tree(form, tokens)
        for found, wanted in zip(traversal(tree), block(tree), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name, rule",
    [(name, partial(rule, replace=False)) for name in FORMS for rule in (recursive, traversal)]
    + [("chain", block)],
)
def test_for_picks_every_rule_accepts_as_the_engine_does(name, rule):
    tree, _ = Models(4).tree(FORMS[name], FORMS[name].ranks[1:])
    # A draft that is certain of token 0, of token 1 once that is taken out, and so on.
    certain = np.broadcast_to(1e-60 ** np.arange(VOCAB), tree.q.shape)
    found, wanted = rule(tree._replace(q=certain)), picks(tree)
    np.testing.assert_allclose(found.probability, wanted.probability, rtol=0, atol=1e-12)


def test_a_perfect_draft_is_always_accepted_when_drawn_and_not_when_picked():
    models, form = Models(6), FORMS["chain"]
    models.q = models.p
    for tokens in itertools.product(range(VOCAB), repeat=3):
        tree, _ = models.tree(form, tokens)
        for rule in (recursive, block, traversal):
            assert expected_tokens(tree, rule(tree)) == pytest.approx(4, abs=1e-12)
        assert expected_tokens(tree, picks(tree)) < 3


def test_block_verification_accepts_no_fewer_tokens_of_a_drawn_chain():
    models, form = Models(7), FORMS["chain"]
    gains = []
    for tokens in itertools.product(range(VOCAB), repeat=3):
        tree, _ = models.tree(form, tokens)
        gain = expected_tokens(tree, block(tree)) - expected_tokens(tree, recursive(tree))
        gains.append(models.chance(form, tokens, True) * gain)
    assert sum(gains) > 1e-3


def test_with_the_same_noise_a_draft_is_accepted_as_often_as_two_maxima_agree():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(VOCAB), size=2)
    noise = rng.gumbel(size=(20_000, 1, VOCAB))
    drafted = np.argmax(np.log(q) + noise[:, 0], axis=-1)
    parents, models = np.array([-1, 0]), (np.stack([p, p]), np.stack([q, q]))
    rounds = [
        same_noise(Drafted(parents, np.array([0, token]), *models), each)
        for token, each in zip(drafted, noise, strict=True)
    ]
    # Token x is both maxima if its noise beats that of every other by the larger of two margins.
    agree = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(VOCAB))
    assert np.mean(rounds) - 1 == pytest.approx(agree, abs=4 * 0.5 / np.sqrt(len(rounds)))


@pytest.fixture(scope="module")
def acceptance():
    """Return the script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("benchmarks")  # scripts there import one another
        yield importlib.import_module("acceptance")


PROMPTS = ([1, 2, 3], [7, 8, 9, 10, 11])


@pytest.fixture(scope="module")
def bench(acceptance, hybrid):
    """Return it with two texts, as they stand after their prompts."""
    sampling = SamplingParams(temperature=1.0)
    requests = [Request(prompt=p, max_new_tokens=4, sampling=sampling) for p in PROMPTS]
    return acceptance.Bench(hybrid, random_draft(hybrid), requests)


def test_trees_without_noise_are_those_of_the_engine(acceptance, bench, hybrid):
    group = acceptance.GROUPS[2]
    for how, plan in (
        ("static picks", static_plan(group.form.paths)),
        ("dynamic picks", group.dynamic),
    ):
        drafter = eagle3(random_draft(hybrid), plan)
        wanted = drafter.propose(bench.state.draft, bench.state.root)
        trees, _ = bench.draft(group, how, np.random.default_rng(0), 1.0)
        for row, tree in enumerate(trees):
            assert tree.tokens.tolist() == wanted.tokens[row].tolist()
            assert tree.parents.tolist() == wanted.parents[row].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_p_is_what_the_target_says_after_the_path_to_a_node(acceptance, bench, hybrid, temperature):
    trees, _ = bench.draft(acceptance.GROUPS[2], "replace", np.random.default_rng(0), temperature)
    for prompt, tree in zip(PROMPTS, trees, strict=True):
        node, path = len(tree.parents) - 1, []
        while node:
            path, node = [int(tree.tokens[node]), *path], tree.parents[node]
        assert len(path) == 4
        text = jnp.array([[*prompt, *path]])
        wanted = jax.nn.softmax(hybrid.logits(hybrid(text).hidden)[0, -1] / temperature)
        assert_close(tree.p[-1], wanted)


def test_children_with_the_targets_noise_are_the_greatest_of_log_q_and_that_noise(
    acceptance, bench
):
    rng, group = np.random.default_rng(0), acceptance.GROUPS[2]
    trees, noise = bench.draft(group, "static noise", rng, 1.0)
    for tree, by_depth in zip(trees, noise, strict=True):
        np.testing.assert_allclose(tree.q[0].sum(), 1, rtol=1e-6)
        for node in np.unique(tree.parents[1:]):
            depth = len(((), *group.form.paths)[node])
            with np.errstate(divide="ignore"):
                order = np.argsort(-np.log(tree.q[node]) - by_depth[depth])
            children = tree.tokens[tree.children(node)]
            assert children.tolist() == order[: len(children)].tolist()
