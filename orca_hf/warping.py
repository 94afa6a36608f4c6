"""Probabilities of the rows of many sampled calls, computed together where they are asked for in the same way."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from orca_kernels import compiled
from orca_kernels.ragged import upload

# Warpers that look at the logits of one row at a time and at nothing else. Every operation in them works on whole rows,
# so a row comes out the same to the last bit in any company; a sum over a row, as in typical sampling, would not.
STACKABLE = frozenset({MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper})
# Elements of a stack: more would leave the cache, where sorting becomes slower than row by row.
_MAX_ELEMENTS = 2**18


Warper = Callable[[Any, Tensor], Tensor]  # of token ids and (num_rows, vocab_size) scores


def faster(warper: Warper) -> Warper:
    """A warper that makes the same of scores in less time; `warper` itself where none is known."""
    kernels = compiled.loaded()
    if kernels is None or type(warper) is not TopPLogitsWarper or not _is_known(TopPLogitsWarper.__call__, kernels):
        return warper
    return _TopP(warper, kernels)


@lru_cache(maxsize=2)
def _is_known(top_p: Callable[..., Tensor], kernels: compiled.Library) -> bool:
    """Whether transformers' warper does what is known of it: another release's, or what someone put there, may not."""
    scores = torch.randn(3, 999, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu") * 4
    warpers = [TopPLogitsWarper(0.9), TopPLogitsWarper(0.3, filter_value=-1.0, min_tokens_to_keep=5)]
    return all(torch.equal(_TopP(each, kernels)(None, scores), top_p(each, None, scores)) for each in warpers)


class _TopP:
    """Top-p by the compiled kernel; rows in which a rounding decides are transformers' own."""

    def __init__(self, warper: TopPLogitsWarper, kernels: compiled.Library) -> None:
        self._warper = warper
        self._kernels = kernels

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        is_plain = type(scores) is Tensor and scores.device.type == "cpu" and scores.dtype == torch.float32
        if not (is_plain and scores.is_contiguous()):
            return self._warper(input_ids, scores)
        kept, is_done = self._kernels.top_p(
            scores,
            self._warper.top_p,
            min_tokens_to_keep=self._warper.min_tokens_to_keep,
            filter_value=self._warper.filter_value,
        )
        if not is_done.all():
            kept[~is_done] = self._warper(input_ids, scores[~is_done])
        return kept


def warped_probabilities(logits: Tensor, warpers: LogitsProcessorList) -> Tensor:
    """(num_rows, vocab_size) in fp32, of logits of the same shape through `warpers`, all of `STACKABLE`."""
    scores = logits.to(dtype=torch.float32)
    for warper in warpers:
        scores = faster(warper)(None, scores)
    return torch.nn.functional.softmax(scores, dim=-1)


def stack_size(vocab_size: int) -> int:
    """Rows that are best warped together."""
    return max(1, _MAX_ELEMENTS // vocab_size)


class RowProbabilities:
    """The probabilities of an iteration's rows, made when the first of a stack is asked for.

    Args:
        logits: (num_rows, vocab_size) of the iteration.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._stacks: dict[Any, list[int]] = {}
        self._stack_of: dict[int, list[int]] = {}
        self._made: dict[int, Tensor] = {}

    def want(self, rows: list[int], warpers: LogitsProcessorList, device: torch.device) -> None:
        """Announce that `rows` will be asked for, through `warpers` and on `device`."""
        alike = device, tuple((type(warper), *map(_told_by, vars(warper).values())) for warper in warpers)
        for row in rows:
            stack = self._stacks.setdefault(alike, [])
            stack.append(row)
            self._stack_of[row] = stack
            if len(stack) == stack_size(self._logits.shape[1]):
                del self._stacks[alike]

    def take(self, row: int, warpers: LogitsProcessorList, device: torch.device) -> Tensor:
        """(1, vocab_size) probabilities of a row: alone, or with those that were announced with the same warpers."""
        if row not in self._made:
            rows = self._stack_of.get(row, [row])
            with torch.inference_mode(False), torch.no_grad():
                probs = warped_probabilities(select_rows(self._logits, rows).to(device), warpers)
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
    (index,) = upload([torch.tensor(rows, dtype=torch.int64, device="cpu")], logits.device)
    return logits.index_select(0, index)
