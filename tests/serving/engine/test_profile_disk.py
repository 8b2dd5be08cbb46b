"""The directory of profiles: what is found after a restart, and what is counted as bad."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from serving.engine.page_keys import KEY_BYTES
from serving.engine.profile_disk import ProfileDisk, Work
from serving.engine.profiles import Profile

PAGES = [np.full(8, n, np.uint8) for n in range(2)]
KEYS = tuple(bytes([n]) * KEY_BYTES for n in range(2))


def disk(directory: Path, fingerprint: str = "model", page_bytes: int = 8) -> ProfileDisk:
    return ProfileDisk(directory, fingerprint, page_bytes, lambda work: work())


def save(target: ProfileDisk, name: str = "p", tenant: str = "t") -> Profile:
    profile = Profile(tenant, name, KEYS)
    told: list[bool] = []
    target.save(profile, PAGES, wanted=lambda: True, saved=lambda: told.append(True))
    assert told == [True]
    return profile


def test_saved_profiles_are_found_and_loaded(tmp_path: Path) -> None:
    save(disk(tmp_path / "new" / "directory"))
    after = disk(tmp_path / "new" / "directory")
    (found,) = after.index()
    assert (found.name, found.keys, found.on_disk) == (("t", "p"), KEYS, True)
    after.load(found)
    assert after.num_out == 1
    (loaded,) = after.collect()
    assert loaded.profile is found
    assert loaded.contents is not None
    assert [c.tolist() for c in loaded.contents] == [p.tolist() for p in PAGES]
    assert after.num_out == after.num_bad == 0
    assert after.collect() == []


def test_other_models_and_strange_files_are_misses_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = disk(tmp_path)
    profile = save(first)
    (path,) = tmp_path.iterdir()
    assert disk(tmp_path, "other").index() == []
    assert disk(tmp_path, page_bytes=4).index() == []
    shutil.copy(path, tmp_path / ("0" * 64 + ".profile"))
    (tmp_path / "junk.profile").write_bytes(b"junk")
    (tmp_path / "unrelated.txt").write_bytes(b"")
    target = disk(tmp_path)
    assert [p.name for p in target.index()] == [("t", "p")]
    assert target.num_bad == 2
    target.index()
    assert target.num_bad == 2
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        target.load(profile)
        (loaded,) = target.collect()
        assert loaded.contents is None
    assert target.num_bad == 3
    assert len([r for r in caplog.records if str(path) in r.getMessage() and "bytes instead" in r.getMessage()]) == 1


def test_a_file_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    target = disk(tmp_path)
    profile = save(target)
    target.remove(profile.name, lambda: False)
    assert not list(tmp_path.iterdir())
    target.load(profile)
    (loaded,) = target.collect()
    assert loaded.contents is None


def test_removal_and_writing_keep_their_order(tmp_path: Path) -> None:
    work: list[Work] = []
    target = ProfileDisk(tmp_path, "model", 8, work.append)
    profile, wanted = Profile("t", "p", KEYS), [True]
    target.save(profile, PAGES, wanted=lambda: wanted[0], saved=lambda: None)
    target.remove(profile.name, lambda: wanted[0])
    wanted[0] = False
    for step in work:
        step()
    assert not list(tmp_path.iterdir())
