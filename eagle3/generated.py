"""A small target of Qwen3.5's proportions, made rather than loaded."""

from flax import nnx

from eagle3.config import GeneratedTarget
from gdn import HybridLM, TargetConfig


def generated_target(
    shape: GeneratedTarget, dtype, eos_token_ids: tuple[int, ...] = ()
) -> HybridLM:
    """Make it with random weights in `dtype`."""
    width, layers, vocab = shape.hidden_size, shape.num_hidden_layers, shape.vocab_size
    kinds = tuple("linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers))
    cfg = TargetConfig(
        model_type="qwen3_5_text", vocab_size=vocab, hidden_size=width, num_hidden_layers=layers,
        intermediate_size=shape.intermediate_size or 3 * width, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width // 2, layer_types=kinds, rope_theta=1e7,
        partial_rotary_factor=0.25, rms_norm_eps=1e-6,
        max_position_embeddings=shape.max_position_embeddings, tie_word_embeddings=True,
        norm_unit_offset=True, qk_norm=True, attn_output_gate=True, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=width // 4, linear_value_head_dim=width // 4,
        bos_token_id=None, eos_token_ids=eos_token_ids, pad_token_id=None,
        initializer_range=shape.initializer_range,
    )  # fmt: skip
    return HybridLM(cfg, dtype=dtype, rngs=nnx.Rngs(shape.seed))
