"""CUDA graphs: iterations of decodes alone, launched as one thing instead of kernel by kernel.

A graph is captured for a bucket: so many rows, K/V up to such a length, both powers of two. An iteration takes the
smallest bucket that holds it. What the graph reads lies in the bucket's own buffers, which an iteration fills before
the replay; rows that it has no request for write to a block of the pool that is nobody's, and are thrown away.

Nothing is trusted. When work begins after an idle time, in which the user may have changed the model in any way, each
bucket's first replay is held against the plain iteration; a graph that has come to differ is captured anew. Where one
differs that was captured just now, or cannot be captured, the model runs without graphs, and says why. A parameter
that has moved is noticed in every iteration. What changes in another way in the middle of work is not: a streamer that
switches an adapter off, a tensor that a module keeps outside of its parameters and buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from orca_hf.batch import ForwardBatch
from orca_hf.errors import UnsupportedError
from orca_hf.parity import disagreement
from orca_hf.scheduler import Iteration
from orca_kernels import RaggedBatch
from orca_kernels.ragged import pack, unpack
from orca_kernels.tiles import next_power_of_two

logger = logging.getLogger(__name__)

_MIN_KV_LEN = 256  # below it another bucket would save less than its graph takes


class Graph(Protocol):
    """A recorded computation; `CudaGraph`, or what a test puts in its place.

    Args:
        device: Where it computes.
    """

    def __init__(self, device: torch.device) -> None: ...

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """The reason why there are no graphs on `device`, if so."""

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Record what `run` does; it may be called several times. Returns what `run` did, where replays leave it."""

    def replay(self) -> None:
        """Do it once more, with what its inputs hold now."""


class CudaGraph:
    """A CUDA graph with memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """The reason why there are no graphs on `device`, if so."""
        return None if device.type == "cuda" else f"the model is on {device}"

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Record what `run` does, after a first time on the side, in which kernels are compiled."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads may do with the device what they like meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                return run()

    def replay(self) -> None:
        """Do it once more."""
        with torch.cuda.device(self._device):
            self._graph.replay()


class _Bucket:
    """A graph, the buffers that it reads, and how an iteration gets into them."""

    def __init__(self, rows: int, max_kv_len: int, block_size: int, spare_block: int, device: torch.device) -> None:
        self._rows = rows
        self._block_size = block_size
        self._spare_block = spare_block
        self._tables: list[tuple[int, ...]] = []  # the requests' blocks, as the block table has them
        self._width = -(-max_kv_len // block_size)
        self._pinned = device.type == "cuda"
        self._inputs = pack(self._lay_out([], [], [], []), pinned=False).to(device)
        token_ids, positions, slots, kv_lens = unpack(self._inputs, self._lay_out([], [], [], []))
        self._block_table = torch.full((rows, self._width), spare_block, dtype=torch.int32, device=device)
        self.batch = ForwardBatch(
            input_ids=token_ids[None],
            position_ids=positions[None],
            sampling_rows=torch.arange(rows, dtype=torch.int64, device=device),
            ragged=RaggedBatch.decodes(
                kv_lens=kv_lens,
                slot_mapping=slots,
                block_table=self._block_table,
                block_size=block_size,
                max_kv_len=max_kv_len,
            ),
        )
        self._graph: Graph | None = None
        self._logits: Tensor | None = None

    def _lay_out(self, tokens: list[int], positions: list[int], slots: list[int], kv_lens: list[int]) -> list[Tensor]:
        """The inputs on the host, with rows that are nobody's after the others."""
        spare = self._rows - len(tokens)
        nobodys = self._spare_block * self._block_size
        wide = torch.tensor(
            [*tokens, *[0] * spare, *positions, *[0] * spare, *slots, *[nobodys] * spare],
            dtype=torch.int64,
            device="cpu",
        )
        return [*wide.split(self._rows), torch.tensor([*kv_lens, *[1] * spare], dtype=torch.int32, device="cpu")]

    def capture(self, graph: Graph, forward: Callable[[ForwardBatch], Tensor]) -> None:
        """Capture the forward over this bucket's buffers; they must hold an iteration."""
        self._logits = graph.capture(lambda: forward(self.batch))
        self._graph = graph

    def fill(self, iteration: Iteration) -> None:
        """Put an iteration into the buffers, by one copy, and another where its requests are not the last one's."""
        size = self._block_size
        tokens, positions, slots, kv_lens, tables = [], [], [], [], []
        for request, position, _, _, _ in iteration.steps:
            tokens += request.tokens(position, position + 1)
            positions.append(position)
            slots.append(request.blocks[position // size] * size + position % size)
            kv_lens.append(position + 1)
            tables.append(request.blocks)
        inputs = pack(self._lay_out(tokens, positions, slots, kv_lens), pinned=self._pinned)
        self._inputs.copy_(inputs, non_blocking=True)
        if tables != self._tables:
            owned = [[*blocks[: self._width], *[0] * (self._width - len(blocks))] for blocks in tables]
            spare = [[self._spare_block] * self._width] * (self._rows - len(owned))
            blocks = torch.tensor(owned + spare, dtype=torch.int32, device="cpu")
            (table,) = unpack(pack([blocks], pinned=self._pinned), [self._block_table])
            self._block_table.copy_(table, non_blocking=True)
            self._tables = tables

    def run(self, iteration: Iteration) -> Tensor:
        """(num_steps, vocab_size) logits of an iteration, by the graph."""
        assert self._graph is not None
        assert self._logits is not None
        self.fill(iteration)
        self._graph.replay()
        return self._logits[: len(iteration.steps)].clone()  # the next replay writes to the same memory


class DecodeGraphs:
    """The graphs of one model on one K/V pool.

    Args:
        graph_type: What records a computation.
        model: Whose parameters a graph has the addresses of.
        device: Where the model takes its input.
        block_size: Slots in a K/V block.
        spare_block: A block of the pool that is no request's.
        given_up: Why there are to be none, if that is known already.

    Attributes:
        given_up: Why there are no graphs; None while there may be.
    """

    def __init__(
        self,
        graph_type: type[Graph],
        model: nn.Module,
        *,
        device: torch.device,
        block_size: int,
        spare_block: int,
        given_up: str | None,
    ) -> None:
        self.given_up = given_up
        self._graph_type = graph_type
        self._model = model
        self._device = device
        self._block_size = block_size
        self._spare_block = spare_block
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._held: set[tuple[int, int]] = set()  # buckets that were held against a plain iteration in this work
        self._addresses: list[int] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def start(self) -> None:
        """Called when work begins after an idle time."""
        self._held.clear()

    def clear(self) -> None:
        """Give the graphs and their memory back."""
        self._buckets.clear()
        self._held.clear()

    def run(
        self, iteration: Iteration, plain: Callable[[], Tensor], forward: Callable[[ForwardBatch], Tensor]
    ) -> Tensor:
        """The logits of an iteration: by a graph, or by `plain` where it cannot be, or is to be held against that.

        Args:
            iteration: What to compute.
            plain: Computes it without a graph.
            forward: Computes the logits of all rows of a batch; this is what is captured.
        """
        if self.given_up is not None or not all(step.length == 1 and step.samples for step in iteration.steps):
            return plain()
        addresses = _addresses(self._model.modules())
        if addresses != self._addresses:
            self.clear()
            self._addresses = addresses
        longest = max(step.start + 1 for step in iteration.steps)
        name = next_power_of_two(len(iteration.steps)), max(_MIN_KV_LEN, next_power_of_two(longest))
        if name in self._held:
            return self._buckets[name].run(iteration)
        expected = plain()
        try:
            self._hold(name, iteration, forward, expected)
        except Exception as error:  # noqa: BLE001 - whatever a model not made for it raises; the logits are there
            self.given_up = str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
            self.clear()
            logger.warning("Orca runs without CUDA graphs: %s.", self.given_up)
        return expected

    def _hold(
        self,
        name: tuple[int, int],
        iteration: Iteration,
        forward: Callable[[ForwardBatch], Tensor],
        expected: Tensor,
    ) -> None:
        """Hold a bucket's logits against those of the plain iteration, capturing what is not there or out of date."""
        if name in self._buckets and disagreement(self._buckets[name].run(iteration), expected):
            self.clear()
        if name not in self._buckets:
            bucket = _Bucket(*name, self._block_size, self._spare_block, self._device)
            bucket.fill(iteration)
            bucket.capture(self._graph_type(self._device), forward)
            if wrong := disagreement(bucket.run(iteration), expected):
                raise UnsupportedError(f"the logits of a captured graph differ from a plain iteration's {wrong}")
            self._buckets[name] = bucket
        self._held.add(name)


def _addresses(modules: Iterable[nn.Module]) -> list[int]:
    """Where each parameter and buffer of `modules` lies."""
    tensors: list[Any] = []
    for module in modules:
        tensors += module._parameters.values()
        tensors += module._buffers.values()
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]
