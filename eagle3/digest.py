"""Short names for contents: settings, and the files of a checkpoint."""

import hashlib
import json
from pathlib import Path
from typing import Any

_KINDS = (".json", ".jinja", ".safetensors")
_SAMPLE, _SAMPLES = 1 << 16, 64  # bytes, and places in a file
_OURS = ("best.json",)  # of a training run, beside the model's files


def digest(value: Any) -> str:
    """Return 12 hex digits for anything that JSON can write."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def directory_digest(directory: str | Path) -> str:
    """Digest a checkpoint by names, sizes and samples of its files, beginning and end included.

    Whole weights would take minutes to read.
    """
    whole = hashlib.sha256()
    for path in sorted(Path(directory).iterdir()):
        if path.suffix in _KINDS and path.is_file() and path.name not in _OURS:
            size = path.stat().st_size
            whole.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for number in range(_SAMPLES):
                    file.seek(max(size - _SAMPLE, 0) * number // (_SAMPLES - 1))
                    whole.update(file.read(_SAMPLE))
    return whole.hexdigest()
