"""Batches as a pure function of (seed, step): resume, skip and replay need no iterator state.

Every source is an endless list of rows: a permutation of all its rows, then another one, and so on.
A mixture takes the next row of one source or another, in blocks in which every source has its share
of places, permuted too. Position p of the mixture is thus known without those before it.

With `share`, a source has that part of its rows, drawn at random: a larger share has those of a
smaller one and more. They keep the numbers that they have among all rows.
"""

import bisect
import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from eagle3.config import ConfigError
from eagle3.training.data.config import DataConfig
from eagle3.training.data.dataset import TokenDataset

_BLOCK = 1000  # places of a mixture that hold its weights exactly
PADDING = 0  # segment id; documents have 1, 2, ... within their row


class Batch(NamedTuple):
    """Rows of tokens, on the host or the device.

    The mask says what a model has to produce. Whether it can be predicted in this row, from a token
    before it with the same segment id, is for the loss to see.
    """

    tokens: Any  # [B, T] int32
    loss_mask: Any  # [B, T] bool; False on padding
    segment_ids: Any  # [B, T] int32, ascending from 1 in a row; PADDING after the last


class Rows:
    """The rows of one source: how its documents fill `length` tokens."""

    def __init__(self, data: TokenDataset, length: int, packing: str, pad_id: int = 0):
        """Place the documents.

        Args:
          packing: one of `PACKINGS`, which DataConfig describes.
          pad_id: token that fills rows up.
        """
        self._data, self._length, self._pad_id = data, length, pad_id
        lengths = np.diff(data.offsets)
        if packing == "window":
            self._bins: list[list[int]] | None = None
            self.num_rows = -(-len(data.tokens) // length)
        else:
            whole = range(len(lengths))
            self._bins = [[i] for i in whole] if packing == "pad" else pack(lengths, length)
            self.num_rows = len(self._bins)

    def row(self, index: int) -> Batch:
        """Return one row, without the axis of the batch."""
        data, length = self._data, self._length
        tokens = np.full(length, self._pad_id, np.int32)
        mask, segments = np.zeros(length, bool), np.full(length, PADDING, np.int32)
        place = 0
        for number, (start, end) in enumerate(self._parts(index), start=1):
            here = slice(place, place + end - start)
            tokens[here], mask[here] = data.tokens[start:end], data.mask[start:end]
            segments[here] = number
            place = here.stop
        return Batch(tokens, mask, segments)

    def _parts(self, index: int) -> list[tuple[int, int]]:
        """Return where the tokens of each segment are."""
        offsets = self._data.offsets
        if self._bins is not None:
            return [(int(offsets[i]), int(offsets[i + 1])) for i in self._bins[index]]
        start = index * self._length
        end = min(start + self._length, len(self._data.tokens))
        first, last = np.searchsorted(offsets, [start, end], side="left")
        inner = offsets[first:last]
        borders = [start, *(int(x) for x in inner if x > start), end]
        return list(zip(borders, borders[1:], strict=False))


class Batches:
    """What step s trains on, for every s."""

    def __init__(self, cfg: DataConfig, data: Mapping[str, TokenDataset], pad_id: int = 0):
        """Take the sources by their names in the configuration.

        Raises:
          ConfigError: a weight so small that its source would never be seen.
        """
        self._cfg = cfg
        weights = {name: source.weight for name, source in cfg.named_sources.items()}
        self._rows = [Rows(data[name], cfg.length, cfg.packing, pad_id) for name in weights]
        self._firsts = [0, *itertools.accumulate(rows.num_rows for rows in self._rows)]
        self._kept = [max(1, round(cfg.share * rows.num_rows)) for rows in self._rows]
        self._counts = _shares(weights)
        self._labels = np.repeat(np.arange(len(self._counts)), self._counts)
        # A few permutations are kept, because the rows of a batch come from the same ones.
        self._permutation = lru_cache(3 * len(weights) + 2)(self._permute)

    @property
    def num_rows(self) -> int:
        """Return the rows of all sources together, whatever the share."""
        return self._firsts[-1]

    def batch_at(self, step: int, own: range | None = None) -> Batch:
        """Return the batch of a step, from 0 on.

        Args:
          own: the rows of it to make; None makes all.
        """
        places = self._places(step)
        wanted = places if own is None else [places[i] for i in own]
        rows = [self._rows[source].row(index) for source, index in wanted]
        return Batch(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))

    def rows_at(self, step: int) -> Int[np.ndarray, " B"]:
        """Return the number of each row of a step's batch among all `num_rows`."""
        places = self._places(step)
        return np.array([self._firsts[source] + index for source, index in places], np.int64)

    def _places(self, step: int) -> list[tuple[int, int]]:
        """Return the source of each row of a step's batch, and its number in that source."""
        size = self._cfg.batch_size
        return [self._place_at(step * size + place) for place in range(size)]

    def _place_at(self, position: int) -> tuple[int, int]:
        source, index = 0, position
        if len(self._rows) > 1:
            block, place = divmod(position, len(self._labels))
            labels = self._labels[self._permutation(len(self._rows), block, len(self._labels))]
            source = int(labels[place])
            before = int(np.count_nonzero(labels[:place] == source))
            index = block * int(self._counts[source]) + before
        kept, whole = self._kept[source], self._rows[source].num_rows
        epoch, place = divmod(index, kept)
        number = int(self._permutation(source, epoch, kept)[place])
        if kept < whole:
            number = int(self._permutation(len(self._rows) + 1 + source, 0, whole)[number])
        return source, number

    def _permute(self, stream: int, epoch: int, size: int) -> np.ndarray:
        return np.random.default_rng((self._cfg.seed, stream, epoch)).permutation(size)


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Put documents into few rows: the longest first, each where the least room is left.

    Returns:
      The documents of each row, in order. None is longer than `capacity`, or ValueError.
    """
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"a document has {lengths.max()} tokens, a row {capacity}")
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # by the tokens that still fit, rows
    rooms: list[int] = []  # the keys, ascending
    for document in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[document])
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            room, index = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            index = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        bins[index].append(document)
        if room - size:
            if room - size not in with_room:
                bisect.insort(rooms, room - size)
            with_room.setdefault(room - size, []).append(index)
    return bins


def _shares(weights: Mapping[str, float]) -> np.ndarray:
    """Return how many places of a block each source has, by largest remainder."""
    values = np.array(list(weights.values()))
    exact = values / values.sum() * _BLOCK
    counts = np.floor(exact).astype(int)
    missing = _BLOCK - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    for name, count in zip(weights, counts, strict=True):
        if not count:
            raise ConfigError(
                f"source {name} has less than 1/{_BLOCK} of the weight, and would never be seen:"
                " raise its weight or leave it out"
            )
    return counts
