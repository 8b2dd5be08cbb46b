"""The form of a profile on disk: whole and what it should be, or BadProfile."""

import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from serving.engine.page_keys import KEY_BYTES
from serving.engine.profile_file import BadProfile, Header, file_name, read_header, read_profile, write_profile

KEYS = tuple(bytes([i]) * KEY_BYTES for i in range(3))
HEADER = Header("model", "tenant", "../../etc/passwd", tuple(key.hex() for key in KEYS), 5)
PAGES = [np.arange(i, i + 5, dtype=np.uint8) for i in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / file_name("model", "tenant", HEADER.profile)
    write_profile(path, HEADER, PAGES)
    return path


def test_round_trip_leaves_one_file(path: Path) -> None:
    assert [p.tolist() for p in read_profile(path, HEADER)] == [p.tolist() for p in PAGES]
    assert read_header(path) == HEADER
    assert HEADER.key_bytes == KEYS
    assert os.listdir(path.parent) == [path.name]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_any_flipped_bit_or_cut_is_found(path: Path, data: st.DataObject) -> None:
    write_profile(path, HEADER, PAGES)
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
    else:
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(BadProfile):
        read_profile(path, HEADER)


@pytest.mark.parametrize(
    "expected",
    [
        Header("other model", HEADER.tenant, HEADER.profile, HEADER.keys, 5),
        Header(HEADER.fingerprint, "other", HEADER.profile, HEADER.keys, 5),
        Header(HEADER.fingerprint, HEADER.tenant, "other", HEADER.keys, 5),
        Header(HEADER.fingerprint, HEADER.tenant, HEADER.profile, HEADER.keys[::-1], 5),
    ],
)
def test_a_file_of_another_is_refused(path: Path, expected: Header) -> None:
    with pytest.raises(BadProfile, match="not the profile"):
        read_profile(path, expected)


def test_names_are_hashes_and_framed() -> None:
    names = {file_name(*parts) for parts in (("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("x", "../..", "/"))}
    assert len(names) == 4
    assert all(len(name) == 64 + len(".profile") and "/" not in name for name in names)


def test_a_disk_that_refuses_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_profile(path, HEADER, PAGES[::-1])
    monkeypatch.undo()
    assert os.listdir(path.parent) == [path.name]
    assert read_profile(path, HEADER)[0].tolist() == PAGES[0].tolist()


def test_a_header_without_pages_is_damaged(tmp_path: Path) -> None:
    write_profile(tmp_path / "x.profile", Header("m", "t", "p", (), 5), [])
    with pytest.raises(BadProfile, match="damaged"):
        read_header(tmp_path / "x.profile")
