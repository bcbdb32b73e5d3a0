"""What proposes trees: a small protocol, the EAGLE-3 draft behind it, and no draft at all.

A drafter is an `nnx.Module` (so that its weights travel into a jit) with a state of its own. Each
round it proposes a tree on the last committed token, and absorbs what was committed.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3.decoding.sampling import Foresight
from eagle3.decoding.tree import DraftPass, Proposal, TreePlan, draft_tree
from eagle3.draft import Eagle3Draft
from gdn import TargetConfig
from gdn.cache import KVCache, grow_kv, write_rows
from gdn.ops.attention import attention, masked_attention, merge_attention


@runtime_checkable
class Drafter(Protocol):
    """Whatever proposes; any proposal is lossless, a good one is accepted."""

    @property
    def depth(self) -> int:
        """Return the number of drafted tokens on the longest path of any proposal."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Return which residual streams of the target `absorb` wants."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Return the tokens of context that the drafter can work with; None: any number."""
        ...

    def problems_with(self, target: TargetConfig) -> list[str]:
        """List why it cannot draft for `target`; empty if it can."""
        ...

    def init_state(self, batch: int, capacity: int) -> Any:
        """Make the state before the first token."""
        ...

    def grow_state(self, state: Any, capacity: int) -> Any:
        """Make room for `capacity` tokens a row."""
        ...

    def absorb(self, state: Any, aux_hidden: jax.Array, tokens: jax.Array, count: jax.Array) -> Any:
        """Take in the first `count` of T committed positions a row; 0 leaves the row as it is.

        Args:
          aux_hidden: [B, T, A, D], the target's own streams at those positions.
          tokens: [B, T], the token *after* each of them.
        """
        ...

    def propose(self, state: Any, root: jax.Array, foresight: Foresight | None = None) -> Proposal:
        """Propose a tree on the last committed tokens, root [B].

        Args:
          foresight: if what comes next is drawn; None: it is the most likely token.
        """
        ...


class NoDraft(nnx.Module):
    """Proposes nothing beyond the root: plain decoding, through the same loop."""

    depth, aux_layers, max_positions = 0, (), None

    def problems_with(self, target: TargetConfig) -> list[str]:
        """Find none."""
        return []

    def init_state(self, batch: int, capacity: int) -> tuple[()]:
        """Return the empty state."""
        return ()

    def grow_state(self, state: tuple[()], capacity: int) -> tuple[()]:
        """Return the empty state."""
        return ()

    def absorb(self, state: tuple[()], aux_hidden, tokens, count) -> tuple[()]:
        """Learn nothing."""
        return ()

    def propose(
        self, state: tuple[()], root: Int[Array, " B"], foresight: Foresight | None = None
    ) -> Proposal:
        """Return the root alone."""
        return Proposal(root[:, None], jnp.full((root.shape[0], 1), -1, jnp.int32))


class Eagle3State(NamedTuple):
    """Keys of committed positions, all made from features of the target, and the last output."""

    cache: KVCache
    lengths: Int[Array, " B"]  # pairs (features, next token) absorbed
    hidden: Float[Array, "B H"]  # feedback after the last of them
    logits: Float[Array, "B Vd"]


class Eagle3Drafter(nnx.Module):
    """An EAGLE-3 draft and the trees it grows.

    Keys made from the draft's own outputs live inside one `propose` only. Pair (features at t,
    token t + 1) has rotary position t; a drafted node follows its parent by one.
    """

    def __init__(self, draft: Eagle3Draft, plan: TreePlan):
        """Wrap a draft.

        Raises:
          ValueError: the plan wants more children than the draft vocabulary has entries.
        """
        cfg = draft.cfg
        if plan.branching > cfg.draft_vocab_size:
            raise ValueError(
                f"tree: {plan.branching} children a node from a draft vocabulary of"
                f" {cfg.draft_vocab_size}; lower top_k"
            )
        self.draft, self.plan = draft, plan
        self.depth, self.aux_layers = plan.depth, cfg.aux_layers
        self.max_positions: int | None = cfg.max_position_embeddings

    def problems_with(self, target: TargetConfig) -> list[str]:
        """List what differs between the target and the one the draft was made for."""
        return self.draft.cfg.problems_with(target)

    def init_state(self, batch: int, capacity: int) -> Eagle3State:
        """Make the state before the first pair; proposals from it are guesses about nothing."""
        cfg, dtype = self.draft.cfg, self.draft.fc[...].dtype
        shape = (batch, cfg.num_key_value_heads, capacity, cfg.head_dim)
        return Eagle3State(
            KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros((batch, cfg.hidden_size), dtype),
            jnp.zeros((batch, cfg.draft_vocab_size), jnp.float32),
        )

    def grow_state(self, state: Eagle3State, capacity: int) -> Eagle3State:
        """Copy the keys into a longer cache."""
        return state._replace(cache=grow_kv(state.cache, capacity))

    def absorb(
        self,
        state: Eagle3State,
        aux_hidden: Float[Array, "B T A D"],
        tokens: Int[Array, "B T"],
        count: Int[Array, " B"],
    ) -> Eagle3State:
        """Add pairs to the cache and keep the output of the last one."""
        slots = jnp.arange(tokens.shape[1])
        cache = state.cache

        def attend(q, k, v):
            nonlocal cache
            rows = (state.lengths, count)
            cache = KVCache(write_rows(cache.k, k, *rows), write_rows(cache.v, v, *rows))
            last = jnp.minimum(slots, count[:, None] - 1) + state.lengths[:, None]
            return attention(q, *cache, last)[0]

        positions = state.lengths[:, None] + slots
        z = self.draft.layer(self.draft.fuse(aux_hidden), tokens, positions, attend)
        z = jnp.take_along_axis(z, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
        some = (count > 0)[:, None]
        return Eagle3State(
            cache,
            state.lengths + count,
            jnp.where(some, self.draft.feedback(z), state.hidden),
            jnp.where(some, self.draft.logits(z), state.logits),
        )

    def propose(
        self, state: Eagle3State, root: Int[Array, " B"], foresight: Foresight | None = None
    ) -> Proposal:
        """Grow a tree from the last output; the state stays as it is."""
        return draft_tree(
            self.plan, root, self.first_logits(state, foresight), state.hidden,
            self.draft.target_ids[...], self.draft_pass(state, foresight), self.no_keys(state),
            self.draft.uses_kernels,
        )  # fmt: skip

    def first_logits(
        self, state: Eagle3State, foresight: Foresight | None = None
    ) -> Float[Array, "B Vd"]:
        """Return what to rank the root's children by."""
        return self._ranked(state.logits[:, None], 0, foresight)[:, 0]

    def _ranked(self, logits, depth, foresight: Foresight | None):
        ids = self.draft.target_ids[...]
        return logits if foresight is None else foresight.on(logits, depth, ids)

    def no_keys(self, state: Eagle3State) -> KVCache:
        """Return room for the keys and values of all passes, `width` a pass."""
        shape = list(state.cache.k.shape)
        shape[2] = (self.plan.depth - 1) * self.plan.width
        return KVCache(*(jnp.zeros(shape, x.dtype) for x in state.cache))

    def draft_pass(self, state: Eagle3State, foresight: Foresight | None = None) -> DraftPass:
        """Return the pass that scores drafted nodes over what was absorbed; see `DraftPass`."""
        draft, committed = self.draft, state.lengths[:, None]

        def one_pass(index, tokens, hidden, visible, own: KVCache):
            def attend(q, k, v):
                nonlocal own
                at = (index - 1) * self.plan.width
                own = KVCache(
                    jax.lax.dynamic_update_slice_in_dim(own.k, k, at, axis=2),
                    jax.lax.dynamic_update_slice_in_dim(own.v, v, at, axis=2),
                )
                last = jnp.broadcast_to(committed - 1, tokens.shape)
                return merge_attention(
                    attention(q, *state.cache, last), masked_attention(q, *own, visible)
                )

            positions = jnp.broadcast_to(committed + index - 1, tokens.shape)
            z = draft.layer(hidden, tokens, positions, attend)
            return self._ranked(draft.logits(z), index, foresight), draft.feedback(z), own

        return one_pass
