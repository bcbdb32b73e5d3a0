"""What a run tells TensorBoard. The only file that knows it; no TensorFlow is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.histogram import metadata as histogram_plugin
from tensorboard.plugins.image import metadata as image_plugin
from tensorboard.plugins.scalar import metadata as scalar_plugin
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

# Generated at import, out of sight of type checkers.
_Event: Any = vars(event_pb2)["Event"]
_Summary: Any = vars(summary_pb2)["Summary"]


class Metrics:
    """Writes scalars, texts, histograms and figures of a run; runs in one directory are joined."""

    def __init__(self, directory: str | Path | None):
        """Open a new event file in `directory`, which is made if need be; None: nothing is told."""
        self._writer = None
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(directory))

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers, by tag."""
        for tag, value in values.items():
            self._add(step, tag, float(value), scalar_plugin.create_summary_metadata("", ""))

    def text(self, step: int, tag: str, text: str) -> None:
        """Write a text that is shown as it is."""
        shown = "    " + text.replace("\n", "\n    ")  # Markdown: indented is verbatim
        self._add(step, tag, [shown.encode()], text_plugin.create_summary_metadata("", ""))

    def bars(self, step: int, tag: str, values: Sequence[float]) -> None:
        """Write one bar per value, numbered from 0, as a histogram."""
        buckets = [[i - 0.5, i + 0.5, float(value)] for i, value in enumerate(values)]
        metadata = histogram_plugin.create_summary_metadata("", "")
        self._add(step, tag, buckets, metadata)

    def image(self, step: int, tag: str, png: bytes) -> None:
        """Write a picture, a PNG file."""
        sizes = (b"%d" % int.from_bytes(png[at : at + 4]) for at in (16, 20))  # of its header
        self._add(step, tag, [*sizes, png], image_plugin.create_summary_metadata("", ""))

    def _add(self, step: int, tag: str, value: Any, metadata: Any) -> None:
        if self._writer is None:
            return
        is_text = isinstance(value, list) and isinstance(value[0], bytes)
        tensor = make_tensor_proto(value if is_text else np.asarray(value, np.float32))
        summary = _Summary(value=[_Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])
        self._writer.add_event(_Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Write out what was added; a running TensorBoard then sees it."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
