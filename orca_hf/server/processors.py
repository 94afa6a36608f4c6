"""OpenAI's penalties and biases as logits processors: what generate() has no option for."""

from collections.abc import Mapping

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessor


class OpenAIPenalties(LogitsProcessor):
    """Lowers what has been said, by OpenAI's definition.

    `logits[t] -= frequency * count(t) + presence * (count(t) > 0)`, counted over the answer, not over the prompt.

    Args:
        prompt_len: Tokens of the prompt.
        presence: For a token that has come.
        frequency: For each time that it has come.
    """

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self.prompt_len = prompt_len
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        """(num_rows, known) tokens and (num_rows, vocab_size) scores to scores."""
        said = input_ids[:, self.prompt_len :]
        counts = torch.zeros_like(scores).scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        lowered: Tensor = scores - self.frequency * counts - self.presence * (counts > 0)
        return lowered  # type: ignore[return-value]


class LogitBias(LogitsProcessor):
    """Adds to the logits of some tokens.

    Args:
        biases: By token id.
        vocab_size: Token ids that the model has logits for.
        device: Of the logits.
    """

    def __init__(self, biases: Mapping[int, float], vocab_size: int, device: torch.device) -> None:
        self.bias = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.bias[list(biases)] = torch.tensor(list(biases.values()), dtype=torch.float32, device=device)

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        """(num_rows, known) tokens and (num_rows, vocab_size) scores to scores."""
        biased: Tensor = scores + self.bias.to(scores.dtype)
        return biased  # type: ignore[return-value]
