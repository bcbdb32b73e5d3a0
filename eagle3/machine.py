"""What kind of processor this is, and programs that are compiled for it, counted and kept."""

import platform
from pathlib import Path
from typing import Any

import jax

from eagle3.digest import digest
from gdn.ops.native.compiler import cache_folder

_FOLDER = "jax_compilation_cache_dir"
_WORTH_KEEPING = 0.5  # seconds of compilation
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts XLA compilations, which make the first of several runs slow."""

    count = 0
    _is_listening = False

    @classmethod
    def listen(cls) -> None:
        """Start counting; calling it again changes nothing."""
        if not cls._is_listening:
            jax.monitoring.register_event_duration_secs_listener(cls._note)
            cls._is_listening = True

    @classmethod
    def _note(cls, event: str, *_: Any, **__: Any) -> None:
        cls.count += event == _COMPILED


def processor() -> str:
    """Return the CPU's name and a short name of its instruction sets, as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} {digest(fields.get('flags') or fields.get('Features', ''))[:8]}"


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether a device could not hold what it was asked to."""
    return "RESOURCE_EXHAUSTED" in str(error)


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
