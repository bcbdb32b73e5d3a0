"""Trees that cost what they are worth: each round drafts and verifies as much as pays, or nothing.

A round of `AutoDrafter` is one of two. With a draft: absorb what was committed since the last one,
draft level by level while the next level pays, verify the size that pays most. Plain: as `NoDraft`
does it; what the draft has to learn of it waits, and is read a block at a time. What pays is
decided in `choice.py`, from seconds measured by `measure.py`.

Whatever may or may not happen in a round is a loop of no or one turn, see `at_most_once`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from eagle3.decoding.accept import Accepted
from eagle3.decoding.auto_state import AutoState, Choice, Drafting, Tally
from eagle3.decoding.choice import (
    Prices,
    after_look,
    best_size,
    calibrated,
    cell_of,
    expected_tokens,
    explores,
    first_pace,
    forget,
    hopeful,
    learn,
    next_width,
    no_knowledge,
    offered,
    rate_of,
    saw_level,
)
from eagle3.decoding.costs import CostBook, Costs, sizes_of
from eagle3.decoding.drafter import Drafter, Eagle3Drafter, Eagle3State, NoDraft
from eagle3.decoding.pending import BLOCK, FEW, defer, no_pending, read, read_all
from eagle3.decoding.sampling import Foresight
from eagle3.decoding.speculate import (
    Chosen,
    DecodeState,
    Requests,
    Scored,
    at_most_once,
    score,
    settle,
)
from eagle3.decoding.tree import (
    Growth,
    Judge,
    Proposal,
    TreePlan,
    best_first,
    first_level,
    next_level,
    path_sums,
)
from eagle3.draft import Eagle3Draft
from gdn import HybridLM, TargetConfig
from gdn.cache import take_nodes


class AutoDrafter(nnx.Module):
    """An EAGLE-3 draft that is used as far as it pays."""

    def __init__(
        self,
        draft: Eagle3Draft,
        plan: TreePlan,
        costs: Costs | None = None,
        book: CostBook | None = None,
    ):
        """Wrap a draft.

        Args:
          plan: the most of everything; see `auto_plan`.
          costs: of rounds; None: asked of `book` for each batch, see `fitted`.

        Raises:
          ValueError: the plan wants more children than the draft vocabulary has entries, or costs
            of a size that it does not have.
        """
        self.inner, self.plan, self.book = Eagle3Drafter(draft, plan), plan, book
        self.depth, self.aux_layers = plan.depth, draft.cfg.aux_layers
        self.max_positions: int | None = draft.cfg.max_position_embeddings
        self.sizes = sizes_of(plan)
        if costs is not None:
            known = dict(costs.rounds)
            if 1 not in known or not set(known) <= set(self.sizes):
                raise ValueError(f"costs of {sorted(known)} nodes; there are {self.sizes}, with 1")
            self.offered = tuple(i for i, n in enumerate(self.sizes) if n in known and n > 1)
            seconds = np.array([known.get(n, np.inf) for n in self.sizes], np.float32)
            prices = Prices(
                jnp.asarray(seconds), jnp.array(costs.levels, jnp.float32),
                jnp.float32(costs.absorb),
            )  # fmt: skip
            self.prices = nnx.List(nnx.Variable(x) for x in prices)

    def problems_with(self, target: TargetConfig) -> list[str]:
        """List what differs between the target and the one the draft was made for."""
        return self.inner.problems_with(target)

    def fitted(
        self, target: HybridLM, batch: int, capacity: int, stand_in: Drafter | None = None
    ) -> Drafter:
        """Return the drafter that knows what rounds of such a batch cost, or none if none pays.

        Args:
          stand_in: returned instead, if it would have to be measured.
        """
        if self.book is None:
            return self
        if stand_in is not None and self.book.known(target, self, batch, capacity) is None:
            return stand_in
        costs = self.book.costs(target, self, batch, capacity)
        if len(costs.rounds) == 1:
            return NoDraft()
        return AutoDrafter(self.inner.draft, self.plan, costs)

    def init_state(self, batch: int, capacity: int) -> AutoState:
        """Make the state before the first token."""
        draft = self.inner.init_state(batch, capacity)
        slots = BLOCK + self.depth + 1  # a block, and the round that fills it
        pending = no_pending(self.inner.draft.cfg, batch, slots, draft.hidden.dtype)
        tally = Tally(
            jnp.zeros(len(self.sizes), jnp.int32),
            jnp.zeros(self.depth + 1, jnp.int32),
            jnp.int32(0),
            jnp.float32(0),
        )
        knowledge = no_knowledge(self.depth, self.sizes)
        return AutoState(draft, pending, knowledge, first_pace(), tally)

    def inherit(self, state: AutoState, before: Any) -> AutoState:
        """Keep what was learned; the first rounds look whether speculation pays."""
        if not isinstance(before, AutoState):
            return state
        pace = state.pace._replace(
            tokens=before.pace.tokens, seconds=before.pace.seconds, looked=jnp.int32(0)
        )
        return state._replace(knowledge=before.knowledge, pace=pace)

    def chosen(self, state: AutoState) -> Chosen:
        """Read the tally."""
        sizes, depths, asked, seconds = jax.device_get(state.tally)
        return Chosen(
            {n: int(count) for n, count in zip(self.sizes, sizes, strict=True) if count},
            {n: int(count) for n, count in enumerate(depths) if count},
            int(asked),
            float(seconds) + int(sizes[0]) * float(self.prices[0][...][0]),
        )

    def grow_state(self, state: AutoState, capacity: int) -> AutoState:
        """Copy the keys into a longer cache."""
        return state._replace(draft=self.inner.grow_state(state.draft, capacity))

    def absorb(self, state: AutoState, aux_hidden, tokens, count) -> AutoState:
        """Absorb what waits, then pairs of a prompt."""
        draft, pending = read_all(self.inner, state.draft, state.pending)
        draft = self.inner.absorb(draft, aux_hidden, tokens, count)
        return state._replace(draft=draft, pending=pending)

    def propose(
        self, state: AutoState, root: Int[Array, " B"], foresight: Foresight | None = None
    ) -> Proposal:
        """Propose the largest tree, whatever it costs."""
        return self.inner.propose(
            read_all(self.inner, state.draft, state.pending)[0], root, foresight
        )

    def rests(self, state: AutoState) -> Bool[Array, ""]:
        """Say whether the next round is plain: the draft is not asked, and need not read."""
        return (state.pace.rest > 0) & (jnp.max(state.pending.count) < BLOCK)

    def plain_round(
        self, target: HybridLM, state: DecodeState, requests: Requests
    ) -> tuple[DecodeState, Accepted, Proposal]:
        """Decode a token a row; the draft hears of it later."""
        root = NoDraft().propose((), state.root)
        scored = score(target, root, 0, self.aux_layers, state, requests)
        auto: AutoState = state.draft
        pace = auto.pace._replace(rest=auto.pace.rest - 1)
        tally = auto.tally._replace(
            sizes=auto.tally.sizes.at[0].add(1),
            depths=auto.tally.depths.at[0].add(1),
        )
        auto = auto._replace(pace=pace, tally=tally, pending=defer(auto.pending, scored))
        tree = self._verified(self._nothing(state.root), state.root)
        return settle(state, scored)._replace(draft=auto), scored.accepted, tree

    def round(
        self, target: HybridLM, state: DecodeState, requests: Requests
    ) -> tuple[DecodeState, Accepted, Proposal]:
        """Read what waits, think unless this is a rest, and verify if something came of it."""
        thinks, auto = state.draft.pace.rest == 0, state.draft
        with jax.named_scope("absorb"):
            waiting = jnp.max(auto.pending.count)
            draft, pending = at_most_once(
                (waiting >= BLOCK) | (thinks & (waiting > 2 * FEW)),
                lambda carry: read(self.inner, *carry, BLOCK),
                (auto.draft, auto.pending),
            )
        nothing = self._nothing(state.root)
        foresight = requests.sampling.foresight(state.emitted, target.cfg.vocab_size)
        with jax.named_scope("draft"):
            auto, choice = at_most_once(
                thinks,
                lambda carry: self.think(carry[0], state.root, state.is_running, foresight),
                (auto._replace(draft=draft, pending=pending), nothing),
            )
        state = state._replace(draft=auto)
        none = jnp.zeros((state.root.shape[0], self.depth + 1), jnp.int32)
        accepted = Accepted(
            none - 1, none, none > 0, none.astype(jnp.float32), none[:, 0], state.is_running, None
        )

        def verify(carry):
            state, _, choice = carry
            state, accepted = self._tree_round(target, state, requests, choice)
            return state, accepted, nothing  # not `choice`: XLA would see that it stays the same

        tree = self._verified(choice, state.root)
        return *at_most_once(choice.size > 0, verify, (state, accepted, choice))[:2], tree

    def _nothing(self, root) -> Choice:
        """Return the choice to verify nothing."""
        tokens = jnp.zeros((root.shape[0], self.sizes[-1]), jnp.int32)
        none = jnp.full(tokens.shape, -jnp.inf)
        nodes = Proposal(tokens, tokens - 1, none)
        return Choice(jnp.int32(0), nodes, none[:, 1:], tokens[:, 1:])

    def _verified(self, choice: Choice, root) -> Proposal:
        """Return the nodes that a choice verifies; the others get the parent -1."""
        is_in = jnp.arange(self.sizes[-1]) < jnp.asarray(self.sizes)[choice.size]
        tokens, parents = choice.nodes.tokens.at[:, 0].set(root), choice.nodes.parents
        scores = choice.nodes.scores
        assert scores is not None
        return Proposal(tokens, jnp.where(is_in, parents, -1), scores.at[:, 0].set(0.0))

    def _tree_round(
        self, target: HybridLM, state: DecodeState, requests: Requests, choice: Choice
    ) -> tuple[DecodeState, Accepted]:
        """Verify the chosen tree, and learn from it."""
        auto: AutoState = state.draft
        branches = [
            lambda nodes, n=self.sizes[i]: self.attempt(target, state, requests, nodes, n)
            for i in self.offered
        ]
        table = np.zeros(len(self.sizes), np.int32)
        table[list(self.offered)] = np.arange(len(self.offered))
        scored, path = jax.lax.switch(jnp.asarray(table)[choice.size], branches, choice.nodes)
        goes_on = scored.accepted.is_running  # a row that ends may end above nodes that were right
        places = jnp.arange(self.sizes[-1])
        verified = (places < jnp.asarray(self.sizes)[choice.size]) & goes_on[:, None]
        right = verified & (jnp.any(path[:, :, None] == places, axis=1) | (places == 0))
        above = choice.nodes.parents[:, 1:]
        tried = verified[:, 1:] & (above >= 0) & jnp.take_along_axis(right, above, axis=1)
        knowledge = learn(auto.knowledge, choice.claims, choice.cells, tried, tried & right[:, 1:])
        auto = auto._replace(knowledge=knowledge, pending=defer(auto.pending, scored))
        state = settle(state, scored)._replace(draft=auto)
        return state, scored.accepted._replace(counts=None)

    def attempt(
        self, target: HybridLM, state: DecodeState, requests: Requests, nodes: Proposal, size: int
    ) -> tuple[Scored, jax.Array]:
        """Score the best `size` nodes; returns what is on the accepted path, and the path.

        Everything has depth + 1 places, whatever the size: so that sizes can be branches of a
        switch, and none of them has to touch a cache.
        """
        tree = Proposal(nodes.tokens[:, :size], nodes.parents[:, :size])
        scored = score(target, tree, self.depth, self.aux_layers, state, requests)
        path = scored.accepted.path
        updates = take_nodes(scored.updates, jnp.maximum(path, 0))
        straight = jnp.where(path >= 0, jnp.arange(path.shape[1]), -1)
        accepted = scored.accepted._replace(path=straight)
        return Scored(accepted, updates, scored.aux_hidden), path

    def think(
        self,
        auto: AutoState,
        root: Int[Array, " B"],
        is_running: Bool[Array, " B"],
        foresight: Foresight | None = None,
    ) -> tuple[AutoState, Choice]:
        """Draft as far as it pays, and choose the size to verify."""
        draft, pending = read_all(self.inner, auto.draft, auto.pending)
        prices, plan = Prices(*(x[...] for x in self.prices)), self.plan
        rows = jnp.sum(is_running, dtype=jnp.float32)
        rate = rows * rate_of(prices, auto.pace)
        start = forget(auto.knowledge, 1)
        hope, is_trial = hopeful(start), explores(prices, auto.pace)
        guide = start._replace(accepted=jnp.where(is_trial, hope.accepted, start.accepted))
        most = rows * jnp.array(self.sizes, jnp.float32)
        draws = jnp.zeros_like(is_running) if foresight is None else foresight.temperature > 0

        def judge(log_q, depth):
            ranks = jnp.arange(plan.branching)
            return calibrated(guide, log_q, cell_of(log_q, ranks, depth, draws))

        def width_of(index, growth, tokens, spent, knowledge):
            offer = offered(growth.scores, is_running, plan.width)
            width = next_width(knowledge, prices, rate, index, offer, tokens, spent, most)
            return jnp.where(index < plan.depth, width, 0)

        def go_down(now: Drafting) -> Drafting:
            offer = offered(now.growth.scores, is_running, plan.width)
            growth = self.expand(draft, now.index, now.growth, now.width, foresight, judge)
            tokens = expected_tokens(growth.pool.scores, is_running, self.sizes)
            gain = tokens - now.tokens
            knowledge = saw_level(now.knowledge, now.index, now.width, offer, gain)
            spent = now.spent + prices.levels[now.width - 1]
            width = width_of(now.index + 1, growth, tokens, spent, knowledge)
            return Drafting(now.index + 1, width, growth, tokens, spent, knowledge)

        growth = self.first(draft, foresight, judge)
        tokens = expected_tokens(growth.pool.scores, is_running, self.sizes)
        index = jnp.int32(1)
        width = width_of(index, growth, tokens, prices.absorb, start)
        end = jax.lax.while_loop(
            lambda now: now.width > 0,
            go_down,
            Drafting(index, width, growth, tokens, prices.absorb, start),
        )
        size, _ = best_size(prices, rate, end.tokens, end.spent)
        # Whether it pays is judged without hope, by what would have been verified then.
        pool = end.growth.pool
        place = jnp.arange(pool.ids.shape[1])
        ranks, depths = place % plan.branching, 1 + place // (plan.width * plan.branching)
        cells = cell_of(pool.claims, ranks, depths, draws)
        believed = path_sums(pool, calibrated(start, pool.claims, cells), plan.depth)
        tokens = expected_tokens(believed, is_running, self.sizes)
        sober, _ = best_size(prices, rate, tokens, end.spent)
        pace = after_look(
            prices, auto.pace, tokens[sober] / jnp.maximum(rows, 1),
            end.spent + prices.rounds[sober],
        )  # fmt: skip
        nodes, chosen = best_first(pool, root, self.sizes[-1])
        claims, cells = (jnp.take_along_axis(x, chosen, axis=1) for x in (pool.claims, cells))
        knowledge = forget(end.knowledge, pace.rest)
        is_tree = (size > 0).astype(jnp.int32)
        pace = pace._replace(rest=pace.rest + 1 - is_tree)  # this round itself is then plain
        tally = Tally(
            auto.tally.sizes.at[size].add(is_tree),
            auto.tally.depths.at[end.index].add(is_tree),
            auto.tally.asked + 1,
            auto.tally.seconds + end.spent + is_tree * prices.rounds[size],
        )
        choice = Choice(size, nodes, claims, cells)
        return AutoState(draft, pending, knowledge, pace, tally), choice

    def first(
        self,
        draft: Eagle3State,
        foresight: Foresight | None = None,
        judge: Judge | None = None,
    ) -> Growth:
        """Return the level that needs no pass."""
        ids, keys = self.inner.draft.target_ids[...], self.inner.no_keys(draft)
        logits = self.inner.first_logits(draft, foresight)
        kernels = self.inner.draft.uses_kernels
        return first_level(self.plan, logits, draft.hidden, ids, keys, judge, kernels)

    def expand(
        self,
        draft: Eagle3State,
        index,
        growth: Growth,
        width,
        foresight: Foresight | None = None,
        judge: Judge | None = None,
    ) -> Growth:
        """Run a draft pass of one node (width 1) or of the whole frontier (2)."""
        one_pass = self.inner.draft_pass(draft, foresight)

        def of(nodes: int) -> Callable[[Growth], Growth]:
            return lambda growth: next_level(
                self.plan, index, growth, self.inner.draft.target_ids[...], one_pass, nodes, judge,
                self.inner.draft.uses_kernels,
            )  # fmt: skip

        if self.plan.width == 1:
            return of(1)(growth)
        return jax.lax.cond(width > 1, of(self.plan.width), of(1), growth)
