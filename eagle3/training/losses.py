"""What the draft's distribution q is trained towards the target's p with, both over Vd entries.

p is renormalised on the draft vocabulary. Every loss comes with the overlap sum(min(p, q)): the
chance that a token drawn from q is accepted, and the expected hit of a sampled one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LossFunction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def soft_cross_entropy(
    logits: Float[Array, "*batch Vd"], teacher: Float[Array, "*batch Vd"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Return -sum p log q, in nats: the loss of EAGLE-3 (arXiv 2503.01840)."""
    log_q, log_p = _log_softmax(logits, teacher)
    return -jnp.sum(jnp.exp(log_p) * log_q, axis=-1), _overlap(log_q, log_p)


def kl_divergence(
    logits: Float[Array, "*batch Vd"], teacher: Float[Array, "*batch Vd"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Return KL(p || q), in nats: the same gradient, zero at its best."""
    log_q, log_p = _log_softmax(logits, teacher)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1), _overlap(log_q, log_p)


def lk_hybrid(
    logits: Float[Array, "*batch Vd"], teacher: Float[Array, "*batch Vd"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Return w KL(p || q) + (1 - w) (1 - overlap) with w = exp(-3 overlap) held constant.

    Far from the target it pulls like KL, near it it raises the acceptance itself.
    """
    divergence, overlap = kl_divergence(logits, teacher)
    weight = jnp.exp(-3.0 * jax.lax.stop_gradient(overlap))
    return weight * divergence + (1.0 - weight) * (1.0 - overlap), overlap


LOSSES: dict[str, LossFunction] = {
    "soft_cross_entropy": soft_cross_entropy,
    "kl": kl_divergence,
    "lk_hybrid": lk_hybrid,
}


def _log_softmax(*logits):
    return (jax.nn.log_softmax(x.astype(jnp.float32), axis=-1) for x in logits)


def _overlap(log_q, log_p):
    return jnp.sum(jnp.exp(jnp.minimum(log_q, log_p)), axis=-1)
