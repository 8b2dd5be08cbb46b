"""How many pages: asked for, enough for all, or what fits."""

from pathlib import Path

import jax
import pytest

from serving.engine.memory import free_bytes, host_bytes, num_pages


def test_what_is_asked_for_is_taken() -> None:
    assert num_pages(asked=7, pages_per_row=100, max_slots=4, page_bytes=10, free=1) == 7


def test_all_slots_at_full_context_are_enough() -> None:
    assert num_pages(asked=0, pages_per_row=100, max_slots=4, page_bytes=10, free=10**9) == 401


def test_less_where_memory_is_short() -> None:
    assert num_pages(asked=0, pages_per_row=100, max_slots=4, page_bytes=10, free=2000) == 200


def test_no_room_for_one_row_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"101 pages of 10 bytes; 1000 bytes are free"):
        num_pages(asked=0, pages_per_row=100, max_slots=4, page_bytes=10, free=1000)
    with pytest.raises(ValueError, match="page 0 is reserved"):
        num_pages(asked=1, pages_per_row=1, max_slots=1, page_bytes=1, free=1)


def test_a_cpu_offers_a_share_of_its_free_memory() -> None:
    assert 0 < free_bytes(jax.devices("cpu")[0]) <= 2 << 30


def test_host_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    assert host_bytes(tmp_path) > 0  # nothing told: all that there is
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert host_bytes(tmp_path) == 4000 * 1024
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.current").write_text("1000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert host_bytes(tmp_path) == 4000 * 1024
    (cgroup / "memory.max").write_text("3000\n")
    assert host_bytes(tmp_path) == 2000
