"""Checkpoints of an unfinished training run, with Orbax: killed at any time, it goes on from the last one.

A run's settings are stored beside its state, so that a checkpoint never continues under other settings unnoticed.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import jax
import orbax.checkpoint as ocp

from .train import TrainState


class OtherSettings(ValueError):
    """The directory holds a run that was started with other settings."""


class RunCheckpoints:
    """The last checkpoint of one run, in `directory`. A context manager."""

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        self._directory = directory.absolute()
        self._settings = {key: str(value) for key, value in settings.items()}
        self._manager = ocp.CheckpointManager(self._directory, options=ocp.CheckpointManagerOptions(max_to_keep=1))

    def __enter__(self) -> "RunCheckpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._manager.close()

    def restore(self, state: TrainState) -> TrainState:
        """The last checkpoint, or `state` itself where there is none. Raises OtherSettings."""
        latest = self._manager.latest_step()
        if latest is None:
            return state
        stored = self._manager.metadata(latest).custom_metadata
        changed = sorted(k for k in self._settings.keys() | stored.keys() if self._settings.get(k) != stored.get(k))
        if changed:
            raise OtherSettings(
                f"{self._directory} holds a run with other {', '.join(changed)}: remove it, or use its own"
            )
        leaves, tree = jax.tree.flatten(state)
        wanted = {str(i): leaf for i, leaf in enumerate(leaves)}
        found = self._manager.restore(latest, args=ocp.args.StandardRestore(wanted))
        restored: TrainState = jax.tree.unflatten(tree, [found[key] for key in wanted])
        return restored

    def save(self, state: TrainState) -> None:
        """Returns when it is on disk: the next step donates the arrays, and so must not meet a write in progress."""
        leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        step = int(state.step)
        self._manager.save(step, args=ocp.args.StandardSave(leaves), custom_metadata=self._settings)
        self._manager.wait_until_finished()

    def remove(self) -> None:
        """The run is over."""
        shutil.rmtree(self._directory)
