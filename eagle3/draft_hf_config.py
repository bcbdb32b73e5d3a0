"""config.json of EAGLE-3 drafts <-> DraftConfig, in the layouts of SafeAILab / SGLang, vLLM and
speculators.

Two numberings of tapped layers are in use: at the top level an id counts the input of a layer, as
`DraftConfig.aux_layers` does, inside `eagle_config` the output, one less for the same stream. What
a file does not say and the weights or the target decide (`eagle3.interop`) stays open here. A value
that would make a reader compute something else than the draft does is refused, all in one list.
Defaults are those of transformers' LlamaConfig; `mrope_section` is skipped, since with text alone
it changes nothing.
"""

import math
from typing import Any

from eagle3.draft_config import DraftConfig, RopeScaling
from gdn.config import is_int
from gdn.hf_config import rope_sections

LAYOUTS = ("sglang", "vllm", "speculators")
# What the readers of a layout do not compute.
_LACKING = {
    "sglang": ("qk_norm", "norm_before_fc", "norm_before_residual"),
    "vllm": ("qk_norm", "fc_bias"),
    "speculators": ("fc_bias", "a hidden_size other than the target's"),
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# Values of the decoder layer's section that the draft computes; absent and null are fine too.
_SUPPORTED: dict[str, tuple] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
}
_SAME_IN_BOTH = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "vocab_size max_position_embeddings initializer_range"
).split()
_FLOATS = ("rms_norm_eps", "initializer_range", "rope_theta")
_LLAMA3 = "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
_ROPE_KEYS = {"default": [], "linear": ["factor"], "llama3": _LLAMA3}


def read_fields(config: dict) -> tuple[dict[str, Any], list[str]]:
    """Read what a config states.

    Flags are looked up at the top level and inside `eagle_config`; an absent one is off, in the
    speculators layout too, where vLLM takes an absent `norm_before_residual` for true. SpecForge
    writes `norm_output` for a norm before the head, which every draft has; here it is, as to all
    readers, the normed feedback of EAGLE-3.1.

    Returns:
      Values by DraftConfig field, without those that are not stated, and the problems found.
    """
    fields = _Fields(config)
    for read in (_check_supported, _check_window, _read_sizes, _read_rope, _read_ids, _read_flags):
        read(fields)
    return fields.values, fields.problems


class _Fields:
    """The sections of a config, the values read, and a problem for each that is of no use."""

    def __init__(self, config: dict):
        self.problems: list[str] = []
        self.values: dict[str, Any] = {}  # by DraftConfig field
        self.top = config
        self.is_speculators = "transformer_layer_config" in config
        self.layer = self._section("transformer_layer_config") if self.is_speculators else config
        self.eagle = self._section("eagle_config")
        self.is_qwen3 = self.layer.get("model_type") == "qwen3"

    def store(self, name: str, value: Any, label: str | None = None) -> None:
        """Store a number, or note that it is none; `label` is its name in the file."""
        if name in _FLOATS:
            value, expected = _as_float(value), "a positive number"
            is_right = isinstance(value, float) and 0 < value < math.inf
        else:
            is_right, expected = is_int(value, 1), "an integer of at least 1"
        if is_right:
            self.values[name] = value
        else:
            self.problems.append(f"{label or name}: found {value!r}, expected {expected}")

    def _section(self, name: str) -> dict:
        section = self.top.get(name)
        if section is None or isinstance(section, dict):
            return section or {}
        self.problems.append(f"{name}: found {section!r}, expected an object")
        return {}


def _check_supported(fields: _Fields) -> None:
    """Note each value that asks for something the draft does not compute."""
    top, layer, problems = fields.top, fields.layer, fields.problems
    stated: list[tuple] = [
        (name, layer.get(name), supported) for name, supported in _SUPPORTED.items()
    ]
    stated.append(("tie_word_embeddings", top.get("tie_word_embeddings"), (False,)))
    for name, section in (("", top), ("eagle_config.", fields.eagle)):
        key = "use_aux_hidden_state"
        stated.append((name + key, section.get(key), (True,)))
    if fields.is_speculators:
        method, kind = top.get("speculators_model_type"), layer.get("model_type") or "nothing"
        stated.append(("speculators_model_type", method, ("eagle3",)))
        stated.append(("transformer_layer_config.model_type", kind, ("llama", "qwen3")))
    for name, value, supported in stated:
        if value is not None and value not in supported:
            allowed = " or ".join(map(repr, supported))
            problems.append(f"{name}: found {value!r}, supported: {allowed}")
    for name in ("quantization_config", "quantization"):
        if found := top.get(name) or layer.get(name):
            problems.append(f"{name}: found {found!r}, supported: unquantised weights only")


def _check_window(fields: _Fields) -> None:
    """Refuse a sliding window, unless it is off or no shorter than what the draft is used for."""
    layer = fields.layer
    window: Any = layer.get("sliding_window")
    kinds = layer.get("layer_types")
    kind = kinds[0] if isinstance(kinds, list) and kinds else None  # the draft has one layer
    if kinds is not None and kind not in ("full_attention", "sliding_attention"):
        fields.problems.append(f"layer_types: found {kinds!r}, supported: ['full_attention']")
        return
    # Without either key beside it, a window cannot be known to be idle.
    is_idle = kind == "full_attention" if kind else layer.get("use_sliding_window") is False
    longest: Any = layer.get("max_position_embeddings") or 2048
    is_long = is_int(window, 1) and is_int(longest, 1) and window >= longest
    if window is not None and not is_idle and not is_long:
        fields.problems.append(
            f"sliding_window: found {window!r}, supported: none, or max_position_embeddings"
            f" ({longest!r}) and more"
        )


def _read_sizes(fields: _Fields) -> None:
    """Read widths, heads and what else the decoder layer's section states."""
    layer = fields.layer
    defaults: dict[str, Any] = {
        "num_key_value_heads": layer.get("num_attention_heads"),
        "head_dim": None,
        "max_position_embeddings": 2048,
    }
    hidden: Any = layer.get("hidden_size")
    heads: Any = layer.get("num_attention_heads")
    if is_int(hidden, 1) and is_int(heads, 1) and hidden % heads == 0:
        defaults["head_dim"] = hidden // heads
    if fields.is_qwen3:  # whose class has the sizes of one model for defaults
        defaults = {}
    defaults |= {"rms_norm_eps": 1e-6, "initializer_range": 0.02}
    for name in _SAME_IN_BOTH:
        value = layer.get(name)
        value = defaults.get(name) if value is None else value
        if value is None:
            fields.problems.append(f"{name}: missing, and there is no safe default")
        else:
            fields.store(name, value)
    for name in ("draft_vocab_size", "target_hidden_size"):
        if (value := fields.top.get(name)) is not None:
            fields.store(name, value)
    if isinstance(bias := fields.top.get("bias"), bool):
        fields.values["fc_bias"] = bias
    elif bias is not None:
        fields.problems.append(f"bias: found {bias!r}, expected true or false")
    if fields.is_speculators:
        fields.values["qk_norm"] = fields.is_qwen3


def _read_rope(fields: _Fields) -> None:
    """Read the rotary base and its scaling, from flat keys or those of transformers 5."""
    layer, problems = fields.layer, fields.problems
    sections = rope_sections(layer, problems)
    bases = {name: section.get("rope_theta") for name, section in sections.items()}
    bases = {f"{name}.rope_theta": base for name, base in bases.items() if base is not None}
    if layer.get("rope_theta") is not None:
        bases["rope_theta"] = layer["rope_theta"]
    if len({repr(_as_float(base)) for base in bases.values()}) > 1:
        problems.append(f"{_listed(bases)}: found different bases, expected one")
    name, base = next(iter(bases.items()), ("rope_theta", 10_000.0))
    fields.store("rope_theta", base, name)
    scalings = {name: _scaling(name, section, problems) for name, section in sections.items()}
    if len(set(scalings.values())) > 1:
        problems.append("rope_scaling: found beside a different rope_parameters, expected one")
    fields.values["rope_scaling"] = next(iter(scalings.values()), RopeScaling())


def _scaling(name: str, section: dict, problems: list[str]) -> RopeScaling:
    """Read one rope section; plain RoPE, with a problem noted, if it is of no use."""
    kind = section.get("rope_type") or section.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        problems.append(f"{name}.rope_type: found {kind!r}, supported: {', '.join(_ROPE_KEYS)}")
        return RopeScaling()
    if kind == "default" and section.get("factor") not in (None, 1):
        problems.append(f"{name}.factor: found {section['factor']!r}, supported: none, or 1")
    if section.get("partial_rotary_factor") not in (None, 1):
        share = section["partial_rotary_factor"]
        problems.append(f"{name}.partial_rotary_factor: found {share!r}, supported: 1")
    for key in sorted(key for key, value in section.items() if isinstance(value, dict)):
        problems.append(f"{name}.{key}: found an object, supported: one rope for all layers")
    numbers = {}
    for key in _ROPE_KEYS[kind]:
        value = _as_float(section.get(key))
        if not isinstance(value, float) or not 0 < value < math.inf:
            problems.append(f"{name}.{key}: found {value!r}, expected a positive number")
            return RopeScaling()
        numbers[key] = int(value) if key.startswith("original") else value
    return RopeScaling(kind=kind, **numbers)


def _read_ids(fields: _Fields) -> None:
    """Read which layers are tapped; the two numberings have to agree."""
    problems, stated, found = fields.problems, {}, {}
    for prefix, section, shift in (("", fields.top, 0), ("eagle_config.", fields.eagle, 1)):
        ids = section.get(LAYER_IDS)
        if ids is None:
            continue
        is_ids = isinstance(ids, list) and ids and all(is_int(i, -shift) for i in ids)
        if not is_ids or ids != sorted(set(ids)):
            problems.append(f"{prefix}{LAYER_IDS}: found {ids!r}, expected ascending layer numbers")
            continue
        found[prefix + LAYER_IDS] = ids
        stated[prefix + LAYER_IDS] = tuple(i + shift for i in ids)
    if len(set(stated.values())) > 1:
        problems.append(
            f"{_listed(found)}: found different layers, expected those of eagle_config, which count"
            " outputs, one less than those at the top level, which count inputs; remove the wrong"
            " ones"
        )
    if stated:
        fields.values["aux_layers"] = next(iter(stated.values()))
    for prefix, section in (("", fields.top), ("eagle_config.", fields.eagle)):
        count = section.get("num_aux_hidden_states")
        expected = len(fields.values.get("aux_layers", (0, 0, 0)))
        if count is not None and count != expected:
            name = f"{prefix}num_aux_hidden_states"
            problems.append(f"{name}: found {count!r}, expected {expected}, as many as layer ids")


def _read_flags(fields: _Fields) -> None:
    """Read the variants of EAGLE-3, wherever a file states them."""
    for flag in FLAGS:
        names = (flag, "use_aux_norm") if flag == "fc_norm" else (flag,)  # the older name
        stated = {
            prefix + name: section[name]
            for prefix, section in (("", fields.top), ("eagle_config.", fields.eagle))
            for name in names
            if section.get(name) is not None
        }
        for name, value in stated.items():
            if not isinstance(value, bool):
                fields.problems.append(f"{name}: found {value!r}, expected true or false")
        if len(set(map(repr, stated.values()))) > 1:
            fields.problems.append(f"{_listed(stated)}: found different values, expected one")
        fields.values[flag] = next(iter(stated.values()), False) is True


def _listed(stated: dict[str, Any]) -> str:
    return " and ".join(f"{name} = {value!r}" for name, value in stated.items())


def _as_float(value: Any) -> Any:
    """Convert an integer (JSON writes 10000000 for 1e7); leave the rest to the range check."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def write_config(cfg: DraftConfig, layout: str, dtype: str, target_name: str | None) -> dict:
    """Return the config.json of a layout; every flag is written, for readers differ in defaults.

    Args:
      dtype: of the weights, as transformers spells it.
      target_name: path or repository of the target; needed in the speculators layout.
    """
    ids, flags = list(cfg.aux_layers), {flag: getattr(cfg, flag) for flag in FLAGS}
    common = {
        "draft_vocab_size": cfg.draft_vocab_size,
        "target_hidden_size": cfg.target_hidden_size,
        "tie_word_embeddings": False,
        LAYER_IDS: ids,
        **flags,
    }
    layer: dict[str, Any] = {
        "model_type": "qwen3" if cfg.qk_norm else "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_theta": cfg.rope_theta,
    }
    layer |= {name: getattr(cfg, name) for name in _SAME_IN_BOTH}
    kind = cfg.rope_scaling.kind
    rope = {"rope_type": kind} | {key: getattr(cfg.rope_scaling, key) for key in _ROPE_KEYS[kind]}
    if layout == "speculators":
        layer["rope_parameters"] = rope | {"rope_theta": cfg.rope_theta}
        return _speculators(layer, target_name) | common | {"dtype": dtype}
    layer["rope_scaling"] = None if kind == "default" else rope
    outputs = {LAYER_IDS: [i - 1 for i in ids], "use_aux_hidden_state": True}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        **common,
        "bias": cfg.fc_bias,
        "torch_dtype": dtype,
        "eagle_config": outputs | {"num_aux_hidden_states": len(ids)} | flags,
    }


def _speculators(layer: dict, target_name: str | None) -> dict:
    """Return what only the speculators layout has; its package and vLLM find the target by name."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,  # what a server drafts unless it is told otherwise
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",  # of the layout written here
        "embed_requires_grad": False,
        "transformer_layer_config": layer | {"tie_word_embeddings": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }


def layout_problems(cfg: DraftConfig, layout: str, target_name: str | None) -> list[str]:
    """List what the readers of `layout` would not compute, and what else they lack."""
    used = {name for name, value in vars(cfg).items() if value is True}
    if cfg.hidden_size != cfg.target_hidden_size:
        used.add("a hidden_size other than the target's")
    problems = []
    if lacking := [name for name in _LACKING[layout] if name in used]:
        able = [other for other in LAYOUTS if not used & set(_LACKING[other])]
        advice = f"save as {' or '.join(map(repr, able))}" if able else "no layout has them all"
        problems.append(f"its readers do not compute {', '.join(lacking)}; {advice}")
    if layout == "speculators" and not target_name:
        problems.append("its readers find the target by name; give target_name")
    return problems
