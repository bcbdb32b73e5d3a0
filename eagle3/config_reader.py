"""Configurations from the command line, YAML files and `key=value` overrides.

The only file that knows OmegaConf, which types the values and answers a misspelt key with the
nearest one.
"""

import argparse
import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from eagle3.config import ConfigError

T = TypeVar("T")


class OneLineParser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, instead of printing the usage and exiting."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--config", metavar="FILE", help="YAML: what differs from the defaults")
        self.add_argument(
            "overrides", nargs="*", metavar="key=value", help="such as generated.seed=3"
        )

    def add_dry_run(self) -> None:
        """Add the flags of a command that can say what it would take."""
        self.add_argument(
            "--dry-run", action="store_true", help="say what it would take, without weights"
        )
        self.add_argument(
            "--device-memory", metavar="SIZE", help="of a dry run: does it fit, such as 80GiB"
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
    stages = {str(name): stage for name, stage in (stages or {}).items()}  # YAML has integers, too
    names = list(stages)
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
