"""From an Iteration to the tensors of one forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from orca_hf.request import Request
from orca_hf.scheduler import Iteration
from orca_kernels import RaggedBatch


@dataclass(frozen=True)
class ForwardBatch:
    """The flattened batch that selective batching runs everything but attention on (Orca, section 4.1).

    Attributes:
        input_ids: (1, num_rows) int64: the steps' tokens, one after another, then padding if it was asked for.
        position_ids: (1, num_rows) int64: each token's position in its own request.
        sampling_rows: (num_sampling,) int64: rows whose logits are wanted, in order; never empty; padded likewise.
        ragged: What the attention kernels need to tell the requests apart.
    """

    input_ids: Tensor
    position_ids: Tensor
    sampling_rows: Tensor
    ragged: RaggedBatch

    @cached_property
    def attention_mask(self) -> Tensor:
        """(1, num_rows) int64, all ones: nothing that a model would have to know of is padding."""
        return torch.ones_like(self.input_ids)


def build_batch(iteration: Iteration, *, block_size: int, device: torch.device, pad_to: int = 1) -> ForwardBatch:
    """Builds the tensors of `iteration` on `device`.

    Args:
        iteration: At least one step; every request in it is admitted.
        block_size: Slots in a K/V block.
        device: Where the model takes its input.
        pad_to: The numbers of rows and of sampling rows become multiples of it.
    """
    tokens: list[int] = []
    positions: list[int] = []
    sampling_rows: list[int] = []
    for step in iteration.steps:
        stop = step.start + step.length
        tokens += step.request.tokens(step.start, stop)
        tokens += step.draft
        positions += range(step.start, stop)
        sampling_rows += range(len(tokens) - step.num_samples, len(tokens))
    # A forward over nothing but prompt chunks has no row to sample; one row keeps every model's head well-formed.
    rows = sampling_rows or [len(tokens) - 1]
    rows += rows[-1:] * (-len(rows) % pad_to)
    padding = [0] * (-len(tokens) % pad_to)
    tokens += padding
    positions += padding
    ragged = RaggedBatch.build(
        query_lens=[step.length for step in iteration.steps],
        kv_lens=[step.start + step.length for step in iteration.steps],
        blocks=[_blocks(step.request, block_size) for step in iteration.steps],
        block_size=block_size,
        device="cpu",
    )
    num_rows = len(tokens)
    inputs: Sequence[Tensor] = torch.tensor(
        [*tokens, *positions, *rows], dtype=torch.int64, device="cpu"
    ).split_with_sizes([num_rows, num_rows, len(rows)])
    if device.type != "cpu":
        ragged, inputs = ragged.to_with(device, inputs)
    return ForwardBatch(input_ids=inputs[0][None], position_ids=inputs[1][None], sampling_rows=inputs[2], ragged=ragged)


def _blocks(request: Request, block_size: int) -> Sequence[int]:
    """A request's blocks, as a range where they are consecutive: then nobody has to look at them one by one."""
    if request.first_slot is None:
        return request.blocks
    first = request.first_slot // block_size
    return range(first, first + len(request.blocks))
