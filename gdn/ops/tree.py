"""The gated delta rule over a tree of candidate tokens, in closed form, with no state per node.

For node i with G_i the sum of log decays along its path (root to i), and D_ij = exp(G_i - G_j)
where j is i or an ancestor of i, else 0 (the chunk form of `chunked.py` with the ancestor mask for
the causal one):

    A_ij = beta_i (k_i . k_j) D_ij, strict ancestors     (I + A) U = beta (V - exp(G) K S)
    O = exp(G) Q S + (Q K^T * D) U

U_i depends on ancestors only, so whichever leaf wins, the state after it is a sum over its path:
S' = exp(G_leaf) S + sum_j exp(G_leaf - G_j) k_j u_j^T. Nothing is solved again, nothing was copied.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_HIGHEST = jax.lax.Precision.HIGHEST


class Tree(NamedTuple):
    """Candidate tokens hung on the last committed one. Node order is free, but for the native
    kernels, which want parents before children, as `tree_from_parents` makes them.

    A padded node has only itself for an ancestor and is nobody's ancestor; it changes nothing else.
    """

    ancestors: Bool[Array, "B M M"]  # [b, i, j]: j is i itself or an ancestor of i
    depth: Int[Array, "B M"]  # 0 for a root: its position is the number of committed tokens


def tree_from_parents(parents: Int[Array, "B M"]) -> Tree:
    """Build the masks from parent indices, `parents[i] < i`; -1 marks a root or a padded node."""
    batch, nodes = parents.shape
    self_mask = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (batch, nodes, nodes))

    def add_node(i, ancestors):
        parent = parents[:, i]
        above = ancestors[jnp.arange(batch), parent] & (parent >= 0)[:, None]
        return ancestors.at[:, i].set(ancestors[:, i] | above)

    ancestors = jax.lax.fori_loop(0, nodes, add_node, self_mask)
    return Tree(ancestors, ancestors.sum(-1, dtype=jnp.int32) - 1)


def chain_tree(batch: int, nodes: int) -> Tree:
    """Build the tree without branches: node i follows node i - 1; one node is plain decoding."""
    ancestors = jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)), (batch, nodes, nodes))
    return Tree(ancestors, jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes)))


def tree_delta_rule(
    q: Float[Array, "B M HK DK"],
    k: Float[Array, "B M HK DK"],
    v: Float[Array, "B M HV DV"],
    g: Float[Array, "B M HV"],
    beta: Float[Array, "B M HV"],
    state: Float[Array, "B HV DK DV"],
    tree: Tree,
) -> tuple[Float[Array, "B M HV DV"], Float[Array, "B M HV DV"]]:
    """Read every node of a tree from one committed state, float32 throughout.

    Returns:
      The read of each node, and its write u: what `commit_state` needs beside k and g.
    """
    nodes, groups = k.shape[1], v.shape[2] // k.shape[2]
    q, k, v, g, beta, state = (x.astype(jnp.float32) for x in (q, k, v, g, beta, state))
    above = tree.ancestors[:, None].astype(g.dtype)
    weighted = above * g.swapaxes(1, 2)[:, :, None]  # [B, HV, i, l]: g_l where l is above i
    # Summed over the nodes between i and j: G_i - G_j would lose the digits of slow decays.
    exponent = jnp.einsum("bhil,bhjl->bhij", weighted, 1.0 - above, precision=_HIGHEST)

    keys_queries = jnp.concatenate([k, q], axis=1).swapaxes(1, 2)  # [B, HK, 2M, DK]
    products = jnp.einsum("bhik,bhjk->bhij", keys_queries, k.swapaxes(1, 2), precision=_HIGHEST)
    # Value heads that share a key head repeat its few rows here, which spares a transposed state.
    keys_queries, products = (jnp.repeat(x, groups, axis=1) for x in (keys_queries, products))
    reads = jnp.einsum("bhik,bhkv->bhiv", keys_queries, state, precision=_HIGHEST)
    beta, v = beta.swapaxes(1, 2)[..., None], v.swapaxes(1, 2)
    scale = jnp.exp(weighted.sum(-1, keepdims=True))
    u = beta * (v - scale * reads[:, :, :nodes])
    ancestors = tree.ancestors[:, None]
    decay = jnp.where(ancestors, jnp.exp(exponent), 0.0)
    if nodes > 1:
        strict = ancestors & ~jnp.eye(nodes, dtype=bool)
        A = jnp.where(strict, beta * products[:, :, :nodes] * decay, 0.0)
        u = _solve_levels(A, u, jnp.max(jnp.sum(tree.ancestors, -1)) - 1)
    mix = products[:, :, nodes:] * decay
    out = scale * reads[:, :, nodes:] + jnp.einsum("bhij,bhjv->bhiv", mix, u, precision=_HIGHEST)
    return out.swapaxes(1, 2), u.swapaxes(1, 2)


def _solve_levels(A, right, levels):
    """Solve (I + A) U = right by level iteration: after t rounds, nodes of depth <= t are final.

    As accurate as substitution and free of any node order; doubling (powers of A) breaks in float32
    on correlated keys. `levels` is a traced count: a shallow tree pays for its own depth only.
    """

    def round_(_, u):
        return right - jnp.einsum("bhij,bhjv->bhiv", A, u, precision=_HIGHEST)

    return jax.lax.fori_loop(0, levels, round_, right)


def commit_state(
    state: Float[Array, "B HV DK DV"],
    k: Float[Array, "B M HK DK"],
    u: Float[Array, "B M HV DV"],
    g: Float[Array, "B M HV"],
    path: Int[Array, "B P"],
) -> Float[Array, "B HV DK DV"]:
    """Advance the state along an accepted path: one update of rank m, m the accepted nodes.

    Args:
      path: node indices from a root downwards, padded at the end with -1. A row of -1 returns its
        state bit for bit; values at nodes off the path are never read into the result.
    """
    batch, _, value_heads, _ = u.shape
    accepted = path >= 0
    rows, index = jnp.arange(batch)[:, None], jnp.maximum(path, 0)
    k, u, g = (jnp.where(accepted.reshape(*path.shape, *(1,) * (x.ndim - 2)), x[rows, index], 0.0)
               for x in (k, u, g))  # fmt: skip
    # Sums of g from the end of the path backwards: from each node on, then after each node.
    onwards = jnp.flip(jnp.cumsum(jnp.flip(g, 1), axis=1), 1)
    after = jnp.pad(onwards[:, 1:], ((0, 0), (0, 1), (0, 0)))
    u = u * jnp.exp(after)[..., None]
    k = jnp.repeat(k, value_heads // k.shape[2], axis=2)
    if path.shape[1] == 1:
        # A sum over one node would not stay a product: XLA fuses the node's whole computation into
        # the update and repeats it for every entry of the state. A second, zero node prevents that.
        k, u = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, u))
    written = jnp.einsum("bphk,bphv->bhkv", k, u, precision=_HIGHEST)
    advanced = jnp.exp(onwards[:, 0])[..., None, None] * state + written
    # Times 1 plus 0 would still turn -0.0 into 0.0.
    return jnp.where(accepted[:, :1, None, None], advanced, state)
