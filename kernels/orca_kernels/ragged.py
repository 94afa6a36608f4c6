"""The description of one iteration that every attention backend reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """Where the tokens of an iteration sit in the flat batch, and where their K and V sit in the caches.

    Request i owns rows `cu_seqlens_q[i]:cu_seqlens_q[i + 1]` of the flat batch. They are its newest tokens, at
    positions `kv_len - query_len .. kv_len - 1`; its K/V of position p is in slot
    `block_table[i, p // block_size] * block_size + p % block_size`.

    Attributes:
        cu_seqlens_q: (num_requests + 1,) int32: query offsets in the flat batch.
        kv_lens: (num_requests,) int32: K/V length of each request, its new tokens included.
        slot_mapping: (total_q,) int64: the slot that each new token's K/V goes to.
        first_blocks: (num_requests,) int32: each request's first block, or empty where one has blocks that are not
            consecutive.
        blocks: The block ids of each request, in order, as many as its K/V take.
        block_size: Tokens in a block.
        query_lens_host: The query lengths on the host, so that no launcher has to wait for the device.
        kv_lens_host: The K/V lengths on the host.
        first_slots: First slot of each request whose slots are consecutive, else None.
        required_slots: The fewest slots a cache must have for this batch.
        batch_invariant: A query's result must not depend, to the last bit, on what else is in the batch: a backend
            may not choose the shape of its work by it.
        bounded: The host knows bounds of the K/V lengths only: a backend takes a length from `kv_lens`, blocks from
            `block_table`, and the shape of its work from the bounds. See `decodes`.
        scratch: What a backend keeps between the layers of one iteration (plans, masks). Not copied by `to`.
    """

    cu_seqlens_q: Tensor
    kv_lens: Tensor
    slot_mapping: Tensor
    first_blocks: Tensor
    blocks: tuple[Sequence[int], ...]
    block_size: int
    query_lens_host: tuple[int, ...]
    kv_lens_host: tuple[int, ...]
    first_slots: tuple[int | None, ...]
    required_slots: int = 0
    batch_invariant: bool = False
    bounded: bool = False
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_requests(self) -> int:
        """Requests of the iteration."""
        return len(self.query_lens_host)

    @property
    def block_table(self) -> Tensor:
        """(num_requests, max_num_blocks) int32: `blocks` as a tensor; past a request's last, what is never read.

        Made when it is asked for first: it grows with the context, and not every backend reads it. Where it can be, it
        is made where it is read, from a number a request.
        """
        table = self.scratch.get("block_table")
        if table is None:
            width = max(map(len, self.blocks))
            if len(self.first_blocks):
                steps = torch.arange(width, dtype=torch.int32, device=self.first_blocks.device)
                table = self.first_blocks[:, None] + steps
            else:
                rows = [[*blocks, *[0] * (width - len(blocks))] for blocks in self.blocks]
                (table,) = upload([torch.tensor(rows, dtype=torch.int32, device="cpu")], self.kv_lens.device)
            self.scratch["block_table"] = table
        return cast("Tensor", table)

    @property
    def total_q(self) -> int:
        """Rows of the flat batch."""
        return sum(self.query_lens_host)

    @property
    def max_query_len(self) -> int:
        """The longest query."""
        return max(self.query_lens_host)

    @property
    def max_kv_len(self) -> int:
        """The longest K/V."""
        return max(self.kv_lens_host)

    def to(self, device: torch.device | str) -> RaggedBatch:
        """Returns the same batch with its tensors on `device` (itself when they are there already)."""
        target = torch.device(device)
        here = self.kv_lens.device
        if here.type == target.type and target.index in (None, here.index):
            return self
        return self.to_with(target, ())[0]

    def to_with(self, device: torch.device, others: Sequence[Tensor]) -> tuple[RaggedBatch, list[Tensor]]:
        """Returns the batch with its tensors on `device`, and `others` there too: all by one copy."""
        cu_seqlens_q, kv_lens, slot_mapping, first_blocks, *moved = upload(
            [self.cu_seqlens_q, self.kv_lens, self.slot_mapping, self.first_blocks, *others], device
        )
        batch = replace(
            self,
            cu_seqlens_q=cu_seqlens_q,
            kv_lens=kv_lens,
            slot_mapping=slot_mapping,
            first_blocks=first_blocks,
            scratch={},
        )
        return batch, moved

    def chunked(self, chunk_size: int) -> RaggedBatch:
        """Returns the batch in which every query sees its own chunk of positions only.

        A chunk begins at every multiple of `chunk_size`. Each that a request has queries in stands as a request of its
        own, whose K/V begin with the chunk. For attention only: its positions count from there.

        Args:
            chunk_size: Positions in a chunk, a multiple of `block_size`.

        Raises:
            ValueError: A chunk does not begin with a block.
        """
        if chunk_size < 1 or chunk_size % self.block_size:
            raise ValueError(f"chunk_size must be a multiple of block_size {self.block_size}, got {chunk_size}.")
        if self.max_kv_len <= chunk_size:
            return self
        if self.bounded:
            raise ValueError(f"Lengths that only the device knows cannot be cut into chunks of {chunk_size}.")
        query_lens, kv_lens, blocks = [], [], []
        for query_len, kv_len, row in zip(self.query_lens_host, self.kv_lens_host, self.blocks, strict=True):
            first = (kv_len - query_len) // chunk_size * chunk_size
            for start in range(first, kv_len, chunk_size):
                end = min(start + chunk_size, kv_len)
                query_lens.append(end - max(start, kv_len - query_len))
                kv_lens.append(end - start)
                blocks.append(row[start // self.block_size :])
        return RaggedBatch.build(
            query_lens=query_lens,
            kv_lens=kv_lens,
            blocks=blocks,
            block_size=self.block_size,
            device=self.kv_lens.device,
        )

    def by_token(self) -> RaggedBatch:
        """Returns the batch with every query as a request of its own, and `batch_invariant`.

        So a query's work has the same shape whether it is a decode or one of a prompt. For attention only.
        """
        if self.max_query_len == 1:
            return replace(self, batch_invariant=True, scratch={})
        kv_lens: list[int] = []
        blocks: list[Sequence[int]] = []
        for query_len, kv_len, row in zip(self.query_lens_host, self.kv_lens_host, self.blocks, strict=True):
            kv_lens += range(kv_len - query_len + 1, kv_len + 1)
            blocks += [row] * query_len
        by_token = RaggedBatch.build(
            query_lens=[1] * len(kv_lens),
            kv_lens=kv_lens,
            blocks=blocks,
            block_size=self.block_size,
            device=self.kv_lens.device,
        )
        return replace(by_token, batch_invariant=True)

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        blocks: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str,
    ) -> RaggedBatch:
        """Builds the batch from host lists; one copy to the device.

        Args:
            query_lens: New tokens of each request, at least 1.
            kv_lens: K/V length of each request with its new tokens, at least its query length.
            blocks: Block ids of each request in order, fastest as a range where they are consecutive; more than kv_len
                needs is fine (a reservation).
            block_size: Tokens in a block.
            device: Where the tensors go.

        Raises:
            ValueError: The lists disagree in length, a length is out of range, or a request has too few blocks.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}.")
        if not (len(query_lens) == len(kv_lens) == len(blocks)):
            raise ValueError(
                "query_lens, kv_lens and blocks must name the same requests, got "
                f"{len(query_lens)}, {len(kv_lens)} and {len(blocks)} of them."
            )
        if not query_lens:
            raise ValueError("A RaggedBatch needs at least one request, got none.")

        table: list[Sequence[int]] = []
        slots: list[int] = []
        first_slots: list[int | None] = []
        last_block = 0
        for index, (query_len, kv_len, owned) in enumerate(zip(query_lens, kv_lens, blocks, strict=True)):
            if not 1 <= query_len <= kv_len:
                raise ValueError(f"Request {index}: needs 1 <= query_len <= kv_len, got {query_len} and {kv_len}.")
            num_blocks = -(-kv_len // block_size)
            if len(owned) < num_blocks:
                raise ValueError(
                    f"Request {index}: kv_len {kv_len} needs {num_blocks} blocks of {block_size} slots, "
                    f"got {len(owned)}."
                )
            used = owned[:num_blocks]
            run = range(used[0], used[0] + num_blocks)
            if used == run or list(used) == list(run):
                used, lowest, highest = run, run[0], run[-1]
            else:
                lowest, highest = min(used), max(used)
            if lowest < 0:
                raise ValueError(f"Request {index}: block ids must not be negative, got {lowest}.")
            last_block = max(last_block, highest)
            table.append(used)
            start = kv_len - query_len
            if used is run:
                first = lowest * block_size
                first_slots.append(first)
                slots.extend(range(first + start, first + kv_len))
            else:
                first_slots.append(None)
                slots.extend(used[p // block_size] * block_size + p % block_size for p in range(start, kv_len))

        firsts = [] if None in first_slots else [blocks[0] for blocks in table]
        num_requests = len(table)
        # One tensor, cut up: making one takes longer than a few numbers more in it.
        cu_seqlens_q, kv_lens_there, first_blocks = torch.tensor(
            [0, *accumulate(query_lens), *kv_lens, *firsts], dtype=torch.int32, device="cpu"
        ).split_with_sizes([num_requests + 1, num_requests, len(firsts)])
        batch = cls(
            cu_seqlens_q=cu_seqlens_q,
            kv_lens=kv_lens_there,
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device="cpu"),
            first_blocks=first_blocks,
            blocks=tuple(table),
            block_size=block_size,
            query_lens_host=tuple(query_lens),
            kv_lens_host=tuple(kv_lens),
            first_slots=tuple(first_slots),
            required_slots=(last_block + 1) * block_size,
        )
        return batch.to(device)

    @classmethod
    def decodes(
        cls, *, kv_lens: Tensor, slot_mapping: Tensor, block_table: Tensor, block_size: int, max_kv_len: int
    ) -> RaggedBatch:
        """Returns the `bounded` batch of requests with one query each, of which only the device knows the lengths.

        Whatever is launched for it may be launched again after the tensors have got other contents.

        Args:
            kv_lens: (num_requests,) int32, each at most `max_kv_len`.
            slot_mapping: (num_requests,) int64.
            block_table: (num_requests, max_num_blocks) int32, wide enough for `max_kv_len`.
            block_size: Tokens in a block.
            max_kv_len: Bound of the K/V lengths.
        """
        num_requests, width = block_table.shape
        if width * block_size < max_kv_len:
            raise ValueError(f"max_kv_len {max_kv_len} needs more blocks than the table's {width} of {block_size}.")
        return cls(
            cu_seqlens_q=torch.arange(num_requests + 1, dtype=torch.int32, device=kv_lens.device),
            kv_lens=kv_lens,
            slot_mapping=slot_mapping,
            first_blocks=kv_lens[:0],
            blocks=(),
            block_size=block_size,
            query_lens_host=(1,) * num_requests,
            kv_lens_host=(max_kv_len,) * num_requests,
            first_slots=(None,) * num_requests,
            bounded=True,
            scratch={"block_table": block_table},
        )


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns tensors of the host on `device`: by one copy, which nobody waits for; themselves if that is the host."""
    if device.type == "cpu":
        return list(tensors)
    return unpack(pack(tensors, pinned=device.type == "cuda").to(device, non_blocking=True), tensors)


def pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """Returns the bytes of `tensors`, one after another, in new memory of the host, page-locked if `pinned`."""
    # Page-locked memory comes from PyTorch's cache, which keeps it until the copies that read it are done.
    packed = torch.empty(sum(map(_aligned, tensors)), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    for place, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        place.copy_(tensor)
    return packed


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of `packed` with the shapes and dtypes of `tensors`, as `pack` lays them out."""
    parts = packed.split_with_sizes(list(map(_aligned, tensors)))
    return [part[: like.nbytes].view(like.dtype).view(like.shape) for part, like in zip(parts, tensors, strict=True)]


def _aligned(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a pack. Triton compiles a kernel once more for pointers that are not so aligned."""
    return -(-tensor.nbytes // 16) * 16
