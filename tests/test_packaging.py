"""The wheel holds both packages and nothing else, and works where the repository is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"orca_hf": ROOT / "orca_hf", "orca_kernels": ROOT / "kernels" / "orca_kernels"}

PROBE = """
import importlib.metadata, json
import orca_hf, orca_kernels
print(json.dumps({
    "orca_hf": orca_hf.__file__,
    "orca_kernels": orca_kernels.__file__,
    "version": orca_hf.__version__,
    "installed version": importlib.metadata.version("orca-hf"),
    "missing names": [name for name in orca_hf.__all__ if not hasattr(orca_hf, name)],
}))
"""
WITHOUT_TRITON = "import sys\nsys.modules['triton'] = None  # import triton raises ImportError\n"


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed; nothing of this process's import path reaches it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, and a folder that is not the repository."""

    folder: Path
    elsewhere: Path

    def run(self, program: str, *arguments: str) -> str:
        return run(self.folder / "bin" / program, *arguments, cwd=self.elsewhere)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel in an empty environment, which then finds the dependencies among this interpreter's own packages.

    They come last on its path, by a .pth file; .pth files that lie beside them, an editable install's among them, are
    not read from there. So nothing but the wheel can provide orca_hf.
    """
    environment = Environment(tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere"))
    venv.create(environment.folder, with_pip=False)
    python = environment.folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=environment.elsewhere)
    site = environment.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    dependencies = [entry for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages"}]
    Path(site, "dependencies.pth").write_text("\n".join(dependencies))
    return environment


def test_wheel_holds_both_packages_whole_and_nothing_else(wheel: Path) -> None:
    sources = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    dist_info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    assert names == sources | {f"{dist_info}/{name}" for name in about}
    assert {"orca_hf/py.typed", "orca_kernels/py.typed"} <= names


def test_wheel_carries_the_licence_the_command_and_the_dependencies(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = {name.partition(".dist-info/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert text["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "orca-hf = orca_hf.cli:main" in text["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in text["METADATA"]
    for dependency in ("torch", "transformers", "accelerate", "safetensors"):
        assert f"Requires-Dist: {dependency}" in text["METADATA"]
    assert "Root-Is-Purelib: true" in text["WHEEL"]


@pytest.mark.parametrize("before", ["", WITHOUT_TRITON], ids=["as_it_is", "without_triton"])
def test_installed_wheel_imports_from_another_folder(installed: Environment, before: str) -> None:
    found = json.loads(installed.run("python", "-c", before + PROBE))
    for name in PACKAGES:
        assert Path(found[name]).is_relative_to(installed.folder)
    assert found["version"] == found["installed version"]
    assert found["missing names"] == []


def test_installed_command_explains_itself(installed: Environment) -> None:
    assert "demo" in installed.run("orca-hf", "--help")


def test_container_folders_are_no_packages() -> None:
    # kernels/__init__.py would shadow the Hugging Face `kernels` package.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("folder", [ROOT / "tests", *(path.parent for path in ROOT.glob("tests/*/conftest.py"))])
def test_nothing_in_tests_is_named_like_a_package(folder: Path) -> None:
    """The suite puts these folders on sys.path, where a folder or file is found in place of the package of its name."""
    importable = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert importable & {*PACKAGES, "kernels", *packages_distributions()} == set()
