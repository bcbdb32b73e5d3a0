"""Compile the kernels with the system's compiler on first use, and keep them for later.

The library's name is a hash of all that decides its code: sources, flags, jaxlib's headers, and
the macros that the compiler defines for this processor (its version and instruction sets). Each
process writes a file of its own and renames it, so two that start at once do not meet.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import jax

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
_NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ("-std=c++17", "-O3", _NATIVE, "-ffp-contract=off", "-fno-math-errno")
_TIMEOUT = 300  # seconds; it takes some fifteen


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; says why, in one line."""


def cache_folder() -> Path:
    """Return the project's folder in the user's cache.

    Raises:
      OSError: the user has no home, and XDG_CACHE_HOME is not set.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"no place for a cache ({error}); set XDG_CACHE_HOME") from error
    return Path(base) / "eagle3-gdn"


def find_compiler() -> str:
    """Return the first C++ compiler on the path.

    Raises:
      BuildError: there is none.
    """
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)}) is installed")


def macros() -> str:
    """Return what the compiler defines for this processor: its version, instruction sets.

    Raises:
      BuildError: there is no compiler, or it fails.
    """
    return _run([find_compiler(), *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])


def build(folder: Path | None = None, anew: bool = False) -> Path:
    """Return the compiled library, made now if it is not there.

    Args:
      folder: where it is kept; default: in the user's cache.
      anew: make it in any case.

    Raises:
      BuildError: there is no compiler, it fails, or the folder cannot be written.
    """
    compiler, folder = find_compiler(), folder or cache_folder() / "native"
    parts = [metadata.version("jaxlib"), *FLAGS, macros()]
    parts += [path.read_text() for path in sorted(SOURCES.glob("*.[ch]*"))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    library = folder / f"kernels-{key}.so"
    if library.exists() and not anew:
        return library
    log.warning("compiling kernels for this processor; this is done once")
    include = jax.ffi.include_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".so", prefix=".building-", dir=folder)
        os.close(handle)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        source = str(SOURCES / "ffi.cc")
        _run([compiler, *FLAGS, "-shared", "-fPIC", "-isystem", include, source, "-o", temporary])
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return library


def _run(command: list[str]) -> str:
    """Run a compiler and return what it prints."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT,
            env=os.environ | {"LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{command[0]} failed: {first}")
    return done.stdout
