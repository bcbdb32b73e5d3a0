"""Grouped-query attention, gated (Qwen3-Next, Qwen3.5) or plain (llama, qwen3), over a KV cache.

The mixer of the `full_attention` layers: projections, q/k norm, partial RoPE, output gate. The
softmax itself is in `gdn.ops.attention`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn.cache import KVCache, KVUpdate, write_rows
from gdn.config import TargetConfig
from gdn.context import Context, PackedContext, TreeContext
from gdn.layers import RMSNorm, apply_rope, linear, linears, normal_init
from gdn.ops import native
from gdn.ops.attention import attention, masked_attention, merge_attention
from gdn.ops.packed import PackedWeight


class Attention(nnx.Module):
    """`o_proj(attend(x) * sigmoid(gate))`; without `attn_output_gate` there is no gate."""

    def __init__(self, cfg: TargetConfig, dtype, *, rngs: nnx.Rngs):
        self.cfg = cfg
        queries, keys = (
            cfg.num_attention_heads * cfg.head_dim,
            cfg.num_key_value_heads * cfg.head_dim,
        )
        gated = 2 if cfg.attn_output_gate else 1
        std = cfg.initializer_range
        self.q_proj = normal_init(rngs, (gated * queries, cfg.hidden_size), std, dtype)
        self.k_proj = normal_init(rngs, (keys, cfg.hidden_size), std, dtype)
        self.v_proj = normal_init(rngs, (keys, cfg.hidden_size), std, dtype)
        self.o_proj = normal_init(rngs, (cfg.hidden_size, queries), std, dtype)
        if cfg.qk_norm:
            self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, cfg.norm_unit_offset, dtype)
            self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, cfg.norm_unit_offset, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        entry: KVCache | None,
    ) -> tuple[Float[Array, "B T D"], KVCache | KVUpdate | None]:
        """Mix over time; returns the new cache entry, or the candidates' update for a tree."""
        q, gate, k, v = self._project(x, context)
        if isinstance(context, PackedContext):
            last = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
            out, _ = attention(q, k, v, last, context.segment_ids, context.segment_ids)
            result = None
        elif isinstance(context, TreeContext):
            assert entry is not None
            out, result = self._attend_tree(q, k, v, context, entry), KVUpdate(k, v)
        else:
            assert entry is not None
            start, count = context.start, context.lengths
            k, v = write_rows(entry.k, k, start, count), write_rows(entry.v, v, start, count)
            # Padded queries look no further than the last real token.
            last = jnp.minimum(jnp.arange(x.shape[1]), count[:, None] - 1) + start[:, None]
            (out, _), result = attention(q, k, v, last), KVCache(k, v)
        out = out.astype(x.dtype).reshape(*x.shape[:2], -1)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return linear(out, self.o_proj[...]), result

    def _attend_tree(self, q, k, v, context: TreeContext, entry: KVCache):
        """Attend from the nodes to what is committed and to their ancestors."""
        ancestors = context.tree.ancestors
        # A model that was packed for the kernels uses them throughout.
        is_packed = isinstance(self.o_proj[...], PackedWeight)
        if is_packed and native.has_heads_of(self.cfg.head_dim):
            return native.tree_attention(q, entry.k, entry.v, context.start, k, v, ancestors)
        last = jnp.broadcast_to(context.start[:, None] - 1, q.shape[:2])
        committed = attention(q, entry.k, entry.v, last)
        return merge_attention(committed, masked_attention(q, k, v, ancestors))

    def _project(self, x, context):
        cfg = self.cfg
        heads = (*x.shape[:2], -1, cfg.head_dim)
        q, k, v = linears(x, self.q_proj[...], self.k_proj[...], self.v_proj[...])
        gate = None
        if cfg.attn_output_gate:  # per head: head_dim query rows, then head_dim gate rows
            q = q.reshape(*x.shape[:2], cfg.num_attention_heads, 2 * cfg.head_dim)
            q, gate = jnp.split(q, 2, axis=-1)
            gate = gate.reshape(*x.shape[:2], -1)
        q, k, v = (y.reshape(heads) for y in (q, k, v))
        if cfg.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (apply_rope(y, context.cos, context.sin) for y in (q, k))
        return q, gate, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
