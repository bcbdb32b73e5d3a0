"""A thread that makes the next items while this one is used."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates over make(start), make(start + 1), ... without end.

    Use it in `with`, or call `close`: the thread waits for room until then.
    """

    def __init__(self, make: Callable[[int], T], start: int = 0, depth: int = 2):
        """Start the thread.

        Args:
          make: such as `Batches.batch_at`; called by the thread only.
          depth: items that wait at most.
        """
        self._make = make
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(start,), daemon=True)
        self._thread.start()

    def __iter__(self) -> "Prefetcher[T]":
        """Return this."""
        return self

    def __next__(self) -> T:
        """Return the next item, or raise what making it raised."""
        if self._is_closed.is_set():
            raise StopIteration
        item, error = self._ready.get()
        if error is not None:
            self.close()
            if isinstance(error, StopIteration):  # would look like the end
                raise RuntimeError("making an item raised StopIteration") from error
            raise error
        return item  # type: ignore[return-value]

    def __enter__(self) -> "Prefetcher[T]":
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread."""
        self.close()

    def close(self) -> None:
        """Stop the thread, and wait for the item that it is making."""
        self._is_closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # makes room for an item the thread wants to leave
            except queue.Empty:
                self._thread.join(0.01)

    def _work(self, step: int) -> None:
        while not self._is_closed.is_set():
            try:
                found: tuple[T | None, BaseException | None] = self._make(step), None
            except BaseException as error:
                found = None, error
            self._ready.put(found)
            if found[1] is not None:
                return
            step += 1
