"""Run configurations: frozen dataclasses filled from YAML and `key=value` overrides.

The only file that knows OmegaConf, which types the values and answers a misspelt key with the
nearest one. Architectures are not configured here: a checkpoint's `config.json` has them.
"""

import argparse
import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

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

T = TypeVar("T")


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
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}, it must be one of {', '.join(DTYPES)}")
        if self.native not in ("auto", "off", False):  # YAML reads off as false
            raise ConfigError(f"native is {self.native!r}, it must be auto or off")
        if self.method not in (None, "eagle3", "autoregressive"):
            raise ConfigError(
                f"method is {self.method!r}, it must be eagle3, autoregressive or null"
            )
        self.mesh.check_rows("batch_size", self.batch_size)
        if self.mesh.size > 1:
            if self.dtype == "int8":
                raise ConfigError("dtype int8 is for one device: take bfloat16, or leave mesh away")
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


class OneLineParser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, instead of printing the usage and exiting."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--config", metavar="FILE", help="YAML: what differs from the defaults")
        self.add_argument(
            "--dry-run", action="store_true", help="say what it would take, without weights"
        )
        self.add_argument(
            "--device-memory", metavar="SIZE", help="of a dry run: does it fit, such as 80GiB"
        )
        self.add_argument(
            "overrides", nargs="*", metavar="key=value", help="such as generated.seed=3"
        )

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError, with the nearest flag for one that is unknown."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].split("=")[0]
        near = difflib.get_close_matches(unknown, self._option_string_actions, n=1)
        if near:
            raise ConfigError(f"there is no flag {unknown}. Did you mean: {near[0]!r}?")
        raise ConfigError(f"{message}; --help lists what there is")


def read_config(cls: type[T], path: str | None, overrides: Sequence[str] = (), **texts: str) -> T:
    """Build `cls` from its defaults, a YAML file, `key=value` overrides and fields, in that order.

    The value of a text field is taken as it is, unless it is quoted: `prompt=def f(n):` is not
    read as YAML, which would make a mapping of it.

    Args:
      texts: fields of `cls` whose values were given in another way than `key=value`.

    Raises:
      ConfigError: the file or a value cannot be used; one line that says why.
    """
    return _build(cls, path, None, overrides, texts)


def read_stages(
    cls: type[T], path: str, overrides: Sequence[str] = (), only: str | None = None
) -> dict[str, T]:
    """Build one `cls`, or several from a file with `stages`, by name and in order.

    Each stage has the file's other keys and its own, which come first. Overrides apply to every
    stage, and `stages.NAME.key=value` to one.

    Args:
      only: the one stage to build; None builds all.

    Raises:
      ConfigError: the file or a value cannot be used; one line that says why.
    """
    with _one_line(cls, f"{path}: "):
        file: Any = OmegaConf.load(path)
        stages: Any = file.get("stages") if OmegaConf.is_dict(file) else None
        common = OmegaConf.masked_copy(file, [k for k in file if k != "stages"]) if stages else file
    if stages and not OmegaConf.is_dict(stages):
        raise ConfigError(f"{path}: stages must be a mapping of names to settings")
    names = [str(name) for name in stages or ()]
    there = f"There are: {', '.join(names)}" if names else "There are none"
    own = [o for o in overrides if o.startswith("stages.")]
    short = [o for o in own if o.split("=")[0].count(".") < 2]
    if short:
        raise ConfigError(f"{short[0]!r} is not an override: write stages.NAME.key=value")
    wanted = [o.split("=")[0].split(".")[1] for o in own] + ([only] if only is not None else [])
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ConfigError(f"{path}: there is no stage {unknown[0]!r}. {there}")
    if not names:
        return {"": read_config(cls, path, overrides)}
    found = {}
    for name in names:
        mine = [o.removeprefix(f"stages.{name}.") for o in own if o.startswith(f"stages.{name}.")]
        settings = [*(o for o in overrides if o not in own), *mine]
        if only in (None, name):
            found[name] = _build(cls, path, [common, stages[name]], settings, {})
    return found


def to_yaml(config: Any) -> str:
    """Write a configuration as the YAML that makes it."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _build(
    cls: type[T],
    path: str | None,
    parts: list[Any] | None,
    overrides: Sequence[str],
    texts: dict[str, str],
) -> T:
    """Merge defaults, parts (or the file, if None) and overrides."""
    is_text = {f.name for f in dataclasses.fields(cls) if f.type in (str, "str")}  # type: ignore[arg-type]
    typed: list[str] = []
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not an override: write key=value")
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        if key in is_text and not is_quoted:
            given[key] = value
        else:
            typed.append(override)
    with _one_line(cls, f"{path}: " if path is not None else ""):
        if parts is None:
            parts = [] if path is None else [OmegaConf.load(path)]
        given |= texts
        # Also merged, as a value may be one that `cls` cannot do without; but OmegaConf would
        # replace ${...} in it.
        plain = OmegaConf.create({k: v for k, v in given.items() if "${" not in v})
        dotted = OmegaConf.from_dotlist(typed)
        merged = OmegaConf.merge(OmegaConf.structured(cls), *parts, dotted, plain)
        config = OmegaConf.to_object(merged)
    assert isinstance(config, cls)
    return dataclasses.replace(config, **given)  # type: ignore[type-var]


@contextlib.contextmanager
def _one_line(cls: type, where: str) -> Iterator[None]:
    """Turn what OmegaConf and YAML raise into a ConfigError of one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"config file {error.filename} does not exist") from error
    except ConfigKeyError as error:
        raise ConfigError(where + _unknown_key(cls, str(error.full_key))) from error
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError, TypeError) as error:
        raise ConfigError(where + " ".join(str(error).split())) from error


def _unknown_key(cls: type, key: str) -> str:
    """Say that there is no such key, and which one may be meant, wherever it is."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name, value in OmegaConf.structured(cls).items():
        if OmegaConf.is_dict(value) and dataclasses.is_dataclass(OmegaConf.get_type(value)):
            known += [f"{name}.{inner}" for inner in value]
    last = key.rpartition(".")[2]
    by_last = {name: name.rpartition(".")[2] for name in known}
    similar = difflib.get_close_matches(key, known, n=1)
    similar += difflib.get_close_matches(last, by_last.values(), n=1)
    wanted = last if last in by_last.values() else similar[0] if similar else None
    nearest = [name for name in known if wanted in (name, by_last[name])]
    if nearest:
        return f"there is no key {key!r}. Did you mean: {' or '.join(map(repr, nearest))}?"
    top = [name for name in known if "." not in name]
    return f"there is no key {key!r}. There are: {', '.join(top)}"
