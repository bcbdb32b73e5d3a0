"""What `AutoDrafter` carries from round to round, and within one."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from eagle3.decoding.choice import Knowledge, Pace
from eagle3.decoding.drafter import Eagle3State
from eagle3.decoding.pending import Pending
from eagle3.decoding.tree import Growth, Proposal


class Tally(NamedTuple):
    """Rounds so far."""

    sizes: Int[Array, " K"]  # by size of the tree that was verified
    depths: Int[Array, " D+1"]  # by levels drafted for it; 0: plain
    asked: Int[Array, ""]  # those with a draft, whatever came of it
    seconds: Float[Array, ""]  # by the costs, but for what plain rounds took


class AutoState(NamedTuple):
    """The draft's own state, and what the decisions rest on."""

    draft: Eagle3State
    pending: Pending
    knowledge: Knowledge
    pace: Pace
    tally: Tally


class Choice(NamedTuple):
    """What a round verifies."""

    size: Int[Array, ""]  # index into the sizes; 0 is plain decoding
    nodes: Proposal  # of the largest size, best nodes first; with the probabilities believed in
    claims: Float[Array, "B M-1"]  # what the draft says of each node but the root, see `learn`
    cells: Int[Array, "B M-1"]


class Drafting(NamedTuple):
    """A draft on its way down."""

    index: jax.Array  # of the next pass, from 1
    width: jax.Array  # of it, as `next_width` says; 0: there is none
    growth: Growth
    tokens: jax.Array  # expected, by size
    spent: jax.Array  # seconds
    knowledge: Knowledge
