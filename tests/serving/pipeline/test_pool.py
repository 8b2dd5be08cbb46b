import asyncio
import threading

import pytest

from serving.errors import Overloaded
from serving.pipeline.pool import EncodePool


def test_work_runs_beside_the_loop_and_its_result_comes_back() -> None:
    async def scenario() -> None:
        pool = EncodePool(1)
        assert await pool.run(lambda: threading.current_thread().name.startswith("encode"))
        with pytest.raises(ValueError, match="wrong"):
            await pool.run(lambda: (_ for _ in ()).throw(ValueError("wrong")))
        assert pool.num_waiting == 0
        pool.close()

    asyncio.run(scenario())


def test_too_much_waiting_work_is_refused() -> None:
    async def scenario() -> None:
        pool, gate = EncodePool(1, max_waiting=2), threading.Event()
        waiting = [asyncio.create_task(pool.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await pool.run(lambda: None)
        assert caught.value.retry_after_s == 1.0
        gate.set()
        assert await asyncio.gather(*waiting) == [True, True]
        assert await pool.run(lambda: 1) == 1
        pool.close()

    asyncio.run(scenario())
