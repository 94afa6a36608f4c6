"""The compiled CPU kernels equal PyTorch's products, are compiled once, and are done without where they cannot be."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from orca_kernels import compiled
from orca_kernels.compiled import CompileError, Library, PackedProduct, RmsNorm, bindings, compile_library


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


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 2), (33, 40), (97, 48), (64, 5000)], ids=str)
def test_linear_in_bfloat16_is_rounded_once(library: Library, shape: tuple[int, int], with_bias: bool) -> None:
    num_out, num_in = shape
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in).bfloat16()
    bias = torch.randn(num_out).bfloat16() if with_bias else None
    packed = library.pack(weight)
    wide = torch.randn(200, num_in + 3).bfloat16()
    for rows in (1, 2, 7, 12, 13, 40, 200):
        for hidden in (wide[:rows, 2 : num_in + 2], wide[:rows, 1 : num_in + 1]):  # the second begins within a word
            exact = torch.nn.functional.linear(
                hidden.double(), weight.double(), None if bias is None else bias.double()
            )
            ours = library.linear(hidden, packed, bias, num_out)
            assert ours.dtype is torch.bfloat16
            torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-5 * num_in)
            assert torch.equal(library.linear(hidden[-1:], packed, bias, num_out)[0], ours[-1])


@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("shape", [(1, 2), (33, 40), (97, 48)], ids=str)
def test_gated_in_bfloat16_is_rounded_as_natively(library: Library, shape: tuple[int, int], gelu: bool) -> None:
    num_out, num_in = shape
    torch.manual_seed(0)
    gate, up = (torch.randn(2, num_out, num_in) * 0.3).bfloat16().unbind()
    packed = library.pack_gated(gate, up)
    for rows in (1, 3, 13, 40):
        hidden = torch.randn(rows, num_in).bfloat16()
        # Each product is rounded once; sums in another order may fall to the other side, so a few may differ by a step.
        products = [torch.nn.functional.linear(hidden.float(), weight.float()).bfloat16() for weight in (gate, up)]
        expected = ACTIVATIONS[gelu](products[0]) * products[1]
        ours = library.gated(hidden, packed, num_out, gelu=gelu)
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.float(), expected.float(), rtol=2**-6, atol=1e-3)
        assert (ours == expected).float().mean() > 0.95


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
        ours = library.rms_norm(rows, RmsNorm(weight, 1e-5, offset))
        torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize("head_dim", [2, 12, 64])
def test_queries_keys_and_values(library: Library, head_dim: int, has_all: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    num_q, num_k, num_in = 6, 2, 40
    hidden = torch.randn(num_rows, 2 * num_in)[:, :num_in]
    weight, bias = torch.randn((num_q + 2 * num_k) * head_dim, num_in), torch.randn((num_q + 2 * num_k) * head_dim)
    cos, sin = torch.randn(num_rows, head_dim), torch.randn(num_rows, head_dim)
    norm, q_norm, k_norm = (RmsNorm(torch.randn(size), 1e-6) for size in (num_in, head_dim, head_dim))
    ours = library.attention_inputs(
        hidden,
        norm if has_all else None,
        library.pack(weight),
        bias if has_all else None,
        (num_q, num_k, num_k),
        cos,
        sin,
        *((q_norm, k_norm) if has_all else ()),
    )
    normed = rms_norm(hidden, norm) if has_all else hidden
    heads = torch.nn.functional.linear(normed, weight, bias if has_all else None).view(num_rows, -1, head_dim)
    for part, head_norm in ((slice(0, num_q), q_norm), (slice(num_q, num_q + num_k), k_norm)):
        part_heads = rms_norm(heads[:, part], head_norm) if has_all else heads[:, part]
        first, second = part_heads.chunk(2, dim=-1)
        heads[:, part] = part_heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    torch.testing.assert_close(ours, heads, rtol=1e-4, atol=1e-4)


def rms_norm(rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:], norm.offset + norm.weight, norm.eps)


@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(12, 40, 24), (96, 64, 2100)], ids=str)
def test_from_attention_to_the_next_layer(
    library: Library, sizes: tuple[int, int, int], with_bias: bool, num_rows: int
) -> None:
    torch.manual_seed(0)
    attended_size, size, inner_size = sizes
    attended, hidden = torch.randn(num_rows, attended_size), torch.randn(num_rows, size)
    output, down = torch.randn(size, attended_size) / 8, torch.randn(size, inner_size) / 8
    gate, up = torch.randn(2, inner_size, size).unbind()
    biases = (torch.randn(size), torch.randn(size)) if with_bias else (None, None)
    norm = RmsNorm(torch.randn(size), 1e-5, 1.0)
    ours = library.layer_outputs(
        attended,
        hidden,
        PackedProduct(library.pack(output), biases[0], attended_size),
        norm,
        library.pack_gated(gate, up),
        PackedProduct(library.pack(down), biases[1], inner_size),
        gelu=False,
    )
    linear = torch.nn.functional.linear
    middle = hidden + linear(attended, output, biases[0])
    normed = rms_norm(middle, norm)
    inner = torch.nn.functional.silu(linear(normed, gate)) * linear(normed, up)
    torch.testing.assert_close(ours, middle + linear(inner, down, biases[1]), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("first", [0, 3, 30])
@pytest.mark.parametrize("num_rows", [1, 2, 13, 16, 40])
def test_a_layers_rows_do_not_depend_on_how_many_there_are(library: Library, num_rows: int, first: int) -> None:
    """What deterministic=True stands on."""
    torch.manual_seed(0)
    size, inner_size, num_heads, head_dim = 96, 200, (6, 2, 2), 16
    hidden, attended, angles = torch.randn(70, size), torch.randn(70, size), torch.randn(70, head_dim)
    norm, head_norm = RmsNorm(torch.randn(size), 1e-6), RmsNorm(torch.randn(head_dim), 1e-6)
    qkv, output = library.pack(torch.randn(160, size)), PackedProduct(library.pack(torch.randn(size, size)), None, size)
    gate_up = library.pack_gated(*torch.randn(2, inner_size, size).unbind())
    down = PackedProduct(library.pack(torch.randn(size, inner_size)), None, inner_size)

    def layer(rows: slice) -> list[torch.Tensor]:
        heads = library.attention_inputs(
            hidden[rows], norm, qkv, None, num_heads, angles[rows].cos(), angles[rows].sin(), head_norm, head_norm
        )
        return [heads, library.layer_outputs(attended[rows], hidden[rows], output, norm, gate_up, down, gelu=False)]

    rows = slice(first, first + num_rows)
    for part, whole in zip(layer(rows), layer(slice(0, 70)), strict=True):
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_store_puts_rows_into_their_slots_and_nothing_else(library: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slots = torch.tensor([7, 0, 11, 3, 4])
    key, value = torch.randn(9, 3, 20).to(dtype)[::2, :, :16], torch.randn(5, 3, 8).to(dtype)
    caches = [torch.randn(12, 3, 24).to(dtype)[..., 4:20], torch.randn(12, 3, 8).to(dtype)]
    expected = [cache.clone() for cache in caches]
    for cache, rows in zip(expected, (key, value), strict=True):
        cache[slots] = rows
    library.store(key, value, *caches, slots)
    assert all(torch.equal(cache, wanted) for cache, wanted in zip(caches, expected, strict=True))


def generator_with(*words: int) -> torch.Generator:
    """One whose next numbers are made of these words, before they are tempered; 0 stays 0."""
    generator = torch.Generator().manual_seed(3)
    torch.rand(1, generator=generator)
    state = generator.get_state()
    state.view(torch.int64)[3 + 1 : 3 + 1 + len(words)] = torch.tensor(words)
    return generator.set_state(state)


def moved_on(seed: int, num_words: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(num_words, generator=generator)  # a word each
    return generator


DISTRIBUTIONS = {
    "flat": lambda rows, size: torch.ones(rows, size) / size,
    "random": lambda rows, size: torch.randn(rows, size).softmax(-1),
    "peaked": lambda rows, size: (torch.randn(rows, size) * 12).softmax(-1),
    "few": lambda rows, size: torch.rand(rows, size) * (torch.arange(size) % 50 == size % 50 // 2),
    "the last": lambda rows, size: torch.eye(size)[-1:].repeat(rows, 1),
    "not normalised": lambda rows, size: torch.rand(rows, size) * 1e30,
    "tiny": lambda rows, size: torch.rand(rows, size) * 1e-40 + 1e-44,
}


@pytest.mark.parametrize("size", [1, 2, 31, 312, 313, 5000])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_draw_is_multinomial_to_the_last_random_number(library: Library, kind: str, size: int) -> None:
    torch.manual_seed(0)
    for moved in (0, 1, 2, 313, 622, 623, 624, 625):
        ours, theirs = moved_on(moved, moved), moved_on(moved, moved)
        for rows in (1, 3, 40):
            probs = DISTRIBUTIONS[kind](rows, size)
            expected = torch.multinomial(probs, 1, generator=theirs)[:, 0]
            assert torch.equal(library.draw(probs, ours), expected)
            assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("words", [(0, 0), (0, 5), (9, 9, 0, 0), (9, 9, 0, 0, 0, 0, 0), (0, 0, 1, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("probs", [[0.0, 0.5, 0.0, 0.5], [0.5, 0.0, 0.5, 0.0], [0.1, 0.2, 0.3, 0.4]], ids=str)
def test_draw_where_the_random_number_is_nothing(library: Library, probs: list[float], words: tuple[int, ...]) -> None:
    """Nothing divided by it is infinite or no number, and PyTorch takes that for the largest."""
    ours, theirs = generator_with(*words), generator_with(*words)
    row = torch.tensor([probs])
    assert torch.equal(library.draw(row, ours), torch.multinomial(row, 1, generator=theirs)[:, 0])


@pytest.mark.parametrize("place", [0, 50, 399])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9, -1.0, None])
def test_draw_of_what_is_no_distribution_leaves_the_generator(
    library: Library, value: float | None, place: int
) -> None:
    probs = torch.rand(3, 400)
    if value is None:
        probs[1] = 0.0
    else:
        probs[1, place] = value
    generator = moved_on(5, 3)
    before = generator.get_state()
    with pytest.raises(RuntimeError):
        torch.multinomial(probs, 1)
    assert library.draw(probs, generator) is None
    assert torch.equal(generator.get_state(), before)


CHANGES = {
    "a bit": lambda rows: rows[13, -1].view(torch.int32).bitwise_xor_(1),
    "a sign": lambda rows: rows[13, 0].neg_(),
    "every sign": lambda rows: rows[13].neg_(),
    "an exchange": lambda rows: rows[13].copy_(rows[13].flip(0)),
    "another size": lambda rows: rows[13].mul_(2),
    "two bits that cancel": lambda rows: rows[13, :2].view(torch.int32).add_(torch.tensor([1, -1], dtype=torch.int32)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [2, 7, 576])
def test_a_fingerprint_sees_every_change(library: Library, size: int, change: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(50, size)
    factors = torch.randint(1, 2**31 - 1, (size,), dtype=torch.int32)
    before = library.fingerprint(rows, factors)
    words = [[word % 2**32 for word in row] for row in rows.view(torch.int32).tolist()]
    expected = [sum(word * factor for word, factor in zip(row, factors.tolist(), strict=True)) % 2**64 for row in words]
    assert [number % 2**64 for number in before.tolist()] == expected
    CHANGES[change](rows)
    assert (library.fingerprint(rows, factors) != before).nonzero().tolist() == [[13]]


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
