"""Mixture-of-experts feed-forward: float32 router, top-k experts, one shared expert behind a gate.

No token is ever dropped. Token-expert pairs are sorted by expert and cut into blocks that belong to
one expert each, so the cost follows the pairs, not tokens times experts. On a mesh every device has
some experts: it looks at its own rows of the batch, visits its own experts, and the results of the
`tensor` axis are added up. Packed experts are one call of the native kernels.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn.config import TargetConfig
from gdn.layers import MLP, linear, normal_init
from gdn.ops import native
from gdn.ops.packed import PackedWeight
from gdn.sharding import ROWS, TENSOR, active_mesh, on_each_device


class Experts(nnx.Module):
    """The routed experts' weights, fused: gate rows first, then up rows."""

    def __init__(self, cfg: TargetConfig, dtype, *, rngs: nnx.Rngs):
        shape = (cfg.num_experts, 2 * cfg.moe_intermediate_size, cfg.hidden_size)
        self.gate_up_proj = normal_init(rngs, shape, cfg.initializer_range, dtype)
        shape = (cfg.num_experts, cfg.hidden_size, cfg.moe_intermediate_size)
        self.down_proj = normal_init(rngs, shape, cfg.initializer_range, dtype)


class MoE(nnx.Module):
    """`sum_k p_k expert_k(x) + sigmoid(w_s x) shared_expert(x)`."""

    def __init__(self, cfg: TargetConfig, dtype, *, rngs: nnx.Rngs):
        self.cfg = cfg
        std = cfg.initializer_range
        self.gate = normal_init(rngs, (cfg.num_experts, cfg.hidden_size), std, dtype)
        self.experts = Experts(cfg, dtype, rngs=rngs)
        self.shared_expert = MLP(
            cfg.hidden_size, cfg.shared_expert_intermediate_size, std, dtype, rngs=rngs
        )
        self.shared_expert_gate = normal_init(rngs, (1, cfg.hidden_size), std, dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        rows = x.reshape(-1, x.shape[-1])
        routed = self._routed(rows, x.shape[0]).astype(x.dtype)
        gate = jax.nn.sigmoid(linear(rows, self.shared_expert_gate[...], jnp.float32))
        shared = self.shared_expert(rows) * gate.astype(x.dtype)
        return (routed + shared).reshape(x.shape)

    def _routed(self, rows: Float[Array, "R D"], batch: int) -> Float[Array, "R D"]:
        cfg, logits = self.cfg, linear(rows, self.gate[...], jnp.float32)
        up, down = self.experts.gate_up_proj[...], self.experts.down_proj[...]
        if isinstance(up, PackedWeight):
            chosen = cfg.num_experts_per_tok
            return native.experts(rows, logits, up, down, chosen, cfg.norm_topk_prob)
        probability = jax.nn.softmax(logits, axis=-1)
        weight, expert = jax.lax.top_k(probability, cfg.num_experts_per_tok)
        if cfg.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdims=True)
        # Few pairs: one row a block, so that no expert is read for padding.
        size = 1 if expert.size <= cfg.num_experts else 16
        if active_mesh() is None:
            return _visit(up, down, rows, weight, expert, size)

        def visit_own(up, down, rows, weight, expert):
            own, first = up.shape[0], up.shape[0] * jax.lax.axis_index(TENSOR)
            is_own = (expert >= first) & (expert < first + own)
            expert = jnp.where(is_own, expert - first, own)
            return _visit(up, down, rows, weight, expert, size, is_partial=True)[None]

        axes = ((TENSOR,), (TENSOR,), (ROWS,), (ROWS,), (ROWS,))
        arguments = (up, down, rows, weight, expert)
        return on_each_device(visit_own, axes, (TENSOR, ROWS), batch, *arguments).sum(0)


def _visit(up, down, rows, weight, expert, size: int, is_partial: bool = False) -> jax.Array:
    """Sum the weighted outputs of each row's experts, [R, D], float32.

    Args:
      up, down: weights of E experts.
      weight, expert: [R, K], of each row.
      size: rows of a block.
      is_partial: an id of E is there too, is nobody's, and adds nothing.
    """
    (count, width), here = rows.shape, up.shape[0]
    slots, block_expert = _assign_blocks(
        expert.reshape(-1), here + is_partial, size, unused=here if is_partial else 0
    )
    blocks = jnp.zeros((block_expert.shape[0] * size, width), rows.dtype)
    source = jnp.repeat(rows, expert.shape[1], axis=0)
    blocks = blocks.at[slots].set(source).reshape(-1, size, width)

    def visit(block):
        x, index = block
        gate, x = jnp.split(linear(x, up[index]), 2, axis=-1)
        return linear(jax.nn.silu(gate) * x, down[index])

    def visit_or_pass(block):
        return jax.lax.cond(block[1] < here, visit, lambda block: jnp.zeros_like(block[0]), block)

    out = jax.lax.map(visit_or_pass if is_partial else visit, (blocks, block_expert))
    out = out.reshape(-1, width)[slots].reshape(count, -1, width)
    return jnp.einsum("rk,rkd->rd", weight, out.astype(jnp.float32))


def _assign_blocks(
    expert: jax.Array, num_experts: int, size: int, unused: int
) -> tuple[jax.Array, jax.Array]:
    """Place pairs into blocks of `size` slots, each block of one expert; the count is static.

    Returns:
      The slot of each pair, and the expert of each block (`unused` for unused blocks).
    """
    pairs = expert.shape[0]
    # Each expert wastes less than a block, and no more experts are used than there are pairs.
    num_blocks = min(pairs, (pairs + min(num_experts, pairs) * (size - 1)) // size)
    counts = jnp.bincount(expert, length=num_experts)
    block_counts = -(-counts // size)
    first_block = jnp.cumsum(block_counts) - block_counts
    order = jnp.argsort(expert, stable=True)
    rank = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    within = rank - (jnp.cumsum(counts) - counts)[expert]
    slots = first_block[expert] * size + within
    block_expert = jnp.full(num_blocks, unused, jnp.int32).at[slots // size].set(expert)
    return slots, block_expert
