"""What is asked of a submission before anything is made of it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from orca_hf.errors import RequestError


def as_row(input_ids: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """A prompt as generate() takes it: (1, prompt_len), the caller's own no more.

    Args:
        input_ids: Token ids: a list, (n,) or (1, n).
        device: Where a list's go; a tensor stays where it is.

    Raises:
        RequestError: It is none of these, or empty.
    """
    if isinstance(input_ids, Tensor):
        row = input_ids.detach().clone()
    elif all(isinstance(token, int) and not isinstance(token, bool) for token in input_ids):
        row = torch.tensor(list(input_ids), dtype=torch.long, device=device)
    else:
        raise RequestError("input_ids are to be integers: a list of token ids, or a tensor of (n,) or (1, n).")
    if row.dim() == 1:
        row = row[None]
    if row.dim() != 2 or len(row) != 1 or row.dtype not in (torch.int64, torch.int32):
        raise RequestError(
            f"input_ids are {row.dtype} of the shape {tuple(row.shape)}, but a request is one row of integers, (n,) or "
            "(1, n); submit each row by itself."
        )
    if row.shape[1] == 0:
        raise RequestError("The prompt has no tokens; give at least one (for instance the BOS token).")
    return row


def check_options(seed: int | None, deadline: float | None, logprobs: int | None) -> None:
    """Refuse what these cannot be.

    Raises:
        RequestError: One of them is not what it should be.
    """
    if seed is not None and (not _is_int(seed) or not -(2**63) <= seed < 2**64):
        raise RequestError(f"seed is {seed!r}, but must be an integer as torch.manual_seed takes it, or None.")
    if deadline is not None and (
        isinstance(deadline, bool) or not isinstance(deadline, int | float) or math.isnan(deadline)
    ):
        raise RequestError(f"deadline is {deadline!r}, but must be a number of seconds, or None.")
    if logprobs is not None and (not _is_int(logprobs) or logprobs < 0):
        raise RequestError(f"logprobs is {logprobs!r}, but must be a number of tokens, at least 0, or None.")


def check_config(generation_config: GenerationConfig) -> None:
    """Refuse a configuration that asks for several rows.

    Raises:
        RequestError: It does.
    """
    if (generation_config.num_return_sequences or 1) != 1:
        raise RequestError(
            f"num_return_sequences is {generation_config.num_return_sequences}, but a request is one row; submit it "
            "as often as you want answers, with seeds that differ."
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
