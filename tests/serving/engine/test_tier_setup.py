"""Which tiers a configuration makes, and when a copy pays."""

from pathlib import Path

import numpy as np
import pytest

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.costs import StepCosts
from serving.engine.kv_tiers import KvTiers
from serving.engine.profiles import Profile
from serving.engine.tier_setup import make_tiers
from tests.fakes import FakeRunner

KEY = bytes(20)


class Copying(FakeRunner):
    """A page takes 1 ms to copy."""

    page_copy_s = 0.001


def made(costs: StepCosts | None = None, fingerprint: str = "model", **config: object) -> KvTiers:
    made_config = EngineConfig(**config)  # type: ignore[arg-type]
    return make_tiers(made_config, Copying(), costs or StepCosts(), fingerprint, lambda work: work())


def found(tiers: KvTiers) -> int:
    tiers.host.put(KEY, np.zeros(64, np.uint8))
    return len(tiers.find([KEY]))


def test_tiers_are_there_unless_there_is_no_cache_or_no_memory() -> None:
    assert found(made()) == 1
    assert found(made(prefix_cache=False)) == 0
    assert found(made(host_tier_bytes=0)) == 0
    assert made().disk is None


@pytest.mark.parametrize(("seconds", "pays"), [(0.0, True), (0.0015, True), (0.0005, False)])
def test_a_copy_pays_where_it_is_quicker_than_computing_the_page(seconds: float, *, pays: bool) -> None:
    costs = StepCosts()
    costs.observe(Bucket(Kind.DECODE, 1, 1, 4), 99.0)
    if seconds:
        costs.observe(Bucket(Kind.EXTEND, 2, 64, 4), seconds / 16 * 128)  # of 16 tokens
    assert (found(made(costs)) == 1) == pays


def test_a_disk_is_for_one_model_and_one_layout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        made(fingerprint="", profile_dir=str(tmp_path))
    disk = made(profile_dir=str(tmp_path)).disk
    assert disk is not None
    page = np.zeros(64, np.uint8)
    disk.save(Profile("t", "p", (KEY,)), [page], wanted=lambda: True, saved=lambda: None)
    assert len(made(profile_dir=str(tmp_path)).profiles.of("t")) == 1
    for other in ({"page_size": 8}, {"deterministic": True}, {"fingerprint": "other"}):
        tiers = made(profile_dir=str(tmp_path), **other)  # type: ignore[arg-type]
        assert tiers.profiles.of("t") == []
        assert tiers.num_bad_files == 1
    assert made(profile_dir=str(tmp_path), profile_bytes_per_tenant=63).profiles.of("t") == []
    assert not list(tmp_path.iterdir())  # beyond the quota: gone
