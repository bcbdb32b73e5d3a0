"""One training step, pure: two tasks, one `train_step`.

A task knows its modules' graphs and its loss; weights, batches and optimiser state are arguments.
Losses are sums divided by counts that the batch alone decides, so a batch in pieces (accumulation)
and a batch at once have the same gradient.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eagle3.sharding import pin
from eagle3.training.data.batches import Batch
from eagle3.training.features import FeaturedBatch, teach
from eagle3.training.losses import LOSSES
from eagle3.training.ttt import draft_loss, slot_weights
from gdn.layers import linear
from gdn.sharding import on_own_rows


class TrainState(NamedTuple):
    """All that a step changes."""

    step: Int[Array, ""]
    params: Any  # pure dict, float32
    optimizer: Any
    average: Any  # exponential moving average of params, or None


class Task(Protocol):
    """What is trained, and towards what."""

    def counts(self, batch: Any) -> Any:
        """Return what the loss of this batch is divided by."""
        ...

    def loss(self, params: Any, frozen: Any, batch: Any, counts: Any) -> tuple[jax.Array, Any]:
        """Return the share of the loss that this batch, or piece of one, has, and sums."""
        ...


class TargetSums(NamedTuple):
    """Sums over the tokens that count."""

    loss: Float[Array, ""]  # nats
    tokens: Float[Array, ""]
    hit: Float[Array, ""]  # tokens that were the most likely ones


@dataclass(frozen=True)
class TargetTask:
    """Next-token prediction with the whole model; documents of a row do not see each other."""

    graph: Any  # of the HybridLM, in the dtype that is computed in
    dtypes: Any  # of its parameters, in the order of jax.tree.leaves; the trained ones are float32
    rows: int = 512  # positions whose logits are held at a time

    def counts(self, batch: Batch) -> Float[Array, ""]:
        """Return the number of tokens to be predicted."""
        return jnp.maximum(jnp.sum(_next_mask(batch), dtype=jnp.float32), 1.0)

    def loss(self, params, frozen, batch: Batch, counts) -> tuple[jax.Array, TargetSums]:
        """Return the mean cross-entropy in nats."""
        model = nnx.merge(self.graph, cast(params, self.dtypes))
        hidden = model(batch.tokens, batch.segment_ids).hidden
        following = jnp.pad(batch.tokens, ((0, 0), (0, 1)))[:, 1:]
        head = model.embed_tokens if model.cfg.tie_word_embeddings else model.lm_head

        def of_own(head, hidden, following, mask):
            return _next_token_sums(head, hidden, following, mask, self.rows), ()

        sums, _ = on_own_rows(of_own, head[...], hidden, following, _next_mask(batch))
        return sums.loss / counts, sums


def _next_mask(batch: Batch) -> Bool[Array, "*A B T"]:
    """Say at which positions the next token is there, in the same document, and to be predicted."""

    def following(x, fill):
        padding = [(0, 0)] * (x.ndim - 1) + [(0, 1)]
        return jnp.pad(x, padding, constant_values=fill)[..., 1:]

    is_same = following(batch.segment_ids, -1) == batch.segment_ids
    return following(batch.loss_mask, False) & is_same


def _next_token_sums(head, hidden, following, mask, rows: int) -> TargetSums:
    """Sum the loss a block of positions at a time; logits are made again in the backward pass."""
    flat = (hidden.reshape(-1, hidden.shape[-1]), following.reshape(-1), mask.reshape(-1))
    count = flat[1].shape[0]
    rows = min(rows, count)
    blocks = [
        jnp.pad(x, ((0, -count % rows), *((0, 0),) * (x.ndim - 1))).reshape(-1, rows, *x.shape[1:])
        for x in flat
    ]

    @jax.checkpoint
    def block(carry, inputs):
        hidden, token, mask = inputs
        logits = linear(hidden, head, jnp.float32)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        loss = jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0)
        hit = mask & (chosen >= logits.max(-1))
        found = (loss, mask, hit)
        return TargetSums(*(a + jnp.sum(b) for a, b in zip(carry, found, strict=True))), None

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(block, TargetSums(zero, zero, zero), tuple(blocks))[0]


@dataclass(frozen=True)
class DraftTask:
    """Training-time test against what a frozen target said about the batch."""

    graph: Any  # of the Eagle3Draft, in the dtype that is computed in
    dtypes: Any
    steps: int = 5  # K, of the unrolling
    decay: float = 0.8  # weight of each step's loss relative to the one before
    loss_name: str = "soft_cross_entropy"
    keep_unknown: bool = False  # train on slots whose best token the draft vocabulary lacks
    remat: bool = True  # hold less, compute more

    def counts(self, batch: FeaturedBatch) -> Float[Array, " K"]:
        """Return the number of slots of each step."""
        tokens, mask, segments = batch.batch
        rows = (-1, tokens.shape[-1])
        mask, segments = mask.reshape(rows), segments.reshape(rows)
        slots = slot_weights(mask, segments, self.steps)
        return jnp.maximum(jnp.sum(slots, axis=(1, 2), dtype=jnp.float32), 1.0)

    def loss(self, params, frozen, batch: FeaturedBatch, counts):
        """Return the mean over steps, with weights decay^k, of each step's mean loss.

        Args:
          frozen: the draft's tables, and the rows of the target's head that `head_rows` gives.
        """
        tables, rows = frozen
        draft = nnx.merge(self.graph, cast(params, self.dtypes), tables)
        teaching = teach(batch, rows)
        sums = draft_loss(
            draft, teaching, self.steps, LOSSES[self.loss_name], self.keep_unknown,
            remat=self.remat,
        )  # fmt: skip
        weights = self.decay ** jnp.arange(self.steps)
        losses = jnp.stack([step.loss for step in sums]) / counts
        return jnp.sum(weights * losses) / jnp.sum(weights), sums


def cast(params: Any, dtypes: tuple) -> Any:
    """Return the parameters in the dtypes that are computed in."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(
        structure, [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    )


class StepMetrics(NamedTuple):
    """What a step tells."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]  # before clipping
    weight_norm: Float[Array, ""]  # after the step
    sums: Any  # of the task


@partial(jax.jit, static_argnames=("task", "optimizer", "ema"), donate_argnames=("state",))
def train_step(
    task: Any, optimizer: Any, state: TrainState, frozen: Any, batch: Any, ema: float = 0.0
) -> tuple[TrainState, StepMetrics]:
    """Take one optimiser step.

    Args:
      frozen: what the task needs and does not train.
      batch: what the task takes, with an axis of pieces in front, such as a Batch of [A, B, T]:
        the gradient is that of all A pieces, computed one by one.
    """
    counts = task.counts(batch)
    gradient_of = jax.value_and_grad(task.loss, has_aux=True)

    def piece(carry, batch):
        # Bound to the piece before, or XLA gathers sharded weights before the loop, all at once.
        weights, batch, carry = jax.lax.optimization_barrier((state.params, batch, carry))
        (loss, sums), gradient = gradient_of(weights, frozen, batch, counts)
        return jax.tree.map(jnp.add, carry, (loss, sums, gradient)), None

    first = jax.tree.map(lambda x: x[0], batch)
    if jax.tree.leaves(batch)[0].shape[0] == 1:
        (loss, sums), gradient = gradient_of(state.params, frozen, first, counts)
        total = (loss, sums, gradient)
    else:  # all in the loop: a first piece outside would be compiled, and held, a second time
        (loss, sums), gradient = jax.eval_shape(gradient_of, state.params, frozen, first, counts)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (loss, sums, gradient))
        total, _ = jax.lax.scan(piece, zeros, batch)
    loss, sums, gradient = total
    updates, new = optimizer.update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
        average = optax.incremental_update(params, average, 1.0 - ema)
    metrics = StepMetrics(loss, optax.tree.norm(gradient), optax.tree.norm(params), sums)
    return pin(TrainState(state.step + 1, params, new, average)), metrics
