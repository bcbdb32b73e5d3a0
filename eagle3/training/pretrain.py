"""Next-token training of a byte-level target on the source of Python's standard library.

The corpus is read from the running interpreter, so nothing is downloaded. The batch of a step is a
pure function of (seed, step).
"""

import sysconfig
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn import HybridLM


def standard_library() -> np.ndarray:
    """Return the bytes of all modules outside the tests and installed packages, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "idle_test", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def batch_at(
    corpus: np.ndarray, seed: int, step: int, batch: int, length: int
) -> Int[Array, "B T"]:
    """Cut `batch` random windows of length + 1 bytes: inputs and, one later, their targets."""
    starts = np.random.default_rng((seed, step)).integers(0, len(corpus) - length, batch)
    return jnp.asarray(corpus[starts[:, None] + np.arange(length + 1)], jnp.int32)


def next_token_loss(model: HybridLM, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Return the mean cross-entropy in nats of every token but the first."""
    logits = model.logits(model(tokens[:, :-1]).hidden)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Use AdamW without decay: clipped to norm 1, warmed up over a tenth, then a cosine to 0."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, steps // 10), steps)
    adam = optax.adamw(schedule, b2=0.95, weight_decay=0.0)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


@partial(jax.jit, static_argnames=("graphdef", "optimizer"), donate_argnums=(2, 3))
def train_step(graphdef, optimizer, params, state, tokens):
    """Return updated parameters and optimizer state, and the loss before the update."""

    def loss_of(params):
        return next_token_loss(nnx.merge(graphdef, params), tokens)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss
