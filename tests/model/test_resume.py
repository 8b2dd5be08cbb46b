"""Checkpoints of runs: the last one comes back, and only under the settings that it was written with."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from model.resume import OtherSettings, RunCheckpoints
from model.train import TrainState

SETTINGS = {"seed": 0, "data": Path("somewhere")}


def state(step: int) -> TrainState:
    params = {"w": jnp.full((2, 3), step, jnp.float32), "b": [jnp.zeros(1, jnp.bfloat16)]}
    return TrainState(params, params, {"count": jnp.asarray(step)}, jnp.asarray(step, jnp.int32))


def test_nothing_to_restore(tmp_path: Path) -> None:
    with RunCheckpoints(tmp_path / "run", SETTINGS) as saved:
        first = state(0)
        assert saved.restore(first) is first


def test_the_last_checkpoint_comes_back(tmp_path: Path) -> None:
    with RunCheckpoints(tmp_path / "run", SETTINGS) as saved:
        saved.save(state(2))
        saved.save(state(4))
    with RunCheckpoints(tmp_path / "run", SETTINGS) as saved:
        got = saved.restore(state(0))
        assert int(got.step) == 4
        np.testing.assert_array_equal(got.params["w"], np.full((2, 3), 4.0))
        assert got.average["b"][0].dtype == jnp.bfloat16
        saved.remove()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changed", "named"), [({"seed": 1}, "seed"), ({"rate": 3}, "rate"), ({"seed": 1, "data": "b"}, "data, seed")]
)
def test_other_settings_are_refused(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    with RunCheckpoints(tmp_path / "run", SETTINGS) as saved:
        saved.save(state(2))
    with (
        RunCheckpoints(tmp_path / "run", {**SETTINGS, **changed}) as saved,
        pytest.raises(OtherSettings, match=f"other {named}:"),
    ):
        saved.restore(state(0))
