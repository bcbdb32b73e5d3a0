"""Checkpoints of a run: asynchronous, atomic, the newest few and every so-manieth kept.

The only file that knows orbax. Weights are an item of their own (`params`), beside the rest of the
training state (`train`) and the configuration (`config`), which a resumed run is compared with
before anything is read. On a mesh every device's part is written and read by itself, and another
mesh may read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from eagle3.training.step import TrainState
from gdn.sharding import active_mesh


class Checkpoints:
    """The checkpoints of one run, `DIRECTORY/STEP/`; use it as a context, so that saves finish."""

    def __init__(
        self,
        directory: str | Path,
        keep_last: int,
        keep_every: int | None = None,
        keep: Sequence[int] = (),
    ):
        """Open the directory, made if need be; what a killed process left half-written is removed.

        Args:
          keep_last: newest checkpoints that stay.
          keep_every: those whose step is a multiple of it stay for good; None: no others.
          keep: steps whose checkpoints stay too.
        """
        policies: Any = ocp.training.preservation_policies
        decisions: Any = ocp.training.save_decision_policies
        kept: list[Any] = [policies.LatestN(keep_last), policies.CustomSteps(list(keep))]
        if keep_every:
            kept.append(policies.EveryNSteps(keep_every))
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._checkpointer = ocp.training.Checkpointer(
            str(self.directory),
            save_decision_policy=decisions.FixedIntervalPolicy(1),  # when is the loop's to say
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
        )
        self._pending: Any = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint; None if there is none."""
        found = self._checkpointer.latest
        return None if found is None else found.step

    def save(self, state: TrainState, config: dict[str, Any]) -> None:
        """Save in the background, named by the state's step.

        Raises:
          ValueError: this save cannot start, or the one before has failed, as on a full disk; the
            checkpoints before are whole.
        """
        self.wait()
        step = int(state.step)
        if step == self.latest():
            return
        if active_mesh() is None:
            # A copy on the host: the next step gives the arrays on the device away.
            state = jax.tree.map(np.asarray, state)
        items = {
            "params": state.params,
            "train": state._replace(params=None)._asdict(),
            "config": config,
        }
        try:
            self._pending = (step, self._checkpointer.save_checkpointables_async(step, items))
        except OSError as error:
            raise self._failure(step, error) from error

    def wait(self) -> None:
        """Wait until what was begun is on disk.

        Raises:
          ValueError: it could not be written.
        """
        if self._pending is None:
            return
        step, response = self._pending
        self._pending = None
        try:
            response.result()
        except jax.errors.JaxRuntimeError:  # another process has ended
            raise
        except Exception as error:  # whatever a thread of the library has met
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: Exception) -> ValueError:
        return ValueError(
            f"checkpoint {step} could not be written to {self.directory}:"
            f" {' '.join(str(error).split())}; the last whole one is {self.latest()}. Make room"
            " there and start again, it goes on from that one"
        )

    def config(self) -> dict[str, Any]:
        """Return the configuration that the newest checkpoint was made with."""
        found = self._checkpointer.load_checkpointables(self.latest(), {"config": None})
        return found["config"]

    def load(self, like: TrainState) -> TrainState:
        """Read the newest checkpoint.

        Args:
          like: a state of the same structure, shapes and dtypes, or what `jax.eval_shape` makes of
            one; where its arrays lie, those that are read will.

        Raises:
          ValueError: the checkpoint has other shapes, or cannot be read.
        """
        step = self.latest()
        items = {"params": like.params, "train": like._replace(params=None)._asdict()}
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_device(x)), items
        )
        try:
            metadata = self._checkpointer.checkpointables_metadata(step).metadata
            self._compare(step, metadata["params"], abstract["params"])
            found = self._checkpointer.load_checkpointables(step, abstract)
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(
                f"checkpoint {step} in {self.directory} cannot be read ({error!r}); remove that"
                " folder to go on from the one before"
            ) from error
        return TrainState(**found["train"] | {"params": found["params"]})

    def _compare(self, step, found, wanted) -> None:
        """Name the parameters that differ, which the library does not."""
        shapes = [
            {_name(path): tuple(leaf.shape) for path, leaf in leaves}
            for leaves in (
                jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
                for tree in (found, wanted)
            )
        ]
        names = sorted(shapes[0].keys() | shapes[1].keys())
        wrong = [n for n in names if shapes[0].get(n) != shapes[1].get(n)]
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"checkpoint {step} in {self.directory} is of another model: {len(wrong)}"
                f" parameters differ, such as {name}, {shapes[0].get(name)} there and"
                f" {shapes[1].get(name)} here"
            )


def _name(path: tuple[Any, ...]) -> str:
    """Join keys with dots; layer numbers are strings in files."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _device(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
