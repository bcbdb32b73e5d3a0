"""Several processes that train together: how they meet, agree and end.

JAX makes one list of the devices of all of them, and a program for a mesh of these devices runs in
every process at once. So all processes take the same steps in the same order, and here is what they
need for that beyond the programs. The files of a run are on a disk that all of them see; the first
one writes them and talks. A process that is alone does all of this at no cost.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eagle3.config import ConfigError
from eagle3.machine import is_out_of_memory
from gdn.sharding import AXES

AUTO = "auto"  # in place of a coordinator: ask the cluster
_HEARTBEAT = 60  # seconds without a sign of life after which JAX ends the others
_LOST = 3  # exit status where a program could not go on, as when another process has ended


def join(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Meet the other processes, before anything is computed; without a coordinator, be alone.

    Args:
      coordinator: HOST:PORT at which process 0 can be reached, or AUTO: this and the other two are
        asked of what started the process (SLURM, Open MPI, Kubernetes, TPU).

    Raises:
      ConfigError: an argument is missing or wrong, or the others cannot be reached.
    """
    if coordinator is None:
        if processes is not None or process_id is not None:
            raise ConfigError("--processes and --process-id are for --coordinator HOST:PORT")
        return
    if coordinator != AUTO:
        if ":" not in coordinator or processes is None or process_id is None:
            raise ConfigError(
                f"--coordinator is {coordinator}: give HOST:PORT with --processes N and"
                " --process-id I, or auto where a cluster's variables say all three"
            )
        if processes < 1 or not 0 <= process_id < processes:
            raise ConfigError(
                f"--process-id is {process_id} of --processes {processes}: ids are 0 to one less"
            )
    handler = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(
            None if coordinator == AUTO else coordinator, processes, process_id,
            heartbeat_timeout_seconds=_HEARTBEAT,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--coordinator {coordinator}: the processes do not meet"
            f" ({' '.join(str(error).split())})"
        ) from error
    signal.signal(signal.SIGTERM, handler)  # JAX has put one of its own there


def is_alone() -> bool:
    """Tell whether there are no other processes."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def is_first() -> bool:
    """Tell whether this is the process that writes and talks."""
    return is_alone() or jax.process_index() == 0


def anyone(wish: bool) -> bool:
    """Return whether any process wishes, once all have said; on the mesh of the run."""
    return wish if is_alone() else bool(_ask(wish))


@contextlib.contextmanager
def first_goes_ahead() -> Iterator[None]:
    """Let the first process do something that the others then find done, such as a cache."""
    anyone(False)  # connects them: who waits for a connection gives up soon
    if not is_first():
        anyone(False)
    yield
    if is_first():
        anyone(False)


class Agreement:
    """Whether to stop, asked before every step, with one answer for all processes.

    The answer is to what was wished one step earlier, so no step waits for it.
    """

    def __init__(self):
        """Begin before the first step."""
        self._asked: Any = False

    def is_reached(self, wish: bool) -> bool:
        """Return whether all stop now."""
        if is_alone():
            return wish
        before, self._asked = self._asked, _ask(wish)
        return bool(before)


@jax.jit
def _any(wishes: jax.Array) -> jax.Array:
    return jnp.any(wishes)


def _ask(wish: bool) -> jax.Array:
    """Start to ask; every device brings what its process wishes."""
    mesh = jax.sharding.get_mesh()
    here = NamedSharding(mesh, P(AXES))
    return _any(jax.make_array_from_callback((mesh.size,), here, lambda _: np.full(1, wish)))


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """End this process at once on any error, if others would wait for it.

    What is open is not closed, as that may wait for them; files are whole at any time.
    """
    try:
        yield
    except Exception as error:
        if is_alone():
            raise
        which = f"process {jax.process_index()} of {jax.process_count()}"
        text = " ".join(str(error).split())
        is_lost = isinstance(error, jax.errors.JaxRuntimeError) and not is_out_of_memory(error)
        if is_lost:
            text = (
                f"cannot go on, most likely because another one has ended ({text}); start all of"
                " them again, they go on from the newest checkpoint"
            )
        is_told = is_lost or isinstance(error, ValueError | OSError)
        if not is_told:
            traceback.print_exc()
        print(f"train.py: {which}: {text}", file=sys.stderr)
        end(_LOST if is_lost or not is_told else 2)


def end(status: int) -> int:
    """Return the status; where there are others, leave with it now, so that they notice."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
