"""Pages that leave the device and come back: what is kept, what it saves, and that the tokens do not change."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from serving.engine.host_tier import HostTier
from serving.engine.kv_tiers import KvTiers
from serving.engine.profile_disk import ProfileDisk, Work
from serving.engine.profiles import Profiles
from serving.engine.sequence import Sequence
from serving.errors import BadRequest
from tests.fakes import FakeRunner
from tests.fakes_engine import TurnedEngine, generate_row

PAGE_BYTES = 16  # of the fake: 4 tokens of 4 bytes


def prompt(number: int, length: int = 24) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(number).integers(1, 300, length))


def tiers(
    directory: Path | None = None,
    *,
    host: int = 10_000,
    quota: int = 1_000,
    run: Callable[[Work], object] = lambda work: work(),
    pays: bool = True,
) -> Callable[[FakeRunner], KvTiers]:
    def make(runner: FakeRunner) -> KvTiers:
        disk = None if directory is None else ProfileDisk(directory, "model", runner.page_bytes, run)
        profiles = Profiles(runner.page_bytes, quota)
        return KvTiers(HostTier(host), profiles, disk, page_size=4, pays=lambda: pays)

    return make


def ask(engine: TurnedEngine, p: tuple[int, ...], tenant: str = "t", profile: str | None = None) -> int:
    """Cached tokens of one request, whose answer must be right."""
    (row,) = engine.submit(generate_row(p, 4), tenant=tenant, profile=profile)
    engine.run()
    check(engine, row, p)
    return row.num_cached


def check(engine: TurnedEngine, row: Sequence, p: tuple[int, ...]) -> None:
    assert engine.last(row).error is None
    assert engine.tokens(row) == engine.model.generate(p, row.max_new)


def flood(engine: TurnedEngine, first: int = 1000) -> None:
    """Other prompts until nothing of the earlier ones is on the device."""
    for number in range(first, first + 8):
        engine.clock.advance(10.0)
        ask(engine, prompt(number, 40), tenant="flood")


def test_a_page_used_twice_comes_back_from_host_memory_and_a_one_off_does_not() -> None:
    engine = TurnedEngine(make_tiers=tiers())
    ask(engine, prompt(1))
    engine.clock.advance(10.0)
    assert ask(engine, prompt(1)) == 20
    ask(engine, prompt(2))
    flood(engine)
    assert ask(engine, prompt(1)) == 20
    assert engine.tiers.num_host_tokens == 20
    assert engine.runner.num_writes > 0
    assert ask(engine, prompt(2)) == 0
    assert engine.pool.used == 0


def test_other_tenants_find_nothing_in_host_memory() -> None:
    engine = TurnedEngine(make_tiers=tiers())
    ask(engine, prompt(1), profile="me")
    flood(engine)
    assert ask(engine, prompt(1), tenant="other") == 0
    assert ask(engine, prompt(1), tenant="other", profile="me") > 0  # its own, from the device
    assert engine.tiers.num_host_tokens == 0


def test_a_profile_used_once_is_kept() -> None:
    engine = TurnedEngine(make_tiers=tiers())
    ask(engine, prompt(1), profile="me")
    assert [len(p.keys) for p in engine.tiers.profiles.of("t")] == [6]
    assert engine.tiers.places(engine.tiers.profiles.of("t")[0]) == ("memory",)
    flood(engine)
    assert ask(engine, prompt(1)) == 20


def test_copies_that_do_not_pay_are_not_made() -> None:
    engine = TurnedEngine(make_tiers=tiers(pays=False))
    ask(engine, prompt(1), profile="me")
    flood(engine)
    assert ask(engine, prompt(1)) == 0
    assert engine.runner.num_writes == 0


def test_a_profile_survives_a_restart_and_another_tenant_misses_it(tmp_path: Path) -> None:
    ask(TurnedEngine(make_tiers=tiers(tmp_path)), prompt(1), profile="me")
    engine = TurnedEngine(make_tiers=tiers(tmp_path))
    assert ask(engine, prompt(1), tenant="other", profile="me") == 0
    assert ask(engine, prompt(1), profile="you") == 0
    engine = TurnedEngine(make_tiers=tiers(tmp_path))
    assert [p.id for p in engine.tiers.profiles.of("t")] == ["me", "you"]
    assert ask(engine, prompt(1), profile="me") == 20
    assert engine.tiers.num_disk_tokens == engine.tiers.num_host_tokens == 20


def test_a_row_waits_for_its_profile_while_others_go_on(tmp_path: Path) -> None:
    ask(TurnedEngine(make_tiers=tiers(tmp_path)), prompt(1), profile="me")
    work: list[Work] = []
    engine = TurnedEngine(make_tiers=tiers(tmp_path, run=work.append))
    (row,) = engine.submit(generate_row(prompt(1), 4), profile="me")
    (other,) = engine.submit(generate_row(prompt(2), 4))
    (gone,) = engine.submit(generate_row(prompt(1), 4), profile="me")
    for _ in range(20):
        engine.loop.turn()
    assert engine.ended(other)
    assert not engine.updates[row]
    engine.cancel(gone)
    work.pop(0)()
    engine.run()
    check(engine, row, prompt(1))
    assert row.num_cached == 20
    assert not work  # one load, and the profile is on the disk as it is


def test_a_file_that_broke_is_a_miss_and_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ask(TurnedEngine(make_tiers=tiers(tmp_path)), prompt(1), profile="me")
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    engine = TurnedEngine(make_tiers=tiers(tmp_path))
    assert ask(engine, prompt(1), profile="me") == 0
    assert engine.tiers.disk is not None
    assert engine.tiers.disk.num_bad == 1
    assert "checksum" in caplog.text
    engine = TurnedEngine(make_tiers=tiers(tmp_path))
    assert ask(engine, prompt(1), profile="me") == 20


def test_what_prompts_share_becomes_the_profile(tmp_path: Path) -> None:
    engine = TurnedEngine(make_tiers=tiers(tmp_path))
    for number in (2, 3):
        ask(engine, prompt(1, 16) + prompt(number, 8), profile="me")
    (profile,) = engine.tiers.profiles.of("t")
    assert len(profile.keys) == 4
    ask(engine, prompt(9), profile="me")  # another context: the profile is that now
    (profile,) = engine.tiers.profiles.of("t")
    assert len(profile.keys) == 6
    assert engine.tiers.places(profile) == ("memory", "disk")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_deleted_profile_is_gone_from_memory_and_disk(tmp_path: Path) -> None:
    engine = TurnedEngine(make_tiers=tiers(tmp_path))
    ask(engine, prompt(1), profile="me")
    assert engine.tiers.host.num_bytes == 6 * PAGE_BYTES
    assert not engine.tiers.delete(("other", "me"))
    assert engine.tiers.delete(("t", "me"))
    assert not engine.tiers.delete(("t", "me"))
    assert engine.tiers.host.num_bytes == 0
    assert not list(tmp_path.iterdir())


def test_a_profile_deleted_while_it_is_written_stays_away(tmp_path: Path) -> None:
    work: list[Work] = []
    engine = TurnedEngine(make_tiers=tiers(tmp_path, run=work.append))
    ask(engine, prompt(1), profile="me")
    assert len(work) == 1
    assert engine.tiers.delete(("t", "me"))
    for step in work:
        step()
    assert not list(tmp_path.iterdir())
    engine.tiers.collect(wait=True)
    assert engine.tiers.host.num_bytes == 0


def test_the_quota_refuses_what_never_fits_and_drops_the_longest_unused() -> None:
    engine = TurnedEngine(make_tiers=tiers(quota=12 * PAGE_BYTES))
    with pytest.raises(BadRequest, match="takes 208 bytes; 192 are allowed"):
        engine.submit(generate_row(prompt(1, 52), 1), profile="me")
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        ask(engine, prompt(number), profile=name)
    assert [p.id for p in engine.tiers.profiles.of("t")] == ["b", "c"]


def test_pinned_profiles_never_take_the_last_page() -> None:
    """Profiles fill the device's cache and all of host memory: a row of the longest context still runs."""
    engine = TurnedEngine(make_tiers=tiers(host=30 * PAGE_BYTES), num_pages=17)
    for number in range(8):
        ask(engine, prompt(number), profile=f"p{number}")
    p = prompt(99, 60)
    assert ask(engine, p) == 0
    assert engine.tiers.host.num_bytes <= 30 * PAGE_BYTES


def test_a_stopped_row_resumes_from_host_memory() -> None:
    engine = TurnedEngine(make_tiers=tiers(), num_pages=17)
    prompts = [prompt(n, 20) for n in range(3)]
    rows = [engine.submit(generate_row(p, 30))[0] for p in prompts]
    engine.run()
    assert engine.scheduler.num_preempted > 0
    assert engine.tiers.num_host_tokens > 0
    for row, p in zip(rows, prompts, strict=True):
        check(engine, row, p)


def test_a_fault_drops_what_was_on_its_way(tmp_path: Path) -> None:
    engine = TurnedEngine(make_tiers=tiers(tmp_path))
    engine.runner.reads_done = False
    (row,) = engine.submit(generate_row(prompt(1), 8), profile="me")
    while not engine.runner.num_reads:
        engine.loop.turn()
    engine.runner.fail_submit.add(len(engine.runner.batches))
    engine.run()
    assert engine.tiers.host.num_bytes == 0
    assert engine.tiers.places(engine.tiers.profiles.of("t")[0]) == ()
    assert row.pages == []
    assert ask(engine, prompt(1), profile="me") == 0
    assert engine.tiers.places(engine.tiers.profiles.of("t")[0]) == ("memory", "disk")


def test_moves_that_fail_turn_the_tiers_off_and_rows_go_on() -> None:
    engine = TurnedEngine(make_tiers=tiers())
    ask(engine, prompt(1), profile="me")
    flood(engine)
    engine.runner.fail_moves = True
    assert engine.scheduler.num_preempted == 0
    (row,) = engine.submit(generate_row(prompt(1), 4))
    (other,) = engine.submit(generate_row(prompt(2), 4))
    engine.run()
    check(engine, row, prompt(1))
    check(engine, other, prompt(2))
    assert engine.runner.num_resets == 1
    writes = engine.runner.num_writes
    ask(engine, prompt(1), profile="me")
    assert engine.runner.num_writes == writes
