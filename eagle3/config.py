"""Run configurations: frozen dataclasses filled from YAML and `key=value` overrides.

The only file that knows OmegaConf, which types the values and answers a misspelt key with the
nearest one. Architectures are not configured here: a checkpoint's `config.json` has them.
"""

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.tree import EAGLE1_PATHS, TreePlan, chain_plan, dynamic_plan, static_plan

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says what to change."""


@dataclass(frozen=True)
class GeneratedTarget:
    """Shape of a byte-level Qwen3.5-like target with random weights, for trying things out."""

    hidden_size: int = 64  # a multiple of 32
    num_hidden_layers: int = 4  # every fourth is full attention
    initializer_range: float = 0.1  # standard deviation of the weights
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject shapes that do not divide.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        if self.num_hidden_layers < 4:
            raise ConfigError("generated.num_hidden_layers must be at least 4")
        if self.hidden_size < 32 or self.hidden_size % 32:
            raise ConfigError("generated.hidden_size must be a multiple of 32")


@dataclass(frozen=True)
class TreeConfig:
    """What the draft proposes each round. The defaults are small enough for a CPU."""

    kind: str = "dynamic"  # chain, static (the same tree in every round) or dynamic
    depth: int = 4  # drafted tokens on the longest path; chain and dynamic
    top_k: int = 3  # children of a node, and nodes expanded per level; dynamic
    total_tokens: int = 8  # nodes to verify, the last committed token included; dynamic
    # Of a static tree: "eagle1", or for each node the ranks from the root down, [[0], [1], [0, 0]].
    paths: Any = "eagle1"

    def __post_init__(self) -> None:
        """Reject what makes no tree.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        if self.kind not in ("chain", "static", "dynamic"):
            raise ConfigError(f"tree.kind is {self.kind!r}, it must be chain, static or dynamic")
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
    dtype: str = "float32"  # of the weights: float32 or bfloat16
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    batch_size: int = 8  # prompts of a file that are decoded together
    stream_every: int = 8  # rounds between two looks at what was made; text comes in such steps
    prefill_chunk: int = 512  # prompt tokens read at once; bounds memory

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field, its value and what it may be.
        """
        for name in ("max_new_tokens", "batch_size", "stream_every", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype is {self.dtype!r}, it must be float32 or bfloat16")
        if self.method not in (None, "eagle3", "autoregressive"):
            raise ConfigError(
                f"method is {self.method!r}, it must be eagle3, autoregressive or null"
            )
        if self.method == "eagle3" and self.draft is None:
            raise ConfigError("method is eagle3, which needs a draft: give draft=DIR")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise ConfigError(f"stop is {self.stop!r}, it must be a list of non-empty texts")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple, whichever form it has."""
        return tuple(self.stop) if isinstance(self.stop, list | tuple) else (self.stop,)


@dataclass(frozen=True)
class TrainConfig:
    """Train a byte-level target on the source of the standard library."""

    generated: GeneratedTarget = field(default_factory=GeneratedTarget)
    out: str = "runs/tiny"  # Hugging Face directory to write
    steps: int = 600
    batch_size: int = 8  # windows a step
    length: int = 128  # bytes a window
    learning_rate: float = 5e-3  # peak, after warm-up
    log_every: int = 100  # steps
    seed: int = 0  # of the data order

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field and its value.
        """
        for name in ("steps", "batch_size", "length", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate is {self.learning_rate}, it must be above 0")


class OneLineParser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, instead of printing the usage and exiting."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--config", metavar="FILE", help="YAML: what differs from the defaults")
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


def load_config(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Build `cls` from its defaults, the file of `--config` and `key=value`, in that order.

    Raises:
      ConfigError: the file or a value cannot be used; one line that says why.
    """
    args = OneLineParser(description=cls.__doc__).parse_args(argv)
    if args.config is None:
        raise ConfigError("give a configuration: --config FILE")
    return read_config(cls, args.config, args.overrides)


def read_config(cls: type[T], path: str | None, overrides: Sequence[str] = (), **texts: str) -> T:
    """Build `cls` from its defaults, a YAML file, `key=value` overrides and fields, in that order.

    The value of a text field is taken as it is, unless it is quoted: `prompt=def f(n):` is not
    read as YAML, which would make a mapping of it.

    Args:
      texts: fields of `cls` whose values were given in another way than `key=value`.

    Raises:
      ConfigError: the file or a value cannot be used; one line that says why.
    """
    is_text = {f.name for f in dataclasses.fields(cls) if f.type is str}  # type: ignore[arg-type]
    typed = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not an override: write key=value")
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        if key in is_text and not is_quoted:
            texts.setdefault(key, value)
        else:
            typed.append(override)
    where = f"{path}: " if path is not None else ""
    try:
        parts = [OmegaConf.structured(cls)]
        if path is not None:
            parts.append(OmegaConf.load(path))
        config = OmegaConf.to_object(OmegaConf.merge(*parts, OmegaConf.from_dotlist(typed)))
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist") from error
    except ConfigKeyError as error:
        raise ConfigError(where + _unknown_key(cls, str(error.full_key))) from error
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError, TypeError) as error:
        raise ConfigError(where + " ".join(str(error).split())) from error
    assert isinstance(config, cls)
    return dataclasses.replace(config, **texts)  # type: ignore[type-var]


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
