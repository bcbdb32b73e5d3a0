"""A Hugging Face directory of safetensors: single files or sharded, opened whole and written whole.

Nothing here knows of models: names, headers, data, and how new files take the place of old ones.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_MAPPED = 16 << 20  # bytes read of a file after which it is opened anew


class TensorFile:
    """An open safetensors file that does not keep what was read.

    The library maps files into memory, and pages that were read stay there as long as the file is
    open: a process of many would seem to hold the whole checkpoint.
    """

    def __init__(self, path: Path):
        """Open.

        Raises:
          SafetensorError, OSError: it cannot be read.
        """
        self._path, self._read, self._mark = path, 0, _mark(path)
        self._file: Any = safe_open(path, framework="numpy")

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file.keys())

    def get_slice(self, name: str) -> Any:
        """Return what the header says of a tensor."""
        return self._file.get_slice(name)

    def get_tensor(self, name: str) -> np.ndarray:
        """Read a tensor.

        Raises:
          ValueError: somebody has replaced the file.
        """
        tensor = self._file.get_tensor(name)
        self._read += tensor.nbytes
        if self._read >= _MAPPED:
            if _mark(self._path) != self._mark:
                raise ValueError(f"{self._path} changed while it was read: load it again")
            self._file, self._read = safe_open(self._path, framework="numpy"), 0
        return tensor


def _mark(path: Path) -> tuple[int, int, int]:
    """Return what tells a file from another of its name."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def open_tensors(directory: Path) -> dict[str, TensorFile]:
    """Map each tensor name to the open file that holds it; raise once for all files at fault."""
    index, weight_map = directory / INDEX, {}
    if index.exists() and (directory / SINGLE).exists():
        raise ValueError(
            f"{directory} holds both {SINGLE} and {INDEX}; remove the one that is stale"
        )
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            if not all(isinstance(file, str) for file in weight_map.values()):
                raise TypeError("weight_map does not map names to files")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    tensors, problems = {}, []
    for name in sorted(set(weight_map.values())) or [SINGLE]:
        path = directory / name
        if not path.exists():
            problems.append(f"{name} does not exist")
            continue
        try:
            file = TensorFile(path)
        except (SafetensorError, OSError) as error:
            problems.append(f"{name} is damaged or cut short ({error})")
            continue
        # The index decides which of two files a tensor is read from, as elsewhere.
        tensors |= {key: file for key in file.keys() if weight_map.get(key, name) == name}
    if not problems and (lost := sorted(set(weight_map) - set(tensors))):
        problems.append(f"{INDEX} lists tensors that no file holds: {some(lost)}")
    if problems:
        raise ValueError(
            f"the weights in {directory} cannot be read; copy or download again:\n  "
            + "\n  ".join(problems)
        )
    return tensors


def some(names: list[str], limit: int = 8) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def write_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file.

    Raises:
      OSError: it could not be written; what was begun is removed.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # which hides the system's error
        path.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from error


def publish(directory: Path, files: list[str], config: dict) -> None:
    """Give `files`, which were written aside as NAME.tmp, their names; `config.json` comes last."""
    write_json(directory, CONFIG, config)
    (directory / CONFIG).unlink(missing_ok=True)
    for file in files:
        os.replace(directory / (file + ".tmp"), directory / file)
    _remove_stale(directory, set(files))
    os.replace(directory / (CONFIG + ".tmp"), directory / CONFIG)


def write_json(directory: Path, file: str, data: dict) -> str:
    """Write NAME.tmp aside, for `publish`; returns the name."""
    (directory / (file + ".tmp")).write_text(json.dumps(data, indent=2) + "\n")
    return file


def _remove_stale(directory: Path, current: set[str]) -> None:
    """Remove weight files of an earlier save, which a reader might take for ours."""
    for path in directory.iterdir():
        ours = re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?(\.tmp)?", path.name)
        if ours and path.name not in current:
            path.unlink()
