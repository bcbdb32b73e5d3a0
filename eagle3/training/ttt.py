"""Training-time test: the draft unrolled over its own outputs (arXiv 2503.01840, section 3.2).

At step k, slot t is fed the token x_{t+1+k} and, from k = 1 on, what step k - 1 made of the same
slot. It attends to the step-0 keys of slots 0..t, made from true features, and to its own keys of
steps 1..k: what decoding sees after position t. Those are one key a step, so no second square of
scores is ever made. It is taught the target's distribution after that token, which predicts
x_{t+2+k}.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3.decoding.sampling import most_likely
from eagle3.draft import Eagle3Draft, draft_logits
from eagle3.training.losses import LossFunction
from gdn.ops.attention import attention, merge_attention
from gdn.sharding import on_own_rows, row_shards

_HIGHEST = jax.lax.Precision.HIGHEST


class Teaching(NamedTuple):
    """What the target says about a batch of T tokens a row, x_0..x_{T-1}."""

    tokens: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]  # True: a token to be predicted, such as the assistant's
    segment_ids: Int[Array, "B T"]  # document of each token
    aux_hidden: Float[Array, "B T A D"]
    logits: Float[Array, "B T Vd"]  # of the target, the draft's rows only
    best: Int[Array, "B T"]  # the target's most likely next token, of all its vocabulary


class StepSums(NamedTuple):
    """Sums over the slots of one step that count; every ratio of them is a metric."""

    loss: Float[Array, ""]  # weighted, not yet divided
    weight: Float[Array, ""]  # slots that were trained on
    slots: Float[Array, ""]  # slots in the mask, whatever their target
    hit: Float[Array, ""]  # of these: the target's best token and the draft's are one
    chains: Float[Array, ""]  # of these: in the mask at all steps before
    run: Float[Array, ""]  # of these: and hit now and at all steps before
    reached: Float[Array, ""]  # of the chains: hit at all steps before
    overlap: Float[Array, ""]  # sum of min(p, q), the chance that a drawn token is accepted


def unroll(
    draft: Eagle3Draft,
    aux_hidden: Float[Array, "B T A D"],
    tokens: Int[Array, "B T"],
    steps: int,
) -> Float[Array, "K B T Vd"]:
    """Return the draft's logits of K = `steps` steps at every slot.

    Args:
      aux_hidden: residual streams of the target at positions 0..T-1.
      tokens: x_1..x_T, the token after each. Step k is meaningful at slots 0..T-1-k, where its
        token exists; later ones see token 0.
    """
    logits = unroll_with(draft, aux_hidden, tokens, steps, lambda step, z: draft.logits(z))
    return jnp.stack(logits)


def unroll_with(
    draft: Eagle3Draft,
    aux_hidden: Float[Array, "B T A D"],
    tokens: Int[Array, "B T"],
    steps: int,
    visit: Callable[[int, jax.Array], Any],
    segment_ids: Int[Array, "B T"] | None = None,
    remat: bool = True,
) -> list[Any]:
    """Unroll, and collect what `visit(step, z)` makes of the layer's output z [B, T, H].

    Args:
      remat: the layer is computed again in the backward pass: memory is that of one step, plus the
        keys, values and z of each.
      segment_ids: a slot sees slots of its own document only; positions need not start again, as
        RoPE knows only their differences.
    """
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))

    def one_step(step, hidden, keys):
        shifted = jnp.pad(tokens, ((0, 0), (0, step)))[:, step:]
        made = None

        def attend(q, k, v):
            nonlocal made
            made = (k, v)
            (first_k, first_v), *own = (*keys, made)
            causal = attention(q, first_k, first_v, positions, segment_ids, segment_ids)
            return merge_attention(causal, _own_slot(q, own)) if own else causal[0]

        return draft.layer(hidden, shifted, positions + step, attend), made

    hidden, keys, results = draft.fuse(aux_hidden), (), []
    for step in range(steps):
        layer = partial(one_step, step)
        z, made = (jax.checkpoint(layer) if remat else layer)(hidden, keys)
        results.append(visit(step, z))
        hidden, keys = draft.feedback(z), (*keys, made)
    return results


def _own_slot(q: Float[Array, "B T N H"], keys):
    """Attend to the keys that slot t itself made in later steps, one of each step."""
    groups = q.shape[2] // keys[0][0].shape[1]
    k, v = (jnp.repeat(jnp.stack(x, 1), groups, axis=2) for x in zip(*keys, strict=True))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.einsum("btnh,bsnth->btns", q, k, precision=_HIGHEST) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("btns,bsnth->btnh", weights, v, precision=_HIGHEST)
    return out, jax.nn.logsumexp(scores, axis=-1)


def slot_weights(
    loss_mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"], steps: int
) -> Bool[Array, "K B T"]:
    """Say which slots count at each step: x_{t+2+k} is to be predicted, in slot t's document."""

    def at(step):
        ahead = step + 2
        mask, document = (_ahead(x, ahead) for x in (loss_mask, segment_ids))
        exists = jnp.arange(loss_mask.shape[1]) + ahead < loss_mask.shape[1]
        return mask & exists & (document == segment_ids)

    return jnp.stack([at(step) for step in range(steps)])


def _ahead(x: jax.Array, places: int) -> jax.Array:
    """Return what is that many places to the right of each slot; zeros past the end."""
    padding = [(0, 0), (0, places)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding)[:, places:]


def draft_loss(
    draft: Eagle3Draft,
    teaching: Teaching,
    steps: int,
    loss_function: LossFunction,
    keep_unknown: bool = False,
    rows: int = 512,
    remat: bool = True,
) -> list[StepSums]:
    """Unroll the draft against the target; returns sums per step.

    Args:
      keep_unknown: also train on slots whose best next token the draft vocabulary lacks.
      rows: slots whose logits are made at a time, on each device.
      remat: activations and logits are made again in the backward pass, not held until then.
    """
    target_ids = draft.target_ids[...]
    counts = slot_weights(teaching.loss_mask, teaching.segment_ids, steps)
    known_ids = jnp.zeros(draft.cfg.vocab_size, bool).at[target_ids].set(True)
    is_known = known_ids[teaching.best]
    following = _ahead(teaching.tokens, 1)
    run = chain = counts[0]
    batch, length = teaching.tokens.shape
    size = min(length, max(1, rows * row_shards(batch) // batch))
    # Once for all steps: as many copies of it would be held.
    teacher = jnp.pad(teaching.logits, ((0, 0), (0, -length % size + steps), (0, 0)))

    def visit(step, z):
        best, known = (_ahead(x, step + 1) for x in (teaching.best, is_known))
        weight = counts[step] & (known | keep_unknown)

        def of_own(head, z, teacher, weight):
            return _scores(head, z, teacher, weight, step + 1, loss_function, size, remat)

        head = draft.norm, draft.lm_head[...]
        loss, (token, overlap) = on_own_rows(of_own, head, z, teacher, weight)
        return loss, weight, target_ids[token] == best, overlap

    seen = unroll_with(
        draft, teaching.aux_hidden, following, steps, visit, teaching.segment_ids, remat
    )
    sums = []
    for step, (loss, weight, hit, overlap) in enumerate(seen):
        slots = counts[step]
        chain, reached = chain & slots, run & slots
        run = reached & hit
        sums.append(
            StepSums(
                loss=loss, weight=_count(weight), slots=_count(slots), hit=_count(hit & slots),
                chains=_count(chain), run=_count(run), reached=_count(reached),
                overlap=jnp.sum(jnp.where(slots, overlap, 0.0)),
            )
        )  # fmt: skip
    return sums


def _scores(
    head: Any,
    z: Float[Array, "B T H"],
    teacher: Float[Array, "B S Vd"],
    weight: Bool[Array, "B T"],
    ahead: int,
    loss_function: LossFunction,
    size: int,
    remat: bool,
) -> tuple[Float[Array, ""], tuple[Int[Array, "B T"], Float[Array, "B T"]]]:
    """Compare the draft at slot t with the teacher at t + `ahead`, `size` slots at a time.

    Args:
      head: of the draft, see `draft_logits`.
      teacher: with as many more slots as `ahead` and the last block reach over.

    Returns:
      The loss, summed over `weight`; the draft's best token, a draft id, and sum(min(p, q)).
    """
    batch, length = z.shape[:2]
    count = -(-length // size)
    padding = ((0, 0), (0, count * size - length))
    z = jnp.pad(z, (*padding, (0, 0))).reshape(batch, count, size, -1)
    weight = jnp.pad(weight, padding).reshape(batch, count, size)

    def block(total, inputs):
        number, z, weight = inputs
        logits = draft_logits(head, z)
        there = jax.lax.dynamic_slice_in_dim(teacher, number * size + ahead, size, axis=1)
        loss, overlap = loss_function(logits, there)
        found = most_likely(logits), overlap
        return total + jnp.sum(jnp.where(weight, loss, 0.0)), found

    blocks = (jnp.arange(count), jnp.swapaxes(z, 0, 1), jnp.swapaxes(weight, 0, 1))
    block = jax.checkpoint(block) if remat else block
    total, found = jax.lax.scan(block, jnp.zeros((), jnp.float32), blocks)
    token, overlap = (jnp.swapaxes(x, 0, 1).reshape(batch, -1)[:, :length] for x in found)
    return total, (token, overlap)


def _count(x: jax.Array) -> jax.Array:
    return jnp.sum(x, dtype=jnp.float32)
