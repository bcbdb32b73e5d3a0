"""The host's side of decoding: a batch of requests, its caches, and a visit every few rounds.

A session owns what lives between device calls: caches that grow in steps, the tokens they hold, and
the drafter, which it drops when the context outgrows it. It knows token ids, not text.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3.decoding.drafter import Drafter, NoDraft
from eagle3.decoding.request import Answer, Chunk, Request, request_problem
from eagle3.decoding.speculate import (
    AdaptiveDrafter,
    Chosen,
    DecodeState,
    Emitted,
    batch_requests,
    read_prompts,
    replace_row,
    run_rounds,
    split,
)
from eagle3.sharding import create, place
from gdn import Cache, HybridLM, grow_cache, init_cache
from gdn.sharding import active_mesh

log = logging.getLogger(__name__)

_FIRST = 8  # rounds before the first, when it is not known how long they take


class Session:
    """Decodes one batch at a time; `start` again continues the caches where the prompts allow."""

    def __init__(
        self,
        target: HybridLM,
        drafter: Drafter | None = None,
        *,
        stream_every: int = 64,
        visit_seconds: float = 0.1,
        prefill_chunk: int = 512,
        min_capacity: int = 256,
        growth: int = 2,
        is_conversation: bool = False,
    ):
        """Prepare; nothing is computed yet.

        Args:
          drafter: None decodes plainly.
          stream_every: most rounds on the device between two visits of the host.
          visit_seconds: from one to the next, if that many rounds do not come before. A visit
            costs some milliseconds, as much as a few rounds of a small model.
          prefill_chunk: tokens of the prompt a pass; bounds memory, changes nothing else.
          min_capacity: tokens that the first caches hold.
          growth: how many times as many the next ones hold. New caches need new programs, which
            take seconds to compile: a conversation that grows is better off with few steps.
          is_conversation: what is asked goes on from what was asked before; a drafter that adapts
            then measures nothing in between.

        Raises:
          ValueError: an option is out of range, or the drafter was made for another target.
        """
        for name, value in (
            ("stream_every", stream_every),
            ("prefill_chunk", prefill_chunk),
            ("min_capacity", min_capacity),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        if growth < 2:
            raise ValueError(f"growth is {growth}, it must be at least 2")
        if not visit_seconds >= 0:
            raise ValueError(f"visit_seconds is {visit_seconds}, it must be 0 or more")
        self.cfg, self._target = target.cfg, target
        self._dtype = target.embed_tokens[...].dtype
        self._stream_every, self._prefill_chunk = stream_every, prefill_chunk
        self._min_capacity, self._growth = min_capacity, growth
        self._is_conversation = is_conversation
        self._visit_seconds = visit_seconds
        self._rounds = min(_FIRST, stream_every)  # until the next visit
        self._drafter: Drafter = NoDraft() if drafter is None else drafter
        if problems := self._drafter.problems_with(target.cfg):
            raise ValueError("the draft does not fit the target: " + "; ".join(problems))
        self._use(self._drafter)
        self._state: DecodeState | None = None
        self._held: list[list[int]] = []  # tokens in the caches and the root, row by row
        self._has_warned = False
        self._is_left = False  # the draft, by a batch that was or became too long for it
        self.answers: list[Answer] = []

    def _use(self, drafter: Drafter) -> None:
        self._active = drafter
        self._graph, self._params = split(self._target, drafter)

    @property
    def is_running(self) -> bool:
        """Tell whether any row goes on."""
        return any(answer.finish_reason is None for answer in self.answers)

    @property
    def chosen(self) -> Chosen | None:
        """Return what rounds since the last new caches verified; None if all verify the same."""
        if self._state is None or not isinstance(self._active, AdaptiveDrafter):
            return None
        return self._active.chosen(self._state.draft)

    def start(self, requests: Sequence[Request]) -> int:
        """Read the prompts.

        If the caches of an earlier batch of this session hold the beginning of the new prompts,
        row by row, only the rest is read.

        Returns:
          How many prompt tokens were found in the caches.

        Raises:
          ValueError: a request that cannot be served as it stands; the session is unchanged.
        """
        prompts = [list(request.prompt) for request in requests]
        self._check(requests, prompts)
        self._ask(requests)
        self.answers = [Answer() for _ in requests]
        reused = self._prepare(prompts)
        self._read(prompts)
        return reused

    def can_admit(self, request: Request) -> bool:
        """Tell whether `admit` can take a request; if not, wait for all rows to end, and `start`.

        It cannot where there is one row only, on a mesh, nor where the batch has left its draft
        behind or would have to.
        """
        limit = self._drafter.max_positions
        has_draft = limit is None or (not self._is_left and len(request.prompt) <= limit)
        return len(self.answers) > 1 and has_draft and active_mesh() is None

    def admit(self, row: int, request: Request) -> None:
        """Give a row that has ended another request; the other rows stay where they are.

        Its prompt is read alone. What is then decoded does not depend on where the others are.

        Raises:
          ValueError: the row has not ended, `can_admit` says no, or the request cannot be served as
            it stands; the session is unchanged.
        """
        if self.answers[row].finish_reason is None or not self.can_admit(request):
            raise ValueError(f"row {row} of {len(self.answers)} cannot be given another request")
        prompt = list(request.prompt)
        self._check([request], [prompt])
        self._ask([*self._asked[:row], request, *self._asked[row + 1 :]])
        self._make_room(len(prompt))
        cache, draft = read_prompts(
            self._graph, self._params, *self._new_caches(1), [prompt], self._prefill_chunk
        )
        state = self._take_state()
        state = replace_row(
            state._replace(counts=self._counted(state.counts)), cache, draft,
            jnp.int32(prompt[-1]), jnp.int32(row),
        )  # fmt: skip
        self._held[row], self.answers[row] = prompt, Answer()
        self._state = state  # last: caches and tokens go together, or there are no caches

    def _ask(self, requests: Sequence[Request]) -> None:
        """Take in what the rows want."""
        self._requests = batch_requests(requests, self.cfg.vocab_size)
        self._stop_ids = [frozenset(r.stop_ids) for r in requests]
        self._ends = [len(r.prompt) + r.max_new_tokens for r in requests]
        self._asked = list(requests)

    def _counted(self, counts: jax.Array | None) -> jax.Array | None:
        """Return the counts that penalties want, made now if no request wanted any before."""
        if not self._requests.sampling.counts_tokens:
            return None
        if counts is not None:
            return counts
        found = np.zeros((len(self.answers), self.cfg.vocab_size), np.int32)
        for row, answer in zip(found, self.answers, strict=True):
            np.add.at(row, answer.tokens, 1)
        return jnp.asarray(found)

    def _check(self, requests: Sequence[Request], prompts: list[list[int]]) -> None:
        """Refuse what cannot be done before anything is done."""
        if not requests:
            raise ValueError("no requests: give at least one prompt")
        for number, request in enumerate(requests):
            if problem := request_problem(self.cfg, request):
                raise ValueError(f"request {number}: {problem}" if len(requests) > 1 else problem)
        drafted = self._drafter.max_positions
        needed = max(len(p) + r.max_new_tokens for p, r in zip(prompts, requests, strict=True))
        if drafted is not None and needed > drafted and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the draft was made for %d positions, up to %d may be needed: once a row comes"
                " there, the batch goes on without it, with the same result",
                drafted, needed,
            )  # fmt: skip

    def _prepare(self, prompts: list[list[int]]) -> int:
        """Keep the caches if every prompt continues what its row holds; else make new ones."""
        state, batch = self._state, len(prompts)
        counts = None
        if self._requests.sampling.counts_tokens:
            counts = jnp.zeros((batch, self.cfg.vocab_size), jnp.int32)
        if state is not None and len(self._held) == batch and self._continues(prompts):
            self._state = state._replace(
                emitted=jnp.zeros(batch, jnp.int32), is_running=jnp.ones(batch, bool), counts=counts
            )
            return sum(len(held) - 1 for held in self._held)
        capacity = self._bucket(max(map(len, prompts)))
        drafter, most = self._drafter, self._drafter.max_positions
        self._is_left = most is not None and max(map(len, prompts)) > most
        if self._is_left:
            drafter = NoDraft()
        if isinstance(drafter, AdaptiveDrafter):
            # Also one that was cut short, and whose caches are of no use.
            goes_on = self._is_conversation and state is not None and len(self._held) == batch
            is_fitted = goes_on and isinstance(self._active, AdaptiveDrafter)
            stand_in = self._active if is_fitted else None
            drafter = drafter.fitted(self._target, batch, capacity, stand_in)
        self._use(drafter)
        self._capacity = capacity
        cache, draft = self._new_caches(batch)
        if state is not None and isinstance(self._active, AdaptiveDrafter):
            draft = self._active.inherit(draft, state.draft)
        self._state = DecodeState(
            cache, draft, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32),
            jnp.ones(batch, bool), counts,
        )  # fmt: skip
        self._held = [prompt[:1] for prompt in prompts]
        return 0

    def _new_caches(self, rows: int) -> tuple[Cache, Any]:
        """Return empty caches of the target and of the draft."""
        active, capacity = self._active, self._capacity
        draft = create(lambda: active.init_state(rows, capacity))
        return create(lambda: init_cache(self.cfg, rows, capacity, self._dtype)), draft

    def _continues(self, prompts: list[list[int]]) -> bool:
        """Tell whether every prompt begins with what its row holds.

        The root counts as held: the draft has already been told that it comes next.
        """
        pairs = zip(prompts, self._held, strict=True)
        return all(prompt[: len(held)] == held for prompt, held in pairs)

    def _bucket(self, tokens: int) -> int:
        """Return a capacity for so many tokens: of few, as each is compiled for."""
        capacity = self._min_capacity
        while capacity < tokens:
            capacity *= self._growth
        return max(tokens, min(capacity, self.cfg.max_position_embeddings))

    def _read(self, prompts: list[list[int]]) -> None:
        """Prefill all that is not held, but for each prompt's last token: the first root."""
        held = self._held
        rest = [prompt[len(h) - 1 :] for prompt, h in zip(prompts, held, strict=True)]
        longest_prompt = max(map(len, prompts))
        limit = self._active.max_positions
        if limit is not None and longest_prompt > limit:
            self._drop_draft()
        self._make_room(longest_prompt)
        state = self._take_state()
        cache, draft = read_prompts(
            self._graph, self._params, state.cache, state.draft, rest, self._prefill_chunk
        )
        root = jnp.array([prompt[-1] for prompt in prompts], jnp.int32)
        self._state = place(state._replace(cache=cache, draft=draft, root=root))
        self._held = prompts

    def _take_state(self) -> DecodeState:
        """Hand the caches to a call that may not come back: interrupted, there are none to use."""
        state, self._state = self._state, None
        if state is None:
            raise ValueError("an earlier call was interrupted and took the caches: start again")
        return state

    def _make_room(self, needed: int) -> None:
        """Grow the caches to hold `needed` tokens a row."""
        if needed > self._capacity:
            capacity = self._bucket(needed)
            self._refit(capacity)
            state = self._take_state()
            cache = _grow_target(state.cache, capacity)
            draft = self._active.grow_state(state.draft, capacity)
            self._capacity = capacity
            self._state = state._replace(cache=cache, draft=draft)

    def _refit(self, capacity: int) -> None:
        """Let a drafter that adapts go by the costs in caches of this size, if they are known.

        In the middle of a text nobody wants to wait for measurements. Those of smaller caches have
        to do: attention over more tokens adds to all rounds, and to larger ones hardly more.
        """
        drafter, active = self._drafter, self._active
        if isinstance(active, AdaptiveDrafter) and isinstance(drafter, AdaptiveDrafter):
            fitted = drafter.fitted(self._target, len(self._held), capacity, active)
            if isinstance(fitted, AdaptiveDrafter):
                self._use(fitted)
            else:
                self._drop_draft()

    def _drop_draft(self) -> None:
        """Go on without the draft until caches are made anew."""
        self._is_left = True
        state = self._take_state()
        self._use(NoDraft())
        self._state = state._replace(draft=())

    def _plan_visit(self, running: list[int]) -> int:
        """Return how many rounds fit, with room made for them; drops a draft that is outgrown."""
        held, rounds = [len(self._held[i]) for i in running], self._rounds

        def needed(rounds: int) -> int:
            most = rounds * (self._active.depth + 1)
            return max(min(n + most, self._ends[i]) for n, i in zip(held, running, strict=True))

        limit = self._active.max_positions
        if limit is not None and needed(rounds) > limit:
            beyond = [n for n, i in zip(held, running, strict=True) if self._ends[i] > limit]
            rounds = (limit - max(beyond)) // (self._active.depth + 1)
            if rounds < 1:
                self._drop_draft()
                rounds = self._rounds
        # Not by the clock: what XLA sums may depend on the size of the caches in its last bits.
        room = needed(self._stream_every)
        limit = self._active.max_positions  # of a draft that is still there; the rounds fit
        self._make_room(room if limit is None else min(room, limit))
        return rounds

    def advance(self) -> list[Chunk]:
        """Run rounds until the next visit; returns what is new, and adds it to `answers`.

        Raises:
          ValueError: the target's logits are not numbers, or an earlier call was interrupted.
        """
        running = [i for i, answer in enumerate(self.answers) if answer.finish_reason is None]
        if not running:
            return []
        new_state, out = self._run(self._plan_visit(running))
        if not out.count[running].all():
            raise RuntimeError("a running row brought no token: host and device disagree, a bug")
        chunks = []
        for row in running:
            count = int(out.count[row])
            chunk = Chunk(
                row,
                out.tokens[row, :count].tolist(),
                out.is_drafted[row, :count].tolist(),
                out.logprobs[row, :count].tolist(),
            )
            if any(math.isnan(x) for x in chunk.logprobs):
                raise ValueError(
                    f"the target's logits are not numbers, within {count} tokens after"
                    f" {len(self._held[row])}: the checkpoint is damaged, or overflows its dtype"
                )
            self._add(chunk)
            chunks.append(chunk)
        self._state = new_state  # last: caches and tokens go together, or there are no caches
        return chunks

    def _run(self, rounds: int) -> tuple[DecodeState, Emitted]:
        """Run rounds on the device; returns the state after them and what they brought."""
        start = time.perf_counter()
        new_state, out = run_rounds(
            self._graph, self._params, self._take_state(), self._requests, rounds,
            self._stream_every,
        )  # fmt: skip
        out, goes_on = jax.device_get((out, new_state.is_running))
        if goes_on.any():  # else not all of the rounds were run
            seconds = (time.perf_counter() - start) / rounds
            wanted = min(self._stream_every, self._visit_seconds / max(seconds, 1e-9))
            self._rounds = max(1, int(wanted))
        return new_state, out

    def _add(self, chunk: Chunk) -> None:
        row, answer = chunk.row, self.answers[chunk.row]
        answer.tokens += chunk.tokens
        answer.is_drafted += chunk.is_drafted
        answer.logprobs += chunk.logprobs
        self._held[row] += chunk.tokens
        if answer.tokens[-1] in self._stop_ids[row]:
            answer.finish_reason = "stop"
        elif len(self._held[row]) >= self._ends[row]:
            answer.finish_reason = "length"

    def stop(self, row: int, keep: int | None = None, reason: str = "stop") -> None:
        """End a row from the host's side, and keep only its first `keep` tokens.

        What the caches hold beyond is found out, and read again, by the next `start`.
        """
        answer = self.answers[row]
        answer.finish_reason = reason
        for values in (answer.tokens, answer.is_drafted, answer.logprobs):
            del values[len(values) if keep is None else keep :]
        if self._state is not None:
            is_running = self._state.is_running.at[row].set(False)
            self._state = self._state._replace(is_running=is_running)


_grow_target = partial(jax.jit, static_argnames=("capacity",))(grow_cache)
