"""The model under test, and the two generate() it is called by."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from orca_hf.bench.workload import ClientRequest
from orca_hf.config import OrcaConfig
from orca_hf.demo import demo_model_folder
from orca_hf.errors import OrcaError
from orca_hf.generate import OrcaGenerate
from orca_hf.loading import load
from orca_hf.wrapping import unwrap

Generate = Callable[..., Any]
_PAD = 0
_WARM_UP = 24  # tokens: packing weights pays from sixteen iterations on


class Subject:
    """A plain model, with native generate() as `native` and as many Orca ones as are asked for.

    Attributes:
        source: Folder or hub id it came from.
        model: The model, not wrapped. It generates greedily and without an end token unless told otherwise.
        native: Its own generate().
    """

    def __init__(self, arguments: Namespace) -> None:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        self.source = arguments.model or str(demo_model_folder())
        self.model: PreTrainedModel = unwrap(load(self.source, dtype=getattr(torch, arguments.dtype)))
        # Whatever the checkpoint says of penalties and ends: all sides shall do the same work, to its last token.
        self.model.generation_config = GenerationConfig(pad_token_id=_PAD)
        self.native: Generate = self.model.generate  # type: ignore[assignment]
        self.vocab_size: int = self.model.config.get_text_config(decoder=True).vocab_size
        self._max_slots = arguments.max_slots
        self._max_batch_tokens = arguments.max_batch_tokens or None
        self._num_speculative_tokens = arguments.num_speculative_tokens

    def orca(
        self, max_batch_size: int = 32, kind: type[OrcaGenerate] = OrcaGenerate, *, whole_prompts: bool = False
    ) -> OrcaGenerate:
        """A generate() by Orca; the model's own stays native."""
        tokens = self._max_batch_tokens
        config = OrcaConfig(
            max_batch_size=max_batch_size,
            max_batch_tokens=None if whole_prompts or tokens is None else max(tokens, max_batch_size),
            max_slots=self._max_slots,
            num_speculative_tokens=self._num_speculative_tokens,
        )
        return kind(self.model, config)

    def batch(self, requests: Sequence[ClientRequest]) -> dict[str, Any]:
        """generate()'s arguments for requests in one batch, padded on the left, run to the longest output."""
        width = max(len(request.prompt) for request in requests)
        ids = [[_PAD] * (width - len(request.prompt)) + list(request.prompt) for request in requests]
        mask = [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in requests]
        return {
            "input_ids": torch.tensor(ids, device=self.model.device),
            "attention_mask": torch.tensor(mask, device=self.model.device),
            "max_new_tokens": max(request.num_outputs for request in requests),
            "do_sample": False,
        }


@contextmanager
def ready(generate: Generate, call: dict[str, Any]) -> Iterator[None]:
    """Warms `generate` up with a call, so that trial, K/V memory and packed weights are there; frees them after.

    Raises:
        OrcaError: The model or call goes native, so that there is nothing to measure.
    """
    if isinstance(generate, OrcaGenerate) and (reasons := generate.explain(**call)):
        raise OrcaError(f"This runs natively, so Orca cannot be measured on it: {'; '.join(reasons)}.")
    generate(**{**call, "max_new_tokens": _WARM_UP})
    try:
        yield
    finally:
        if isinstance(generate, OrcaGenerate):
            generate.release()


def new_tokens(output: Tensor, call: dict[str, Any], requests: Sequence[ClientRequest]) -> list[list[int]]:
    """Each request's own tokens of a batch's output."""
    rows = output[:, call["input_ids"].shape[1] :].tolist()
    return [row[: request.num_outputs] for row, request in zip(rows, requests, strict=True)]
