"""The target: a language model of Gated DeltaNet and attention layers, one class for all families.

`HybridLM` is pure: `__call__` for training, `prefill` and `verify` for decoding; `gdn.cache.commit`
closes the round. A module is a pytree, so `jax.jit(HybridLM.verify)(model, ...)` works as it
stands; for a cheaper dispatch split it once (`nnx.split`) and merge inside the jit. It knows
nothing of drafts: what EAGLE-3 taps are residual streams, returned for any set of `aux_layers`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn.attention import Attention
from gdn.cache import Cache, Updates
from gdn.config import TargetConfig
from gdn.context import Context, packed_context, prefill_context, tree_context
from gdn.deltanet import GatedDeltaNet
from gdn.layers import MLP, RMSNorm, embed, linear, normal_init
from gdn.moe import MoE
from gdn.ops.packed import PackedWeight
from gdn.ops.tree import Tree
from gdn.sharding import ROWS, constrain


class ForwardOutput(NamedTuple):
    """`hidden` is after the final norm, for `HybridLM.logits`; taps come in the order asked for."""

    hidden: Float[Array, "B T D"]
    aux_hidden: Float[Array, "B T A D"]


class PrefillOutput(NamedTuple):
    """`logits` are those of each row's last real token; zeros for a row that was given none."""

    logits: Float[Array, "B V"]
    aux_hidden: Float[Array, "B T A D"]
    cache: Cache


class VerifyOutput(NamedTuple):
    """One logits row per node, and what `commit` needs; the cache itself is untouched."""

    logits: Float[Array, "B M V"]
    aux_hidden: Float[Array, "B M A D"]
    updates: Updates


class DecoderLayer(nnx.Module):
    """Pre-norm residual block; `layer_types` decides the mixer, `moe_layers` the feed-forward."""

    def __init__(self, cfg: TargetConfig, index: int, dtype, *, rngs: nnx.Rngs):
        norm = (cfg.hidden_size, cfg.rms_norm_eps, cfg.norm_unit_offset, dtype)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(*norm), RMSNorm(*norm)
        self.is_attention = cfg.layer_types[index] == "full_attention"
        if self.is_attention:
            self.self_attn = Attention(cfg, dtype, rngs=rngs)
        else:
            self.linear_attn = GatedDeltaNet(cfg, dtype, rngs=rngs)
        if cfg.moe_layers and cfg.moe_layers[index]:
            self.mlp = MoE(cfg, dtype, rngs=rngs)
        else:
            self.mlp = MLP(
                cfg.hidden_size, cfg.intermediate_size, cfg.initializer_range, dtype, rngs=rngs
            )

    def __call__(self, x: Float[Array, "B T D"], context: Context, entry):
        mixer = self.self_attn if self.is_attention else self.linear_attn
        mixed, entry = mixer(self.input_layernorm(x), context, entry)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), entry


class HybridLM(nnx.Module):
    """embed -> layers -> norm -> head, over tokens, over a prompt with a cache, or over a tree."""

    def __init__(self, cfg: TargetConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        """Create random weights in `dtype`; gates and the DeltaNet norm are always float32."""
        self.cfg = cfg
        std = cfg.initializer_range
        self.embed_tokens = normal_init(rngs, (cfg.vocab_size, cfg.hidden_size), std, dtype)
        self.layers = nnx.List(
            DecoderLayer(cfg, i, dtype, rngs=rngs) for i in range(cfg.num_hidden_layers)
        )
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, cfg.norm_unit_offset, dtype)
        if not cfg.tie_word_embeddings:
            self.lm_head = normal_init(rngs, (cfg.vocab_size, cfg.hidden_size), std, dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """Run whole sequences without a cache, for training and scoring.

        Args:
          segment_ids: document of each token of a packed row; where it changes, recurrent state,
            convolution, attention and positions start again. Give trailing padding an id of its
            own.
          aux_layers: k returns the residual stream after k layers; 0 is the embedding.
        """
        context = packed_context(self.cfg, tokens.shape, segment_ids)
        x = embed(self.embed_tokens[...], tokens)
        hidden, aux_hidden, _ = self._run(x, context, None, aux_layers)
        return ForwardOutput(hidden, aux_hidden)

    @property
    def uses_kernels(self) -> bool:
        """Tell whether the model was packed for the native kernels."""
        return isinstance(self._head[...], PackedWeight)

    @property
    def _head(self) -> nnx.Variable:
        return self.embed_tokens if self.cfg.tie_word_embeddings else self.lm_head

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Apply the head to final-normed hidden states; float32."""
        return linear(hidden, self._head[...], jnp.float32)

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        cache: Cache,
        aux_layers: tuple[int, ...] = (),
        chunk_size: int | None = None,
    ) -> PrefillOutput:
        """Append right-padded prompts to the cache, each row at its own committed length.

        Args:
          lengths: real tokens of each row, 0..T; a row of 0 keeps its cache bit for bit.
          chunk_size: tokens per pass, to bound memory; the result does not depend on it.

        Raises:
          ValueError: `tokens` has no column, or `chunk_size` is below 1.
        """
        batch, length = tokens.shape
        size = min(chunk_size if chunk_size is not None else length, length)
        if size < 1:
            raise ValueError(
                f"prefill needs T >= 1 and chunk_size >= 1, got {length} and {chunk_size}"
            )
        count = -(-length // size)
        tokens = jnp.pad(tokens, ((0, 0), (0, count * size - length)))

        def one_chunk(carry, inputs):
            cache, final = carry
            chunk, index = inputs
            real = jnp.clip(lengths - index * size, 0, size)
            context = prefill_context(self.cfg, size, real, cache.lengths)
            x = embed(self.embed_tokens[...], chunk, differentiable=False)
            hidden, aux_hidden, layers = self._run(x, context, cache.layers, aux_layers)
            last = jnp.maximum(real - 1, 0)[:, None, None]
            here = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
            final = jnp.where((real > 0)[:, None], here, final)
            return (Cache(layers, cache.lengths + real), final), aux_hidden

        carry = (cache, jnp.zeros((batch, self.cfg.hidden_size), self.embed_tokens[...].dtype))
        if count == 1:
            (cache, final), aux_hidden = one_chunk(carry, (tokens, 0))
        else:
            chunks = jnp.moveaxis(tokens.reshape(batch, count, size), 1, 0)
            (cache, final), aux_hidden = jax.lax.scan(one_chunk, carry, (chunks, jnp.arange(count)))
            aux_hidden = jnp.moveaxis(aux_hidden, 0, 1).reshape(
                batch, count * size, *aux_hidden.shape[3:]
            )
        return PrefillOutput(self.logits(final), aux_hidden[:, :length], cache)

    def verify(
        self,
        tokens: Int[Array, "B M"],
        tree: Tree,
        cache: Cache,
        aux_layers: tuple[int, ...] = (),
    ) -> VerifyOutput:
        """Score every node of a tree of candidates in one forward.

        A chain (`chain_tree`) is a special case, one node is plain decoding. Node positions are the
        committed length plus the node's depth.
        """
        context = tree_context(self.cfg, tree, cache.lengths)
        x = embed(self.embed_tokens[...], tokens, differentiable=False)
        hidden, aux_hidden, updates = self._run(x, context, cache.layers, aux_layers)
        return VerifyOutput(self.logits(hidden), aux_hidden, updates)

    def _run(self, x, context, entries, aux_layers: tuple[int, ...]):
        """Run all layers; returns normed hidden states, the taps, and what each layer returned."""
        depth = self.cfg.num_hidden_layers
        x = constrain(x, ROWS, None, None)
        if not all(0 <= k <= depth for k in aux_layers):
            raise ValueError(f"aux_layers must be ids in 0..{depth}, got {aux_layers}")
        taps, results = {0: x}, []
        # Unrolled: a scan would copy each layer's weights out of a stacked array at every step.
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, result = layer(x, context, entries[index] if entries is not None else None)
            x = constrain(x, ROWS, None, None)
            taps[index + 1] = x
            results.append(result)
        shape = (*x.shape[:2], 0, x.shape[2])
        aux = (
            jnp.stack([taps[k] for k in aux_layers], axis=2)
            if aux_layers
            else jnp.zeros(shape, x.dtype)
        )
        return self.norm(x), aux, tuple(results)
