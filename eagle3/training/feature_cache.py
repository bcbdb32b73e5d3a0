"""What a frozen target said about rows of the training data, read from a file in later epochs.

A row is a record of fixed size at the place that its number gives: a file without an index, with
holes where rows are still to come. The last bytes of a record are its checksum. It tells a row that
is there from one that never was, that a killed process left half-written or that a disk has
damaged, and also from a mixture of two processes that wrote it at once.

What a run has once been given for a row it is given ever after, as long as no other writes the same
rows, even where what the target says about a row depends, in the last bits, on the rows beside it:
a resumed run sees the bits of one that was not interrupted. Only rows that a kill kept from being
written may be read beside others the second time.
"""

import contextlib
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from eagle3.config import ConfigError
from eagle3.digest import digest
from eagle3.training.features import Features

_VERSION = 1  # of the files: raise it when they change


class FeatureCache:
    """The features of rows 0 to num_rows - 1, in `DIRECTORY/DIGEST/rows.bin`."""

    def __init__(
        self,
        directory: str | Path,
        fingerprint: str,
        *,
        num_rows: int,
        length: int,
        num_aux: int,
        width: int,
        dtype: Any,
        limit_gb: float,
        share: float = 1.0,
        in_parts: bool = True,
        report: Callable[[str], Any] = print,
    ):
        """Open the file, made if need be. Nothing stays open between two calls.

        Args:
          fingerprint: of all that decides what the features are, but for the sizes given here: the
            target and its aux layers, the tokens, and how they fill rows. Another one is another
            folder.
          num_rows: `Batches.num_rows`, whose numbers `Batches.rows_at` gives.
          dtype: of the streams, as the target gives them.
          limit_gb: most that all rows together may take, in 10^9 bytes.
          share: of the rows that will be asked for.
          in_parts: the target may read a part of a batch; if not, as on a mesh, it reads it whole.
          report: takes a line if there is no more room; training goes on.

        Raises:
          ConfigError: the rows would take more, or the directory cannot be written.
        """
        dtype = np.dtype(dtype)
        self._record = np.dtype(
            [
                ("best", np.int32, (length,)),
                ("aux_hidden", dtype, (length, num_aux, width)),
                ("hidden", dtype, (length, width)),
                ("crc32", np.uint32),  # last: what is written is written in order
            ]
        )
        needed = int(num_rows * share) * self._record.itemsize
        if needed > limit_gb * 1e9:
            raise ConfigError(
                f"data.feature_cache needs {math.ceil(needed / 1e7) / 100:,} GB for"
                f" {num_rows:,} rows, and data.feature_cache_gb is {limit_gb}: raise it, or leave"
                " data.feature_cache empty, which runs the target each time"
            )
        content = [_VERSION, fingerprint, num_rows, length, num_aux, width, dtype.name]
        self.path = Path(directory) / digest(content) / "rows.bin"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"):
                pass
        except OSError as error:
            raise ConfigError(
                f"data.feature_cache {directory} cannot be written: {error}"
            ) from error
        self._num_rows, self._report, self._is_writing = num_rows, report, True
        self._in_parts = in_parts

    def features(
        self,
        row_ids: Int[np.ndarray, "A B"],
        compute: Callable[[Int[np.ndarray, "C D"]], Features],
    ) -> Features:
        """Return the features [A, B, T, ...] of rows, on the host or the device.

        Args:
          compute: runs the target on the rows at these places of the batch, counted through, and
            returns [C, D, T, ...]; called unless all rows are there. C is a power of two or A, D
            one or B, so that there are few shapes to compile for.
        """
        rows, first, places = np.unique(row_ids, return_index=True, return_inverse=True)
        if rows[0] < 0 or rows[-1] >= self._num_rows:
            raise ValueError(f"rows {rows[0]} to {rows[-1]} are not all below {self._num_rows}")
        records, is_there = self._read(rows)
        if not is_there.all():
            missing = np.flatnonzero(~is_there)
            wanted = np.arange(row_ids.size).reshape(row_ids.shape)
            if self._in_parts:
                wanted = _pieces(first[missing], wanted)
            computed = compute(wanted)
            is_whole = len(missing) == len(rows) and wanted.shape == row_ids.shape
            if is_whole and not self._is_writing:
                return computed
            found_at = {place: i for i, place in enumerate(wanted.reshape(-1).tolist())}
            places_made = np.array([found_at[place] for place in first[missing].tolist()])
            self._fill(records, missing, computed, places_made)
            self._write(rows, records, missing)
            if is_whole and len(rows) == row_ids.size:  # no row came twice
                return computed
        places = places.reshape(row_ids.shape)
        found: Any = (records[name][places] for name in Features._fields)
        return Features(*found)

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, Bool[np.ndarray, " N"]]:
        """Return the records of rows, and which of them are whole."""
        records, is_whole = np.empty(len(rows), self._record), np.zeros(len(rows), bool)
        # What cannot be read is not there.
        with contextlib.suppress(OSError), self.path.open("rb", buffering=0) as file:
            for place, (row, raw) in enumerate(zip(rows, _bytes(records), strict=True)):
                is_read = _read_at(file.fileno(), raw, int(row) * len(raw))
                is_whole[place] = is_read and records["crc32"][place] == _checksum(raw)
        return records, is_whole

    def _fill(
        self, records: np.ndarray, missing: np.ndarray, computed: Features, places: np.ndarray
    ) -> None:
        """Copy what the target said, at `places` of what was computed, into missing records."""
        for name, array in jax.device_get(computed)._asdict().items():
            field = records[name]
            if array.dtype != field.dtype or array.shape[2:] != field.shape[1:]:
                raise ValueError(
                    f"the target gives {name} as {array.dtype}{array.shape[2:]} a row, the feature"
                    f" cache is of {field.dtype}{field.shape[1:]}"
                )
            field[missing] = array.reshape(-1, *array.shape[2:])[places]
        raw = _bytes(records)
        for place in missing:
            records["crc32"][place] = _checksum(raw[place])

    def _write(self, rows: np.ndarray, records: np.ndarray, missing: np.ndarray) -> None:
        """Write the missing records while there is room."""
        if not self._is_writing:
            return
        raw = _bytes(records)
        try:
            with self.path.open("r+b", buffering=0) as file:
                for place in missing:
                    offset = int(rows[place]) * self._record.itemsize
                    _write_at(file.fileno(), raw[place], offset)
        except OSError as error:
            self._is_writing = False
            self._report(
                f"data.feature_cache: {self.path} cannot be written ({error}); training goes on,"
                " and runs the target on rows that are not there"
            )


def _pieces(places: np.ndarray, whole: Int[np.ndarray, "A B"]) -> Int[np.ndarray, "C D"]:
    """Put some places of a batch into pieces of no more than B, some twice to fill the last one.

    Args:
      whole: all places, which are returned if the pieces would be as many.
    """
    size = min(whole.shape[1], 1 << (len(places) - 1).bit_length())
    count = 1 << (-(-len(places) // size) - 1).bit_length()
    if count * size >= whole.size:
        return whole
    return np.resize(places, count * size).reshape(count, size)


def _bytes(records: np.ndarray) -> list[memoryview]:
    """View each record as bytes."""
    raw: Any = records.view(np.uint8).reshape(len(records), records.dtype.itemsize)
    return [memoryview(record) for record in raw]


def _checksum(raw: memoryview) -> int:
    """Return the checksum of a record, over all but its own place; 0 is what holes read as."""
    return zlib.crc32(raw[:-4]) or 1


def _read_at(file: int, view: memoryview, offset: int) -> bool:
    """Fill the view from a file, or return False if the file ends before."""
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            return False
        done += count
    return True


def _write_at(file: int, view: memoryview, offset: int) -> None:
    """Write all of the view; not through mapped memory, where a full disk kills the process."""
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)
