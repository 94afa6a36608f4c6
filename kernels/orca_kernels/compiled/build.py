"""From the C++ files beside this one to a shared library in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
# Sums may be reordered, which is what makes them vectors; NaN and infinity stay what they are.
_FLAGS = [
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
]
_TIMEOUT_S = 120


class CompileError(RuntimeError):
    """There is no compiler, or it refused; the message says which and why."""


def compile_library(folder: Path | None = None) -> Path:
    """Compile the kernels, unless that has been done on a machine like this one.

    Args:
        folder: Where libraries are kept; `$XDG_CACHE_HOME/orca_hf/kernels` or `~/.cache/orca_hf/kernels` if None.

    Returns:
        The library's path. Its name stands for sources, flags, compiler and processor.

    Raises:
        CompileError: It cannot be compiled here.
        OSError: The folder cannot be written.
    """
    compiler = _find_compiler()
    sources = sorted(FOLDER.glob("*.cpp"))
    headers = sorted(FOLDER.glob("*.h"))
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orca_hf" / "kernels"
    path = folder / f"orca_kernels-{_fingerprint(compiler, sources + headers)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Two processes may compile at the same time: each its own file, and the last to be done puts it in place.
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(descriptor)
    try:
        run = subprocess.run(
            [compiler, *_FLAGS, "-o", name, *map(str, sources)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if run.returncode != 0:
            raise CompileError(f"{compiler} failed: {run.stderr.strip() or f'exit code {run.returncode}'}")
        os.replace(name, path)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{compiler} took longer than {_TIMEOUT_S} s") from None
    finally:
        Path(name).unlink(missing_ok=True)
    return path


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if found := shutil.which(name):
            return found
    raise CompileError("there is no C++ compiler (c++, g++ or clang++, or the one that CXX names)")


def _fingerprint(compiler: str, files: list[Path]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    parts = [*(file.read_text() for file in files), *_FLAGS, compiler, version.stdout, _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
