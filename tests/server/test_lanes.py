"""Promise: one client's work, however much it is, lets others have their turns, and is left out when nobody waits."""

import asyncio
import threading

import pytest
from live import PATIENCE

from orca_hf.server.lanes import Lane


class Work:
    """Pieces of work that wait to be let go, one by one, in the order in which the lane takes them."""

    def __init__(self):
        self.done = []
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def __call__(self, name):
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE)
        self.done.append(name)
        return name

    def let_go(self, count=1):
        for _ in range(count):
            self.may_end.release()


def on_a_lane(test):
    """Runs `test(lane, work)` in an event loop."""

    async def run():
        lane, work = Lane("test"), Work()
        try:
            await asyncio.wait_for(test(lane, work), PATIENCE)
        finally:
            work.let_go(100)
            lane.close()

    asyncio.run(run())


async def begun(lane, work, client, *names):
    """Tasks that wait for such pieces of work, in their queues when this returns."""
    tasks = [asyncio.create_task(lane.run(client, work, name)) for name in names]
    await asyncio.sleep(0)
    return tasks


def test_clients_take_turns_whoever_has_more():
    async def test(lane, work):
        tasks = await begun(lane, work, "a", *(f"a{i}" for i in range(6)))
        tasks += await begun(lane, work, "b", "b0", "b1")
        tasks += await begun(lane, work, "c", "c0")
        work.let_go(9)
        assert await asyncio.gather(*tasks) == [*(f"a{i}" for i in range(6)), "b0", "b1", "c0"]
        assert work.done == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4", "a5"]

    on_a_lane(test)


def test_requests_of_one_client_take_turns_piece_by_piece():
    async def request(lane, work, name):
        for piece in range(3):
            await lane.run("a", work, f"{name}{piece}")

    async def test(lane, work):
        work.let_go(6)
        await asyncio.gather(*(request(lane, work, name) for name in "xy"))
        assert work.done == ["x0", "y0", "x1", "y1", "x2", "y2"]

    on_a_lane(test)


def test_what_nobody_waits_for_is_not_begun():
    async def test(lane, work):
        first, second, third = await begun(lane, work, "a", "first", "second", "third")
        second.cancel()
        first.cancel()  # which runs already, and runs to its end for nobody
        work.let_go(2)
        assert await third == "third"
        assert work.done == ["first", "third"]

    on_a_lane(test)


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyError("k")], ids=repr)
def test_errors_are_the_waiters(error):
    def fail():
        raise error

    async def test(lane, work):
        failing = asyncio.create_task(lane.run("a", fail))
        (other,) = await begun(lane, work, "a", "other")
        work.let_go()
        assert await other == "other"
        with pytest.raises(type(error)) as caught:
            await failing
        assert caught.value is error

    on_a_lane(test)


def test_whoever_waits_when_it_fails_is_told_at_once():
    async def test(lane, work):
        tasks = await begun(lane, work, "a", "runs", "waits")
        assert work.begun.acquire(timeout=PATIENCE)
        lane.fail(RuntimeError("over"))
        for task in [*tasks, *await begun(lane, work, "b", "late")]:
            with pytest.raises(RuntimeError, match="over"):
                await task
        assert work.done == []

    on_a_lane(test)
