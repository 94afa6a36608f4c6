"""What must hold wherever an interruption comes.

Ctrl-C is raised between any two instructions: after a lock was taken and before anybody noted it, within a `finally`,
where a `with` block ends. So nothing here relies on one `finally`. What an outermost call must leave behind is done by
`always`, and changes that belong together are made under a `ChangeLock`, which knows when one was cut off.
"""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from orca_hf.errors import OrcaError

if TYPE_CHECKING:
    # The lock's own record of its owner is the one that no interruption can tear from it.
    Lock = Any
T = TypeVar("T")


def always(work: Callable[[], T], cleanup: Callable[[], object]) -> T:
    """`work()`, and `cleanup()` after it, also if an interruption comes in the middle of that.

    Args:
        work: What to do.
        cleanup: Runs twice, so the second time it must find nothing left to do.
    """
    try:
        try:
            return work()
        finally:
            cleanup()
    finally:
        cleanup()


def outermost(work: Callable[[], T], locks: Iterable["Lock"]) -> T:
    """`work()`, after which this thread holds none of these `threading.RLock`s that it did not hold before."""
    own = [lock for lock in locks if not lock._is_owned()]
    return always(work, lambda: let_go(own))


def let_go(locks: Iterable["Lock"]) -> None:
    """Release what this thread holds of these `threading.RLock`s."""
    for lock in locks:
        while lock._is_owned():
            lock.release()


class ChangeLock:
    """A lock around the changes of a state, for `with`. A thread that holds it may take it again.

    Attributes:
        is_cut: A change was not brought to its end: it was interrupted, or raised something that is no `OrcaError`,
            which refuses before it changes anything. Whoever mends the state sets it back, holding the lock.
        lock: A `threading.RLock`.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self.lock: Lock = threading.RLock()
        self._condition = threading.Condition(self.lock)
        self._depth = 0  # of `with` blocks; not 0 without an owner: one was cut off

    def __enter__(self) -> None:
        is_nested = self.lock._is_owned()
        self.lock.acquire()
        if not is_nested and self._depth:
            self.is_cut = True
            self._depth = 0
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, OrcaError):
            self._depth -= 1
        if self.lock._is_owned():
            self.lock.release()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        return bool(self.lock._is_owned())

    def wait(self, timeout: float | None = None) -> None:
        """Let others have it until `notify_all`, or for `timeout` seconds; not within nested blocks."""
        depth, self._depth = self._depth, 0
        self._condition.wait(timeout)
        self._depth = depth

    def notify_all(self) -> None:
        """Wake those who wait."""
        self._condition.notify_all()
