"""Committed pairs that a draft has not absorbed: it reads a few after a round, blocks in a rest."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3.decoding.drafter import Eagle3Drafter, Eagle3State
from eagle3.decoding.speculate import Scored
from eagle3.draft_config import DraftConfig
from gdn.cache import write_rows

FEW, BLOCK = 4, 32  # pairs that the draft reads at once: after a round, and while it is not asked


class Pending(NamedTuple):
    """What waits, oldest first."""

    aux_hidden: Float[Array, "B A Q D"]
    tokens: Int[Array, "B Q"]
    count: Int[Array, " B"]


def no_pending(cfg: DraftConfig, batch: int, slots: int, dtype: Any) -> Pending:
    """Return room for so many pairs a row."""
    streams = jnp.zeros((batch, cfg.num_aux, slots, cfg.target_hidden_size), dtype)
    return Pending(streams, jnp.zeros((batch, slots), jnp.int32), jnp.zeros(batch, jnp.int32))


def defer(pending: Pending, scored: Scored) -> Pending:
    """Put what a round committed behind what waits."""
    accepted = scored.accepted
    new = jnp.swapaxes(scored.aux_hidden, 1, 2).astype(pending.aux_hidden.dtype)
    aux_hidden = write_rows(pending.aux_hidden, new, pending.count, accepted.count)
    place = jnp.arange(accepted.tokens.shape[1])
    at = jnp.where(place < accepted.count[:, None], pending.count[:, None] + place, 1 << 30)
    rows = jnp.arange(len(at))[:, None]
    tokens = pending.tokens.at[rows, at].set(accepted.tokens, mode="drop")
    return Pending(aux_hidden, tokens, pending.count + accepted.count)


def read(
    drafter: Eagle3Drafter, draft: Eagle3State, pending: Pending, size: int
) -> tuple[Eagle3State, Pending]:
    """Absorb the `size` oldest pending pairs of each row, fewer where there are not so many."""
    count = jnp.minimum(pending.count, size)
    aux_hidden = jnp.swapaxes(pending.aux_hidden[:, :, :size], 1, 2)
    draft = drafter.absorb(draft, aux_hidden, pending.tokens[:, :size], count)
    left = Pending(
        jnp.roll(pending.aux_hidden, -size, axis=2),
        jnp.roll(pending.tokens, -size, axis=1),
        pending.count - count,
    )
    return draft, left


def read_all(
    drafter: Eagle3Drafter, draft: Eagle3State, pending: Pending
) -> tuple[Eagle3State, Pending]:
    """Absorb all that waits, a few at a time: as many as most rounds bring."""
    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[1].count > 0),
        lambda carry: read(drafter, *carry, FEW),
        (draft, pending),
    )
