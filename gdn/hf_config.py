"""Hugging Face `config.json` to TargetConfig and back.

Reads text configs and the wrapped configs of released Qwen3.5 checkpoints, in the flat rope layout
of transformers 4 and the nested one of transformers 5; writes the text-only classes of transformers
5.24, whose configuration classes are the source for every default below. A value that would make
the model compute something else than this package does is refused, not ignored, and all refusals
come in one error. Keys that change nothing in the text forward pass are skipped, among them
`mrope_section`: with text alone the three position rows are equal and M-RoPE is plain RoPE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gdn.config import (
    HYBRID_TYPES,
    LINEAR_SIZES,
    MOE_SIZES,
    TargetConfig,
    contradictions,
    is_int,
    raise_problems,
    unknown_name,
)

# model_type in a file -> model_type of the text model inside it.
_TEXT_TYPES = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_5_moe_text": "qwen3_5_moe_text",
    "qwen3_next": "qwen3_next",
    "llama": "llama",
    "qwen3": "qwen3",
}
_ARCHITECTURES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Values for which this package computes what transformers does; absent and null are fine too.
_SUPPORTED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "output_gate_type": ("swish", "silu"),  # two names of the gate inside a DeltaNet layer
    "mamba_ssm_dtype": ("float32",),  # dtype of the recurrent state
}
_SUPPORTED_HYBRID = {"attn_output_gate": (True,)}
_SUPPORTED_BY_TYPE: dict[str, dict[str, tuple]] = {
    "qwen3_5_text": _SUPPORTED_HYBRID,
    "qwen3_next": _SUPPORTED_HYBRID,
    # This class has experts in every layer and always rescales, whatever the file says.
    "qwen3_5_moe_text": _SUPPORTED_HYBRID
    | {"norm_topk_prob": (True,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
    # Without use_sliding_window beside it, a window in a llama file cannot be known to be idle.
    "llama": {"attn_output_gate": (False,), "sliding_window": (None,)},
    "qwen3": {"attn_output_gate": (False,)},
}

# Fields that go into the file under their own name, for every model type.
_SAME_IN_BOTH = (
    "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings "
    "initializer_range"
).split()

_REQUIRED = object()


def read_hf(source: dict | str | Path) -> TargetConfig:
    """Build a TargetConfig from a config dict, a `config.json`, or the folder that holds one.

    Raises:
        ValueError: listing every field that is missing, malformed or not supported.
    """
    origin, config = _load(source)
    fields = _Fields(config)
    _check_supported(fields)
    _read_rope(fields)
    if fields.model_type:  # else the fields to expect are unknown, and there is an error to raise
        _read_sizes(fields)
        _read_layers(fields)
        _read_experts(fields)
        _read_tokens(fields)
    raise_problems(origin, fields.problems + contradictions(fields.values))
    return TargetConfig(**fields.values)


def _load(source: dict | str | Path) -> tuple[str, dict]:
    """Return where the config is from, for messages, and the config itself."""
    if isinstance(source, dict):
        return "config", source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a config.json or the folder holding it")
    return str(path), read_json(path)


def read_json(path: Path) -> dict:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: the file is missing, not JSON, or something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8, or nested too deeply
        raise ValueError(f"{path}: not JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: found a {type(value).__name__}, expected a JSON object")
    return value


class _Fields:
    """The values read so far, and a problem for each that cannot be had or used."""

    def __init__(self, config: dict):
        self.problems: list[str] = []
        self.values: dict[str, Any] = {}  # by TargetConfig field
        self.text = config  # section of the text model
        self.outer: dict = {}  # the wrapper around that section, empty when there is none
        nested = config.get("text_config")
        if isinstance(nested, dict):
            self.text, self.outer = nested, config
        elif nested is not None:
            self.problems.append(f"text_config: found {nested!r}, expected an object")
        self.model_type = self._find_model_type()

    def _find_model_type(self) -> str | None:
        """Return the type of the text model; None, with a problem noted, when it is unknown."""
        inner = self.text.get("model_type")
        stated = self.outer.get("model_type") or inner
        model_type = _TEXT_TYPES.get(str(stated))
        if stated is None:
            self.problems.append(f"model_type: missing, supported: {', '.join(_TEXT_TYPES)}")
        elif model_type is None:
            self.problems.append(f"model_type: {unknown_name(stated, tuple(_TEXT_TYPES))}")
        elif self.outer and inner is not None and _TEXT_TYPES.get(str(inner)) != model_type:
            self.problems.append(
                f"text_config.model_type: found {inner!r}, expected {model_type!r} in {stated!r}"
            )
        elif self.outer and stated in ("qwen3_next", "llama", "qwen3"):
            self.problems.append(f"text_config: found in a {stated} config, which has no wrapper")
        if model_type:
            self.values["model_type"] = model_type
        return model_type

    def read(self, name: str, default: Any = _REQUIRED) -> Any:
        """Store and return the value of `name`; null counts as absent."""
        value = self.text.get(name)
        if value is None and default is _REQUIRED:
            self.problems.append(f"{name}: missing, and there is no safe default")
            return None
        value = default if value is None else value
        self.values[name] = _as_float(value) if isinstance(default, float) else value
        return value


def _first(name: str, *sections: dict, default: Any = None) -> Any:
    """Return the first value of `name` in `sections` that is not null."""
    values = (section.get(name) for section in sections)
    return next((value for value in values if value is not None), default)


def _as_float(value: Any) -> Any:
    """Convert an integer (JSON writes 10000000 for 1e7); leave the rest to the range check."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_supported(fields: _Fields) -> None:
    """Note each value that asks for something this package does not compute."""
    by_type = _SUPPORTED_BY_TYPE.get(fields.model_type or "", {})
    for name, supported in (_SUPPORTED | by_type).items():
        value = fields.text.get(name)
        if value is not None and value not in supported:
            allowed = " or ".join(map(repr, supported))
            fields.problems.append(f"{name}: found {value!r}, supported: {allowed}")
    for name in ("quantization_config", "quantization"):
        found = fields.text.get(name) or fields.outer.get(name)
        if found:
            fields.problems.append(f"{name}: found {found!r}, supported: unquantised weights only")


def rope_sections(config: dict, problems: list[str]) -> dict[str, dict]:
    """Return the sections about RoPE that are there, new and old name; note a broken one."""
    sections: dict[str, dict] = {}
    for name in ("rope_parameters", "rope_scaling"):
        section = config.get(name)
        if section is not None and not isinstance(section, dict):
            problems.append(f"{name}: found {section!r}, expected an object or null")
        elif section:
            sections[name] = section
    return sections


def _read_rope(fields: _Fields) -> None:
    """Read the rotary base and share; a value in a rope section beats the flat one."""
    text, problems = fields.text, fields.problems
    sections = rope_sections(text, problems)
    for name, section in sections.items():
        kind = section.get("rope_type") or section.get("type") or "default"
        if kind != "default":
            problems.append(f"{name}.rope_type: found {kind!r}, supported: 'default'")
        elif section.get("factor") not in (None, 1):
            problems.append(f"{name}.factor: found {section['factor']!r}, supported: none, or 1")
        for key in sorted(key for key, value in section.items() if isinstance(value, dict)):
            problems.append(f"{name}.{key}: found an object, supported: one rope for all layers")
    if len(sections) == 2 and sections["rope_parameters"] != sections["rope_scaling"]:
        problems.append("rope_scaling: found beside a different rope_parameters, expected one")
    stated = next(iter(sections.values()), {})
    # 10000 is the default of all five classes; every released hybrid states 1e7.
    theta = _first("rope_theta", stated, text, default=10000.0)
    share = 0.25 if fields.model_type in HYBRID_TYPES else 1.0  # defaults of the classes
    share = _first("partial_rotary_factor", stated, text, default=share)
    fields.values["rope_theta"] = _as_float(theta)
    fields.values["partial_rotary_factor"] = _as_float(share)


def _read_sizes(fields: _Fields) -> None:
    """Read widths, heads and norms, and the conventions that the model type fixes."""
    model_type, text, values = fields.model_type, fields.text, fields.values
    for name in ("vocab_size", "num_hidden_layers", "max_position_embeddings"):
        fields.read(name)
    hidden, heads = fields.read("hidden_size"), fields.read("num_attention_heads")
    # The MoE families may have no dense layer; if there is one, the range check asks for a width.
    has_experts = model_type in ("qwen3_5_moe_text", "qwen3_next")
    fields.read("intermediate_size", 0 if has_experts else _REQUIRED)
    # No key in llama, or null in qwen3, means one key-value head per query head. The default of 32
    # that Qwen3Config gives to a missing key is the size of one model.
    is_multi_head = model_type == "llama" or (
        model_type == "qwen3" and "num_key_value_heads" in text
    )
    if heads is not None or not is_multi_head:
        fields.read("num_key_value_heads", heads if is_multi_head else _REQUIRED)
    if model_type != "llama" or text.get("head_dim") is not None:
        fields.read("head_dim")
    elif is_int(hidden, 1) and is_int(heads, 1):
        if hidden % heads:
            fields.problems.append(
                f"head_dim: missing, and hidden_size = {hidden} is not a multiple of "
                f"num_attention_heads = {heads}"
            )
        else:
            values["head_dim"] = hidden // heads
    fields.read("rms_norm_eps", 1e-6)
    fields.read("initializer_range", 0.02)
    # A wrapper class ties by its own key and a text class by its own; a wrapped checkpoint was
    # saved by the wrapper class, so its key describes the file.
    values["tie_word_embeddings"] = _first("tie_word_embeddings", fields.outer, text, default=False)
    is_hybrid = model_type in HYBRID_TYPES
    values.update(
        norm_unit_offset=is_hybrid, qk_norm=model_type != "llama", attn_output_gate=is_hybrid
    )


def _depth(fields: _Fields) -> int:
    """Return the number of layers, or 0 when it is missing or malformed (reported elsewhere)."""
    depth = fields.values.get("num_hidden_layers")
    return depth if depth is not None and is_int(depth, 1) else 0


def _read_layers(fields: _Fields) -> None:
    """Read the kind of each layer, and the DeltaNet sizes if some layer has them."""
    is_hybrid = fields.model_type in HYBRID_TYPES
    stated = fields.text.get("layer_types")
    interval = _first("full_attention_interval", fields.text, default=4)  # class default
    if isinstance(stated, list):  # an explicit list beats the interval
        fields.values["layer_types"] = tuple(stated)
    elif stated is not None:
        fields.problems.append(f"layer_types: found {stated!r}, expected a list or null")
    elif is_hybrid and not is_int(interval, 1):
        fields.problems.append(
            f"full_attention_interval: found {interval!r}, expected a positive integer"
        )
    elif depth := _depth(fields):
        fields.values["layer_types"] = tuple(
            "linear_attention" if is_hybrid and (i + 1) % interval else "full_attention"
            for i in range(depth)
        )
    if is_hybrid and "linear_attention" in fields.values.get("layer_types", ("linear_attention",)):
        for name in LINEAR_SIZES:
            fields.read(name)
        fields.read("linear_conv_kernel_dim", 4)


def _read_experts(fields: _Fields) -> None:
    """Read which layers are sparse, and the expert sizes if some layer is."""
    if fields.model_type == "qwen3_next":
        sparse = _sparse_layers(fields)
    elif fields.model_type == "qwen3_5_moe_text":
        sparse = (True,) * _depth(fields) or None
    else:
        sparse = ()
    if sparse is not None:
        fields.values["moe_layers"] = sparse
    if sparse != ():
        for name in MOE_SIZES:
            fields.read(name)
        if fields.model_type == "qwen3_next":  # the other class has no such field
            fields.read("norm_topk_prob", True)


def _sparse_layers(fields: _Fields) -> tuple[bool, ...] | None:
    """Return which layers of a qwen3_next have experts, () if none has, None if it is unknown."""
    depth = _depth(fields)
    dense = _first("mlp_only_layers", fields.text, default=[])
    step = _first("decoder_sparse_step", fields.text, default=1)
    if fields.text.get("num_experts") == 0:
        return ()
    if not depth:
        return None
    if not isinstance(dense, list) or not all(is_int(i, 0, depth) for i in dense):
        fields.problems.append(
            f"mlp_only_layers: found {dense!r}, expected a list of layers from 0 to {depth - 1}"
        )
        return None
    if not is_int(step, 1):
        fields.problems.append(f"decoder_sparse_step: found {step!r}, expected a positive integer")
        return None
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(depth))
    return sparse if any(sparse) else ()


def _read_tokens(fields: _Fields) -> None:
    """Read the special tokens; a wrapper may hold those that the text section lacks.

    An absent token stays absent: the bos 1 and eos 2 that LlamaConfig would put there belong to
    one vocabulary.
    """
    bos, eos, pad = (
        _first(name, fields.text, fields.outer)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    )
    fields.values["bos_token_id"] = bos
    fields.values["pad_token_id"] = None if pad == -1 else pad  # -1: an old way to say none
    fields.values["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
    if eos is None:
        fields.values["eos_token_ids"] = ()


def write_hf(config: TargetConfig) -> dict:
    """Return the `config.json` of the text-only transformers class of `config.model_type`."""
    eos = config.eos_token_ids
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    hf: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
        "pad_token_id": config.pad_token_id,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # flat as well, for readers of the older layout
    }
    for name in _SAME_IN_BOTH:
        hf[name] = getattr(config, name)
    if config.model_type == "llama":
        return hf | {"mlp_bias": False}
    hf["layer_types"] = list(config.layer_types)
    if config.model_type == "qwen3":
        return hf | {"use_sliding_window": False, "sliding_window": None}
    rope["partial_rotary_factor"] = hf["partial_rotary_factor"] = config.partial_rotary_factor
    for name in (*LINEAR_SIZES, "linear_conv_kernel_dim"):
        hf[name] = getattr(config, name)
    if config.model_type != "qwen3_5_text":
        for name in MOE_SIZES:
            hf[name] = getattr(config, name)
    if config.model_type == "qwen3_next":
        is_dense = [i for i, is_sparse in enumerate(config.moe_layers) if not is_sparse]
        hf |= {"norm_topk_prob": config.norm_topk_prob, "mlp_only_layers": is_dense}
        hf["decoder_sparse_step"] = 1
    return hf
