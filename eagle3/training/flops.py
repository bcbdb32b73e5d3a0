"""How many operations training takes, to compare with what a device can do.

Counted are matrix products: two operations per weight and token forward, four backward. What is
computed again to save memory is not counted, nor is the delta rule; attention's square is.
"""

import time

import jax
import jax.numpy as jnp

from eagle3.draft_config import DraftConfig
from gdn import TargetConfig


def target_flops(cfg: TargetConfig, length: int) -> float:
    """Return operations per token of a forward pass over rows of `length` tokens."""
    embedding = cfg.vocab_size * cfg.hidden_size
    weights = cfg.num_parameters() - (0 if cfg.tie_word_embeddings else embedding)
    if any(cfg.moe_layers):  # of the routed experts, a token visits a few
        unused = cfg.num_experts - cfg.num_experts_per_tok
        weights -= sum(cfg.moe_layers) * unused * 3 * cfg.hidden_size * cfg.moe_intermediate_size
    full = cfg.layer_types.count("full_attention")
    return 2.0 * weights + full * _attention(cfg.num_attention_heads * cfg.head_dim, length)


def draft_flops(cfg: DraftConfig, length: int, steps: int) -> float:
    """Return operations per token of an unrolling over `steps` steps, forward."""
    width, queries = cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim
    keys = cfg.num_key_value_heads * cfg.head_dim
    layer = 2 * width * (queries + 2 * keys) + queries * width + 3 * width * cfg.intermediate_size
    step = 2.0 * (layer + width * cfg.draft_vocab_size) + _attention(queries, length)
    return steps * step + 2.0 * cfg.num_aux * cfg.target_hidden_size * width


def _attention(width: int, length: int) -> float:
    """Scores and values of the causal half of a square."""
    return 2.0 * width * length


def measured_peak(dtype, size: int = 2048) -> float:
    """Return the operations per second that a product of two square matrices reaches here."""
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: a @ b)
    product(a, a).block_until_ready()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)
