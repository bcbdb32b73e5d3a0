"""The gated delta rule in chunks: matrix products inside a chunk, a scan between chunks.

The WY form of arXiv 2412.06464, section 3.3, for training and prefill. Inside a chunk of C tokens
with cumulative log decay G, which starts again at every chunk:

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

    decay, enter, leave, carry = _decays(g, segments)
    keys_keys = jnp.einsum("nbhik,nbhjk->nbhij", k, k, precision=_HIGHEST)[:, :, :, None]
    keys_queries = jnp.einsum("nbhik,nbhjk->nbhij", q, k, precision=_HIGHEST)[:, :, :, None]
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    A = jnp.where(strict, keys_keys * decay * beta[..., None], 0.0)
    solve = unit_lower_inverse(A) * beta[..., None, :]
    mix = keys_queries * decay

    S = state.astype(jnp.float32).reshape(batch, key_heads, groups, key_dim, value_dim)
    S, out = jax.lax.scan(_run_chunk, S, (q, k, v, solve, mix, enter, leave, carry))
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, count * size, value_heads, value_dim)
    return out[:, :length], S.reshape(state.shape)


def _run_chunk(S, chunk):
    """Take the state through one chunk: what depends on the state and nothing else."""
    q, k, v, solve, mix, enter, leave, carry = chunk
    keys_queries = jnp.concatenate([k, q], axis=2)
    reads = jnp.einsum("bhik,bhrkv->bhriv", keys_queries, S, precision=_HIGHEST)
    known, old = jnp.split(reads, 2, axis=3)
    target = v - enter[..., None] * known
    u = jnp.einsum("bhrij,bhrjv->bhriv", solve, target, precision=_HIGHEST)
    new = jnp.einsum("bhrij,bhrjv->bhriv", mix, u, precision=_HIGHEST)
    written = jnp.einsum("bhjk,bhrjv->bhrkv", k, leave[..., None] * u, precision=_HIGHEST)
    return carry[..., None, None] * S + written, enter[..., None] * old + new


def _decays(g: Float[Array, "N B HK R C"], segments: Int[Array, "N B C"]):
    """Return four factors: token to token, entering state to token, token to end, state to end.

    Every factor is zero across a document border. The exponent between two tokens is summed over
    the tokens between them: as G_i - G_j it would lose the digits of a slow decay after a fast one.
    """
    size = g.shape[-1]
    step = jnp.arange(size)
    between = (step[:, None, None] >= step) & (step > step[:, None])  # [i, j, l]: j < l <= i
    exponent = jnp.einsum("nbhrl,ijl->nbhrij", g, between.astype(g.dtype), precision=_HIGHEST)

    entering = jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])[..., None]
    leaving = segments[..., -1:]
    pairs = segments[..., :, None] == segments[..., None, :]
    pairs = (pairs & (step[:, None] >= step))[:, :, None, None]
    decay = jnp.where(pairs, jnp.exp(exponent), 0.0)
    enter = jnp.exp(jnp.cumsum(g, axis=-1))
    leave = jnp.where((segments == leaving)[:, :, None, None], decay[..., -1, :], 0.0)
    carry = jnp.where((entering == leaving)[:, :, None], enter[..., -1], 0.0)
    enter = jnp.where((segments == entering)[:, :, None, None], enter, 0.0)
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
