"""The compiled CPU kernels equal PyTorch's products, are compiled once, and are done without where they cannot be."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from orca_kernels import compiled
from orca_kernels.compiled import CompileError, Library, bindings, compile_library


@pytest.fixture(scope="module")
def library() -> Library:
    found = compiled.library()
    if found is None:
        pytest.skip("the kernels cannot be compiled on this machine")
    return found


SHAPES = [(1, 1), (16, 3), (31, 24), (32, 32), (33, 40), (64, 576), (97, 48), (576, 1536), (70, 5000)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_is_a_linear(library: Library, shape: tuple[int, int], with_bias: bool, threads: int) -> None:
    num_out, num_in = shape
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in)
    bias = torch.randn(num_out) if with_bias else None
    packed = library.pack(weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (0, 1, 2, 5, 7, 12, 13, 16, 25, 40):
            hidden = torch.randn(1, rows, num_in)
            expected = torch.nn.functional.linear(
                hidden.double(), weight.double(), None if bias is None else bias.double()
            )
            ours = library.linear(hidden, packed, bias, num_out)
            torch.testing.assert_close(ours, expected.float(), rtol=1e-4, atol=1e-5 * num_in**0.5)
    finally:
        torch.set_num_threads(before)


def test_rows_may_lie_in_a_larger_tensor(library: Library) -> None:
    weight = torch.randn(40, 24)
    packed = library.pack(weight)
    wide = torch.randn(9, 50)
    for rows in (wide[:, 3:27], wide[::2, :24], wide.t()[:9, :].t()[:, :9].expand(9, 9)[:, :1].expand(9, 24)):
        torch.testing.assert_close(library.linear(rows, packed, None, 40), rows @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_in", [48, 576, 3000])
def test_a_row_does_not_depend_on_how_many_there_are(library: Library, num_in: int) -> None:
    torch.manual_seed(1)
    weight, hidden = torch.randn(80, num_in), torch.randn(40, num_in)
    packed = library.pack(weight)
    together = library.linear(hidden, packed, None, 80)
    for start, rows in ((0, 1), (7, 1), (3, 5), (10, 12), (11, 13), (0, 39)):
        assert torch.equal(
            library.linear(hidden[start : start + rows], packed, None, 80), together[start : start + rows]
        )


def test_nan_and_infinity_stay(library: Library) -> None:
    weight = torch.eye(3)
    hidden = torch.tensor([[float("nan"), 1.0, 2.0], [float("inf"), 0.0, 0.0], [1.0, 2.0, 3.0]])
    ours = library.linear(hidden, library.pack(weight), None, 3)
    assert torch.equal(ours.isnan(), (hidden @ weight).isnan())
    assert torch.equal(ours[2], hidden[2])


def test_it_is_compiled_once(library: Library, tmp_path: Path) -> None:
    first = compile_library(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert compile_library(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert Library(first).pack(torch.randn(2, 2)).numel() >= 4


def test_several_may_compile_at_once(library: Library, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(compile_library, [tmp_path] * 3))
    assert len(paths) == 1
    assert [path.name for path in tmp_path.iterdir()] == [paths.pop().name]


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError, match="there is no C\\+\\+ compiler"):
        compile_library(tmp_path)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _script(tmp_path / "broken", 'echo "no such flag" >&2; [ "$1" = --version ]')
    monkeypatch.setenv("CXX", broken)
    cache = tmp_path / "cache"
    with pytest.raises(CompileError, match="no such flag"):
        compile_library(cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("error", [CompileError("none"), OSError("read-only")], ids=["compiler", "folder"])
def test_what_cannot_be_compiled_is_done_without(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise error

    load = bindings._load.__wrapped__
    monkeypatch.setattr(bindings, "compile_library", fail)
    assert load() is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "ORCA_HF_COMPILE", "0")
    assert bindings._load.__wrapped__() is None
