"""The calls that an engine serves: who is there, who is no longer wanted, and who is to be told of the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from orca_hf.errors import CancelledError, DeadlineError

if TYPE_CHECKING:
    from orca_hf.sampling import Generation


class Calls:
    """Generate() calls, each waited for by its thread, and submitted requests, each with a listener.

    The engine's lock is held around all of it but `abandon`.

    Attributes:
        ended: Done, and their listeners not told yet: their streamers run a user's code, or an interruption came.
    """

    def __init__(self) -> None:
        self.ended: deque[Generation] = deque()
        self._live: dict[Generation, int] = {}  # by arrival, with their numbers
        self._num_entered = 0
        self._abandoned: deque[Generation] = deque()
        self._due: list[tuple[float, int]] = []  # deadlines and arrival numbers, a heap
        self._timed: dict[int, Generation] = {}

    def __iter__(self) -> Iterator[Generation]:
        """Those that are not done, by arrival; they may leave meanwhile."""
        return iter(tuple(self._live))

    def __len__(self) -> int:
        return len(self._live)

    @property
    def has_submitted(self) -> bool:
        """Whether any of them has a listener."""
        return any(generation.listener is not None for generation in tuple(self._live))

    def enter(self, generation: Generation) -> None:
        """A call has been submitted to the scheduler."""
        self._live[generation] = number = self._num_entered
        self._num_entered += 1
        if generation.deadline is not None:
            self._timed[number] = generation
            heappush(self._due, (generation.deadline, number))

    def leave(self, generation: Generation) -> bool:
        """A call is done; False if it has left before, or never came."""
        number = self._live.get(generation)
        if number is None:
            return False
        if generation.listener is not None:
            self.ended.append(generation)  # before it is forgotten, so that no interruption makes it forgotten only
        self._timed.pop(number, None)
        del self._live[generation]
        return True

    def told(self, generation: Generation) -> None:
        """The listener of one that has ended knows."""
        if generation in self.ended:
            self.ended.remove(generation)

    def abandon(self, generation: Generation) -> None:
        """Nobody will read it. Takes no lock: the garbage collector may call it anywhere."""
        self._abandoned.append(generation)

    def unwanted(self, now: float) -> Iterator[tuple[Generation, Exception]]:
        """Calls that nobody wants any more, or whose time is over, with the error to end each by."""
        while self._abandoned:
            yield self._abandoned.popleft(), CancelledError("Its handle is gone, so that nobody can read it.")
        while self._due and self._due[0][0] <= now:
            generation = self._timed.get(heappop(self._due)[1])
            if generation is not None:
                yield generation, DeadlineError("The request's deadline has passed before its end.")
