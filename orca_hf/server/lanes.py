"""Threads for what would hold the event loop up, shared fairly by the clients."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """One thread, which does a piece of work of each client by turns. Used on the event loop.

    A request waits for one piece of its work before it asks for the next one. So a turn is one piece long, however much
    a request or a client wants; and of one client's requests each has its turn too. What nobody waits for any more when
    its turn comes is left out.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, f"orca-{name}")
        # Clients in the order of their next turns, each with its pieces of work and who waits for them.
        self._queues: dict[str, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = {}
        self._current: asyncio.Future[Any] | None = None
        self._error: Exception | None = None

    async def run(self, client: str, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of `work`, in its client's turn.

        Raises:
            Exception: What `work` raises, or what the lane was closed with.
        """
        if self._error is not None:
            raise self._error
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append((waiter, partial(work, *args, **kwargs)))
        self._start_next()
        return await waiter

    def fail(self, error: Exception) -> None:
        """Ends all that is waited for, now and from now on. What runs on the thread runs to its end, for nobody."""
        self._error = error
        queued = [waiter for queue in self._queues.values() for waiter, _ in queue]
        self._queues.clear()
        for waiter in queued if self._current is None else [self._current, *queued]:
            if not waiter.done():
                waiter.set_exception(error)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _start_next(self) -> None:
        while self._current is None and self._queues:
            client = next(iter(self._queues))
            queue = self._queues.pop(client)
            waiter, work = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind the others
            if not waiter.done():
                self._current = waiter
                running = asyncio.get_running_loop().run_in_executor(self._thread, work)
                running.add_done_callback(self._ended)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        waiter, self._current = self._current, None
        assert waiter is not None
        error = running.exception()  # looked at in any case: asyncio logs one that nobody has looked at
        if not waiter.done():
            if error is None:
                waiter.set_result(running.result())
            else:
                waiter.set_exception(error)
        self._start_next()
