"""The reservation ledger over a block allocator: who holds which K/V slots. Knows no tensors.

Orca, section 4.2: a request's slots are reserved when it is first scheduled, enough for its last token, and come
back when it ends; so no admitted request can ever be stuck for memory. We count them in whole blocks, which a block
table maps, so that any free block will do; consecutive blocks are preferred, so that a reader that wants a request's
K/V in one piece nearly always finds them so.
"""

from bisect import bisect_left

from orca_hf.errors import CapacityError
from orca_hf.request import Request


class BlockAllocator:
    """Hands out block numbers, as runs of consecutive ones where it can.

    Free blocks are kept as disjoint, non-adjacent runs sorted by their start.
    """

    def __init__(self, num_blocks: int) -> None:
        self._starts: list[int] = [0] if num_blocks else []
        self._lengths: list[int] = [num_blocks] if num_blocks else []
        self.num_free = num_blocks

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks: the smallest run that holds them (the lowest of equals), else the largest runs.

        Raises:
            CapacityError: Fewer than `count` blocks are free.
        """
        if count > self.num_free:
            raise CapacityError(f"{count} blocks were asked for, {self.num_free} are free.")
        fitting = [index for index, length in enumerate(self._lengths) if length >= count]
        if fitting:
            return tuple(self._take(min(fitting, key=lambda index: self._lengths[index]), count))
        blocks: list[int] = []
        while len(blocks) < count:
            largest = max(range(len(self._lengths)), key=lambda index: self._lengths[index])
            blocks += self._take(largest, min(count - len(blocks), self._lengths[largest]))
        return tuple(blocks)

    def _take(self, index: int, count: int) -> range:
        start = self._starts[index]
        if count == self._lengths[index]:
            del self._starts[index], self._lengths[index]
        else:
            self._starts[index] += count
            self._lengths[index] -= count
        self.num_free -= count
        return range(start, start + count)

    def free(self, blocks: tuple[int, ...]) -> None:
        """Take `blocks` back, joining them with their free neighbours."""
        first = 0
        for index in range(1, len(blocks) + 1):
            if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
                self._insert(blocks[first], index - first)
                first = index

    def _insert(self, start: int, length: int) -> None:
        index = bisect_left(self._starts, start)
        joins_left = index > 0 and self._starts[index - 1] + self._lengths[index - 1] == start
        joins_right = index < len(self._starts) and start + length == self._starts[index]
        self.num_free += length
        if joins_left:
            self._lengths[index - 1] += length + (self._lengths[index] if joins_right else 0)
            if joins_right:
                del self._starts[index], self._lengths[index]
        elif joins_right:
            self._starts[index] = start
            self._lengths[index] += length
        else:
            self._starts.insert(index, start)
            self._lengths.insert(index, length)


class KVManager:
    """The ledger of Algorithm 1: `n_rsrv <= n_slots` at all times.

    Args:
        num_slots: Slots there are; rounded down to whole blocks.
        block_size: Slots in a block.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_slots // block_size
        self._allocator = BlockAllocator(self.num_blocks)

    @property
    def num_slots(self) -> int:
        """Slots there are (`n_slots`)."""
        return self.num_blocks * self.block_size

    @property
    def num_reserved(self) -> int:
        """Slots reserved (`n_rsrv`), counted in whole blocks."""
        return (self.num_blocks - self._allocator.num_free) * self.block_size

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.block_size)

    def check_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        """Refuse what could never be admitted, however long it waited.

        Raises:
            CapacityError: Its slots are more than the pool has.
        """
        num_slots = prompt_len + max_new_tokens - 1
        if self.blocks_for(num_slots) > self.num_blocks:
            raise CapacityError(
                f"prompt {prompt_len:,} + max_new_tokens {max_new_tokens:,} needs {num_slots:,} slots, the pool has "
                f"{self.num_slots:,}; raise max_slots (or memory_fraction) in OrcaConfig, or shorten the request."
            )

    def can_reserve(self, request: Request) -> bool:
        """Whether `request` could be admitted now."""
        return self.blocks_for(request.max_slots) <= self._allocator.num_free

    def reserve(self, request: Request) -> None:
        """Give `request` its blocks; `can_reserve` must hold."""
        assert not request.blocks, f"{request} holds blocks already"
        request.blocks = self._allocator.allocate(self.blocks_for(request.max_slots))
        consecutive = request.blocks[-1] - request.blocks[0] == len(request.blocks) - 1 and all(
            right == left + 1 for left, right in zip(request.blocks, request.blocks[1:], strict=False)
        )
        request.first_slot = request.blocks[0] * self.block_size if consecutive else None

    def release(self, request: Request) -> None:
        """Take the blocks of `request` back, if it holds any."""
        if request.blocks:
            self._allocator.free(request.blocks)
            request.blocks = ()
            request.first_slot = None
