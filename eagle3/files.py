"""Files and folders that are there whole or not at all, whatever ends the process."""

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8, in place of one that is there; two at once do not meet."""
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}.tmp")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def why_not_writable(path: Path) -> str | None:
    """Say why `write_whole` would fail, by beginning to; None if it would not."""
    try:
        if path.exists() and not path.is_file():
            return "is no regular file"
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return None


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a hidden folder to fill, which takes the name of `folder` at the end.

    Of two that are made at once, one is kept: a name must say all that decides the content.
    """
    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another one was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
