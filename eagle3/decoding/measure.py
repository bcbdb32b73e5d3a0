"""Measures what the parts of a round cost, with the very functions that a round is made of.

Each part runs in a device loop of its own, all in turn, several times; the shortest counts, as what
else a machine does only ever adds. That takes a second or two, more only where single rounds take
long; most of the time is compilation, of as many programs at once as there are processors.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3.decoding.accept import Limits
from eagle3.decoding.auto import AutoDrafter
from eagle3.decoding.auto_state import AutoState
from eagle3.decoding.costs import Costs
from eagle3.decoding.pending import FEW, read
from eagle3.decoding.sampling import SamplingParams, batch_sampling
from eagle3.decoding.speculate import DecodeState, Requests, merge, settle, split
from eagle3.decoding.tree import Proposal
from gdn import HybridLM, init_cache

_SECONDS, _REPEATS = 0.03, 9  # of one sample of one part, and samples
_FIRST = 3  # of them decide whether a larger size is looked at


_Step = Callable[[HybridLM, AutoDrafter, DecodeState], DecodeState]


class _Part(NamedTuple):
    """Something to time: `run` repeats it so many times and waits."""

    run: Callable[[int], None]
    count: int  # repetitions of a sample


def measure_costs(target: HybridLM, drafter: AutoDrafter, batch: int, capacity: int) -> Costs:
    """Measure rounds of `batch` rows in caches half full.

    Sizes are timed in ascending order, up to the first that costs as much as the most tokens it
    can bring cost plainly: from there on none can pay.
    """
    bench = _Bench(target, drafter, batch, capacity)
    steps: dict[Any, _Step] = {nodes: bench.round_of(nodes) for nodes in drafter.sizes}
    steps |= {"absorb": bench.absorb, ("level", 1): bench.level(1), ("level", 2): bench.level(2)}
    programs = bench.compiled(steps)
    parts: dict[Any, _Part] = {}
    plain = None
    for nodes in drafter.sizes:
        parts[nodes] = bench.part(programs[nodes])
        seconds = min(_sample(parts[nodes]) for _ in range(_FIRST))
        plain = plain or seconds
        if seconds >= (drafter.depth + 1) * plain:
            break
    sizes = list(parts)
    for name in steps.keys() - set(drafter.sizes):
        parts[name] = bench.part(programs[name])
    samples: dict[Any, list[float]] = {name: [] for name in parts}
    for _ in range(_REPEATS):
        for name, part in parts.items():
            samples[name].append(_sample(part))
    least = {name: min(found) for name, found in samples.items()}
    # A larger tree is never cheaper; where it seems so, it is noise.
    rounds = np.maximum.accumulate([least[n] for n in sizes]).tolist()
    levels = least["level", 1], max(least["level", 1], least["level", 2])
    return Costs(tuple(zip(sizes, rounds, strict=True)), levels, least["absorb"])


def _sample(part: _Part) -> float:
    """Return seconds of one repetition."""
    start = time.perf_counter()
    part.run(part.count)
    return (time.perf_counter() - start) / part.count


class _Bench:
    """A batch in the middle of its text, which never moves on; its state is handed around."""

    def __init__(self, target: HybridLM, drafter: AutoDrafter, batch: int, capacity: int):
        self.place = min(capacity // 2, target.cfg.max_position_embeddings - 1)
        self.vocab = target.cfg.vocab_size
        self.graph, self.params = split(target, drafter)
        sampling = batch_sampling([SamplingParams()] * batch, [[0]] * batch, self.vocab)
        never = Limits(jnp.full((batch, 4), -1, jnp.int32), jnp.full(batch, 1 << 30, jnp.int32))
        self.requests = Requests(sampling, never)
        self.state = self.back(
            DecodeState(
                init_cache(target.cfg, batch, capacity, target.embed_tokens[...].dtype),
                drafter.init_state(batch, capacity),
                jnp.zeros(batch, jnp.int32),
                jnp.zeros(batch, jnp.int32),
                jnp.ones(batch, bool),
                None,
            )
        )

    def back(self, state: DecodeState) -> DecodeState:
        """Return to the place in the text, keeping what was computed."""

        def rows_of(value: int) -> jax.Array:
            return jnp.full_like(state.root, value)

        auto: AutoState = state.draft
        pending = auto.pending._replace(count=rows_of(2))
        draft = auto.draft._replace(lengths=rows_of(self.place))
        return state._replace(
            cache=state.cache._replace(lengths=rows_of(self.place)),
            draft=auto._replace(draft=draft, pending=pending),
            emitted=rows_of(0),
        )

    def compiled(self, steps: dict[Any, _Step]) -> dict[Any, Callable[..., DecodeState]]:
        """Compile the repetition of each step, several at a time.

        One alone keeps a core busy: ten for a target of 30 layers took 19.5 s on two cores, 24.5
        one after the other.
        """
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            # Traced here: what JAX is set to is a thread's own.
            jobs = {name: pool.submit(self._loop(step).compile) for name, step in steps.items()}
            return {name: job.result() for name, job in jobs.items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for few

    def _loop(self, step: _Step) -> jax.stages.Lowered:
        graph, vocab = self.graph, self.vocab

        def loop(params, state, count):
            modules = merge(graph, params)

            def turn(i, state):
                state = self.back(step(*modules, state))
                return state._replace(root=(state.root + i) % vocab)

            return jax.lax.fori_loop(0, count, turn, state)

        return jax.jit(loop, donate_argnums=1).lower(self.params, self.state, np.int32(1))

    def part(self, program: Callable[..., DecodeState]) -> _Part:
        """Return a program that repeats something as a part, and see how many make a sample."""

        def run(count: int) -> None:
            self.state = jax.block_until_ready(program(self.params, self.state, np.int32(count)))

        run(1)
        once = _sample(_Part(run, 1))
        return _Part(run, max(1, min(1000, int(_SECONDS / once))))

    def round_of(self, nodes: int) -> _Step:
        """Return a round that verifies so many nodes: a chain as deep as may be, then leaves."""

        def step(target: HybridLM, drafter: AutoDrafter, state: DecodeState) -> DecodeState:
            if nodes == 1:
                return drafter.plain_round(target, state, self.requests)[0]
            place = np.arange(nodes)
            above = np.where(place <= drafter.depth, place - 1, place % drafter.depth)
            tokens = (state.root[:, None] + 7 * place) % self.vocab
            parents = jnp.broadcast_to(jnp.asarray(above, jnp.int32), tokens.shape)
            tree = Proposal(tokens, parents)
            return settle(state, drafter.attempt(target, state, self.requests, tree, nodes)[0])

        return step

    def absorb(self, target: HybridLM, drafter: AutoDrafter, state: DecodeState) -> DecodeState:
        """Read the pairs of a usual round."""
        auto: AutoState = state.draft
        pending = auto.pending
        streams = pending.aux_hidden + auto.draft.hidden[:, :1, None, None] * 1e-9
        pending = pending._replace(aux_hidden=streams)
        draft, pending = read(drafter.inner, auto.draft, pending, FEW)
        return state._replace(draft=auto._replace(draft=draft, pending=pending))

    def level(self, width: int) -> _Step:
        """Return a draft pass of one node (1) or of the whole frontier (2)."""

        def step(target: HybridLM, drafter: AutoDrafter, state: DecodeState) -> DecodeState:
            auto: AutoState = state.draft
            growth = drafter.expand(auto.draft, 1, drafter.first(auto.draft), width)
            logits = auto.draft.logits + growth.scores[:, :1] * 1e-9
            return state._replace(draft=auto._replace(draft=auto.draft._replace(logits=logits)))

        return step
