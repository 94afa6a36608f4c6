"""A thread that drives an engine."""

import logging
import threading

from orca_hf.engines import Engine
from orca_hf.errors import StoppedError

logger = logging.getLogger(__name__)


class Driver:
    """Drives one engine from a thread of its own: for as long as it is to linger, or until nothing is left.

    Args:
        engine: What it drives.

    Attributes:
        error: What the thread died of, or None.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._lock = threading.Lock()  # guards the next three; taken within the engine's
        self._runs = False
        self._lingers = False
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        """Whether its thread is there, and will take whatever comes."""
        thread = self._thread
        return self._runs and thread is not None and thread.is_alive()

    def start(self, *, linger: bool = False) -> None:
        """Have a thread drive, if none does."""
        with self._lock:
            self._lingers |= linger
            if not self.runs and self.error is None:
                self._runs = True
                self._thread = threading.Thread(target=self._run, name="orca-driver", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Let the thread end when nothing is left, and wait for it."""
        with self._lock:
            self._lingers = False
            thread = self._thread
        self.engine.notice()
        if thread is not None:
            thread.join()

    def _may_end(self) -> bool:
        with self._lock:
            if self._lingers:
                return False
            self._runs = False
            return True

    def _run(self) -> None:
        try:
            self.engine.serve(stays=lambda: self._lingers, may_end=self._may_end)
        except BaseException as error:
            logger.exception("The thread that drives the engine has died.")
            with self._lock:
                self._runs, self.error = False, error
            stopped = StoppedError(f"The thread that drives the engine has died of {type(error).__name__}: {error}")
            stopped.__cause__ = error
            self.engine.fail_submitted(stopped)
