"""A corpus that everybody has: the source of Python's standard library, in the running interpreter.

Modules are split by a hash of their path, so that a held-out module stays held out whatever else
the installation has. Another Python version is another corpus: `fingerprint` tells them apart.
"""

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from eagle3.config import ConfigError

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELDOUT = 10  # one module of so many


def module_paths(split: str) -> list[str]:
    """Return the paths of the modules of `train` or `heldout`, below the library, in order.

    Raises:
      ConfigError: the interpreter came without source.
    """
    root, names = _root(), []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]  # not walked into
        below = Path(folder).relative_to(root)
        names += [(below / name).as_posix() for name in files if name.endswith(".py")]
    if not names:
        raise ConfigError(
            f"{root} has no modules: this Python came without the source of its standard library;"
            " use another, or train on files"
        )
    return [name for name in sorted(names) if is_heldout(name) == (split == "heldout")]


def is_heldout(name: str) -> bool:
    """Tell whether a module is kept from training, by its path below the library."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELDOUT == 0


def documents(split: str) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each module, decoded as Python decodes it.

    Raises:
      ValueError: a module is not text in the encoding it declares.
    """
    root = _root()
    for name in module_paths(split):
        try:
            with tokenize.open(root / name) as file:
                yield name, file.read()
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            raise ValueError(f"{root / name} cannot be read: {error}") from error


def fingerprint(split: str) -> str:
    """Return a hash of the paths and contents."""
    root, whole = _root(), hashlib.sha256()
    for name in module_paths(split):
        content = hashlib.sha256((root / name).read_bytes()).hexdigest()
        whole.update(f"{name} {content}\n".encode())
    return whole.hexdigest()


def _root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
