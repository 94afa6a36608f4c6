"""Log-probabilities of tokens under the model's raw logits, before any processor."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from orca_hf.patches import model_lock
from orca_hf.runner import CACHE_FIELD


class TokenLogprobs(NamedTuple):
    """How likely a token was.

    Attributes:
        logprob: Its own log-probability.
        top: The most likely tokens there, as (token id, log-probability), likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


_MAX_ELEMENTS = 2**22  # of the logits that are made, or looked at, together
_MAX_ROWS = 128  # tokens in a piece, however small the vocabulary: iterations wait for it


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The log-probabilities of `tokens` under `logits`: (len(tokens), vocab_size). A few rows at a time."""
    found: list[TokenLogprobs] = []
    for part in logits.split(_num_rows(logits.shape[1])):
        logprobs = torch.log_softmax(part.float(), dim=-1)
        own = torch.tensor(tokens[len(found) : len(found) + len(part)], dtype=torch.long, device=logprobs.device)
        chosen = logprobs.gather(1, own[:, None])[:, 0].tolist()
        values, ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
        found += [
            TokenLogprobs(logprob, tuple(zip(row_ids, row_values, strict=True)))
            for logprob, row_ids, row_values in zip(chosen, ids.tolist(), values.tolist(), strict=True)
        ]
    return found


def sequence_logprobs(model: PreTrainedModel, input_ids: Tensor, num_top: int, start: int = 1) -> list[TokenLogprobs]:
    """The log-probabilities of the tokens from `start` on, each after those before it.

    Args:
        model: Run once, natively, while no iteration runs on it.
        input_ids: (1, length), at least one token.
        num_top: How many of the most likely tokens to give at each place.
        start: The first token asked for, at least 1.
    """
    with _forward(model):
        logits = model(input_ids=input_ids.clone(), use_cache=False, return_dict=True).logits[0]
    return token_logprobs(logits[start - 1 : -1], input_ids[0, start:].tolist(), num_top)


def logprobs_in_pieces(model: PreTrainedModel, input_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """The same for a long prompt, all but its first token, in little memory beside its K/V.

    Args:
        model: Run natively on one piece after the other, between iterations. It is one that Orca runs: what it makes of
            a token depends on those before it, and not on which of them come in the same forward.
        input_ids: (1, length), at least one token.
        num_top: How many of the most likely tokens to give at each place.
    """
    takes = inspect.signature(model.forward).parameters
    name = next((each for each in (CACHE_FIELD, "past_key_values") if each in takes), None)
    tokens = input_ids[0].tolist()
    num_rows = _num_rows(model.config.get_text_config().vocab_size)
    cache: Any = None
    found: list[TokenLogprobs] = []
    for first in range(0, len(tokens) - 1, num_rows):
        if name is None or (first and cache is None):
            return sequence_logprobs(model, input_ids, num_top)  # it keeps no K/V
        last = min(first + num_rows, len(tokens) - 1)
        with _forward(model):
            piece = input_ids[:, first:last].clone()
            output = model(input_ids=piece, use_cache=True, return_dict=True, **{name: cache})
        cache = getattr(output, name, None)
        found += token_logprobs(output.logits[0], tokens[first + 1 : last + 1], num_top)
    return found


def _num_rows(vocab_size: int) -> int:
    return max(1, min(_MAX_ROWS, _MAX_ELEMENTS // vocab_size))


@contextmanager
def _forward(model: PreTrainedModel) -> Iterator[None]:
    """Around a forward that no iteration meets. Its input is to be a clone: one of inference mode could not be used."""
    with model_lock(model), torch.inference_mode(False), torch.no_grad():
        yield
