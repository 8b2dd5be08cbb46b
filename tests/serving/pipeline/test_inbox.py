import asyncio
import threading

import pytest

from serving.errors import Overloaded
from serving.pipeline.inbox import Inbox
from serving.types import TokenLogprob, Update

TOKEN = TokenLogprob(1, -1.0)


def test_updates_of_another_thread_arrive_in_order() -> None:
    async def scenario() -> list[int]:
        inbox = Inbox()

        def engine() -> None:
            for row in range(100):
                inbox.listener((Update(row), Update(row)))

        thread = threading.Thread(target=engine)
        thread.start()
        rows: list[int] = []
        while len(rows) < 200:
            rows += [update.row for update in await inbox.take()]
        thread.join()
        return rows

    assert asyncio.run(scenario()) == [row for row in range(100) for _ in range(2)]


def test_one_take_gives_everything_that_waits() -> None:
    async def scenario() -> int:
        inbox = Inbox()
        for row in range(5):
            inbox.listener((Update(row),))
        await asyncio.sleep(0)
        return len(await inbox.take())

    assert asyncio.run(scenario()) == 5


def test_a_reader_too_far_behind_gets_an_error_and_no_memory_is_held() -> None:
    async def scenario() -> None:
        inbox, cuts = Inbox(max_behind_tokens=3), []
        inbox.on_overflow = lambda: cuts.append(1)
        inbox.listener((Update(0, (TOKEN, TOKEN, TOKEN)),))
        await asyncio.sleep(0)
        assert len(await inbox.take()) == 1
        inbox.listener((Update(0, (TOKEN, TOKEN)),))
        inbox.listener((Update(0, (TOKEN, TOKEN)),))
        await asyncio.sleep(0)
        inbox.listener((Update(0, (TOKEN, TOKEN)),))
        await asyncio.sleep(0)
        assert inbox._updates == []
        assert cuts == [1]
        for _ in range(2):
            with pytest.raises(Overloaded):
                await inbox.take()

    asyncio.run(scenario())


def test_an_engine_that_outlives_the_loop_is_not_disturbed() -> None:
    async def make() -> Inbox:
        return Inbox()

    asyncio.run(make()).listener((Update(0),))
