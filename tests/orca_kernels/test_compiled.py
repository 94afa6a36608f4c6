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


def test_many_rows_are_the_same_rows(library: Library) -> None:
    """They are computed in chunks that stay in the cache."""
    torch.manual_seed(2)
    weight, hidden = torch.randn(40, 1024), torch.randn(300, 1024)
    packed, gate_up = library.pack(weight), library.pack_gated(weight, weight)
    together, gated = library.linear(hidden, packed, None, 40), library.gated(hidden, gate_up, 40, gelu=False)
    for row in (0, 63, 64, 150, 299):
        assert torch.equal(library.linear(hidden[row : row + 1], packed, None, 40)[0], together[row])
        assert torch.equal(library.gated(hidden[row : row + 1], gate_up, 40, gelu=False)[0], gated[row])


ACTIVATIONS = {False: torch.nn.functional.silu, True: lambda x: torch.nn.functional.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("gelu", ACTIVATIONS, ids=["silu", "gelu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_is_an_activation_times_a_linear(library: Library, shape: tuple[int, int], gelu: bool) -> None:
    num_out, num_in = shape
    torch.manual_seed(0)
    gate, up = torch.randn(num_out, num_in) * 0.3, torch.randn(num_out, num_in) * 0.3
    packed = library.pack_gated(gate, up)
    for rows in (0, 1, 3, 12, 13, 30):
        hidden = torch.randn(1, rows, num_in)
        expected = ACTIVATIONS[gelu](hidden.double() @ gate.double().t()) * (hidden.double() @ up.double().t())
        ours = library.gated(hidden, packed, num_out, gelu=gelu)
        torch.testing.assert_close(ours, expected.float(), rtol=1e-3, atol=1e-5 * num_in)


@pytest.mark.parametrize("gelu", ACTIVATIONS, ids=["silu", "gelu"])
def test_activations_are_right_everywhere(library: Library, gelu: bool) -> None:
    gates = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, float("nan")])])
    hidden = torch.stack([gates, torch.ones_like(gates)], dim=1)
    packed = library.pack_gated(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    ours = library.gated(hidden, packed, 1, gelu=gelu)[:, 0]
    torch.testing.assert_close(ours, ACTIVATIONS[gelu](gates), rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 7, 64, 576])
def test_rms_norm(library: Library, size: int, offset: float) -> None:
    torch.manual_seed(0)
    weight, wide = torch.randn(size), torch.randn(1, 90, size + 3)
    for rows in (wide[..., :size], wide[:, :5, :size]):
        expected = torch.nn.functional.rms_norm(rows.double(), (size,), offset + weight.double(), 1e-5)
        ours = library.rms_norm(rows, weight, offset=offset, eps=1e-5)
        torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("head_dim", [2, 12, 64])
def test_rotate_turns_the_halves_of_query_and_key_heads(library: Library, head_dim: int, with_norms: bool) -> None:
    torch.manual_seed(0)
    rows, num_q, num_k = 70, 6, 2
    qkv = torch.randn(rows, (num_q + 2 * num_k) * head_dim)
    cos, sin = torch.randn(rows, head_dim), torch.randn(rows, head_dim)
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if with_norms else ()
    heads = qkv.view(rows, -1, head_dim).clone()
    for part, weight in zip((slice(0, num_q), slice(num_q, num_q + num_k)), norms or (None, None), strict=True):
        part_heads = heads[:, part]
        if weight is not None:
            part_heads = torch.nn.functional.rms_norm(part_heads, (head_dim,), weight, 1e-6)
        first, second = part_heads.chunk(2, dim=-1)
        heads[:, part] = part_heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    library.rotate(qkv, num_q, num_k, cos, sin, *norms, eps=1e-6)
    torch.testing.assert_close(qkv.view(rows, -1, head_dim), heads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_store_puts_rows_into_their_slots_and_nothing_else(library: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 3, 20).to(dtype)[::2, :, :16]
    slots = torch.tensor([7, 0, 11, 3, 4])
    cache = torch.randn(12, 3, 24).to(dtype)[..., 4:20]
    expected = cache.clone()
    expected[slots] = rows
    library.store(rows, cache, slots)
    assert torch.equal(cache, expected)


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
