"""The Gated DeltaNet mixer of the `linear_attention` layers (arXiv 2412.06464, as in Qwen3-Next).

Projections, short convolution, gates, delta rule, gated norm. The rule itself is in `gdn.ops`; this
file only prepares its inputs. Gates, norms, rule and state are float32 whatever the weights are.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn.cache import RecurrentState, RecurrentUpdate, SequentialUpdate, empty_state
from gdn.config import TargetConfig
from gdn.context import Context, PackedContext, TreeContext
from gdn.layers import linear, linears, normal_init, rms_norm
from gdn.ops import native
from gdn.ops.conv import advance_window, short_conv, short_conv_tree
from gdn.ops.delta_rule import gated_delta_rule
from gdn.ops.packed import PackedWeight
from gdn.ops.tree import tree_delta_rule
from gdn.sharding import ROWS, TENSOR, constrain


class GatedDeltaNet(nnx.Module):
    """`out_proj(norm(delta_rule(conv(in_proj x))) * silu(z))`."""

    def __init__(self, cfg: TargetConfig, dtype, *, rngs: nnx.Rngs):
        self.cfg = cfg
        heads, std = cfg.linear_num_value_heads, cfg.initializer_range
        values = heads * cfg.linear_value_head_dim
        width = cfg.linear_conv_kernel_dim
        self.in_proj_qkv = normal_init(rngs, (cfg.conv_channels, cfg.hidden_size), std, dtype)
        self.in_proj_z = normal_init(rngs, (values, cfg.hidden_size), std, dtype)
        self.in_proj_b = normal_init(rngs, (heads, cfg.hidden_size), std, dtype)
        self.in_proj_a = normal_init(rngs, (heads, cfg.hidden_size), std, dtype)
        self.conv1d = normal_init(rngs, (cfg.conv_channels, width), width**-0.5, dtype)
        # Per head a rate A in (0.01, 16) and a step dt in (1e-3, 0.1): slow to fast forgetting.
        rate = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 0.01, 16.0)
        log_dt = jax.random.uniform(
            rngs.params(), (heads,), jnp.float32, *jnp.log(jnp.array([1e-3, 0.1]))
        )
        self.A_log = nnx.Param(jnp.log(rate))
        self.dt_bias = nnx.Param(jnp.log(jnp.expm1(jnp.exp(log_dt))))  # inverse softplus
        self.norm = nnx.Param(jnp.ones(cfg.linear_value_head_dim, jnp.float32))
        self.out_proj = normal_init(rngs, (cfg.hidden_size, values), std, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        entry: RecurrentState | None,
    ) -> tuple[Float[Array, "B T D"], RecurrentState | RecurrentUpdate | SequentialUpdate | None]:
        """Mix over time; returns the new cache entry, or the candidates' update for a tree."""
        # A model that was packed for the kernels uses them throughout.
        is_packed = isinstance(self.out_proj[...], PackedWeight)
        if is_packed and isinstance(context, TreeContext):
            assert entry is not None
            if native.has_heads_of(*entry.state.shape[2:]):
                return self._native_tree(x, context, entry)
        inputs, weight = linear(x, self.in_proj_qkv[...]), self.conv1d[...]
        if isinstance(context, TreeContext):
            assert entry is not None
            mixed = short_conv_tree(inputs, weight, entry.conv, context.tree)
            q, k, v, g, beta = self._rule_inputs(x, mixed)
            out, u = tree_delta_rule(q, k, v, g, beta, entry.state, context.tree)
            return self._output(x, out), RecurrentUpdate(k, u, g, inputs)
        if isinstance(context, PackedContext):
            state, window = empty_state(self.cfg, x.shape[0], x.dtype)
            mixed = short_conv(inputs, weight, window, context.segment_ids)
            out, _ = gated_delta_rule(*self._rule_inputs(x, mixed), state, context.segment_ids)
            return self._output(x, out), None
        assert entry is not None
        mixed = short_conv(inputs, weight, entry.conv)
        q, k, v, g, beta = self._rule_inputs(x, mixed)
        # A padded token neither decays the state nor writes to it.
        real = (jnp.arange(x.shape[1]) < context.lengths[:, None])[..., None]
        g, beta = jnp.where(real, g, 0.0), jnp.where(real, beta, 0.0)
        out, state = gated_delta_rule(q, k, v, g, beta, entry.state)
        # Exactly, also for -0.0, where a row was given no token.
        state = jnp.where((context.lengths > 0)[:, None, None, None], state, entry.state)
        window = advance_window(entry.conv, inputs, context.lengths)
        return self._output(x, out), RecurrentState(state, window)

    def _native_tree(self, x, context: TreeContext, entry: RecurrentState):
        """Do in one call what lies between the projections."""
        weights = native.DeltaNetWeights(
            self.conv1d[...], self.A_log[...], self.dt_bias[...], self.norm[...]
        )
        inputs, a, b, z = linears(
            x, self.in_proj_qkv[...], self.in_proj_a[...], self.in_proj_b[...],
            self.in_proj_z[...],
        )  # fmt: skip
        z = z.reshape(*x.shape[:2], *entry.state.shape[1::2])
        out, k, u, g = native.tree_delta_net(
            inputs, entry.conv, a, b, z, entry.state, context.tree.ancestors, weights,
            self.cfg.linear_num_key_heads, self.cfg.rms_norm_eps,
        )  # fmt: skip
        out = linear(out.astype(x.dtype).reshape(*x.shape[:2], -1), self.out_proj[...])
        return out, SequentialUpdate(k, u, g, inputs)

    def _rule_inputs(self, x, mixed):
        """Split the convolved channels into heads, normalise q and k, and compute the gates."""
        cfg = self.cfg
        keys = cfg.linear_num_key_heads * cfg.linear_key_head_dim
        q, k, v = jnp.split(jax.nn.silu(mixed), (keys, 2 * keys), axis=-1)
        q, k = (y.reshape(*x.shape[:2], -1, cfg.linear_key_head_dim) for y in (q, k))
        v = v.reshape(*x.shape[:2], -1, cfg.linear_value_head_dim)
        # The projections' rows are split evenly, whatever they are of; from here on, by heads.
        q, k, v = (constrain(y, ROWS, None, TENSOR, None) for y in (q, k, v))
        beta = jax.nn.sigmoid(linear(x, self.in_proj_b[...], jnp.float32))
        step = jax.nn.softplus(linear(x, self.in_proj_a[...], jnp.float32) + self.dt_bias[...])
        g = -jnp.exp(self.A_log[...]) * step
        return l2_normalize(q) * cfg.linear_key_head_dim**-0.5, l2_normalize(k), v, g, beta

    def _output(self, x, out):
        z = linear(x, self.in_proj_z[...]).astype(jnp.float32).reshape(out.shape)
        # Plain weight here, whatever the other norms of the model do; the norm comes before the
        # gate.
        out = rms_norm(out, self.norm[...], self.cfg.rms_norm_eps, unit_offset=False)
        out = (out * jax.nn.silu(z)).astype(x.dtype)
        return linear(out.reshape(*x.shape[:2], -1), self.out_proj[...])


def l2_normalize(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Divide by the Euclidean norm over the last axis, in float32, with the model's 1e-6.

    The gradient at a zero vector is zero: the formula's own, 1000 times the incoming one, would
    make the gradients of all-zero rows explode from layer to layer.
    """
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jnp.where(square > 0, jax.lax.rsqrt(jnp.where(square > 0, square, 1.0) + 1e-6), 0.0)
