"""Promise: a thread that stops driving keeps no OpenMP threads, and loses nothing by giving them back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orca_hf import openmp

TASKS = Path("/proc/self/task")
# A thread drives three times; native threads are counted before, while its team is there, and after each time.
PROGRAM = """
import json, os, threading, time
import torch
from orca_hf.openmp import release_threads

def num_threads():
    return len(os.listdir("/proc/self/task"))

def num_threads_left(expected):
    # A thread that has been let go is counted until the kernel has taken it down.
    deadline = time.monotonic() + 30
    while num_threads() > expected and time.monotonic() < deadline:
        os.sched_yield()
    return num_threads()

def drive():
    counts.append(num_threads())
    for _ in range(3):
        results.append(hidden @ hidden)
        counts.append(num_threads())
        release_threads()
        counts.append(num_threads_left(counts[0]))
    release_threads()
    counts.append(num_threads())

counts, results = [], []
hidden = torch.randn(512, 512)
hidden @ hidden  # whatever PyTorch starts once in a process
driver = threading.Thread(target=drive)
driver.start()
driver.join()
print(json.dumps([counts, all(torch.equal(results[0], result) for result in results)]))
"""


@pytest.mark.skipif(not TASKS.exists(), reason="native threads are counted in /proc")
@pytest.mark.skipif(openmp._pause_function() is None, reason="this OpenMP runtime cannot give threads back")
def test_a_threads_team_is_given_back_and_comes_again():
    settings = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_DYNAMIC": "false"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts, equal = json.loads(done.stdout)
    without = counts[0]
    assert counts == [without, *[without + 1, without] * 3, without]
    assert equal


class Runtime:
    """A process without `omp_pause_resource_all`."""


def raises(error):
    def load(name):
        raise error

    return load


@pytest.mark.parametrize(
    "load", [lambda name: Runtime(), raises(OSError("no such library")), raises(TypeError("a name is needed"))]
)
def test_where_the_runtime_cannot_nothing_happens(monkeypatch, load):
    openmp._pause_function.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", load)
    try:
        openmp.release_threads()
        assert openmp._pause_function() is None
    finally:
        openmp._pause_function.cache_clear()
