"""The EAGLE-3 draft (arXiv 2503.01840, section 3.1): one decoder layer on the target's features.

Slot t pairs the target's tapped residual streams at position t with the token after it:

    g = fc(streams)                              only where the streams are the target's own
    a = [norm(embed(token)), norm(g)]            embedding first
    y = g + attention(a);  z = y + MLP(norm(y))  the residual is g itself
    logits = head(norm(z)), over the draft vocabulary;  z takes the place of g one step later

Whether `fc` applies is the caller's choice of method (`fuse` or not), never a guess from a width.
This file knows nothing of trees or losses: `layer` leaves attention to a function it is given.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3.draft_config import DraftConfig
from gdn import HybridLM
from gdn.layers import (
    MLP,
    RMSNorm,
    Weight,
    apply_rope,
    embed,
    linear,
    linears,
    normal_init,
    rope_angles,
)
from gdn.ops.packed import PackedWeight
from gdn.sharding import ROWS, constrain

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q, k, v -> values


class Table(nnx.Variable):
    """A table that is no parameter: `nnx.split(draft, nnx.Param, ...)` keeps it from training."""


class Eagle3Draft(nnx.Module):
    """Fused features, one decoder layer, a reduced-vocabulary head."""

    def __init__(
        self,
        cfg: DraftConfig,
        embed_tokens: Float[Array, "V H"],
        target_ids: Int[Array, " Vd"] | np.ndarray,
        *,
        dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Create random weights in `dtype`.

        Args:
          embed_tokens: shared with the target and frozen.
          target_ids: id in the target's vocabulary of each draft id, ascending. Files hold it as
            `d2t`, the differences target_ids - arange(Vd).
        """
        self.cfg = cfg
        std, width, inner = cfg.initializer_range, cfg.hidden_size, cfg.num_aux
        self.embed_tokens = Table(embed_tokens)
        self.target_ids = Table(jnp.asarray(target_ids, jnp.int32))
        self.fc = normal_init(rngs, (width, inner * cfg.target_hidden_size), std, dtype)
        if cfg.fc_bias:
            self.fc_bias = nnx.Param(jnp.zeros(width, dtype))

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, cfg.rms_norm_eps, False, dtype)

        if cfg.fc_norm:
            self.fc_norm = nnx.List(norm(cfg.target_hidden_size) for _ in range(inner))
        if cfg.norm_before_fc:
            self.input_norm = norm(inner * cfg.target_hidden_size)
        self.input_layernorm, self.hidden_norm = norm(width), norm(width)
        queries = cfg.num_attention_heads * cfg.head_dim
        keys = cfg.num_key_value_heads * cfg.head_dim
        self.q_proj = normal_init(rngs, (queries, 2 * width), std, dtype)
        self.k_proj = normal_init(rngs, (keys, 2 * width), std, dtype)
        self.v_proj = normal_init(rngs, (keys, 2 * width), std, dtype)
        self.o_proj = normal_init(rngs, (width, queries), std, dtype)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = norm(cfg.head_dim), norm(cfg.head_dim)
        self.post_attention_layernorm = norm(width)
        self.mlp = MLP(width, cfg.intermediate_size, std, dtype, rngs=rngs)
        self.norm = norm(width)
        self.lm_head = normal_init(rngs, (cfg.draft_vocab_size, width), std, dtype)

    @property
    def uses_kernels(self) -> bool:
        """Tell whether the draft was packed for the native kernels."""
        return isinstance(self.lm_head[...], PackedWeight)

    def fuse(self, aux_hidden: Float[Array, "B T A D"]) -> Float[Array, "B T H"]:
        """Turn the target's residual streams, low to high, into the features g.

        From here on everything has the draft's own dtype, whatever the target's is.
        """
        aux_hidden = aux_hidden.astype(self.fc[...].dtype)
        if self.cfg.fc_norm:
            streams = [norm(aux_hidden[:, :, i]) for i, norm in enumerate(self.fc_norm)]
            aux_hidden = jnp.stack(streams, axis=2)
        joined = aux_hidden.reshape(*aux_hidden.shape[:2], -1)
        if self.cfg.norm_before_fc:
            joined = self.input_norm(joined)
        g = constrain(linear(joined, self.fc[...]), ROWS, None, None)
        return (g + self.fc_bias[...]).astype(g.dtype) if self.cfg.fc_bias else g

    def layer(
        self,
        hidden: Float[Array, "B T H"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
    ) -> Float[Array, "B T H"]:
        """Run the decoder layer; returns z, before the final norm.

        Args:
          hidden: features of the target (from `fuse`), or the feedback of the step before.
          tokens: target ids, each one position after its features.
          positions: of the features, for RoPE.
          attend: gets q [B, T, N, H] and k, v [B, K, T, H] of these slots, rotated; returns the
            values [B, T, N, H].
        """
        cfg = self.cfg
        cos, sin = rope_angles(positions, jnp.asarray(cfg.rope_frequencies()))
        with jax.named_scope("draft_layer"):
            e = embed(self.embed_tokens[...], tokens, differentiable=False)
            normed = self.hidden_norm(hidden)
            a = jnp.concatenate([self.input_layernorm(e.astype(hidden.dtype)), normed], axis=-1)
            heads = (*tokens.shape, -1, cfg.head_dim)
            q, k, v = linears(a, self.q_proj[...], self.k_proj[...], self.v_proj[...])
            q, k, v = (y.reshape(heads) for y in (q, k, v))
            if cfg.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            out = attend(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
            out = out.astype(hidden.dtype).reshape(*tokens.shape, -1)
            y = normed if cfg.norm_before_residual else hidden
            y = y + linear(out, self.o_proj[...])
            y = y + self.mlp(self.post_attention_layernorm(y))
            return constrain(y, ROWS, None, None)

    def feedback(self, z: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
        """Return what takes the place of the features in the next draft step."""
        return self.norm(z) if self.cfg.norm_output else z

    def logits(self, z: Float[Array, "*batch H"]) -> Float[Array, "*batch Vd"]:
        """Score the draft vocabulary; float32."""
        return draft_logits((self.norm, self.lm_head[...]), z)


def draft_logits(
    head: tuple[RMSNorm, Weight], z: Float[Array, "*batch H"]
) -> Float[Array, "*batch Vd"]:
    """Score the draft vocabulary with a draft's last norm and its head; float32."""
    norm, weight = head
    return linear(norm(z), weight, jnp.float32)


def draft_for(
    target: HybridLM, cfg: DraftConfig, target_ids: np.ndarray, *, rngs: nnx.Rngs
) -> Eagle3Draft:
    """Make an untrained draft for `target`: its embedding, and its head's rows where they fit.

    Raises:
      ValueError: the two do not fit together, or the draft would need an embedding of its own.
    """
    problems = cfg.problems_with(target.cfg)
    table = target.embed_tokens[...]
    if cfg.hidden_size != table.shape[1]:
        problems.append(
            f"hidden_size is {cfg.hidden_size}; it has to be the target's ({table.shape[1]}) to"
            " share its embedding"
        )
    problems += vocabulary_problems(cfg, target_ids)
    if problems:
        raise ValueError("this draft cannot serve this target:\n  " + "\n  ".join(problems))
    draft = Eagle3Draft(cfg, table, target_ids, dtype=table.dtype, rngs=rngs)
    head = target.embed_tokens if target.cfg.tie_word_embeddings else target.lm_head
    draft.lm_head[...] = head[...][np.asarray(target_ids)]
    return draft


def vocabulary_problems(cfg: DraftConfig, target_ids: np.ndarray) -> list[str]:
    """List what is wrong with the target ids of a draft vocabulary; empty if nothing is."""
    ids = np.asarray(target_ids)
    if ids.shape != (cfg.draft_vocab_size,):
        return [f"target_ids have shape {ids.shape}, expected ({cfg.draft_vocab_size},)"]
    found = []
    if ids.min() < 0 or ids.max() >= cfg.vocab_size:
        found.append(f"target ids lie in {ids.min()}..{ids.max()}, outside 0..{cfg.vocab_size - 1}")
    if (np.diff(ids) <= 0).any():
        found.append("target ids are not ascending and distinct")
    return found
