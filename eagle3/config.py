"""Run configurations: frozen dataclasses that check what they are given; see `config_reader`.

Architectures are not configured here: a checkpoint's `config.json` has them.
"""

from dataclasses import dataclass, field
from typing import Any

from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.tree import (
    EAGLE1_PATHS,
    TreePlan,
    auto_plan,
    chain_plan,
    dynamic_plan,
    static_plan,
)
from gdn.packing import DTYPES


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says what to change."""


@dataclass(frozen=True)
class GeneratedTarget:
    """Shape of a new target of Qwen3.5's kind, with random weights."""

    vocab_size: int = 256  # 256: bytes
    hidden_size: int = 64  # a multiple of 32
    num_hidden_layers: int = 4  # every fourth is full attention
    intermediate_size: int = 0  # of its SwiGLU; 0: three times hidden_size
    max_position_embeddings: int = 4096  # tokens
    initializer_range: float = 0.1  # standard deviation of the weights
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject shapes that do not divide.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        for name, low in (
            ("vocab_size", 256),
            ("num_hidden_layers", 4),
            ("intermediate_size", 0),
            ("max_position_embeddings", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < low:
                value = getattr(self, name)
                raise ConfigError(f"generated.{name} is {value}, it must be at least {low}")
        if self.hidden_size < 32 or self.hidden_size % 32:
            raise ConfigError(
                f"generated.hidden_size is {self.hidden_size}, it must be a multiple of 32"
            )


@dataclass(frozen=True)
class TreeConfig:
    """What the draft proposes each round. The defaults are small enough for a CPU."""

    # chain, static (the same tree in every round), dynamic, or auto: as much of a dynamic tree as
    # pays in each round, by costs that are measured once on each machine.
    kind: str = "dynamic"
    depth: int = 4  # drafted tokens on the longest path; chain and dynamic
    top_k: int = 3  # children of a node, and nodes expanded per level; dynamic, and at most in auto
    total_tokens: int = 8  # nodes to verify, the last committed token included; dynamic
    # Of a static tree: "eagle1", or for each node the ranks from the root down, [[0], [1], [0, 0]].
    paths: Any = "eagle1"
    max_depth: int = 8  # auto: most levels drafted
    max_nodes: int = 16  # auto: most nodes to verify; sizes up to there that may pay are compiled

    def __post_init__(self) -> None:
        """Reject what makes no tree.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        if self.kind not in ("chain", "static", "dynamic", "auto"):
            raise ConfigError(
                f"tree.kind is {self.kind!r}, it must be chain, static, dynamic or auto"
            )
        is_list = isinstance(self.paths, list | tuple) and all(
            isinstance(path, list | tuple) and all(type(rank) is int for rank in path)
            for path in self.paths
        )
        if self.paths != "eagle1" and not is_list:
            raise ConfigError(
                f"tree.paths is {self.paths!r}, it must be eagle1 or lists of ranks such as"
                " [[0], [1], [0, 0]]"
            )
        try:
            self.plan()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def plan(self) -> TreePlan:
        """Return the sizes that decoding is compiled for."""
        if self.kind == "chain":
            return chain_plan(self.depth)
        if self.kind == "dynamic":
            return dynamic_plan(self.top_k, self.depth, self.total_tokens)
        if self.kind == "auto":
            return auto_plan(self.top_k, self.max_depth, self.max_nodes)
        return static_plan(EAGLE1_PATHS if self.paths == "eagle1" else self.paths)


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are picked: the fields of SamplingParams, which says what each one does."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Any, float] = field(default_factory=dict)  # token id: what to add
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field, its value and what it may be.
        """
        try:
            self.params()
        except ValueError as error:
            raise ConfigError(f"sampling.{error}") from error

    def params(self, seed: int | None = None) -> SamplingParams:
        """Return them in the form that decoding takes, perhaps with another seed."""
        values = dict(vars(self))
        if seed is not None:
            values["seed"] = seed
        bias = {str(token): value for token, value in self.logit_bias.items()}
        wrong = [token for token in bias if not token.isdecimal()]
        if wrong:
            raise ValueError(f"logit_bias has the key {wrong[0]!r}, it must be a token id")
        values["logit_bias"] = tuple((int(token), value) for token, value in bias.items())
        return SamplingParams(**values)


@dataclass(frozen=True)
class MeshConfig:
    """Devices as a grid, data * fsdp * tensor of them; see `gdn.sharding`."""

    data: int = 1  # groups of devices that split the rows of a batch, and nothing else
    fsdp: int = 1  # the same, and weights and what the optimiser knows of them are split as well
    tensor: int = 1  # heads, MLP widths, experts and vocabularies are split

    def __post_init__(self) -> None:
        """Reject what is no grid.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"mesh.{name} is {value}, it must be at least 1")

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return self.data * self.fsdp * self.tensor

    def check_rows(self, name: str, rows: int) -> None:
        """Refuse a batch that cannot be split evenly.

        Raises:
          ConfigError: naming the setting, its value and what it may be.
        """
        shards = self.data * self.fsdp
        if rows % shards:
            raise ConfigError(
                f"{name} is {rows}, it must be a multiple of mesh.data * mesh.fsdp = {shards}"
            )


@dataclass(frozen=True)
class DecodeConfig:
    """Continue prompts, or chat, with a target and perhaps a draft."""

    target: str | None = None  # Hugging Face directory; null makes the `generated` model
    draft: str | None = None  # directory of a draft for it, in any layout
    method: str | None = None  # eagle3 or autoregressive; null: eagle3 if there is a draft
    generated: GeneratedTarget = field(default_factory=GeneratedTarget)
    prompt: str = ""  # text to continue
    max_new_tokens: int = 256  # fewer when the target ends the text
    stop: Any = field(default_factory=list)  # text, or list of texts, that an answer ends before
    ignore_eos: bool = False  # go on after an end-of-text token
    dtype: str = "float32"  # of the weights: float32, bfloat16 or int8 (one scale an output)
    draft_dtype: str | None = None  # of the draft's; null: int8 with native kernels, else `dtype`
    native: Any = "auto"  # kernels compiled for this CPU, if it can be done: auto or off
    # Refuse to decode where speculation is the same as plain decoding only up to rounding.
    deterministic: bool = False
    mesh: MeshConfig = field(default_factory=MeshConfig)  # devices to decode on
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    recalibrate: bool = False  # of tree.kind auto: measure what rounds cost here once more
    batch_size: int = 8  # prompts of a file that are decoded together
    stream_every: int = 64  # most rounds between two looks at what was made, ten times a second
    prefill_chunk: int = 512  # prompt tokens read at once; bounds memory

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field, its value and what it may be.
        """
        for name in ("max_new_tokens", "batch_size", "stream_every", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("dtype", "draft_dtype"):
            value = getattr(self, name)
            if value not in DTYPES and not (name == "draft_dtype" and value is None):
                raise ConfigError(f"{name} is {value!r}, it must be one of {', '.join(DTYPES)}")
        if self.native not in ("auto", "off", False):  # YAML reads off as false
            raise ConfigError(f"native is {self.native!r}, it must be auto or off")
        if self.method not in (None, "eagle3", "autoregressive"):
            raise ConfigError(
                f"method is {self.method!r}, it must be eagle3, autoregressive or null"
            )
        self.mesh.check_rows("batch_size", self.batch_size)
        if self.mesh.size > 1:
            for name in ("dtype", "draft_dtype"):
                if getattr(self, name) == "int8":
                    raise ConfigError(
                        f"{name} int8 is for one device: take bfloat16, or leave mesh away"
                    )
            if self.tree.kind == "auto" and self.draft is not None:
                raise ConfigError(
                    "tree.kind auto measures one device: take dynamic, or leave mesh away"
                )
        if self.method == "eagle3" and self.draft is None:
            raise ConfigError("method is eagle3, which needs a draft: give draft=DIR")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise ConfigError(f"stop is {self.stop!r}, it must be a list of non-empty texts")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple, whichever form it has."""
        return tuple(self.stop) if isinstance(self.stop, list | tuple) else (self.stop,)
