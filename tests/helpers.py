"""What several test files need: tolerances, tiny configurations, random weights, compiled steps.

The steps are compiled once per shape and session, so the files agree on one shape where they can:
BATCH rows, prompts padded to PROMPT tokens, caches of CAPACITY slots; and for whole generations the
rows of PROMPTS with the options of `serve`.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from eagle3.decoding.drafter import Drafter, Eagle3Drafter
from eagle3.decoding.request import Answer, Request
from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.session import Session
from eagle3.decoding.tree import Proposal, TreePlan
from eagle3.draft import Eagle3Draft, draft_for
from eagle3.draft_config import DraftConfig
from eagle3.training.ttt import unroll
from gdn import Cache, HybridLM, TargetConfig, chain_tree, commit, init_cache
from gdn.cache import KVCache

# Largest error allowed, relative to the largest expected value; see `assert_close`.
# The last is loose: two layers round 8-bit mantissas some twenty times (0.06 was measured).
RTOL = {"float32": 1e-5, "bfloat16": 1e-2, "bfloat16 model": 1e-1}

BATCH, PROMPT, CAPACITY = 4, 40, 64  # PROMPT is longer than a chunk of the delta rule

LINEAR: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    shared_expert_intermediate_size=14,
)
HYBRID = TargetConfig(
    model_type="qwen3_5_text",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=("linear_attention", "full_attention"),
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-6,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    norm_unit_offset=True,
    qk_norm=True,
    attn_output_gate=True,
    bos_token_id=None,
    pad_token_id=None,
    **LINEAR,
)
LLAMA = TargetConfig(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    layer_types=("full_attention",) * 2,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    norm_unit_offset=False,
    qk_norm=False,
    attn_output_gate=False,
    bos_token_id=None,
    pad_token_id=None,
)
QWEN3 = dataclasses.replace(LLAMA, model_type="qwen3", qk_norm=True, tie_word_embeddings=True)
TIED_HYBRID = dataclasses.replace(HYBRID, tie_word_embeddings=True)
QWEN3_5_MOE = dataclasses.replace(
    HYBRID, model_type="qwen3_5_moe_text", moe_layers=(True,) * 2, **EXPERTS
)
QWEN3_NEXT = dataclasses.replace(
    HYBRID, model_type="qwen3_next", moe_layers=(True, False), **EXPERTS
)


def float32(x) -> np.ndarray:
    """Copy to float32; called like this, numpy's own type would be a scalar to pyright."""
    return np.array(x, np.float32)


def float64(x) -> np.ndarray:
    """Copy to float64."""
    return np.array(x, np.float64)


def int32(x) -> np.ndarray:
    """Copy to int32."""
    return np.array(x, np.int32)


def relative_error(actual, expected) -> float:
    """Return the largest difference over the largest expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    if not expected.size:
        return 0.0
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def assert_close(actual, expected, dtype="float32"):
    """Check every pair of leaves of two pytrees against the tolerance of `dtype`."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    errors = [relative_error(x, y) for x, y in pairs]
    # Not `max(errors) < ...`: a NaN has to fail.
    assert all(error < RTOL[dtype] for error in errors), f"relative errors {errors}"


def assert_same_bits(actual, expected):
    """Check that two pytrees are equal bit for bit, which tells -0 from 0 and compares NaN."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def random_model(cfg: TargetConfig, seed: int = 0, dtype=jnp.float32) -> HybridLM:
    """Draw every parameter away from its initial value, so that each term of the model counts."""
    abstract = nnx.eval_shape(lambda: HybridLM(cfg, dtype=dtype, rngs=nnx.Rngs(0)))
    return _randomised(abstract, cfg.norm_unit_offset, seed)


def _randomised(module, norm_unit_offset: bool, seed: int):
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    rng = np.random.default_rng(seed)
    leaves = []
    for path, leaf in nnx.to_flat_state(params):
        value = _draw(norm_unit_offset, path, leaf.shape, rng)
        leaves.append((path, leaf.replace(jnp.asarray(value, leaf.dtype))))
    return nnx.merge(graphdef, nnx.from_flat_state(leaves), rest)


def _draw(norm_unit_offset: bool, path: tuple, shape: tuple[int, ...], rng) -> np.ndarray:
    noise, names = rng.standard_normal(shape), "/".join(map(str, path))
    if names.endswith("A_log"):  # from slow to fast forgetting over the heads
        return np.linspace(np.log(0.02), np.log(8.0), shape[0]) + 0.1 * noise
    if names.endswith("dt_bias"):
        return 1.5 * noise - 1.5
    if names.endswith("linear_attn/norm"):
        return 1 + 0.3 * noise
    if "norm" in names:
        return (0.0 if norm_unit_offset else 1.0) + 0.3 * noise
    if names.endswith("conv1d"):
        return 0.5 * noise
    return noise * (1.0 if "embed_tokens" in names else 1.2 * shape[-1] ** -0.5)


def parameters(model: HybridLM) -> dict[str, jax.Array]:
    """Return the parameters by dotted path."""
    return {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))
    }


def all_taps(model: HybridLM) -> tuple[int, ...]:
    """Return every aux layer id."""
    return tuple(range(model.cfg.num_hidden_layers + 1))


forward = jax.jit(HybridLM.__call__, static_argnames=("aux_layers",))
prefill = jax.jit(HybridLM.prefill, static_argnames=("aux_layers", "chunk_size"))
verify = jax.jit(HybridLM.verify, static_argnames=("aux_layers",))
commit_path = jax.jit(commit)


@jax.jit
def decode(model: HybridLM, tokens, steps, cache: Cache):
    """Append the first `steps` [B] of `tokens` [B, T] one at a time.

    Returns:
      Logits [B, T, V] and all residual streams [B, T, L + 1, D] at each token, and the cache.
    """
    batch, length = tokens.shape

    def step(cache, inputs):
        token, index = inputs
        out = model.verify(token[:, None], chain_tree(batch, 1), cache, all_taps(model))
        cache = commit(cache, out.updates, jnp.where(index < steps, 0, -1)[:, None])
        return cache, (out.logits[:, 0], out.aux_hidden[:, 0])

    cache, outputs = jax.lax.scan(step, cache, (tokens.T, jnp.arange(length)))
    logits, aux_hidden = (jnp.moveaxis(x, 0, 1) for x in outputs)
    return logits, aux_hidden, cache


def start_cache(model: HybridLM, prompts: list[np.ndarray], capacity: int = CAPACITY):
    """Prefill `prompts`, each of at most PROMPT tokens, into a new cache; returns the output."""
    tokens = np.zeros((len(prompts), PROMPT), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = init_cache(model.cfg, len(prompts), capacity)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    return prefill(model, tokens, lengths, cache, all_taps(model))


def take_rows(cache: Cache, rows) -> Cache:
    """Pick rows of the batch."""
    rows = np.asarray(rows)
    return jax.tree.map(lambda x: np.asarray(x)[rows], cache)


def committed(cache: Cache) -> list[list[np.ndarray]]:
    """Return what may be read of each row: slots below its length, and recurrent entries."""
    entries = [(np.asarray(x), isinstance(entry, KVCache)) for entry in cache.layers for x in entry]
    return [
        [x[row, :, :length] if is_kv else x[row] for x, is_kv in entries]
        for row, length in enumerate(np.asarray(cache.lengths))
    ]


# What follows is about decoding: drafts, whole generations, and what they have to be equal to.

DRAFT_VOCAB = 48  # of the 64 tokens of the targets
_sizes = (1, 2, 17, 64, 130)
PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in _sizes]
LONGEST = 640  # tokens of a row, with room for the longest prompt and 500 more
FITTED, FIT_STEPS, FIT_SLOTS = 3, 3, 82  # rows, steps of the unrolling, slots of each row


def draft_config(cfg: TargetConfig, **changes) -> DraftConfig:
    """Return a draft for any of the tiny targets: every stream, grouped heads, fewer tokens."""
    sizes: dict[str, Any] = dict(
        hidden_size=cfg.hidden_size,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=cfg.vocab_size,
        draft_vocab_size=min(DRAFT_VOCAB, cfg.vocab_size),
        target_hidden_size=cfg.hidden_size,
        aux_layers=tuple(range(cfg.num_hidden_layers + 1)),
        max_position_embeddings=cfg.max_position_embeddings,
    )
    return DraftConfig(**(sizes | changes))


def random_draft(target: HybridLM, seed: int = 0, **changes) -> Eagle3Draft:
    """Draw a draft that knows nothing of the target but has strong opinions."""
    cfg = draft_config(target.cfg, **changes)
    rng = np.random.default_rng(seed)
    target_ids = np.sort(rng.choice(cfg.vocab_size, cfg.draft_vocab_size, replace=False))
    draft = Eagle3Draft(cfg, target.embed_tokens[...], target_ids, rngs=nnx.Rngs(0))
    return _randomised(draft, False, seed)


def serve(
    target: HybridLM, drafter: Drafter | None, requests: Sequence[Request], **options
) -> list[Answer]:
    """Answer a batch, with caches that need not grow, prefill of one shape, one visit a round."""
    session = open_session(target, drafter, **options)
    session.start(requests)
    return finish(session)


def finish(session: Session) -> list[Answer]:
    """Advance to the end; every visit has to bring something."""
    while session.is_running:
        assert all(chunk.tokens for chunk in session.advance())
    return session.answers


def open_session(target: HybridLM, drafter: Drafter | None, **options) -> Session:
    """Prepare a session as in `serve`."""
    common: dict[str, Any] = dict(min_capacity=1024, prefill_chunk=16, stream_every=1)
    return Session(target, drafter, **(common | options))


def greedy_requests(count: int, prompts=PROMPTS, **fields) -> list[Request]:
    """Ask for `count` greedy tokens after each prompt."""
    return [Request(prompt=p, max_new_tokens=count, **fields) for p in prompts]


def snapshot(session: Session) -> list[list[np.ndarray]]:
    """Copy what the target's caches hold, row by row; see `committed`."""
    assert session._state is not None
    return committed(jax.tree.map(lambda x: np.array(x, copy=True), session._state.cache))


class PlainText(NamedTuple):
    """The greedy continuations of PROMPTS, 500 tokens each, and what the target says about them."""

    target: HybridLM
    answers: list[Answer]
    tokens: np.ndarray  # [B, LONGEST], prompt and answer, zeros after
    logits: np.ndarray  # [B, LONGEST, V], by one forward without a cache
    aux_hidden: np.ndarray  # [B, LONGEST, L + 1, D]
    states: list[list[list[np.ndarray]]]  # by tokens emitted, up to 48: the snapshot of each row


def plain_text(target: HybridLM) -> PlainText:
    """Decode PROMPTS plainly, and score the result by full recomputation."""
    session = open_session(target, None)
    session.start(greedy_requests(500))
    states = [snapshot(session)]
    while session.is_running:
        session.advance()
        if len(states) <= 48:
            states.append(snapshot(session))
    tokens = np.zeros((len(PROMPTS), LONGEST), np.int32)
    for row, prompt, answer in zip(tokens, PROMPTS, session.answers, strict=True):
        row[: len(prompt) + 500] = prompt + answer.tokens
    out = forward(target, tokens, aux_layers=all_taps(target))
    logits = jax.jit(HybridLM.logits)(target, out.hidden)
    logits, aux_hidden = (np.asarray(x) for x in (logits, out.aux_hidden))
    return PlainText(target, session.answers, tokens, logits, aux_hidden, states)


def assert_same_text(found: Sequence[Answer], text: PlainText, count: int = 500):
    """Check greedy answers, and their log-probabilities, against plain decoding.

    Up to a tie of the two likeliest tokens: after one, the texts are different ones.
    """
    for row, (answer, expected) in enumerate(zip(found, text.answers, strict=True)):
        assert len(answer.tokens) == count
        same = np.array(answer.tokens) == expected.tokens[:count]
        first = count if same.all() else int(np.argmin(same))
        if first < count:
            logits = text.logits[row, len(PROMPTS[row]) + first - 1]
            best = np.sort(logits)
            margin = float(best[-1] - best[-2])
            assert margin < RTOL["float32"] * np.abs(logits).max(), (row, first, margin)
            assert answer.tokens[first] in np.argsort(logits)[-2:]
        if first:
            assert_close(np.array(answer.logprobs[:first]), np.array(expected.logprobs[:first]))


def fitted_draft(text: PlainText) -> Eagle3Draft:
    """Train a draft until it knows the beginnings of the first FITTED texts by heart."""
    target, reach = text.target, FIT_SLOTS + FIT_STEPS
    tokens = text.tokens[:FITTED, : reach + 1]
    frequent = np.argsort(-np.bincount(tokens.ravel(), minlength=64), kind="stable")
    ids = np.sort(frequent[:DRAFT_VOCAB])
    draft = draft_for(target, draft_config(target.cfg), ids, rngs=nnx.Rngs(0))
    to_draft = np.full(64, -1)
    to_draft[ids] = np.arange(DRAFT_VOCAB)
    shifts = range(2, 2 + FIT_STEPS)  # step k predicts the token after the one it is fed
    labels = np.stack([to_draft[tokens[:, s : s + FIT_SLOTS]] for s in shifts])
    starts = np.array([len(prompt) for prompt in PROMPTS[:FITTED]])  # prompts are random
    answers = np.add.outer(shifts, np.arange(FIT_SLOTS))[:, None] >= starts[:, None]
    weights = (labels >= 0) & answers
    graph, params, rest = nnx.split(draft, nnx.Param, ...)
    aux_hidden, following = text.aux_hidden[:FITTED, :FIT_SLOTS], tokens[:, 1 : FIT_SLOTS + 1]
    params = _train(graph, nnx.to_pure_dict(params), rest, aux_hidden, following, labels, weights)
    return nnx.merge(graph, params, rest)


@partial(jax.jit, static_argnames=("graph",))
def _train(graph, params, rest, aux_hidden, tokens, labels, weights):
    def loss(params):
        logits = unroll(nnx.merge(graph, params, rest), aux_hidden, tokens, FIT_STEPS)
        log_q = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * weights) / jnp.sum(weights)

    optimiser = optax.adam(optax.cosine_decay_schedule(5e-3, 120))

    def step(carry, _):
        params, state = carry
        updates, state = optimiser.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    start = (params, optimiser.init(params))
    return jax.lax.scan(step, start, None, length=120)[0][0]


def expected_probabilities(
    logits, params: SamplingParams, prompt: Sequence[int] = (), answer: Sequence[int] = ()
) -> np.ndarray:
    """Return the distribution of the next token, written to be read: sorts, float64, one row."""
    x = float64(logits)
    for token in range(len(x)):
        count = list(answer).count(token)
        if count or token in prompt:
            rate = params.repetition_penalty
            x[token] = x[token] / rate if x[token] > 0 else x[token] * rate
        x[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    for token, bias in params.logit_bias:
        x[token] += bias
    if params.temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    p = _normalised(np.exp((x - x.max()) / params.temperature))
    if params.top_k:
        p = _normalised(np.where(p >= np.sort(p)[::-1][: params.top_k][-1], p, 0))
    if params.top_p < 1:
        p = _normalised(np.where([p[p > own].sum() < params.top_p for own in p], p, 0))
    return _normalised(np.where(p >= params.min_p * p.max(), p, 0))


def _normalised(p: np.ndarray) -> np.ndarray:
    return p / p.sum()


class Oracle(nnx.Module):
    """A drafter that knows the texts, but for some places where it is told to be wrong.

    A drafter is a protocol, so this is all there is to one. Every node has a wrong sibling that
    comes first, so the accepted path is neither the first child nor consecutive.
    """

    aux_layers = ()

    def __init__(self, tokens, is_known, depth: int = 5, max_positions: int | None = None):
        self.tokens, self.is_known = nnx.Variable(tokens), nnx.Variable(is_known)
        self.depth, self.max_positions = depth, max_positions

    def problems_with(self, target: TargetConfig) -> list[str]:
        return []

    def init_state(self, batch: int, capacity: int):
        return jnp.zeros(batch, jnp.int32)  # place of the root in the text

    def grow_state(self, state, capacity: int):
        return state

    def absorb(self, state, aux_hidden, tokens, count):
        return state + count

    def propose(self, state, root, foresight=None):
        places = state[:, None] + 1 + jnp.arange(self.depth)
        places = jnp.minimum(places, self.tokens.shape[1] - 1)
        right, known = (
            jnp.take_along_axis(x[...], places, axis=1) for x in (self.tokens, self.is_known)
        )
        pairs = jnp.stack([(right + 1) % 64, jnp.where(known, right, (right + 2) % 64)], axis=-1)
        tokens = jnp.concatenate([root[:, None], pairs.reshape(len(root), -1)], axis=1)
        # The right node of level i is node 2 i, the root is node 0.
        parents = np.concatenate([[-1], np.repeat(2 * np.arange(self.depth), 2)])
        return Proposal(tokens, jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens.shape))


def token_paths(tokens, parents) -> list[tuple[int, ...]]:
    """Return, for each node of one row, the drafted tokens from the root down to it."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in itertools.islice(zip(tokens, parents, strict=True), 1, None):
        paths.append((*paths[parent], int(token)))
    return paths


def eagle3(draft: Eagle3Draft, plan: TreePlan) -> Drafter:
    """Wrap a draft; typed as what the sessions take."""
    return Eagle3Drafter(draft, plan)
