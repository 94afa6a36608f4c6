"""Interruptions at a chosen line or instruction of the library, as Ctrl-C would raise them."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import orca_hf

_LIBRARY = str(Path(orca_hf.__file__).parent)

Place = tuple[CodeType, int]  # a function, and a line or an instruction of it


class Interrupter:
    """Runs code with a trace that sees each line, or instruction, of the library that this thread comes to.

    Args:
        by_instruction: See instructions in place of lines.
    """

    def __init__(self, *, by_instruction: bool = False) -> None:
        self._event = "opcode" if by_instruction else "line"
        self._see: Callable[[Place], None] = lambda place: None

    def places(self, work: Callable[[], Any]) -> list[Place]:
        """Where `work()` comes by, in order."""
        seen: list[Place] = []
        with self._tracing(seen.append):
            work()
        return seen

    def interrupt(self, work: Callable[[], Any], place: Place, nth: int = 1) -> BaseException | None:
        """Run `work()` with an interruption the n-th time that it comes to a place.

        Returns:
            What was raised; None if nothing was, for the place was not come to so often.
        """
        left = nth

        def see(at: Place) -> None:
            nonlocal left
            if at == place:
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt(f"at {place[0].co_qualname}:{place[1]}")

        try:
            with self._tracing(see):
                work()
        except BaseException as error:
            return error
        return None

    @contextmanager
    def _tracing(self, see: Callable[[Place], None]):
        before, self._see = sys.gettrace(), see
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == self._event:
            self._see((frame.f_code, frame.f_lasti if event == "opcode" else frame.f_lineno))
        return self._step
