"""Write a Hugging Face directory as one GGUF file for llama.cpp; a module of benchmarks/peers.py.

Token ids go in and come out, so there is no tokenizer in the file, only the size of the vocabulary.
Families: `llama` and dense hybrids, `qwen3_5_text`. What llama.cpp's graphs want otherwise than the
files have it, as read from src/models/{llama,qwen35}.cpp of llama-cpp-python 0.3.36:

- llama: pairs of neighbouring dimensions are rotated, in files those of two halves;
- qwen35: norms hold the one that the model adds, the decay is -exp(A_log), and value heads are
  ordered so that all key heads repeat as a block, in files each by itself.

Needs `gguf` from PyPI.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from gdn import HybridLM, TargetConfig, load_pretrained

ARCHITECTURES = {"llama": "llama", "qwen3_5_text": "qwen35"}
# Kind of matrix -> names of its data type and of such a file in `gguf`. Vectors and convolutions
# are always float32, as llama.cpp demands, and so are rows that do not divide into blocks.
KINDS = {
    "f32": ("F32", "ALL_F32"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
Q8_BLOCK = 32  # weights that share a scale of 16 bits
_OUTSIDE = {
    "embed_tokens": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head": "output.weight",
}
_INSIDE = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj": "attn_q.weight",
    "self_attn.k_proj": "attn_k.weight",
    "self_attn.v_proj": "attn_v.weight",
    "self_attn.o_proj": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj": "ffn_gate.weight",
    "mlp.up_proj": "ffn_up.weight",
    "mlp.down_proj": "ffn_down.weight",
    "linear_attn.in_proj_qkv": "attn_qkv.weight",
    "linear_attn.in_proj_z": "attn_gate.weight",
    "linear_attn.in_proj_b": "ssm_beta.weight",
    "linear_attn.in_proj_a": "ssm_alpha.weight",
    "linear_attn.conv1d": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm.weight",
    "linear_attn.out_proj": "ssm_out.weight",
}


def problem_with(cfg: TargetConfig) -> str | None:
    """Say why a model cannot be written for llama.cpp; None if it can."""
    if cfg.model_type not in ARCHITECTURES:
        return f"no export of {cfg.model_type}, only of {', '.join(ARCHITECTURES)}"
    if cfg.linear_key_head_dim != cfg.linear_value_head_dim:
        return (
            f"its qwen35 has one size for key and value heads, not {cfg.linear_key_head_dim} and"
            f" {cfg.linear_value_head_dim}"
        )
    return None


def export(directory: str | Path, path: str | Path, kind: str) -> None:
    """Write the model in a directory to a file.

    Args:
      kind: of the matrices, one of KINDS.

    Raises:
      ValueError: llama.cpp has no such model, or the directory cannot be read.
    """
    import gguf

    model = load_pretrained(directory)
    if (problem := problem_with(model.cfg)) is not None:
        raise ValueError(f"{directory} cannot be written as GGUF: {problem}")
    dtype, file_type = gguf.GGMLQuantizationType[KINDS[kind][0]], gguf.LlamaFileType[KINDS[kind][1]]
    aside = Path(f"{path}.tmp")
    writer = gguf.GGUFWriter(aside, ARCHITECTURES[model.cfg.model_type])
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _describe(writer, model.cfg)
    for name, value in tensors(model):
        is_matrix = value.ndim == 2 and "conv1d" not in name
        fits = kind != "q8_0" or value.shape[-1] % Q8_BLOCK == 0
        kept = dtype if is_matrix and fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(value, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(aside, path)


def tensors(model: HybridLM) -> Iterator[tuple[str, np.ndarray]]:
    """Yield llama.cpp's name and float32 array of every parameter."""
    for keys, leaf in nnx.to_flat_state(nnx.state(model)):
        path, value = ".".join(map(str, keys)), np.asarray(leaf[...], np.float32)
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", path):
            layer, inside = match.groups()
            name = f"blk.{layer}.{_inside(model.cfg, inside)}"
            path = inside
        else:
            name = _OUTSIDE[path]
        yield name, np.ascontiguousarray(_as_llama_cpp_has_it(model.cfg, path, value))


def _inside(cfg: TargetConfig, path: str) -> str:
    if path == "post_attention_layernorm.weight":
        return "ffn_norm.weight" if cfg.model_type == "llama" else "post_attention_norm.weight"
    return _INSIDE[path]


def _as_llama_cpp_has_it(cfg: TargetConfig, path: str, value: np.ndarray) -> np.ndarray:
    """Change a parameter, named without its layer, from the model's form to llama.cpp's."""
    kind = path.rpartition(".")[2]
    if cfg.model_type == "llama":
        return _neighbours(value, cfg.head_dim) if kind in ("q_proj", "k_proj") else value
    if path.endswith("norm.weight"):
        return value + 1 if cfg.norm_unit_offset else value
    if kind == "A_log":
        return -np.exp(_blocks(cfg, value))
    if kind in ("in_proj_qkv", "conv1d"):
        keys = 2 * cfg.linear_num_key_heads * cfg.linear_key_head_dim
        return np.concatenate([value[:keys], _blocks(cfg, value[keys:])])
    if kind in ("in_proj_z", "in_proj_b", "in_proj_a", "dt_bias"):
        return _blocks(cfg, value)
    return _blocks(cfg, value.T).T if kind == "out_proj" else value


def _neighbours(value: np.ndarray, head_dim: int) -> np.ndarray:
    """Order the rows of each head so that the two of a rotated pair are neighbours."""
    halves = value.reshape(-1, 2, head_dim // 2, value.shape[-1])
    return halves.swapaxes(1, 2).reshape(value.shape)


def _blocks(cfg: TargetConfig, value: np.ndarray) -> np.ndarray:
    """Order value heads, whole groups of rows, by place in their group and then by key head."""
    heads = value.reshape(cfg.linear_num_key_heads, cfg.num_value_groups, -1)
    return heads.swapaxes(0, 1).reshape(value.shape)


def _describe(writer: Any, cfg: TargetConfig) -> None:
    """Write the architecture."""
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_rope_dimension_count(cfg.rotary_dim)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if cfg.model_type == "llama":
        return
    # Three positions per token, for images; in a text they are one, so only that they cover all
    # rotated pairs matters.
    third = -(-cfg.rotary_dim // 6)
    writer.add_rope_dimension_sections([third, third, third, 0])
    writer.add_ssm_conv_kernel(cfg.linear_conv_kernel_dim)
    writer.add_ssm_state_size(cfg.linear_key_head_dim)
    writer.add_ssm_group_count(cfg.linear_num_key_heads)
    writer.add_ssm_time_step_rank(cfg.linear_num_value_heads)
    writer.add_ssm_inner_size(cfg.linear_num_value_heads * cfg.linear_value_head_dim)
    # No method for it in gguf 0.19; without it, llama.cpp takes every fourth layer for attention.
    is_recurrent = [kind == "linear_attention" for kind in cfg.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_recurrent)
