"""torch.multinomial, one token a row, in a tenth of the time where the kernels are compiled."""

from functools import lru_cache

import torch
from torch import Tensor

from orca_kernels import compiled


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """`torch.multinomial(probs, 1, generator=generator)`: the same tokens, and the generator goes where it would.

    Args:
        probs: (num_rows, vocab_size), not negative.
        generator: Of the same device; the default one, or one that no other thread draws from.

    Returns:
        (num_rows,) int64.

    Raises:
        RuntimeError: PyTorch's, where a row is no distribution.
    """
    kernels = compiled.loaded()
    # PyTorch fills memory with random numbers, whatever the order of rows and columns in it.
    is_plain = probs.device.type == "cpu" and probs.dtype == torch.float32 and probs.is_contiguous()
    is_own = generator is not torch.default_generator  # which other threads may draw from at the same time
    if kernels is not None and is_plain and is_own and _draws_alike(kernels):
        tokens = kernels.draw(probs, generator)
        if tokens is not None:
            return tokens
    return _native(probs, generator)


def _native(probs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)


@lru_cache(maxsize=1)
def _draws_alike(kernels: compiled.Library) -> bool:
    """Whether this PyTorch draws as the kernel was written to: how it makes numbers is its own affair."""
    ours, theirs, source = (torch.Generator("cpu").manual_seed(seed) for seed in (1, 1, 2))
    probs = torch.rand(4, 999, generator=source, dtype=torch.float32, device="cpu").square().softmax(dim=-1)
    for _ in range(3):
        tokens = kernels.draw(probs, ours)
        if tokens is None or not torch.equal(tokens, _native(probs, theirs)):
            return False
    return torch.equal(ours.get_state(), theirs.get_state())
