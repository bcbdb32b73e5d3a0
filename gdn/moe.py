"""Mixture-of-experts feed-forward: float32 router, top-k experts, one shared expert behind a gate.

No token is ever dropped. Token-expert pairs are sorted by expert and cut into blocks that belong to
one expert each, so the cost follows the pairs, not tokens times experts.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn.config import TargetConfig
from gdn.layers import MLP, linear, normal_init


class Experts(nnx.Module):
    """The routed experts' weights, fused: gate rows first, then up rows."""

    def __init__(self, cfg: TargetConfig, dtype, *, rngs: nnx.Rngs):
        shape = (cfg.num_experts, 2 * cfg.moe_intermediate_size, cfg.hidden_size)
        self.gate_up_proj = normal_init(rngs, shape, cfg.initializer_range, dtype)
        shape = (cfg.num_experts, cfg.hidden_size, cfg.moe_intermediate_size)
        self.down_proj = normal_init(rngs, shape, cfg.initializer_range, dtype)

    def __call__(self, x: Float[Array, "R D"], expert: jax.Array) -> Float[Array, "R D"]:
        """Apply one expert to rows that all belong to it."""
        gate, up = jnp.split(linear(x, self.gate_up_proj[...][expert]), 2, axis=-1)
        return linear(jax.nn.silu(gate) * up, self.down_proj[...][expert])


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
        routed = self._routed(rows).astype(x.dtype)
        gate = jax.nn.sigmoid(linear(rows, self.shared_expert_gate[...], jnp.float32))
        shared = self.shared_expert(rows) * gate.astype(x.dtype)
        return (routed + shared).reshape(x.shape)

    def _routed(self, rows: Float[Array, "R D"]) -> Float[Array, "R D"]:
        cfg, count = self.cfg, rows.shape[0]
        probability = jax.nn.softmax(linear(rows, self.gate[...], jnp.float32), axis=-1)
        weight, expert = jax.lax.top_k(probability, cfg.num_experts_per_tok)
        if cfg.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdims=True)
        pairs = count * cfg.num_experts_per_tok
        # Few pairs: one row a block, so that no expert is read for padding.
        size = 1 if pairs <= cfg.num_experts else 16
        slots, block_expert = _assign_blocks(expert.reshape(-1), cfg.num_experts, size)
        blocks = jnp.zeros((block_expert.shape[0] * size, rows.shape[1]), rows.dtype)
        source = jnp.repeat(rows, cfg.num_experts_per_tok, axis=0)
        blocks = blocks.at[slots].set(source).reshape(-1, size, rows.shape[1])
        out = jax.lax.map(lambda block: self.experts(*block), (blocks, block_expert))
        out = out.reshape(-1, rows.shape[1])[slots].reshape(count, -1, rows.shape[1])
        return jnp.einsum("rk,rkd->rd", weight, out.astype(jnp.float32))


def _assign_blocks(expert: jax.Array, num_experts: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Place pairs into blocks of `size` slots, each block of one expert; the count is static.

    Returns:
      The slot of each pair, and the expert of each block (any expert for unused blocks).
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
    block_expert = jnp.zeros(num_blocks, jnp.int32).at[slots // size].set(expert)
    return slots, block_expert
