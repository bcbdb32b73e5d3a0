"""The specification: the gated delta rule token by token, written to be read.

Everything is float32 and follows arXiv 2412.06464 (Gated Delta Networks), equation 10. `chunked.py`
and `tree.py` must match these functions in outputs and, where gradients flow, in gradients.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def gated_delta_rule_reference(
    q: Float[Array, "B T HK DK"],
    k: Float[Array, "B T HK DK"],
    v: Float[Array, "B T HV DV"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV DK DV"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T HV DV"], Float[Array, "B HV DK DV"]]:
    """Run the recurrence over T tokens, one after the other.

    For each value head, with S the DK x DV state: decay `S' = exp(g) S`, erase and write
    `u = beta (v - S'^T k)`, `S = S' + k u^T`, read `o = S^T q`. The read sees the write.

    Args:
      q: queries, already l2-normalised and scaled; value head j reads key head j // (HV // HK).
      g: log decay, <= 0.
      beta: write strength in (0, 1); g = 0 and beta = 0 make a token an exact no-op on the state.
      state: state before the first token; it belongs to the first token's segment.
      segment_ids: document of each token; where it changes, the state starts again from zero.

    Returns:
      The reads, and the state after the last token.
    """
    groups = v.shape[2] // k.shape[2]
    starts = segment_starts(segment_ids, v.shape[:2])

    def step(S, token):
        q_t, k_t, v_t, g_t, beta_t, start_t = token
        q_t, k_t = (jnp.repeat(x, groups, axis=1) for x in (q_t, k_t))
        S = jnp.where(start_t[:, None, None, None], 0.0, S)
        S = S * jnp.exp(g_t)[..., None, None]
        u = beta_t[..., None] * (v_t - jnp.einsum("bhkv,bhk->bhv", S, k_t))
        S = S + jnp.einsum("bhk,bhv->bhkv", k_t, u)
        return S, jnp.einsum("bhkv,bhk->bhv", S, q_t)

    tokens = (*(x.astype(jnp.float32) for x in (q, k, v, g, beta)), starts)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    state, out = jax.lax.scan(step, state.astype(jnp.float32), tokens)
    return jnp.moveaxis(out, 0, 1), state


def segment_starts(
    segment_ids: Int[Array, "B T"] | None, shape: tuple[int, ...]
) -> Bool[Array, "B T"]:
    """Mark the tokens that open a new document; the first token of a row continues the state."""
    if segment_ids is None:
        return jnp.zeros(shape, bool)
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def document_index(
    segment_ids: Int[Array, "B T"] | None, shape: tuple[int, ...]
) -> Int[Array, "B T"]:
    """Number the documents of each row 0, 1, ...; an id that comes back is a new document."""
    return jnp.cumsum(segment_starts(segment_ids, shape), axis=1, dtype=jnp.int32)


def tree_delta_rule_reference(
    q: Float[Array, "B M HK DK"],
    k: Float[Array, "B M HK DK"],
    v: Float[Array, "B M HV DV"],
    g: Float[Array, "B M HV"],
    beta: Float[Array, "B M HV"],
    state: Float[Array, "B HV DK DV"],
    parents: Int[Array, "B M"],
) -> tuple[Float[Array, "B M HV DV"], Float[Array, "B M HV DK DV"]]:
    """Run the recurrence along every root-to-node path, storing one state per node.

    The oracle for the closed form in `tree.py`, and what other engines do: memory and time grow
    with M times the state. `parents[i] < i`; -1 hangs a node on the committed state.

    Returns:
      The read of each node, and the state after each node.
    """
    batch, nodes = parents.shape
    rows = jnp.arange(batch)

    def step(i, carry):
        out, states = carry
        parent = parents[:, i]
        before = jnp.where((parent < 0)[:, None, None, None], state, states[rows, parent])
        q_i, k_i, v_i, g_i, beta_i = (
            jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in (q, k, v, g, beta)
        )
        o, after = gated_delta_rule_reference(q_i, k_i, v_i, g_i, beta_i, before)
        return out.at[:, i].set(o[:, 0]), states.at[:, i].set(after)

    out = jnp.zeros(v.shape, jnp.float32)
    states = jnp.zeros((batch, nodes, *state.shape[1:]), jnp.float32)
    return jax.lax.fori_loop(0, nodes, step, (out, states))
