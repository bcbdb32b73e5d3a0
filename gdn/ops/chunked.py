"""The gated delta rule in chunks: matrix products inside a chunk, a scan between chunks.

The WY form of arXiv 2412.06464, section 3.3, for training and prefill. Inside a chunk of C tokens
with cumulative log decay G (which restarts at every chunk, so differences never lose digits):

    D_ij = exp(G_i - G_j) for j <= i           A = strict_lower(beta_i (k_i . k_j) D_ij)
    U = (I + A)^-1 beta (V - exp(G) K S)       O = exp(G) Q S + (Q K^T * D) U
    S <- exp(G_C) S + (exp(G_C - G) K)^T U

`U` is what each token writes once the tokens before it have been accounted for. The inverse is
formed by exact merges of triangular blocks: a power series in A would be wrong by orders of
magnitude on correlated keys, and a batched triangular solve leaves XLA's thread pool on a CPU
waiting for itself.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.ops.reference import document_index

_HIGHEST = jax.lax.Precision.HIGHEST  # the default float32 product is TF32 on some accelerators


def gated_delta_rule_chunked(
    q: Float[Array, "B T HK DK"],
    k: Float[Array, "B T HK DK"],
    v: Float[Array, "B T HV DV"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV DK DV"],
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int = 32,
) -> tuple[Float[Array, "B T HV DV"], Float[Array, "B HV DK DV"]]:
    """Run the rule over T tokens; arguments and results as `gated_delta_rule_reference`.

    Args:
      chunk_size: a power of two; 32 is the fastest on a CPU.
    """
    batch, length, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    groups = value_heads // key_heads
    size = min(chunk_size, max(1, 1 << (length - 1).bit_length()))
    count = -(-length // size)
    padding = count * size - length

    def chunks(x, heads):
        """[B, T, HK * r, ...] -> [N, B, HK, r, C, ...], zero-padded at the end, float32."""
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, count, size, key_heads, heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 4))

    q, k = chunks(q, 1)[:, :, :, 0], chunks(k, 1)[:, :, :, 0]
    v, g, beta = chunks(v, groups), chunks(g, groups), chunks(beta, groups)
    documents = document_index(segment_ids, (batch, length))
    # Padding joins the last document: with g = beta = 0 it hands that document's state on
    # unchanged.
    segments = jnp.pad(documents, ((0, 0), (0, padding)), mode="edge")
    segments = jnp.moveaxis(segments.reshape(batch, count, size), 1, 0)

    decay, enter, leave, carry = _decays(jnp.cumsum(g, axis=-1), segments)
    keys_keys = jnp.einsum("nbhik,nbhjk->nbhij", k, k, precision=_HIGHEST)[:, :, :, None]
    keys_queries = jnp.einsum("nbhik,nbhjk->nbhij", q, k, precision=_HIGHEST)[:, :, :, None]
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    A = jnp.where(strict, keys_keys * decay * beta[..., None], 0.0)
    solve = unit_lower_inverse(A) * beta[..., None, :]
    mix = keys_queries * decay

    def step(S, chunk):
        q_c, k_c, v_c, solve_c, mix_c, enter_c, leave_c, carry_c = chunk
        reads = (
            jnp.einsum(
                "bhik,bhrkv->bhriv", jnp.concatenate([k_c, q_c], axis=2), S, precision=_HIGHEST
            )
            * jnp.concatenate([enter_c, enter_c], axis=-1)[..., None]
        )
        known, old = reads[..., :size, :], reads[..., size:, :]
        u = jnp.einsum("bhrij,bhrjv->bhriv", solve_c, v_c - known, precision=_HIGHEST)
        out = old + jnp.einsum("bhrij,bhrjv->bhriv", mix_c, u, precision=_HIGHEST)
        written = jnp.einsum("bhjk,bhrjv->bhrkv", k_c, leave_c[..., None] * u, precision=_HIGHEST)
        return carry_c[..., None, None] * S + written, out

    S = state.astype(jnp.float32).reshape(batch, key_heads, groups, key_dim, value_dim)
    S, out = jax.lax.scan(step, S, (q, k, v, solve, mix, enter, leave, carry))
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, count * size, value_heads, value_dim)
    return out[:, :length], S.reshape(state.shape)


def _decays(G: Float[Array, "N B HK R C"], segments: Int[Array, "N B C"]):
    """Give the decay between two tokens, from the entering state, to the leaving one, and of the
    state.

    Every factor is zero across a document border. The exponent is masked before `exp`: for j > i it
    may overflow, and a mask afterwards would leave NaN gradients.
    """
    size = G.shape[-1]
    entering = jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])[..., None]
    leaving = segments[..., -1:]
    pairs = segments[..., :, None] == segments[..., None, :]
    pairs = (pairs & jnp.tril(jnp.ones((size, size), bool)))[:, :, None, None]

    def masked_exp(exponent, mask):
        return jnp.exp(jnp.where(mask, exponent, -jnp.inf))

    decay = masked_exp(G[..., :, None] - G[..., None, :], pairs)
    enter = masked_exp(G, (segments == entering)[:, :, None, None])
    leave = masked_exp(G[..., -1:] - G, (segments == leaving)[:, :, None, None])
    carry = masked_exp(G[..., -1], (entering == leaving)[:, :, None])
    return decay, enter, leave, carry


@jax.custom_vjp
def unit_lower_inverse(A: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Invert I + A for strictly lower triangular A, C a power of two.

    Diagonal blocks of 1, 2, 4, ... are merged by [[P, 0], [M, Q]]^-1 = [[P^-1, 0], [-Q^-1 M P^-1,
    Q^-1]], all of one size at once: exact like substitution, and nothing but matrix products.
    """
    size = A.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    block = 1
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=A.dtype), A.shape)
    while block < size:
        same_pair = row // (2 * block) == column // (2 * block)
        below = jnp.where(same_pair & (row // block > column // block), A, 0.0)
        # Blocks of one are the identity: their first merge needs no product.
        inverse = inverse - (below if block == 1 else _product(_product(inverse, below), inverse))
        block *= 2
    return inverse


def _product(x, y):
    return jnp.matmul(x, y, precision=_HIGHEST)


def _inverse_forward(A):
    inverse = unit_lower_inverse(A)
    return inverse, inverse


def _inverse_backward(inverse, grad):
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_product(_product(transposed, grad), transposed), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
