"""The short causal depthwise convolution of a Gated DeltaNet layer: sequence and tree forms.

Tap W-1 multiplies the current token, tap 0 the one W-1 tokens before it. What lies before the first
token is the committed window: the last W-1 inputs, oldest first, zeros at the start of a text.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.ops.tree import Tree


def short_conv(
    x: Float[Array, "B T E"],
    weight: Float[Array, "E W"],
    window: Float[Array, "B W-1 E"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T E"]:
    """Convolve a sequence in float32; a tap that reaches into another document adds zero.

    Args:
      segment_ids: from `document_index`: one id a document, none used twice.
    """
    length, width = x.shape[1], weight.shape[1]
    extended = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (width - 1, 0)), mode="edge")
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        term = _tap(extended[:, tap : tap + length], weight, tap)
        if segment_ids is not None:
            same = segment_ids[:, tap : tap + length] == segment_ids[:, width - 1 :]
            term = jnp.where(same[..., None], term, 0.0)
        out = out + term
    return out


def short_conv_tree(
    x: Float[Array, "B M E"],
    weight: Float[Array, "E W"],
    window: Float[Array, "B W-1 E"],
    tree: Tree,
) -> Float[Array, "B M E"]:
    """Convolve each node with its own W-1 nearest ancestors, then with the window, in float32."""
    batch, width = x.shape[0], weight.shape[1]
    extended = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    rows = jnp.arange(batch)[:, None]
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):  # in the order of `short_conv`, for the same rounding
        above = extended[rows, _ancestor_index(tree, width - 1 - tap, width)]
        out = out + _tap(above, weight, tap)
    return out


def _tap(x: jax.Array, weight: Float[Array, "E W"], tap: int) -> jax.Array:
    return x.astype(jnp.float32) * weight[:, tap].astype(jnp.float32)


def _ancestor_index(tree: Tree, distance: int, width: int) -> Int[Array, "B M"]:
    """Find where in [window, nodes] the ancestor that many steps above each node lies."""
    target = tree.depth - distance
    at_depth = tree.ancestors & (tree.depth[:, None, :] == target[..., None])
    node = jnp.argmax(at_depth, axis=-1)
    return jnp.where(target >= 0, node + width - 1, target + width - 1)


def advance_window(
    window: Float[Array, "B P E"], x: Float[Array, "B T E"], count: Int[Array, " B"]
) -> Float[Array, "B P E"]:
    """Take the last P = W-1 inputs of [window, first `count` rows of x]; 0 changes nothing."""
    extended = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
    index = count[:, None] + jnp.arange(window.shape[1])
    return jnp.take_along_axis(extended, index[..., None], axis=1)
