"""Handing the CPU's cores from one driving thread to the next.

Every Python thread that runs a parallel PyTorch operation on the CPU gets OpenMP threads of its own, which stay when
it is done. GNU OpenMP counts them all, and when there are more of them than cores, even sleeping ones, its threads
wait for each other in the kernel instead of on the core. Measured on two cores, a packed linear of 576 x 576 at 16
rows then takes 140 us instead of 73. So a thread that has driven the engine gives its OpenMP threads back; they
come again, in about 0.1 ms, when it needs them.
"""

import ctypes
from collections.abc import Callable
from functools import cache

_PAUSE_SOFT = 1  # omp_pause_soft: free the threads, keep the settings (OpenMP 5.0, section 3.2.44)


def release_threads() -> None:
    """Give back the calling thread's idle OpenMP threads; does nothing where the runtime cannot."""
    pause = _pause_function()
    if pause is not None:
        pause(_PAUSE_SOFT)


@cache
def _pause_function() -> Callable[[int], int] | None:
    # PyTorch loads its OpenMP runtime with global symbols; the process itself stands for them.
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (OSError, AttributeError, TypeError):  # another kind of build, an older runtime, or Windows
        return None
