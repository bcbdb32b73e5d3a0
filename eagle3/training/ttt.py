"""Training-time test: the draft unrolled over its own outputs (arXiv 2503.01840, section 3.2).

At step k, slot t is fed the token x_{t+1+k} and, from k = 1 on, what step k - 1 made of the same
slot. It attends to the step-0 keys of slots 0..t, made from true features, and to its own keys of
steps 1..k: what decoding sees after position t. Those are one key a step, so no second square of
scores is ever made.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3.draft import Eagle3Draft
from gdn.ops.attention import attention, merge_attention

_HIGHEST = jax.lax.Precision.HIGHEST


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
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    hidden, logits = draft.fuse(aux_hidden), []
    keys: list[tuple[jax.Array, jax.Array]] = []
    for step in range(steps):
        shifted = jnp.pad(tokens, ((0, 0), (0, step)))[:, step:]

        def attend(q, k, v):
            keys.append((k, v))
            causal = attention(q, *keys[0], positions)
            return causal[0] if len(keys) == 1 else merge_attention(causal, _own_slot(q, keys[1:]))

        z = draft.layer(hidden, shifted, positions + step, attend)
        logits.append(draft.logits(z))
        hidden = draft.feedback(z)
    return jnp.stack(logits)


def _own_slot(q: Float[Array, "B T N H"], keys):
    """Attend to the keys that slot t itself made in later steps, one of each step."""
    groups = q.shape[2] // keys[0][0].shape[1]
    k, v = (jnp.repeat(jnp.stack(x, 1), groups, axis=2) for x in zip(*keys, strict=True))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.einsum("btnh,bsnth->btns", q, k, precision=_HIGHEST) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("btns,bsnth->btnh", weights, v, precision=_HIGHEST)
    return out, jax.nn.logsumexp(scores, axis=-1)
