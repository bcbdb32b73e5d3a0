"""How far to draft and how much to verify: expected tokens against seconds, inside the jit.

Tokens per second of a whole text are largest if every round maximises tokens - rate * seconds,
where `rate` is what rounds bring on average (the fixed point is the best rate: Dinkelbach).
Maximising each round's own tokens / seconds instead would cut short the rounds that promise most
and draw out those that promise little. Expected tokens are 1 plus the probabilities of the paths to
all nodes kept: products, along a path, of what the draft says of each token, corrected by how often
such tokens were accepted lately when the text had come to their parent. "Such" are tokens as likely
by the draft's word, with as many likelier ones beside them, as deep, drawn or not. Of two tokens of
which a draft says the same, a second choice is right less often than a first one, and a deep one
less often than a shallow one. Corrected by path probability alone, trees grow too wide and flat.

Nothing here knows of models: scores go in, decisions come out.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BINS = 4  # of a token's probability, evenly in its square root
RANKS, DEPTHS = 3, 3  # first, second and other choices; first, second and deeper levels
CELLS = 2 * DEPTHS * RANKS * BINS  # greedy rows and those that draw
_FORGET = 0.98  # what a round leaves of the counts before it: a window of fifty rounds
_TRUST = 2.0  # verified nodes of a cell that the draft's own word is worth
_HOPE = 2.0  # how many times likelier than it is said to be a token may be, for all that is known
_CERTAIN = 0.99  # nothing is more
_OPTIMISM = 1.0  # the same for what a level brings at best: all of the frontier's probability
_RECENT = 0.9  # of the mean rate: a window of ten rounds
LOOK, MIN_REST, MAX_REST = 6, 16, 256  # rounds of a look; plain rounds between looks
EXTRA = 4  # rounds more of the very first look, when nothing is known
_WORTH = 1.01  # speculation has to bring this much more than plain decoding


class Prices(NamedTuple):
    """Seconds; arrays, so that one compiled loop serves any."""

    rounds: Float[Array, " K"]  # verify, accept and commit, by size of the tree; inf: not offered
    levels: Float[Array, " 2"]  # a draft pass of one node, and of the widest frontier
    absorb: Float[Array, ""]  # before a draft: reading what the round before committed


class Knowledge(NamedTuple):
    """What verified nodes and drafted levels have taught; slowly forgotten."""

    # By cell, of verified nodes whose parent was right:
    claimed: Float[Array, " C"]  # probabilities that the draft gave to their tokens, summed
    accepted: Float[Array, " C"]  # how many of them were accepted
    offered: Float[Array, "D 2"]  # by pass and width: probability of the nodes it expanded
    gained: Float[Array, "D 2 K"]  # and by how much the expected tokens of a tree of each size rose


class Pace(NamedTuple):
    """Whether speculation pays, and when to look again if it does not."""

    tokens: Float[Array, ""]  # expected, a row, in recent rounds with a draft
    seconds: Float[Array, ""]  # of these
    looked: Int[Array, ""]  # such rounds since the last rest; the first look starts below 0
    rest: Int[Array, ""]  # plain rounds to come before the draft is asked again
    next_rest: Int[Array, ""]


def no_knowledge(depth: int, sizes: tuple[int, ...]) -> Knowledge:
    """Return the start: the draft is as right as it says."""
    shape = (depth - 1, 2)  # no array twice: a state is given away whole
    levels = (jnp.zeros(shape), jnp.zeros((*shape, len(sizes))))
    return Knowledge(jnp.zeros(CELLS), jnp.zeros(CELLS), *levels)


def first_pace() -> Pace:
    """Return the start: a first look, now."""
    counts = (jnp.int32(-EXTRA), jnp.int32(0), jnp.int32(MIN_REST))
    return Pace(jnp.float32(0), jnp.float32(0), *counts)


def _word() -> Float[Array, " C"]:
    """Return what the tokens that stand for the draft's own word claim, by cell."""
    return _TRUST * ((jnp.arange(CELLS) % BINS + 0.5) / BINS) ** 2


def cell_of(
    log_claims: Float[Array, "*shape"],
    ranks: Int[Array, "..."],
    depths: Int[Array, "..."] | int,
    draws: Bool[Array, " B"],
) -> Int[Array, "*shape"]:
    """Return what tokens count as.

    Args:
      log_claims: log-probabilities that the draft gives to them after their parents.
      ranks: how many tokens beside each it takes for likelier; from 0. Broadcast, as depths are.
      depths: below the root, from 1.
      draws: rows whose tokens are drawn, not the likeliest.
    """
    by_word = jnp.minimum((jnp.exp(log_claims / 2) * BINS).astype(jnp.int32), BINS - 1)
    kind = draws.astype(jnp.int32).reshape(-1, *(1,) * (log_claims.ndim - 1))
    kind = kind * DEPTHS + jnp.minimum(depths, DEPTHS) - 1
    return (kind * RANKS + jnp.minimum(ranks, RANKS - 1)) * BINS + by_word


def calibrated(
    knowledge: Knowledge, log_claims: Float[Array, "*shape"], cells: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Return the log-probabilities that tokens are accepted if their parents are."""
    word = _word()
    right = jnp.log((knowledge.accepted + word) / (knowledge.claimed + word))
    return jnp.minimum(log_claims + right[cells], math.log(_CERTAIN))


def hopeful(knowledge: Knowledge) -> Knowledge:
    """Return the same with the benefit of the doubt, where little was verified.

    The probability that a draft gives to its best token need not be low because the draft is bad:
    of many likely tokens a greedy target still takes one, and often the same. Only verifying tells.
    """
    word = _word()
    times = 1 + (_HOPE - 1) * word / (knowledge.claimed + word)
    return knowledge._replace(accepted=times * (knowledge.accepted + word) - word)


def explores(prices: Prices, pace: Pace) -> Bool[Array, ""]:
    """Say whether a round is to try rather than to gain.

    The first of a look are, as many as together cost about one plain round more than plain ones.
    """
    extra = jnp.min(prices.rounds[1:]) - prices.rounds[0]
    return (pace.looked < LOOK) & (pace.looked * extra < prices.rounds[0] - extra / 2)


def learn(
    knowledge: Knowledge,
    log_claims: Float[Array, "B M"],
    cells: Int[Array, "B M"],
    tried: Bool[Array, "B M"],
    accepted: Bool[Array, "B M"],
) -> Knowledge:
    """Count nodes that were verified and whose parents were right: `tried`."""
    in_cell = jax.nn.one_hot(cells, CELLS) * tried[..., None]
    claimed, right = (
        jnp.sum(in_cell * x[..., None], axis=(0, 1)) for x in (jnp.exp(log_claims), accepted)
    )
    return knowledge._replace(
        claimed=knowledge.claimed + claimed, accepted=knowledge.accepted + right
    )


def expected_tokens(
    scores: Float[Array, "B N"], is_running: Bool[Array, " B"], sizes: tuple[int, ...]
) -> Float[Array, " K"]:
    """Return the tokens of all running rows from trees of the best candidates, by size.

    Args:
      scores: log-probabilities that candidates are accepted, with all above them.
    """
    best, _ = jax.lax.top_k(scores, sizes[-1] - 1)
    kept = jnp.cumsum(jnp.sum(jnp.exp(best) * is_running[:, None], axis=0))
    rows = jnp.sum(is_running, dtype=jnp.float32)
    return rows + jnp.concatenate([jnp.zeros(1), kept[jnp.array(sizes[1:]) - 2]])


def best_size(
    prices: Prices, rate: Float[Array, ""], tokens: Float[Array, " K"], spent: Float[Array, ""]
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Return which size to verify, and its tokens - rate * seconds; of equals the smallest."""
    values = tokens - rate * (spent + prices.rounds)
    best = jnp.argmax(values)
    return best.astype(jnp.int32), values[best]


def offered(
    scores: Float[Array, "B n"], is_running: Bool[Array, " B"], width: int
) -> Float[Array, " 2"]:
    """Return the probability of the nodes that a narrow and a wide pass would expand."""
    best, _ = jax.lax.top_k(scores, width)
    frontier = jnp.sum(jnp.exp(best) * is_running[:, None], axis=0)
    return jnp.stack([frontier[0], jnp.sum(frontier)])


def next_width(
    knowledge: Knowledge,
    prices: Prices,
    rate: Float[Array, ""],
    index: Int[Array, ""],
    offer: Float[Array, " 2"],
    tokens: Float[Array, " K"],
    spent: Float[Array, ""],
    most: Float[Array, " K"],
) -> Int[Array, ""]:
    """Say whether pass `index` pays: 0 no, 1 as a narrow, 2 as a wide one.

    A level adds at most the probability of the nodes it expands, and on average the share of it
    that such levels have added.

    Args:
      most: tokens that trees of each size could bring.
    """
    given = knowledge.offered[index - 1][:, None]
    share = (knowledge.gained[index - 1] + _OPTIMISM) / (given + _OPTIMISM)
    then = jnp.minimum(tokens + share * offer[:, None], most)
    costs = spent + prices.levels[:, None] + prices.rounds
    values = jnp.max(then - rate * costs, axis=1)
    _, now = best_size(prices, rate, tokens, spent)
    better = values > now
    return jnp.where(better.any(), 1 + jnp.argmax(values), 0).astype(jnp.int32)


def saw_level(knowledge: Knowledge, index, width, offer, gain) -> Knowledge:
    """Note what a draft pass has added; `width` as `next_width` says it."""
    at = (index - 1, width - 1)
    return knowledge._replace(
        offered=knowledge.offered.at[at].add(offer[width - 1]),
        gained=knowledge.gained.at[at].add(gain),
    )


def forget(knowledge: Knowledge, rounds: Int[Array, ""] | int) -> Knowledge:
    """Fade all counts, as after so many rounds.

    What is not tried for long is so believed in again: a draft that was bad is looked at without
    prejudice, and so are levels that did not pay.
    """
    kept = _FORGET ** jnp.asarray(rounds, jnp.float32)
    return Knowledge(*(kept * x for x in knowledge))


def rate_of(prices: Prices, pace: Pace) -> Float[Array, ""]:
    """Return tokens a second and row: of recent rounds, at least those of plain decoding."""
    return jnp.maximum(
        pace.tokens / jnp.maximum(pace.seconds, 1e-12) * (pace.seconds > 0), 1 / prices.rounds[0]
    )


def after_look(prices: Prices, pace: Pace, tokens, seconds) -> Pace:
    """Count a round with a draft; rest if such rounds do not bring more than plain ones.

    Args:
      tokens: expected of it, a row.
      seconds: of it, draft included.
    """
    tokens = _RECENT * pace.tokens + tokens
    seconds = _RECENT * pace.seconds + seconds
    looked = pace.looked + 1
    pays = tokens * prices.rounds[0] >= _WORTH * seconds
    is_judged = looked >= LOOK
    rests = is_judged & ~pays
    longer = jnp.minimum(2 * pace.next_rest, MAX_REST)
    next_rest = jnp.where(is_judged, jnp.where(pays, MIN_REST, longer), pace.next_rest)
    kept = jnp.where(rests, 0.0, 1.0)
    return Pace(
        kept * tokens,
        kept * seconds,
        jnp.where(rests, 0, looked).astype(jnp.int32),
        jnp.where(rests, pace.next_rest, 0).astype(jnp.int32),
        next_rest.astype(jnp.int32),
    )
