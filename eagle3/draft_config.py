"""Shape and flags of an EAGLE-3 draft (arXiv 2503.01840, section 3.1), whatever file it comes from.

Files say the same things under several names; `eagle3.interop` translates. Nothing here knows of
weights or files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdn.config import TargetConfig, is_int, raise_problems


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How released checkpoints stretch RoPE; `kind` is Hugging Face's `rope_type`."""

    kind: str = "default"  # "default", "linear" (divide by factor) or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low are divided by factor
    high_freq_factor: float = 4.0  # llama3: wavelengths below original / high are left alone
    original_max_position_embeddings: int = 8192  # llama3: tokens


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Everything that decides what a draft computes. A flag that is off is plain EAGLE-3."""

    hidden_size: int  # H, of the draft
    intermediate_size: int  # of its SwiGLU
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # free: heads * head_dim need not be hidden_size
    vocab_size: int  # V, of the target
    draft_vocab_size: int  # Vd <= V, of the draft's own head
    target_hidden_size: int  # D, of the target
    aux_layers: tuple[int, ...]  # k taps the residual stream after k target layers, low to high
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0  # all of head_dim is rotated
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int = 2048  # tokens; beyond, decoding goes on without the draft
    fc_bias: bool = False
    qk_norm: bool = False  # RMS norm over head_dim on q and k, as in Qwen3
    fc_norm: bool = False  # EAGLE-3.1: an RMS norm on each tapped stream before fc
    norm_output: bool = False  # EAGLE-3.1: the next draft step is fed the normed output
    norm_before_fc: bool = False  # one RMS norm over the concatenated streams before fc
    norm_before_residual: bool = False  # the residual is the normed hidden state, not the raw one
    initializer_range: float = 0.02  # standard deviation of random initial weights

    def __post_init__(self) -> None:
        """Reject contradictions.

        Raises:
          ValueError: naming every field that is out of range or disagrees with another.
        """
        raise_problems("DraftConfig", _contradictions(self))

    @property
    def num_aux(self) -> int:
        """Return how many residual streams are tapped."""
        return len(self.aux_layers)

    def rope_frequencies(self) -> np.ndarray:
        """Return the angle per position of each of the head_dim // 2 channel pairs, float32."""
        pairs = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequency = self.rope_theta**-pairs
        scaling = self.rope_scaling
        if scaling.kind == "linear":
            frequency = frequency / scaling.factor
        elif scaling.kind == "llama3":
            # Between the two wavelengths, a blend that is linear in original / wavelength.
            turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
            frequency = frequency * (keep + (1.0 - keep) / scaling.factor)
        return frequency.astype(np.float32)

    def problems_with(self, target: TargetConfig) -> list[str]:
        """List why this draft cannot serve `target`; empty if it can."""
        found = []
        for name, ours, theirs in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                found.append(f"{name} is {ours} in the draft, the target has {theirs}")
        if max(self.aux_layers) > target.num_hidden_layers:
            found.append(
                f"aux_layers {self.aux_layers} go beyond the {target.num_hidden_layers} layers of"
                " the target"
            )
        return found


_SIZES = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
    "draft_vocab_size target_hidden_size max_position_embeddings"
).split()


def _contradictions(cfg: DraftConfig) -> list[str]:
    values: dict[str, Any] = vars(cfg)
    bad = [name for name in _SIZES if not is_int(values[name], 1)]
    problems = [
        f"{name}: found {values[name]!r}, expected an integer of at least 1" for name in bad
    ]
    for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
        if not (isinstance(values[name], float) and 0 < values[name] < math.inf):
            problems.append(f"{name}: found {values[name]!r}, expected a positive finite float")
    layers = cfg.aux_layers
    if not layers or not all(is_int(k, 0) for k in layers) or list(layers) != sorted(set(layers)):
        problems.append(f"aux_layers: found {layers!r}, expected ascending layer numbers from 0 on")
    if not bad:
        if cfg.num_attention_heads % cfg.num_key_value_heads:
            problems.append(
                f"num_attention_heads: {cfg.num_attention_heads} is not a multiple of"
                f" num_key_value_heads ({cfg.num_key_value_heads})"
            )
        if cfg.head_dim % 2:
            problems.append(f"head_dim: {cfg.head_dim} is odd, RoPE rotates pairs")
        if cfg.draft_vocab_size > cfg.vocab_size:
            problems.append(
                f"draft_vocab_size: {cfg.draft_vocab_size} is more than vocab_size"
                f" ({cfg.vocab_size})"
            )
    if cfg.fc_norm and cfg.norm_before_fc:
        problems.append("fc_norm and norm_before_fc exclude each other")
    scaling = cfg.rope_scaling
    if scaling.kind not in ("default", "linear", "llama3"):
        problems.append(
            f"rope_scaling: {scaling.kind!r} is not supported (default, linear, llama3)"
        )
    elif not scaling.factor >= 1.0:
        problems.append(f"rope_scaling.factor: found {scaling.factor!r}, expected 1 or more")
    elif scaling.kind == "llama3" and not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        problems.append("rope_scaling: expected 0 < low_freq_factor < high_freq_factor")
    return problems
