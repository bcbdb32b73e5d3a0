"""The architecture of a target model, as one frozen dataclass.

`TargetConfig` holds what the forward pass needs and nothing about precision, sharding, decoding or
drafting. It is hashable, so it can be a static argument of `jax.jit`. Reading and writing the
`config.json` of a checkpoint is the business of `gdn/hf_config.py`; field names follow that file
where it has one. The sizes follow the Qwen3-Next and Qwen3.5 model cards, the layer the Gated
DeltaNet paper (arXiv 2412.06464).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HYBRID_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
ATTENTION_TYPES = ("llama", "qwen3")
MODEL_TYPES = HYBRID_TYPES + ATTENTION_TYPES
LAYER_TYPES = ("linear_attention", "full_attention")
LINEAR_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
MOE_SIZES = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Describe a hybrid Gated DeltaNet / attention language model, or a pure attention one.

    Build it with `from_hf`; the constructor takes every field by name and raises one ValueError
    that lists all contradictions. DeltaNet and expert sizes that no layer uses keep their default.
    """

    model_type: str  # config.json of the text model; one of MODEL_TYPES
    vocab_size: int  # rows of the embedding and of the head, padding rows included
    hidden_size: int  # D, width of the residual stream
    num_hidden_layers: int  # L
    intermediate_size: int  # F of a dense MLP; any value, also 0, if no layer is dense
    num_attention_heads: int  # N, query heads of a full-attention layer
    num_key_value_heads: int  # K, divides N
    head_dim: int  # H, independent of hidden_size in the Qwen families
    layer_types: tuple[str, ...]  # one of LAYER_TYPES per layer
    rope_theta: float  # base of the rotary frequencies; 1e7 in released hybrids
    partial_rotary_factor: float = 1.0  # share of head_dim that is rotated; 0.25 in the hybrids
    rms_norm_eps: float  # added to the mean square; also used by the norm inside DeltaNet
    max_position_embeddings: int  # positions seen in training; not enforced by the model
    tie_word_embeddings: bool  # True: the head reuses the embedding
    norm_unit_offset: bool  # True: norms multiply by 1 + w (Qwen3-Next, Qwen3.5); False: by w
    qk_norm: bool  # RMS norm over head_dim on q and k before the rotation
    attn_output_gate: bool  # attention output times sigmoid of a gate made by q_proj
    linear_num_key_heads: int = 0  # HK, query and key heads of a DeltaNet layer
    linear_num_value_heads: int = 0  # HV, multiple of HK; one recurrent state each
    linear_key_head_dim: int = 0  # DK, rows of the recurrent state
    linear_value_head_dim: int = 0  # DV, columns of the recurrent state
    linear_conv_kernel_dim: int = 4  # W, taps of the causal convolution, current token included
    num_experts: int = 0  # E, routed experts of a sparse layer
    num_experts_per_tok: int = 0  # experts that each token is sent to
    moe_intermediate_size: int = 0  # width of one routed expert
    shared_expert_intermediate_size: int = 0  # width of the expert that every token visits
    norm_topk_prob: bool = True  # rescale the chosen router probabilities to sum 1
    moe_layers: tuple[bool, ...] = ()  # True: experts in that layer; empty: every layer is dense
    bos_token_id: int | None  # vocabulary id; None when the family has no such token
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a generation
    pad_token_id: int | None  # vocabulary id
    initializer_range: float = 0.02  # standard deviation of random initial weights

    def __post_init__(self) -> None:
        """Reject contradictions.

        Raises:
            ValueError: naming every field that is out of range or disagrees with another.
        """
        raise_problems("TargetConfig", contradictions(vars(self)))

    @property
    def rotary_dim(self) -> int:
        """Return how many leading dimensions of each head are rotated (even)."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_value_groups(self) -> int:
        """Return how many value heads share one key head in a DeltaNet layer."""
        return self.linear_num_value_heads // max(self.linear_num_key_heads, 1)

    @property
    def conv_channels(self) -> int:
        """Return the channels of the DeltaNet convolution: all q, all k, all v."""
        key_channels = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * key_channels + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def default_aux_layers(self) -> tuple[int, ...]:
        """Return the residual streams that a draft taps: after 2, L // 2 and L - 3 layers.

        Id k is the stream after k layers, so 0 is the embedding and L the last layer before the
        final norm. In a shallow model an id that is outside 0..L or already taken gives way to the
        nearest free one, the deeper of two; only L = 1 is left with fewer than three.
        """
        depth = self.num_hidden_layers
        taps: set[int] = set()
        for wanted in (2, depth // 2, depth - 3):
            free = [k for k in range(depth + 1) if k not in taps]
            if free:
                taps.add(min(free, key=lambda k: (abs(k - wanted), -k)))
        return tuple(sorted(taps))

    def num_parameters(self) -> int:
        """Count the weights of the text model, embedding and head included (a tied head once)."""
        d = self.hidden_size
        attention_width = self.num_attention_heads * self.head_dim
        attention = (2 + self.attn_output_gate) * d * attention_width
        attention += 2 * d * self.num_key_value_heads * self.head_dim
        attention += 2 * self.head_dim * self.qk_norm

        value_width = self.linear_num_value_heads * self.linear_value_head_dim
        deltanet = (self.conv_channels + 2 * value_width + 2 * self.linear_num_value_heads) * d
        deltanet += self.conv_channels * self.linear_conv_kernel_dim
        deltanet += 2 * self.linear_num_value_heads + self.linear_value_head_dim

        dense = 3 * d * self.intermediate_size
        # Per sparse layer: router rows and experts, then the shared expert and its scalar gate.
        sparse = self.num_experts * (d + 3 * d * self.moe_intermediate_size)
        sparse += 3 * d * self.shared_expert_intermediate_size + d

        num_deltanet = self.layer_types.count("linear_attention")
        num_sparse = sum(self.moe_layers)
        total = (1 if self.tie_word_embeddings else 2) * self.vocab_size * d + d
        total += num_deltanet * deltanet + (self.num_hidden_layers - num_deltanet) * attention
        total += num_sparse * sparse + (self.num_hidden_layers - num_sparse) * dense
        return total + self.num_hidden_layers * 2 * d

    @classmethod
    def from_hf(cls, source: dict | str | Path) -> TargetConfig:
        """Read a Hugging Face config: a dict, a `config.json`, or the folder that holds one.

        Raises:
            ValueError: listing every field that is missing, malformed or not supported.
        """
        from gdn.hf_config import read_hf  # not at the top: that module imports this one

        return read_hf(source)

    def to_hf(self) -> dict:
        """Return the `config.json` of the text-only class; `from_hf` reads it back unchanged."""
        from gdn.hf_config import write_hf  # not at the top: that module imports this one

        return write_hf(self)


def raise_problems(subject: str, problems: list[str]) -> None:
    """Raise one ValueError that lists `problems`, if there are any."""
    if problems:
        listing = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(f"{subject}: not usable, {len(problems)} problem(s):{listing}")


def unknown_name(name: object, known: tuple[str, ...]) -> str:
    """Say that `name` is none of `known`, with the nearest of them."""
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"found {name!r}, supported: {', '.join(known)}{hint}"


def is_int(value: Any, low: int, end: int | float = math.inf) -> bool:
    """Tell whether `value` is an integer in low..end-1; True and False are not integers."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end


def contradictions(fields: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the fields of a TargetConfig.

    Args:
        fields: values by field name. A missing one is not reported and skips the checks that need
            it, so that the reader of a broken file can still report everything else.
    """
    wrong = _out_of_range(fields)
    usable = {name: value for name, value in fields.items() if name not in wrong}
    problems = list(wrong.values())
    for check in (_head_problems, _layer_problems, _use_problems, _family_problems):
        problems += check(usable)
    return problems


# What a value has to be, by the annotation of its field.
_EXPECTED = {
    "str": "a string",
    "int": "an integer of at least {low}",
    "float": "a positive finite float",
    "bool": "true or false",
    "int | None": "none or a token id below {vocab}",
    "tuple[int, ...]": "a tuple of token ids below {vocab}",
    "tuple[str, ...]": "a tuple of strings",
    "tuple[bool, ...]": "a tuple of booleans",
}


def _is_right(kind: str, low: int, vocab: int | float, value: Any) -> bool:
    """Tell whether `value` is what `_EXPECTED[kind]` says."""
    if kind.startswith("tuple"):
        element = kind.removeprefix("tuple[").removesuffix(", ...]")
        element = "int | None" if element == "int" else element  # integers in tuples are tokens
        return isinstance(value, tuple) and all(
            v is not None and _is_right(element, low, vocab, v) for v in value
        )
    match kind:
        case "int":
            return is_int(value, low)
        case "int | None":
            return value is None or is_int(value, 0, vocab)
        case "float":
            return isinstance(value, float) and 0 < value < math.inf
        case _:
            return isinstance(value, {"str": str, "bool": bool}[kind])


def _out_of_range(fields: Mapping[str, Any]) -> dict[str, str]:
    """Check each field on its own; return the problem by field name."""
    vocab = fields.get("vocab_size", math.inf)
    vocab = vocab if is_int(vocab, 1) else math.inf
    wrong = {}
    for field in dataclasses.fields(TargetConfig):
        kind = str(field.type)  # a string already: annotations are not evaluated in this module
        low = 0 if field.default == 0 or field.name == "intermediate_size" else 1
        value = fields.get(field.name)
        if field.name in fields and not _is_right(kind, low, vocab, value):
            expected = _EXPECTED[kind].format(low=low, vocab=vocab)
            wrong[field.name] = f"{field.name}: found {value!r}, expected {expected}"
    return wrong


def _head_problems(fields: Mapping[str, Any]) -> list[str]:
    """Check that heads divide into groups and that rotation has pairs to turn."""
    problems = []
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        heads, groups = fields.get(many), fields.get(few)
        if heads and groups and heads % groups:
            problems.append(f"{many}: found {heads}, expected a multiple of {few} = {groups}")
    if {"partial_rotary_factor", "head_dim"} <= fields.keys():
        factor, head_dim = fields["partial_rotary_factor"], fields["head_dim"]
        rotary = int(head_dim * factor)
        if factor > 1 or rotary < 2 or rotary % 2:
            problems.append(
                f"partial_rotary_factor: found {factor}, which rotates {rotary} of head_dim = "
                f"{head_dim} dimensions, expected an even number from 2 to head_dim"
            )
    return problems


def _layer_problems(fields: Mapping[str, Any]) -> list[str]:
    """Check the two per-layer tuples against the known names and the depth."""
    layer_types, moe_layers = fields.get("layer_types"), fields.get("moe_layers")
    unknown = sorted(set(layer_types or ()) - set(LAYER_TYPES))
    problems = [f"layer_types: {unknown_name(name, LAYER_TYPES)}" for name in unknown]
    depth = fields.get("num_hidden_layers")
    for name, found in (("layer_types", layer_types), ("moe_layers", moe_layers or None)):
        if depth is not None and found is not None and len(found) != depth:
            problems.append(
                f"{name}: found {len(found)} entries, expected num_hidden_layers = {depth}"
            )
    if moe_layers and not any(moe_layers):
        problems.append("moe_layers: found only False, expected () when every layer is dense")
    return problems


def _use_problems(fields: Mapping[str, Any]) -> list[str]:
    """Check that what some layer uses is there, and what no layer uses keeps its default."""
    is_used: dict[str, bool] = {}
    if "layer_types" in fields:
        has_linear = "linear_attention" in fields["layer_types"]
        is_used |= dict.fromkeys([*LINEAR_SIZES, "linear_conv_kernel_dim"], has_linear)
    if "moe_layers" in fields:
        moe_layers = fields["moe_layers"]
        is_used |= dict.fromkeys([*MOE_SIZES, "norm_topk_prob"], any(moe_layers))
        if not moe_layers or not all(moe_layers):  # else kept as found: files state it unused
            is_used["intermediate_size"] = True
    defaults = {field.name: field.default for field in dataclasses.fields(TargetConfig)}
    problems = []
    for name, used in is_used.items():
        value = fields.get(name, defaults[name])
        if name in fields and used and value == 0 and value is not False:
            problems.append(f"{name}: found 0, expected a positive integer, for some layer uses it")
        elif not used and value != defaults[name]:
            problems.append(
                f"{name}: found {value}, expected {defaults[name]}, for no layer uses it"
            )
    chosen, experts = fields.get("num_experts_per_tok", 0), fields.get("num_experts", math.inf)
    if chosen > experts > 0:
        problems.append(
            f"num_experts_per_tok: found {chosen}, expected at most num_experts = {experts}"
        )
    return problems


def _family_problems(fields: Mapping[str, Any]) -> list[str]:
    """Check the fields that the model type decides."""
    if "model_type" not in fields:
        return []
    model_type = fields["model_type"]
    if model_type not in MODEL_TYPES:
        return [f"model_type: {unknown_name(model_type, MODEL_TYPES)}"]
    is_hybrid = model_type in HYBRID_TYPES
    decided: dict[str, Any] = {
        "norm_unit_offset": is_hybrid,
        "qk_norm": model_type != "llama",
        "attn_output_gate": is_hybrid,
    }
    if not is_hybrid:
        decided["partial_rotary_factor"] = 1.0
    if model_type == "qwen3_5_moe_text":
        decided["norm_topk_prob"] = True
    problems = [
        f"{name}: found {fields[name]}, expected {value} for {model_type}"
        for name, value in decided.items()
        if name in fields and fields[name] != value
    ]
    if not is_hybrid and "linear_attention" in fields.get("layer_types", ()):
        problems.append(
            f"layer_types: found 'linear_attention', expected 'full_attention' for {model_type}"
        )
    moe_layers = fields.get("moe_layers")
    if model_type == "qwen3_5_moe_text" and moe_layers is not None:
        if not moe_layers or not all(moe_layers):
            problems.append(f"moe_layers: found a dense layer, expected none in {model_type}")
    elif model_type != "qwen3_next" and moe_layers:
        problems.append(f"moe_layers: found a sparse layer, expected () for {model_type}")
    return problems
