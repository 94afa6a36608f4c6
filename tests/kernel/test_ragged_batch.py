"""A RaggedBatch says the same on the host and on the device, and refuses what makes no sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orca_kernels import RaggedBatch, selective_attention

GOOD: dict[str, Any] = {
    "query_lens": [1, 3, 5],
    "kv_lens": [6, 3, 9],
    "blocks": [[4, 5, 6], [2], [9, 1, 3]],
    "block_size": 4,
    "device": "cpu",
}


def test_build_lays_out_the_batch() -> None:
    batch = RaggedBatch.build(**GOOD)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 9]
    assert batch.kv_lens.tolist() == [6, 3, 9]
    # Block 6 of the first request is reserved, not used.
    assert batch.block_table.tolist() == [[4, 5, 0], [2, 0, 0], [9, 1, 3]]
    assert batch.slot_mapping.tolist() == [21, 8, 9, 10, 4, 5, 6, 7, 12]
    assert batch.first_slots == (16, 8, None)
    assert batch.required_slots == 40
    assert (batch.num_requests, batch.total_q, batch.max_query_len, batch.max_kv_len) == (3, 9, 5, 9)
    assert [tensor.dtype for tensor in (batch.cu_seqlens_q, batch.kv_lens, batch.block_table)] == [torch.int32] * 3
    assert batch.slot_mapping.dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lens": [1, 3]}, "got 2, 3 and 3"),
        ({"query_lens": [], "kv_lens": [], "blocks": []}, "at least one request"),
        ({"query_lens": [0, 3, 5]}, "Request 0: needs 1 <= query_len <= kv_len, got 0 and 6"),
        ({"query_lens": [1, 4, 5]}, "Request 1: needs 1 <= query_len <= kv_len, got 4 and 3"),
        ({"kv_lens": [6, 5, 9]}, "Request 1: kv_len 5 needs 2 blocks of 4 slots, got 1"),
        ({"blocks": [[4, -5], [2], [9, 1, 3]]}, "Request 0: block ids must not be negative, got -5"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_build_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaggedBatch.build(**(GOOD | change))


def test_to_moves_tensors_and_keeps_the_rest() -> None:
    batch = RaggedBatch.build(**GOOD)
    assert batch.to("cpu") is batch
    batch.scratch["mask"] = 1
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in (moved.cu_seqlens_q, moved.kv_lens, moved.slot_mapping)} == {"meta"}
    assert moved.block_table.device.type == "meta"
    assert (moved.first_slots, moved.kv_lens_host, moved.required_slots) == (batch.first_slots, (6, 3, 9), 40)
    assert "mask" not in moved.scratch


@pytest.mark.parametrize("chunk_size", [4, 8, 64])
def test_chunked_attention_sees_the_queries_own_chunk(chunk_size: int) -> None:
    batch = RaggedBatch.build(**GOOD)
    torch.manual_seed(0)
    query = torch.randn(9, 4, 16)
    keys, values = torch.randn(2, 48, 2, 16).unbind(0)
    ours = selective_attention(query, keys, values, batch.chunked(chunk_size), scaling=0.3)
    row = 0
    for query_len, kv_len, blocks in zip(GOOD["query_lens"], GOOD["kv_lens"], GOOD["blocks"], strict=True):
        slots = [blocks[p // 4] * 4 + p % 4 for p in range(kv_len)]
        for p in range(kv_len - query_len, kv_len):
            seen = slots[p // chunk_size * chunk_size : p + 1]
            for head in range(4):
                weights = (0.3 * keys[seen, head // 2] @ query[row, head]).softmax(dim=0)
                torch.testing.assert_close(ours[row, head], weights @ values[seen, head // 2])
            row += 1


def test_chunked_refuses_a_chunk_that_begins_in_a_block() -> None:
    with pytest.raises(ValueError, match="multiple of block_size 4, got 6"):
        RaggedBatch.build(**GOOD).chunked(6)


def test_by_token_makes_every_query_a_decode_with_the_same_result() -> None:
    batch = RaggedBatch.build(**GOOD)
    by_token = batch.by_token()
    assert by_token.query_lens_host == (1,) * 9
    assert by_token.kv_lens_host == (6, 1, 2, 3, 5, 6, 7, 8, 9)
    assert by_token.slot_mapping.tolist() == batch.slot_mapping.tolist()
    assert (by_token.batch_invariant, batch.batch_invariant) == (True, False)
    torch.manual_seed(0)
    query = torch.randn(9, 4, 16)
    keys, values = torch.randn(2, 48, 2, 16).unbind(0)
    ours, expected = (selective_attention(query, keys, values, each, scaling=0.3) for each in (by_token, batch))
    torch.testing.assert_close(ours, expected)
    decodes = RaggedBatch.build(query_lens=[1], kv_lens=[6], blocks=[[4, 5]], block_size=4, device="cpu")
    alone = selective_attention(query[:1], keys, values, decodes.by_token(), scaling=0.3)
    assert torch.equal(alone[0], ours[0])


def test_a_bounded_batch_refuses_what_needs_its_lengths() -> None:
    numbers = torch.ones(2, dtype=torch.int32)
    table = torch.zeros(2, 3, dtype=torch.int32)
    batch = RaggedBatch.decodes(
        kv_lens=numbers, slot_mapping=numbers.long(), block_table=table, block_size=4, max_kv_len=12
    )
    assert (batch.max_query_len, batch.max_kv_len, batch.total_q) == (1, 12, 2)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2]
    assert batch.block_table is table
    assert batch.chunked(12) is batch
    with pytest.raises(ValueError, match="cannot be cut into chunks of 8"):
        batch.chunked(8)
    with pytest.raises(ValueError, match="max_kv_len 13 needs more blocks than the table's 3 of 4"):
        RaggedBatch.decodes(
            kv_lens=numbers, slot_mapping=numbers.long(), block_table=table, block_size=4, max_kv_len=13
        )
