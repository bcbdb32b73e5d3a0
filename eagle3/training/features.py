"""What the target says about a batch: the streams the draft is fed, and what it is taught.

The target runs without gradient. Its logits over the whole vocabulary are needed for one number a
position, the most likely token, and are made a few positions at a time; the distribution that the
draft learns is made from the head's rows of the draft vocabulary alone.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3.decoding.sampling import most_likely
from eagle3.training.ttt import Teaching
from gdn import HybridLM
from gdn.layers import linear


def teach(
    target: HybridLM,
    target_ids: Int[Array, " Vd"],
    aux_layers: tuple[int, ...],
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> Teaching:
    """Run the target over a batch."""
    out = target(tokens, segment_ids, aux_layers)
    head = target.embed_tokens if target.cfg.tie_word_embeddings else target.lm_head
    logits = linear(out.hidden, head[...][target_ids], jnp.float32)
    teaching = Teaching(
        tokens, loss_mask, segment_ids, out.aux_hidden, logits, most_likely_next(target, out.hidden)
    )
    return jax.lax.stop_gradient(teaching)


def most_likely_next(
    target: HybridLM, hidden: Float[Array, "B T D"], rows: int = 256
) -> Int[Array, "B T"]:
    """Return the target's most likely token after each position, `rows` positions at a time."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    count = flat.shape[0]
    rows = min(rows, count)
    blocks = jnp.pad(flat, ((0, -count % rows), (0, 0))).reshape(-1, rows, flat.shape[-1])

    best = jax.lax.map(lambda block: most_likely(target.logits(block)), blocks)
    return best.reshape(-1)[:count].reshape(hidden.shape[:2])
