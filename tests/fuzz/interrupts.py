"""KeyboardInterrupt at the n-th line of the library that a call runs, as Ctrl-C may come anywhere."""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import orca_hf

_LIBRARY = str(Path(orca_hf.__file__).parent)


@cache
def _with_blocks(file: str) -> dict[int, range]:
    """For the first line of each `with` statement of a file the lines of its body."""
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    return {
        line: range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        for node in nodes
        if isinstance(node, ast.With)
        for line in range(node.lineno, node.body[0].lineno)
    }


class Lines:
    """Counts the lines of the library that this thread runs, and may raise at one of them."""

    def __init__(self, raise_at: int | None = None) -> None:
        self.raise_at = raise_at
        self.num_lines = 0
        self.where = ""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within the block."""
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return None
        blocks, last = _with_blocks(frame.f_code.co_filename), 0

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "line":
                # Python says that it is at the `with` again when it leaves the body. It is between two instructions
                # then, where it looks for no signal: a Ctrl-C comes before them or after.
                leaves = last in blocks.get(frame.f_lineno, ())
                last = frame.f_lineno
                if not leaves:
                    self._count(frame)
            return line

        return line

    def _count(self, frame: FrameType) -> None:
        self.num_lines += 1
        if self.num_lines == self.raise_at:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            raise KeyboardInterrupt
