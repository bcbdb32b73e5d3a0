"""One round of speculative decoding, and the device loop of many.

propose -> verify -> accept -> commit -> absorb. Plain decoding is the same round with a tree of one
node; a drafter that adapts puts the same parts together in its own way. Between rounds every row
holds: the cache of all tokens but the last, and the last, the root.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eagle3.decoding.accept import Accepted, Limits, accept
from eagle3.decoding.drafter import Drafter
from eagle3.decoding.request import Request
from eagle3.decoding.sampling import Sampling, batch_sampling
from eagle3.decoding.tree import Proposal
from eagle3.sharding import pin
from gdn import Cache, HybridLM, commit, tree_from_parents
from gdn.cache import Updates

T = TypeVar("T")


class Requests(NamedTuple):
    """What the rows of a batch ask for."""

    sampling: Sampling
    limits: Limits


def batch_requests(requests: Sequence[Request], vocab_size: int) -> Requests:
    """Gather what each row asks for.

    Raises:
      ValueError: a bias names a token outside the vocabulary.
    """
    prompts = [request.prompt for request in requests]
    sampling = batch_sampling([request.sampling for request in requests], prompts, vocab_size)
    width = 1 << (max(4, *(len(request.stop_ids) for request in requests)) - 1).bit_length()
    stops = np.full((len(requests), width), -1, np.int32)
    for row, request in zip(stops, requests, strict=True):
        row[: len(request.stop_ids)] = request.stop_ids
    most = np.array([request.max_new_tokens for request in requests], np.int32)
    return Requests(sampling, Limits(jnp.asarray(stops), jnp.asarray(most)))


class DecodeState(NamedTuple):
    """A batch between two rounds."""

    cache: Cache  # of the target: every committed token but the root
    draft: Any  # the drafter's own
    root: Int[Array, " B"]  # last committed token
    emitted: Int[Array, " B"]  # tokens of the answer so far
    is_running: Bool[Array, " B"]
    counts: Int[Array, "B V"] | None  # of each token in the answer, if a penalty wants them


class Emitted(NamedTuple):
    """What some rounds brought: the first `count` of N tokens a row."""

    tokens: Int[Array, "B N"]
    is_drafted: Bool[Array, "B N"]
    logprobs: Float[Array, "B N"]
    count: Int[Array, " B"]
    tree: Proposal | None = None  # what the last of them verified, if it was asked for


class Chosen(NamedTuple):
    """What rounds verified, for people."""

    sizes: dict[int, int]  # nodes: rounds
    depths: dict[int, int]  # levels drafted for them: rounds
    asked: int  # rounds in which the draft was asked, whatever came of it
    seconds: float  # that all of them should have taken, by the costs


class Scored(NamedTuple):
    """What a pass of the target over one tree brought."""

    accepted: Accepted
    updates: Updates  # of all nodes: what `accepted.path` commits
    aux_hidden: Float[Array, "B P A D"]  # the target's own streams along the path


@runtime_checkable
class AdaptiveDrafter(Drafter, Protocol):
    """A drafter that runs its rounds itself, as what is verified depends on what it would cost."""

    def fitted(
        self, target: HybridLM, batch: int, capacity: int, stand_in: Drafter | None = None
    ) -> Drafter:
        """Return the drafter for rounds of so many rows, in caches of so many slots.

        Between two of them, states can be exchanged; one that is not adaptive has none. If that
        takes long to find out, `stand_in` is returned where there is one.
        """
        ...

    def rests(self, state: Any) -> Bool[Array, ""]:
        """Say whether the next round is a plain one."""
        ...

    def plain_round(
        self, target: HybridLM, state: DecodeState, requests: Requests
    ) -> tuple[DecodeState, Accepted, Proposal]:
        """Run a round without a draft; its tree is padded, with parents -1."""
        ...

    def round(
        self, target: HybridLM, state: DecodeState, requests: Requests
    ) -> tuple[DecodeState, Accepted, Proposal]:
        """Run one with a draft, of up to depth + 1 tokens a row; or none, and rest from then on."""
        ...

    def inherit(self, state: Any, before: Any) -> Any:
        """Return a first state that knows what an earlier batch has taught."""
        ...

    def chosen(self, state: Any) -> Chosen:
        """Return what the rounds since the first state verified."""
        ...


def decode_round(
    target: HybridLM, drafter: Drafter, state: DecodeState, requests: Requests
) -> tuple[DecodeState, Accepted, Proposal]:
    """Run one round; a row that has ended keeps everything as it is.

    Returns:
      The state after it, what was accepted, and the tree that was verified.
    """
    with jax.named_scope("draft"):
        foresight = requests.sampling.foresight(state.emitted, target.cfg.vocab_size)
        proposal = drafter.propose(state.draft, state.root, foresight)
    scored = score(target, proposal, drafter.depth, drafter.aux_layers, state, requests)
    accepted = scored.accepted
    state = settle(state, scored)
    with jax.named_scope("absorb"):
        draft = drafter.absorb(state.draft, scored.aux_hidden, accepted.tokens, accepted.count)
    return state._replace(draft=draft), accepted, proposal


def score(
    target: HybridLM,
    proposal: Proposal,
    depth: int,
    aux_layers: tuple[int, ...],
    state: DecodeState,
    requests: Requests,
) -> Scored:
    """Verify a tree and see how far it is right; the state stays as it is."""
    with jax.named_scope("verify"):
        tree = tree_from_parents(proposal.parents)
        out = target.verify(proposal.tokens, tree, state.cache, aux_layers)
    with jax.named_scope("accept"):
        accepted = accept(
            out.logits, proposal, depth, requests.sampling, requests.limits,
            state.is_running, state.emitted, state.counts, target.uses_kernels,
        )  # fmt: skip
    nodes = jnp.maximum(accepted.path, 0)[:, :, None, None]
    return Scored(accepted, out.updates, jnp.take_along_axis(out.aux_hidden, nodes, axis=1))


def settle(state: DecodeState, scored: Scored) -> DecodeState:
    """Add what was accepted to the target's caches; the last token is the new root."""
    accepted = scored.accepted
    with jax.named_scope("commit"):
        cache = commit(state.cache, scored.updates, accepted.path)
    last = jnp.maximum(accepted.count - 1, 0)[:, None]
    newest = jnp.take_along_axis(accepted.tokens, last, axis=1)[:, 0]
    root = jnp.where(accepted.count > 0, newest, state.root)
    emitted = state.emitted + accepted.count
    return DecodeState(cache, state.draft, root, emitted, accepted.is_running, accepted.counts)


def decode_rounds(
    target: HybridLM,
    drafter: Drafter,
    state: DecodeState,
    requests: Requests,
    rounds: Int[Array, ""] | int,
    most_rounds: int,
    keeps_tree: bool = False,
) -> tuple[DecodeState, Emitted]:
    """Run `rounds` rounds on the device, fewer if all rows end.

    The cache must have room for rounds * (drafter.depth + 1) more tokens of every running row.

    Args:
      most_rounds: no fewer than `rounds`; decides the size of the result, N, at compile time.
      keeps_tree: return the tree of the last round beside the tokens.
    """
    batch, most = state.root.shape[0], drafter.depth + 1
    shape, rows = (batch, most_rounds * most), jnp.arange(batch)[:, None]

    def more(carry):
        index, state, _ = carry
        return (index < rounds) & jnp.any(state.is_running)

    def record(out, new, tree):
        place = jnp.arange(new.tokens.shape[1])
        real = place < new.count[:, None]
        at = jnp.where(real, out.count[:, None] + place, shape[1])  # beyond the end: dropped

        def put(buffer, values):
            return buffer.at[rows, at].set(values, mode="drop")

        return Emitted(
            put(out.tokens, new.tokens),
            put(out.is_drafted, new.is_drafted),
            put(out.logprobs, new.logprobs),
            out.count + new.count,
            None if out.tree is None else choose(new, tree, out.tree),
        )

    def choose(new, tree, before):
        return jax.tree.map(partial(jnp.where, jnp.any(new.count > 0)), tree, before)

    def step_of(one_round):
        def step(carry):
            index, state, out = carry
            state, new, tree = one_round(target, state, requests)
            # A drafter may have chosen to rest instead: then nothing came, of any row.
            return index + jnp.any(new.count > 0), state, record(out, new, tree)

        return step

    if isinstance(drafter, AdaptiveDrafter):
        # Rests are loops of their own, so that a plain round is plain decoding and nothing else.
        rest, speculate = step_of(drafter.plain_round), step_of(drafter.round)

        def step(carry):
            carry = jax.lax.while_loop(
                lambda carry: more(carry) & drafter.rests(carry[1].draft), rest, carry
            )
            return at_most_once(more(carry), speculate, carry)
    else:
        step = step_of(lambda target, *rest: decode_round(target, drafter, *rest))

    empty = Emitted(
        jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32),
        jnp.zeros(batch, jnp.int32), _no_tree(drafter, state) if keeps_tree else None,
    )  # fmt: skip
    _, state, out = jax.lax.while_loop(more, step, (jnp.int32(0), state, empty))
    return state, out


def _no_tree(drafter: Drafter, state: DecodeState) -> Proposal:
    """Return zeros in the shape of what the drafter proposes."""
    shapes = jax.eval_shape(drafter.propose, state.draft, state.root)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def at_most_once(condition: Bool[Array, ""], body: Callable[[T], Any], carry: T) -> Any:
    """Run `body` on the carry if the condition holds.

    A loop, as XLA updates what a loop carries in place; a conditional would copy caches.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, c: body(c), carry)


def prefill(
    target: HybridLM,
    drafter: Drafter,
    cache: Cache,
    draft: Any,
    tokens: Int[Array, "B T"],
    following: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[Cache, Any]:
    """Take in the first `count` of T prompt tokens a row; `following` is the token after each."""
    out = target.prefill(tokens, count, cache, drafter.aux_layers)
    return out.cache, drafter.absorb(draft, out.aux_hidden, following, count)


# The compiled steps. Modules come as `split` returns them: cheap to pass at every call.


class Structure:
    """What modules are but for their arrays, hashed once: a jit looks up static arguments by hash.

    Hashing the graph of twelve layers takes a millisecond, at each visit of the host.
    """

    def __init__(self, graph: nnx.GraphDef):
        """Take what `nnx.split` returns first."""
        self.graph, self._hash = graph, hash(graph)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Structure):
            return self is other
        if self.graph is not other.graph and self.graph == other.graph:
            self.graph = other.graph  # so that the next look is as quick as a hash
        return self.graph is other.graph


def split(target: HybridLM, drafter: Drafter) -> tuple[Structure, Any]:
    """Part target and drafter into a static argument and a tree of arrays."""
    graph, params = nnx.split((target, drafter))
    return Structure(graph), nnx.to_pure_dict(params)


def merge(structure: Structure, params: Any) -> tuple[HybridLM, Any]:
    """Return target and drafter again."""
    return nnx.merge(structure.graph, params)


@partial(
    jax.jit, static_argnames=("graph", "most_rounds", "keeps_tree"), donate_argnames=("state",)
)
def run_rounds(
    graph: Structure,
    params,
    state: DecodeState,
    requests: Requests,
    rounds,
    most_rounds: int,
    keeps_tree: bool = False,
):
    """Run `decode_rounds`; the state is updated in place."""
    target, drafter = merge(graph, params)
    state, out = decode_rounds(target, drafter, state, requests, rounds, most_rounds, keeps_tree)
    return pin(state), out


@partial(jax.jit, static_argnames=("graph",), donate_argnames=("cache", "draft"))
def run_prefill(graph: Structure, params, cache, draft, tokens, following, count):
    """Run `prefill`; cache and drafter state are updated in place."""
    target, drafter = merge(graph, params)
    return pin(prefill(target, drafter, cache, draft, tokens, following, count))


def read_prompts(
    graph: Structure, params, cache: Cache, draft: Any, rows: Sequence[Sequence[int]], chunk: int
) -> tuple[Cache, Any]:
    """Run `run_prefill` over all tokens of each row but the last, up to `chunk` at a time."""
    longest = max(map(len, rows)) - 1
    for start in range(0, longest, chunk):
        size = min(longest - start, chunk)
        # Few lengths to compile for: whole chunks, and powers of two for what is left.
        padded = min(chunk, max(16, 1 << (size - 1).bit_length()))
        tokens = np.zeros((len(rows), padded + 1), np.int32)
        count = np.zeros(len(rows), np.int32)
        for row, ids in enumerate(rows):
            part = ids[start : start + size + 1]
            tokens[row, : len(part)] = part
            count[row] = max(len(part) - 1, 0)
        cache, draft = run_prefill(
            graph, params, cache, draft, tokens[:, :-1], tokens[:, 1:], count
        )
    return cache, draft


@partial(jax.jit, donate_argnames=("state",))
def replace_row(state: DecodeState, cache: Cache, draft: Any, root, row) -> DecodeState:
    """Put caches of one row in the place of a row's; its answer is to begin."""

    def put(whole: jax.Array, one: jax.Array) -> jax.Array:
        # What a drafter has learned is of no row, and stays: there are several, this is one.
        return whole if whole.shape == one.shape else whole.at[row].set(one[0])

    return DecodeState(
        jax.tree.map(put, state.cache, cache),
        jax.tree.map(put, state.draft, draft),
        state.root.at[row].set(root),
        state.emitted.at[row].set(0),
        state.is_running.at[row].set(True),
        None if state.counts is None else state.counts.at[row].set(0),
    )
