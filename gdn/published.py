"""Shapes of released targets, for planning without their files.

Numbers of the models' config.json; `tests/test_dry_run.py` holds the parameter counts that they
give against the published ones.
"""

from typing import Any

from gdn.config import TargetConfig

_SHARED: dict[str, Any] = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
}
_COLUMNS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    "linear_num_value_heads tie_word_embeddings"
).split()
_DENSE = {  # the last column is the width of the MLP
    "Qwen3.5-0.8B": (1024, 24, 8, 2, 16, True, 3584),
    "Qwen3.5-2B": (2048, 24, 8, 2, 16, True, 6144),
    "Qwen3.5-4B": (2560, 32, 16, 4, 32, True, 9216),
    "Qwen3.5-9B": (4096, 32, 16, 4, 32, False, 12288),
    "Qwen3.5-27B": (5120, 64, 24, 4, 48, False, 17408),
}
_SPARSE = {  # family, vocabulary, experts, and how many of them a token visits
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", 248320, 256, 8, (2048, 40, 16, 2, 32, False)),
    "Qwen3-Next-80B-A3B": ("qwen3_next", 151936, 512, 10, (2048, 48, 16, 2, 32, False)),
}
NAMES = (*_DENSE, *_SPARSE)


def published_shape(name: str) -> TargetConfig | None:
    """Return the shape of a released model, whatever follows its name; None if it is not known."""
    known = [x for x in NAMES if name == x or name.startswith(x + "-")]
    if not known:
        return None
    if known[0] in _DENSE:
        *sizes, width = _DENSE[known[0]]
        own = {"model_type": "qwen3_5_text", "vocab_size": 248320, "intermediate_size": width}
    else:
        family, vocab, experts, visited, sizes = _SPARSE[known[0]]
        own = {"model_type": family, "vocab_size": vocab, "num_experts": experts}
        own |= {"num_experts_per_tok": visited, "moe_intermediate_size": 512}
        own |= {"shared_expert_intermediate_size": 512}
    return TargetConfig.from_hf(_SHARED | own | dict(zip(_COLUMNS, sizes, strict=True)))
