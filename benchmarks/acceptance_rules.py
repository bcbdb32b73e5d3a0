"""Rules of acceptance on plain arrays, as references: what `benchmarks/acceptance.py` compares.

A rule gets a drafted tree with what both models say, and returns where the path ends and what the
next token is drawn from: everything that its expectation and a proof by enumeration need. No rule
knows a model; run as a script, this file does nothing.

What theory says of picks. A tree that does not depend on chance is accepted down to a node with
at most the probability that the target's text begins with the tokens down to it, the product of
p along the path: else the text would not be the target's. The engine's rule reaches that bound at
every node at once, so no rule can do better with picks. The rules for draws have nothing to add,
as one sees in a chain: let q be 1 at the pick c_i and a_i = p(c_1) ... p(c_i). A block's level is
min(a_{i-1} p(c_i) / 1, 1) = a_i. Above the end, the residual [a_i p - q]+ has the mass
a_i - a_{i+1}, so the path ends at i, if not further down, with probability
h_i = (a_i - a_{i+1}) / (1 - a_{i+1}), and 1 - h_i = (1 - a_i) / (1 - a_{i+1}). At the end
1 - h = 1 - a. Multiplied from there up to i that leaves 1 - a_i: the path reaches i with
probability a_i, as before. Traversal does the same to a tree of picks, sibling after sibling.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Drafted(NamedTuple):
    """A drafted tree and what both models say after each node; float64."""

    parents: np.ndarray  # [M], -1 for the root; children of a node are judged in this order
    tokens: np.ndarray  # [M]
    p: np.ndarray  # [M, V], the target's probabilities
    q: np.ndarray  # [M, V], the draft's; not read where nothing was drafted

    def children(self, node: int) -> np.ndarray:
        """Return the nodes below."""
        return np.flatnonzero(self.parents == node)


class Ending(NamedTuple):
    """Where the accepted path ends, and how the text goes on there."""

    probability: np.ndarray  # [M], that it is this node
    following: np.ndarray  # [M, V], what the next token is drawn from, if it is


Rule = Callable[[Drafted], Ending]


class Shape(NamedTuple):
    """A tree without its tokens; by child rank, as the paths of `static_plan`."""

    paths: tuple[tuple[int, ...], ...]  # parents first

    @property
    def parents(self) -> list[int]:
        """Return the node above each, the root being node 0."""
        place = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        return [-1, *(place[path[:-1]] for path in self.paths)]

    @property
    def ranks(self) -> list[int]:
        """Return which child of its parent each node is."""
        return [0, *(path[-1] for path in self.paths)]


def shape(text: str) -> Shape:
    """Read paths such as "0 1 00"."""
    paths = {tuple(map(int, path)) for path in text.split()}
    return Shape(tuple(sorted(paths, key=lambda path: (len(path), path))))


def depths(parents: np.ndarray) -> np.ndarray:
    """Return how far below the root each node is."""
    found = np.zeros(len(parents), int)
    for node in range(1, len(parents)):
        found[node] = found[parents[node]] + 1
    return found


def expected_tokens(tree: Drafted, ending: Ending) -> float:
    """Return the tokens of a round: those on the path, and the one after it."""
    return float(ending.probability @ (depths(tree.parents) + 1))


def picks(tree: Drafted) -> Ending:
    """Accept what the target draws, as the engine does; for any tree without chance in it."""
    reach, following = np.ones(len(tree.parents)), tree.p.copy()
    for node in range(1, len(reach)):
        above, token = tree.parents[node], tree.tokens[node]
        reach[node] = reach[above] * tree.p[above, token]
        following[above, token] = 0.0  # were it drawn, the path would go on
    rest = following.sum(-1)
    return Ending(reach * rest, following / np.where(rest > 0, rest, 1.0)[:, None])


def recursive(tree: Drafted, replace: bool = True) -> Ending:
    """Judge token by token from the root; a chain is the rule of arXiv 2211.17192.

    Args:
      replace: siblings were drawn independently; else each without the tokens of those before.
    """
    ends, following = np.zeros(len(tree.parents)), tree.p.copy()
    reach = np.eye(len(ends))[0]
    for node in range(len(ends)):
        p, q, left = tree.p[node], tree.q[node], reach[node]
        for child in tree.children(node):
            token = int(tree.tokens[child])
            accepted = min(p[token] / q[token], 1.0)
            reach[child], left = left * accepted, left * (1 - accepted)
            p, q = _residual(p, q)[0], q if replace else _without(q, token)
        ends[node], following[node] = left, p
    return Ending(ends, following)


def block(tree: Drafted) -> Ending:
    """Judge a chain as a whole: the longest beginning that is accepted (arXiv 2403.10444)."""
    length = len(tree.parents) - 1
    level, ends, following = 1.0, np.zeros(length + 1), tree.p.copy()
    accepts = np.ones(length + 1)
    for i in range(length + 1):
        if i:
            token = tree.tokens[i]
            level = min(level * tree.p[i - 1, token] / tree.q[i - 1, token], 1.0)
        if i == length:
            accepts[i] = level
        else:
            following[i], accepts[i] = _residual(tree.p[i], tree.q[i], level)
    left = 1.0
    for i in range(length, -1, -1):
        ends[i], left = left * accepts[i], left * (1 - accepts[i])
    return Ending(ends, following)


def traversal(tree: Drafted, replace: bool = True) -> Ending:
    """Judge paths as wholes from the leaves to the root (arXiv 2505.12398); see `recursive`."""
    ends, following = np.zeros(len(tree.parents)), tree.p.copy()

    def visit(node: int, level: float, left: float) -> float:
        """Take in that `left` has come here; return what is left when all here is rejected."""
        p, q = tree.p[node], tree.q[node]
        for child in tree.children(node):
            token = int(tree.tokens[child])
            left = visit(child, min(float(level * p[token] / q[token]), 1.0), left)
            p, level = _residual(p, q, level)
            q = q if replace else _without(q, token)
        ends[node], following[node] = left * level, p
        return left * (1 - level)

    visit(0, 1.0, 1.0)
    return Ending(ends, following)


def _residual(p: np.ndarray, q: np.ndarray, level: float = 1.0) -> tuple[np.ndarray, float]:
    """Return what p is, and its node's level, once a draw from q has been rejected below it."""
    rest = np.maximum(level * p - q, 0.0)
    mass = rest.sum()
    if mass <= 0:  # then nothing is rejected below, or nothing accepted here
        return p, float(level >= 1)
    return rest / mass, mass / (mass + 1 - level)


def _without(q: np.ndarray, token: int) -> np.ndarray:
    """Return q for a draw that must differ from `token`."""
    q = q.copy()
    q[token] = 0.0
    return q / max(q.sum(), 1e-300)


def same_noise(tree: Drafted, noise: np.ndarray) -> float:
    """Return the tokens of a round whose target draws with `noise` [depth, V].

    The token at depth d is the maximum of log p + noise[d - 1], so it is drawn from p whatever was
    drafted. The tree should hold the greatest of log q + noise[d - 1].
    """
    node, count = 0, 1
    log_p = np.log(np.maximum(tree.p, 1e-300))
    while (below := tree.children(node)).size:
        token = np.argmax(log_p[node] + noise[count - 1])
        found = below[tree.tokens[below] == token]
        if not found.size:
            break
        node, count = found[0], count + 1
    return float(count)
