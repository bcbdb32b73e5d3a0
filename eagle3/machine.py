"""What kind of processor this is, and compiled programs that are kept for it between runs."""

import platform
from pathlib import Path

import jax

from eagle3.digest import digest
from gdn.ops.native.compiler import cache_folder

_FOLDER = "jax_compilation_cache_dir"
_WORTH_KEEPING = 0.5  # seconds of compilation


def processor() -> str:
    """Return the CPU's name and a short name of its instruction sets, as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} {digest(fields.get('flags') or fields.get('Features', ''))[:8]}"


def keep_compiled_programs() -> None:
    """Let the next run find what this one compiles, unless JAX was told where to keep it.

    Programs for a CPU are machine code, so each kind of processor has a folder of its own.
    """
    if getattr(jax.config, _FOLDER) is None:
        try:
            folder = cache_folder() / "xla" / digest(processor())[:16]
        except OSError:
            return
        jax.config.update(_FOLDER, str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
