"""What a training run is: one frozen dataclass per concern, `TrainConfig` over all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.config import ConfigError, GeneratedTarget, MeshConfig, TreeConfig
from eagle3.draft_config import DraftConfig
from eagle3.draft_hf_config import LAYOUTS, layout_problems
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.losses import LOSSES
from eagle3.training.optim import OptimConfig, warmup_steps
from gdn import TargetConfig
from gdn.packing import DTYPES

TASKS = ("target", "draft")


def _require(prefix: str, values: object, minima: Mapping[str, int]) -> None:
    for name, low in minima.items():
        value = getattr(values, name)
        if not low <= value < float("inf"):
            raise ConfigError(f"{prefix}{name} is {value}, it must be at least {low}")


@dataclass(frozen=True)
class DraftShape:
    """Shape and flags of a new draft. What is 0 or empty is the target's own."""

    vocab_size: int = 0  # the most frequent tokens of the training data; 0: all of the target's
    intermediate_size: int = 0  # of its SwiGLU
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    aux_layers: tuple[int, ...] = ()  # k taps the stream after k target layers; 2, L // 2, L - 3
    rope_theta: float = 0.0
    max_position_embeddings: int = 0  # tokens; beyond, decoding goes on without the draft
    qk_norm: bool = False
    fc_norm: bool = False  # EAGLE-3.1 (arXiv 2605.09992): a norm on each stream
    norm_output: bool = False  # EAGLE-3.1: the next draft step is fed the normed output
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    initializer_range: float = 0.02  # standard deviation of its weights, but for the head
    seed: int = 0
    layout: str = "sglang"  # of the files: sglang, vllm or speculators

    def __post_init__(self) -> None:
        """Reject values that no draft can have.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        sizes = "vocab_size intermediate_size num_attention_heads num_key_value_heads head_dim"
        _require("draft.", self, dict.fromkeys([*sizes.split(), "rope_theta", "seed"], 0))
        if self.layout not in LAYOUTS:
            raise ConfigError(f"draft.layout is {self.layout!r}, it must be one of {LAYOUTS}")

    def for_target(self, target: TargetConfig) -> DraftConfig:
        """Fill in what the target decides.

        Raises:
          ConfigError: the two do not fit together.
        """
        heads = self.num_attention_heads or target.num_attention_heads
        try:
            cfg = DraftConfig(
                hidden_size=target.hidden_size,
                intermediate_size=self.intermediate_size or _mlp_width(target),
                num_attention_heads=heads,
                num_key_value_heads=self.num_key_value_heads or target.num_key_value_heads,
                head_dim=self.head_dim or target.head_dim,
                vocab_size=target.vocab_size,
                draft_vocab_size=self.vocab_size or target.vocab_size,
                target_hidden_size=target.hidden_size,
                aux_layers=tuple(self.aux_layers) or target.default_aux_layers,
                rms_norm_eps=target.rms_norm_eps,
                rope_theta=self.rope_theta or target.rope_theta,
                max_position_embeddings=self.max_position_embeddings
                or target.max_position_embeddings,
                qk_norm=self.qk_norm,
                fc_norm=self.fc_norm,
                norm_output=self.norm_output,
                norm_before_fc=self.norm_before_fc,
                norm_before_residual=self.norm_before_residual,
                initializer_range=self.initializer_range,
            )
        except ValueError as error:
            raise ConfigError(f"draft: {error}") from error
        problems = cfg.problems_with(target)
        # Now, not when all of it is trained. The name is the target's directory, which is known.
        problems += [
            f"layout {self.layout!r}: {x}" for x in layout_problems(cfg, self.layout, "named")
        ]
        if problems:
            raise ConfigError("draft: " + "; ".join(problems))
        return cfg


def _mlp_width(target: TargetConfig) -> int:
    """Return the width of the target's MLP, or of the experts that a token visits together."""
    experts = target.num_experts_per_tok * target.moe_intermediate_size
    return target.intermediate_size or experts + target.shared_expert_intermediate_size


@dataclass(frozen=True)
class TTTConfig:
    """Training-time test (arXiv 2503.01840, section 3.2): the draft over its own outputs."""

    steps: int = 5  # K: a draft is trained to propose so many tokens in a row
    decay: float = 0.8  # weight of each step's loss relative to the one before
    loss: str = "soft_cross_entropy"  # or kl, lk_hybrid
    keep_unknown: bool = False  # train also where the target's best token is not in the vocabulary
    # Make activations and logits again in the backward pass: less memory, a third more arithmetic.
    remat: bool = True

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        _require("ttt.", self, {"steps": 1})
        if not 0 < self.decay <= 1:
            raise ConfigError(f"ttt.decay is {self.decay}, it must be above 0 and at most 1")
        if self.loss not in LOSSES:
            raise ConfigError(f"ttt.loss is {self.loss!r}, it must be one of {', '.join(LOSSES)}")


@dataclass(frozen=True)
class EvalConfig:
    """Measuring on text that is not trained on. What is best there is what a run leaves behind."""

    every: int = 200  # steps; 0: only after the last
    # As data.sources; none: the held-out modules, if only the standard library is trained on.
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    batches: int = 4  # of data.batch_size rows
    prompts: int = 8  # beginnings that are decoded, all at once; 0: no real tau
    prompt_tokens: int = 64  # of plain text; a conversation is cut where its first answer begins
    max_new_tokens: int = 96
    tree: TreeConfig = field(default_factory=lambda: TreeConfig(kind="chain"))

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        minima = {"every": 0, "batches": 1, "prompts": 0, "prompt_tokens": 1, "max_new_tokens": 1}
        _require("eval.", self, minima)


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints, which a run goes on from."""

    # Steps; the last one, an interrupted one, and that after which the rate of wsd begins to fall
    # are saved as well. This last one stays.
    every: int = 200
    keep_last: int = 2
    keep_every: int = 0  # those whose step is a multiple of it stay for good; 0: none

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        _require("save.", self, {"every": 1, "keep_last": 1, "keep_every": 0})


@dataclass(frozen=True)
class RegenerateConfig:
    """Answers of the target in place of those in the data: a draft learns what the target says."""

    rows: int = 0  # answers to make; 0: train on the data as it is
    batch_size: int = 16  # prompts decoded together
    prompt_tokens: int = 32  # of plain text; of a conversation, all up to its answers
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    dtype: str = ""  # that the target answers in: float32, bfloat16 or int8; empty: the run's own

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        if self.dtype not in ("", *DTYPES):
            raise ConfigError(
                f"regenerate.dtype is {self.dtype!r}, it must be one of {', '.join(DTYPES)}, or"
                " empty for the run's own"
            )
        minima = {"rows": 0, "batch_size": 1, "prompt_tokens": 1, "max_new_tokens": 1}
        _require("regenerate.", self, minima | {"temperature": 0, "seed": 0})


@dataclass(frozen=True)
class TrainConfig:
    """Train a target, or a draft for one."""

    task: str = "draft"  # target: next tokens; draft: EAGLE-3 for `target`
    out: str = ""  # directory of the run: the model's files, checkpoints/ and tensorboard/
    target: str | None = None  # Hugging Face directory; task target starts from it, if given
    generated: GeneratedTarget = field(default_factory=GeneratedTarget)  # shape of a new target
    # Of a new target: directory with a tokenizer; null trains a BPE of generated.vocab_size on the
    # data, or takes bytes if that is 256.
    tokenizer: str | None = None
    draft: DraftShape = field(default_factory=DraftShape)
    ttt: TTTConfig = field(default_factory=TTTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    steps: int = 1000  # of the optimiser
    accumulate: int = 1  # batches a step, one after the other: memory of one, gradient of all
    dtype: str = "float32"  # that is computed in, or bfloat16; trained weights are float32
    mesh: MeshConfig = field(default_factory=MeshConfig)  # devices to train on
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log_every: int = 20  # steps
    profile_from: int = 10  # first step of a trace for TensorBoard's profile page
    profile_steps: int = 0  # how many; 0: none
    peak_tflops: float = 0.0  # of the device, for utilisation; 0: what a matrix product reaches

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        minima = {"steps": 1, "accumulate": 1, "log_every": 1}
        _require("", self, minima | {"profile_from": 0, "profile_steps": 0, "peak_tflops": 0})
        if self.task not in TASKS:
            raise ConfigError(f"task is {self.task!r}, it must be one of {', '.join(TASKS)}")
        if not self.out:
            raise ConfigError("out is empty: give the directory of the run, such as runs/draft")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype is {self.dtype!r}, it must be float32 or bfloat16")
        if warmup_steps(self.optim, self.steps) > self.steps:
            raise ConfigError(
                f"optim.warmup is {self.optim.warmup:g} steps, of {self.steps} in all: lower it"
            )
        self.mesh.check_rows("data.batch_size", self.data.batch_size)
        if self.mesh.size > 1 and self.eval.tree.kind == "auto":
            raise ConfigError(
                "eval.tree.kind auto measures one device: take chain, or leave mesh away"
            )
        if self.task == "draft" and self.target is None:
            raise ConfigError("task is draft, which needs a target to draft for: give target=DIR")
        if self.target is not None and Path(self.target).resolve() == Path(self.out).resolve():
            raise ConfigError(
                f"out and target are both {self.out}: the run would overwrite what it starts from;"
                " give another out"
            )
        if self.task == "target" and self.target is not None and self.tokenizer is not None:
            raise ConfigError("tokenizer is set, but target has its own: give one of the two")
        if self.task == "target" and self.regenerate.rows:
            raise ConfigError("regenerate.rows is set, but only drafts learn from a target's text")
        if self.task == "target" and self.data.feature_cache:
            raise ConfigError("data.feature_cache is set, but only drafts learn from features")
