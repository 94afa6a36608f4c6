"""Run from the repository: `python -m tests.fuzz --cases 5000`."""

import sys
from importlib import import_module
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_TESTS.parent), str(_TESTS.parent / "kernels"), str(_TESTS)]

if __name__ == "__main__":
    sys.exit(import_module("fuzz.command").main())
