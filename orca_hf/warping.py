"""Probabilities of the rows of many sampled calls, computed together where they are asked for in the same way."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from orca_kernels.ragged import upload

# Warpers that look at the logits of one row at a time and at nothing else. Every operation in them works on whole rows,
# so a row comes out the same to the last bit in any company; a sum over a row, as in typical sampling, would not.
STACKABLE = frozenset({MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper})
# Elements of a stack: more would leave the cache, where sorting becomes slower than row by row.
_MAX_ELEMENTS = 2**18


class RowProbabilities:
    """The probabilities of an iteration's rows, made when the first of a stack is asked for.

    Args:
        logits: (num_rows, vocab_size) of the iteration.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._stacks: dict[Any, list[int]] = {}
        self._stack_of: dict[int, tuple[torch.device, list[int]]] = {}
        self._made: dict[int, Tensor] = {}

    def want(self, rows: list[int], warpers: LogitsProcessorList, device: torch.device) -> None:
        """Announce that `rows` will be asked for, through `warpers` and on `device`."""
        alike = device, tuple((type(warper), *map(_told_by, vars(warper).values())) for warper in warpers)
        for row in rows:
            stack = self._stacks.setdefault(alike, [])
            stack.append(row)
            self._stack_of[row] = device, stack
            if (len(stack) + 1) * self._logits.shape[1] > _MAX_ELEMENTS:
                del self._stacks[alike]

    def take(self, row: int, warpers: LogitsProcessorList) -> Tensor:
        """(1, vocab_size) probabilities of a row that was announced with the same warpers."""
        if row not in self._made:
            device, rows = self._stack_of[row]
            scores = select_rows(self._logits, rows).to(device=device, dtype=torch.float32)
            with torch.inference_mode(False), torch.no_grad():
                for warper in warpers:
                    scores = warper(None, scores)
                probs = torch.nn.functional.softmax(scores, dim=-1)
            self._made.update(zip(rows, probs.split(1), strict=True))
        return self._made.pop(row)


def _told_by(value: Any) -> Any:
    return repr(value) if isinstance(value, (int, float)) else id(value)


def select_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """The given rows of `logits`: a view where they are neighbours."""
    stop = rows[0] + len(rows)
    if rows == list(range(rows[0], stop)):
        return logits[rows[0] : stop]
    # An index on the host would be waited for until it is copied.
    (index,) = upload([torch.tensor(rows, dtype=torch.int64)], logits.device)
    return logits.index_select(0, index)
