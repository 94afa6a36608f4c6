"""Promise: an iteration waits for the device once, for the sampled tokens, and sends it its inputs by one copy.

Without a device, what would wait for one is counted among the operations: numbers and sizes that only a tensor knows,
and copies from one device to another.
"""

from collections import Counter

import pytest
import torch
from tiny import PROMPTS, make_model, pad_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.batch import build_batch
from orca_hf.engines import Engine
from orca_hf.request import Request
from orca_hf.sampling import Generation, greedy_tokens
from orca_hf.sampling_options import SamplingOptions
from orca_hf.scheduler import Iteration, Step
from orca_hf.warping import RowProbabilities, select_rows
from orca_kernels import RaggedBatch
from orca_kernels.ragged import pack, unpack, upload

WAITS = {
    torch.ops.aten._local_scalar_dense.default: "a number",
    torch.ops.aten.nonzero.default: "a size",
    torch.ops.aten.masked_select.default: "a size",
    torch.ops.aten.equal.default: "a comparison",
}


class Counting(TorchDispatchMode):
    """Counts operations that would wait for a device, and copies between devices."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in WAITS:
            self.seen[WAITS[func]] += 1
        elif func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            indices = [index for index in args[1] if index is not None]
            self.seen["a size"] += any(index.dtype == torch.bool for index in indices)
            self.seen["an index of the host"] += any(index.device != args[0].device for index in indices)
        elif func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            devices = {leaf.device for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)}
            self.seen["a copy"] += len(devices) > 1
        return result


class Reading(TorchFunctionMode):
    """Counts tensors that Python reads as a whole, which on the CPU is no operation and on a device waits for it."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy)
        return func(*args, **(kwargs or {}))


def iteration(lens, scattered=()):
    """Steps of (query_len, kv_len); the blocks of the requests of `scattered` are not consecutive."""
    steps = []
    for index, (query_len, kv_len) in enumerate(lens):
        request = Request(list(range(kv_len)), 4)
        blocks = range(10 * index, 10 * index + 9)
        request.blocks = tuple(reversed(blocks)) if index in scattered else tuple(blocks)
        request.first_slot = None if index in scattered else blocks[0] * 4
        request.computed = kv_len - query_len
        steps.append(Step(request, kv_len - query_len, query_len, samples=True))
    return Iteration(tuple(steps))


MIXED = [(1, 9), (7, 7), (1, 30), (3, 12)]


@pytest.mark.parametrize("scattered", [(), (1, 3)], ids=["consecutive", "scattered"])
def test_a_batch_goes_up_in_one_copy(scattered):
    with Counting() as counting:
        batch = build_batch(iteration(MIXED, scattered), block_size=4, device=torch.device("meta"))
        assert batch.attention_mask.device.type == "meta"
    assert counting.seen["a copy"] == 1
    assert sum(counting.seen.values()) == 1
    tensors = (batch.input_ids, batch.position_ids, batch.sampling_rows, batch.ragged.cu_seqlens_q)
    tensors += (batch.ragged.kv_lens, batch.ragged.slot_mapping)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {tensor.dtype for tensor in tensors} == {torch.int64, torch.int32}
    with Counting() as counting:
        assert batch.ragged.block_table.shape == (4, 8)
    # From a number a request, on the device; blocks here and there are one more copy.
    assert counting.seen["a copy"] == bool(scattered)


@pytest.mark.parametrize("scattered", [(), (1, 3)], ids=["consecutive", "scattered"])
def test_what_goes_up_is_what_was_built(scattered):
    """The same bytes, cut up again: on the host, where they can be read."""
    batch = build_batch(iteration(MIXED, scattered), block_size=4, device=torch.device("cpu"))
    ragged = batch.ragged
    sent = [batch.input_ids, ragged.kv_lens, batch.sampling_rows, ragged.cu_seqlens_q, ragged.first_blocks]
    packed = pack(sent, pinned=False)
    views = unpack(packed, sent)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, sent, strict=True))
    assert {view.untyped_storage().data_ptr() for view in views} == {packed.untyped_storage().data_ptr()}
    assert all(view.storage_offset() * view.itemsize % 16 == 0 for view in views)
    assert upload(sent, torch.device("cpu")) == sent


def test_a_table_made_on_the_device_is_the_one_of_the_blocks():
    built = build_batch(iteration(MIXED), block_size=4, device=torch.device("cpu")).ragged
    for row, kv_len, first in zip(built.block_table.tolist(), built.kv_lens_host, (0, 10, 20, 30), strict=True):
        used = -(-kv_len // 4)
        assert row[:used] == list(range(first, first + used))


@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [0, 2], [3, 0]])
def test_selected_rows(rows):
    logits = torch.randn(4, 9)
    assert torch.equal(select_rows(logits, rows), logits[torch.tensor(rows)])
    with Counting() as counting:
        select_rows(logits.to("meta"), rows)
    assert counting.seen["an index of the host"] == 0


def counted_iterations(monkeypatch, model_type, calls):
    """What each iteration that all rows only decode in waits for."""
    model = orca_hf.wrap(make_model(model_type), OrcaConfig(max_slots=1024, pack_weights=False))
    run_one = Engine._run_one_iteration
    counts = []

    def counted(engine):
        with Reading() as reading, Counting() as counting:
            run_one(engine)
        counts.append(+counting.seen + Counter({"a reading": reading.seen}))

    monkeypatch.setattr(Engine, "_run_one_iteration", counted)
    # On the CPU the tokens are read by numpy, which no operation shows; here, as from any device.
    monkeypatch.setattr("orca_hf.outcome.greedy_tokens", lambda logits: torch.argmax(logits.float(), dim=-1).tolist())
    for call in calls:
        model.generate(**call)
    return counts[1:]  # the first makes what is kept


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "opt", "mistral", "bloom", "falcon:alibi", "phi3"])
def test_a_greedy_iteration_waits_for_nothing_but_its_tokens(monkeypatch, model_type):
    counts = counted_iterations(
        monkeypatch, model_type, [{**pad_left(PROMPTS), "max_new_tokens": 9, "do_sample": False}]
    )
    assert len(counts) == 8
    for seen in counts:
        assert seen == {"a reading": 1}


def test_a_sampled_row_waits_for_its_token_and_for_the_check_of_its_probabilities(monkeypatch):
    call = {**pad_left(PROMPTS[:1]), "max_new_tokens": 6, "do_sample": True, "top_k": 5}
    counts = counted_iterations(monkeypatch, "llama", [call])
    assert len(counts) == 5
    with Counting() as counting:
        torch.multinomial(torch.ones(1, 7), 1)
    for seen in counts:
        assert seen == {"a reading": 1} | +counting.seen


def test_rows_of_a_sampled_call_are_read_together():
    options = SamplingOptions(
        LogitsProcessorList(), StoppingCriteriaList([MaxLengthCriteria(9)]), max_length=9, do_sample=True
    )
    generation = Generation(torch.tensor([[3], [4], [5]]), [[3], [4], [5]], options)
    assert generation.is_plain_sampling
    probabilities = RowProbabilities(torch.randn(3, 97))
    generation.want_probabilities([0, 1, 2], probabilities)
    with Reading() as reading:
        tokens = generation.draw_tokens(generation.requests, [0, 1, 2], probabilities)
    assert len(tokens) == 3
    assert reading.seen == 1


def test_tokens_of_a_device_are_the_numpy_ones():
    logits = torch.randn(5, 97)
    assert greedy_tokens(logits) == torch.argmax(logits, dim=-1).tolist()


def test_to_with_moves_a_batch_and_others_by_one_copy():
    built = RaggedBatch.build(query_lens=[2], kv_lens=[5], blocks=[[3, 4]], block_size=4, device="cpu")
    with Counting() as counting:
        moved, (other,) = built.to_with(torch.device("meta"), [torch.arange(3)])
    assert counting.seen["a copy"] == 1
    assert (moved.kv_lens.device.type, other.device.type, other.shape) == ("meta", "meta", (3,))
    assert moved.kv_lens_host == (5,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_greedy_iteration_on_a_device_waits_for_its_tokens_alone(monkeypatch):
    """PyTorch's own count of waits, in every iteration but for the reading of the tokens."""
    model = orca_hf.wrap(make_model().cuda(), OrcaConfig(max_slots=1024))
    call = {name: tensor.cuda() for name, tensor in pad_left(PROMPTS).items()}
    model.generate(**call, max_new_tokens=9, do_sample=False)

    def read(logits):
        torch.cuda.set_sync_debug_mode("default")
        tokens = greedy_tokens(logits)
        torch.cuda.set_sync_debug_mode("error")
        return tokens

    def run_one(engine, before=Engine._run_one_iteration):
        torch.cuda.set_sync_debug_mode("error")
        try:
            before(engine)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr("orca_hf.outcome.greedy_tokens", read)
    monkeypatch.setattr(Engine, "_run_one_iteration", run_one)
    assert model.generate(**call, max_new_tokens=9, do_sample=False).shape == (5, 20)
