"""Plain greedy decoding: the baseline, through the same `verify` and `commit` as speculation.

The token loop runs on the device; the host sees the tokens when it ends.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from gdn import HybridLM, chain_tree, commit, init_cache


def generate_greedy(
    model: HybridLM,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...] = (),
) -> tuple[Int[Array, "B K"], Int[Array, " B"]]:
    """Continue right-padded prompts with the most likely token, K = `max_new_tokens` at most.

    Args:
      lengths: real tokens of each prompt, at least 1.
      eos_token_ids: a row ends with the first of these; it is the last token that is returned.

    Returns:
      The new tokens, zeros after the end of a row, and how many of each row count.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 1")
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    return _generate(graphdef, params, prompts, lengths, max_new_tokens, eos_token_ids)


@partial(jax.jit, static_argnames=("graphdef", "max_new_tokens", "eos_token_ids"))
def _generate(graphdef, params, prompts, lengths, max_new_tokens, eos_token_ids):
    model = nnx.merge(graphdef, params)
    batch, length = prompts.shape
    dtype = model.embed_tokens[...].dtype
    cache = init_cache(model.cfg, batch, length + max_new_tokens, dtype)
    prefilled = model.prefill(prompts, lengths, cache)
    tree = chain_tree(batch, 1)

    def emit(tokens, counts, running, token):
        """Append to the running rows; a row that has just emitted its end stops."""
        tokens = tokens.at[:, jnp.max(counts)].set(jnp.where(running, token, 0))
        ended = jnp.isin(token, jnp.array(eos_token_ids, jnp.int32))
        return tokens, counts + running, running & ~ended

    def more(carry):
        _, counts, running, _, _ = carry
        return jnp.any(running) & (jnp.max(counts) < max_new_tokens)

    def step(carry):
        tokens, counts, running, token, cache = carry
        out = model.verify(token[:, None], tree, cache)
        cache = commit(cache, out.updates, jnp.where(running, 0, -1)[:, None])
        token = most_likely(out.logits[:, 0])
        return *emit(tokens, counts, running, token), token, cache

    token = most_likely(prefilled.logits)
    tokens = jnp.zeros((batch, max_new_tokens), jnp.int32)
    start = emit(tokens, jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool), token)
    tokens, counts, *_ = jax.lax.while_loop(more, step, (*start, token, prefilled.cache))
    return tokens, counts


def most_likely(logits: jax.Array) -> jax.Array:
    """Return the lowest index of the maximum along the last axis.

    The maximum first, then where it is: XLA's CPU `argmax` over floats is ten times slower.
    """
    best = logits.max(axis=-1, keepdims=True)
    return jnp.argmax(logits == best, axis=-1).astype(jnp.int32)
