"""Log-probabilities of tokens under the model's raw logits, before any processor."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from orca_hf.patches import model_lock


class TokenLogprobs(NamedTuple):
    """How likely a token was.

    Attributes:
        logprob: Its own log-probability.
        top: The most likely tokens there, as (token id, log-probability), likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """The log-probabilities of `tokens` under `logits`: (len(tokens), vocab_size)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, dtype=torch.long, device=logprobs.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return [
        TokenLogprobs(logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, row_ids, row_values in zip(chosen, ids.tolist(), values.tolist(), strict=True)
    ]


def sequence_logprobs(model: PreTrainedModel, input_ids: Tensor, num_top: int, start: int = 1) -> list[TokenLogprobs]:
    """The log-probabilities of the tokens from `start` on, each after those before it.

    Args:
        model: Run once, natively, while no iteration runs on it.
        input_ids: (1, length), at least one token.
        num_top: How many of the most likely tokens to give at each place.
        start: The first token asked for, at least 1.
    """
    with model_lock(model), torch.inference_mode(False), torch.no_grad():
        # A clone: a tensor made in inference mode could not be used here.
        logits = model(input_ids=input_ids.clone(), use_cache=False, return_dict=True).logits[0]
    return token_logprobs(logits[start - 1 : -1], input_ids[0, start:].tolist(), num_top)
