"""The allocator never gives a block twice, prefers consecutive ones, and joins what comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orca_hf.errors import CapacityError
from orca_hf.kv_manager import BlockAllocator, KVManager
from orca_hf.request import Request


@pytest.mark.parametrize(
    ("taken", "freed", "count", "expected"),
    [
        pytest.param([3, 2], [], 4, (5, 6, 7, 8), id="the next blocks"),
        pytest.param([3, 2, 5], [0], 2, (0, 1), id="the start of a run"),
        pytest.param([3, 1, 2, 4], [0, 2], 2, (4, 5), id="the smallest run that holds them"),
        pytest.param([2, 1, 2, 5], [0, 2], 2, (0, 1), id="the lowest of equal runs"),
        pytest.param([2, 3, 5], [0, 1], 5, (0, 1, 2, 3, 4), id="a run joined with the one before it"),
        pytest.param([2, 3, 5], [1, 0], 5, (0, 1, 2, 3, 4), id="a run joined with the one after it"),
        pytest.param([2, 3, 2, 3], [0, 2, 1], 7, (0, 1, 2, 3, 4, 5, 6), id="a run joined with both sides"),
        pytest.param([2, 3, 5], [2, 1, 0], 10, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), id="everything, joined again"),
        pytest.param([1, 1, 3, 1, 4], [0, 2], 4, (2, 3, 4, 0), id="the largest runs where none holds them"),
    ],
)
def test_allocator_takes(taken: list[int], freed: list[int], count: int, expected: tuple[int, ...]) -> None:
    """Of 10 blocks, runs of the sizes `taken` are allocated and those at the indices `freed` come back."""
    allocator = BlockAllocator(10)
    runs = [allocator.allocate(size) for size in taken]
    for index in freed:
        allocator.free(runs[index])
    num_free = allocator.num_free
    assert allocator.allocate(count) == expected
    assert allocator.num_free == num_free - count


def test_allocator_refuses_more_than_is_free_and_keeps_what_it_has() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    with pytest.raises(CapacityError, match="4 blocks were asked for, 3 are free"):
        allocator.allocate(4)
    assert allocator.allocate(3) == (1, 2, 3)


@pytest.mark.parametrize(("num_slots", "block_size", "num_blocks"), [(64, 16, 4), (79, 16, 4), (15, 16, 0), (5, 1, 5)])
def test_slots_are_whole_blocks(num_slots: int, block_size: int, num_blocks: int) -> None:
    kv_manager = KVManager(num_slots, block_size)
    assert kv_manager.num_blocks == num_blocks
    assert kv_manager.num_slots == num_blocks * block_size
    assert kv_manager.num_reserved == 0


def test_consecutive_blocks_have_a_first_slot_and_scattered_ones_none() -> None:
    kv_manager = KVManager(num_slots=6 * 4, block_size=4)
    requests = [Request(range(8), 1) for _ in range(3)]
    for request in requests:
        kv_manager.reserve(request)
    assert [request.first_slot for request in requests] == [0, 8, 16]
    kv_manager.release(requests[0])
    kv_manager.release(requests[2])
    scattered = Request(range(16), 1)
    kv_manager.reserve(scattered)
    assert sorted(scattered.blocks) == [0, 1, 4, 5]
    assert scattered.first_slot is None


class AllocatorMachine(RuleBasedStateMachine):
    """The block allocator against a plain set of free block numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[int, ...]] = []

    @initialize(num_blocks=st.integers(0, 32))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_blocks = set(range(num_blocks))
        self.allocator = BlockAllocator(num_blocks)

    def free_runs(self) -> list[range]:
        """Maximal runs of consecutive free blocks, by start."""
        runs: list[range] = []
        for block in sorted(self.free_blocks):
            if runs and runs[-1].stop == block:
                runs[-1] = range(runs[-1].start, block + 1)
            else:
                runs.append(range(block, block + 1))
        return runs

    @rule(count=st.integers(1, 6))
    def allocate(self, count: int) -> None:
        if count > len(self.free_blocks):
            with pytest.raises(CapacityError, match=f"{count} blocks were asked for, {len(self.free_blocks)} are free"):
                self.allocator.allocate(count)
            return
        runs = self.free_runs()
        fitting = [run for run in runs if len(run) >= count]
        blocks = self.allocator.allocate(count)
        if fitting:
            run = min(fitting, key=len)  # the lowest of the shortest
            assert blocks == tuple(run[:count])
        else:
            expected: list[int] = []
            for run in sorted(runs, key=len, reverse=True):
                expected += run[: count - len(expected)]
            assert blocks == tuple(expected)
        self.free_blocks -= set(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.free_blocks)
    @rule()
    def allocate_the_longest_run(self) -> None:
        self.allocate(max(map(len, self.free_runs())))

    @precondition(lambda self: self.free_blocks)
    @rule()
    def allocate_all(self) -> None:
        self.allocate(len(self.free_blocks))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 31))
    def free(self, index: int) -> None:
        blocks = self.held.pop(index % len(self.held))
        self.allocator.free(blocks)
        self.free_blocks |= set(blocks)

    @invariant()
    def held_and_free_blocks_are_all_blocks(self) -> None:
        held = [block for blocks in self.held for block in blocks]
        assert len(held) == len(set(held))
        assert set(held) | self.free_blocks == set(range(self.num_blocks))
        assert not set(held) & self.free_blocks
        assert self.allocator.num_free == len(self.free_blocks)

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for blocks in self.held:
            self.allocator.free(blocks)
        assert self.allocator.allocate(self.num_blocks) == tuple(range(self.num_blocks))


TestBlockAllocator = AllocatorMachine.TestCase
TestBlockAllocator.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
