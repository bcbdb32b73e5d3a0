"""Run configurations: frozen dataclasses filled from YAML and `key=value` overrides.

The only file that knows OmegaConf, which types the values and answers a misspelt key with the
nearest one. Architectures are not configured here: a checkpoint's `config.json` has them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

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
class DecodeConfig:
    """Decode greedily from a prompt."""

    target: str | None = None  # Hugging Face directory; null makes the `generated` model
    generated: GeneratedTarget = field(default_factory=GeneratedTarget)
    prompt: str = ""  # text to continue
    max_new_tokens: int = 64  # fewer when the target ends the text
    dtype: str = "float32"  # of the weights: float32 or bfloat16

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field, its value and what it may be.
        """
        if not self.prompt:
            raise ConfigError(
                "prompt is empty: give the text to continue, as in prompt='def f(n):'"
            )
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}, it must be at least 1")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype is {self.dtype!r}, it must be float32 or bfloat16")


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


def load_config(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Build `cls` from its defaults, a YAML file and `key=value` overrides, in that order.

    Raises:
      ConfigError: the file or a value cannot be used; one line that says why.
    """
    parser = argparse.ArgumentParser(description=cls.__doc__)
    parser.add_argument(
        "--config", required=True, help="YAML file with what differs from the defaults"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as max_new_tokens=8"
    )
    args = parser.parse_args(argv)
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(cls),
            OmegaConf.load(args.config),
            OmegaConf.from_dotlist(args.overrides),
        )
        config = OmegaConf.to_object(merged)
    except FileNotFoundError as error:
        raise ConfigError(f"config file {args.config} does not exist") from error
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError, TypeError) as error:
        raise ConfigError(f"{args.config}: {' '.join(str(error).split())}") from error
    assert isinstance(config, cls)
    return config
