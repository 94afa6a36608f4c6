"""Answers that follow a JSON schema: llguidance says which tokens may come next, the logits of all others go."""

import json
import threading
from typing import Any

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from orca_hf.server.errors import ApiError, bad_request
from orca_hf.server.protocol import ResponseFormat

_FIELD = "response_format"


class Grammars:
    """Makes the processors of structured answers; llguidance's view of the vocabulary is made once.

    Args:
        tokenizer: The model's.
        vocab_size: Token ids that the model has logits for.
        eos_token_ids: What ends an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer: Any = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def processor(self, wanted: ResponseFormat | None, prompt_len: int) -> LogitsProcessor | None:
        """The processor of one answer, None where the format is free.

        Raises:
            ApiError: The schema cannot be followed, or llguidance is not installed.
        """
        if wanted is None or wanted.type == "text":
            return None
        schema = self._schema(wanted)
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise bad_request(
                f"{_FIELD} of type {wanted.type} needs llguidance, which this server does not have. Its operator can "
                "install it: pip install 'orca-hf[structured]'.",
                _FIELD,
            ) from error
        if not self._eos_token_ids:
            raise bad_request("The model has no end-of-sequence token, so no structured answer could end.", _FIELD)
        vocabulary = self._vocabulary_of_tokenizer()
        try:
            matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        except ValueError as error:
            raise bad_request(f"The schema cannot be followed: {error}", _FIELD) from error
        if matcher.is_error():
            raise bad_request(f"The schema cannot be followed: {matcher.get_error()}", _FIELD)
        return GrammarProcessor(matcher, prompt_len, self._eos_token_ids)

    @staticmethod
    def _schema(wanted: ResponseFormat) -> dict[str, Any]:
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise bad_request("response_format.json_schema.schema is missing.", _FIELD)
        return wanted.json_schema.schema_

    def _vocabulary_of_tokenizer(self) -> Any:
        import llguidance.hf

        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = llguidance.hf.from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                    )
                except ValueError as error:
                    raise ApiError(
                        400, f"llguidance cannot work with this model's tokenizer: {error}", param=_FIELD
                    ) from error
            return self._vocabulary


class GrammarProcessor(LogitsProcessor):
    """Leaves one answer the tokens that its grammar allows next; when it is complete, only its end.

    Args:
        matcher: llguidance's, at its start.
        prompt_len: Tokens of the prompt.
        eos_token_ids: What ends the answer.
    """

    def __init__(self, matcher: Any, prompt_len: int, eos_token_ids: list[int]) -> None:
        self._matcher = matcher
        self._num_read = prompt_len
        self._eos_token_ids = eos_token_ids

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        """(1, known) tokens and (1, vocab_size) scores to scores."""
        for token in input_ids[0, self._num_read :].tolist():
            if not self._matcher.consume_token(token):
                raise ValueError(f"Token {token} is outside the answer's grammar: {self._matcher.get_error()}")
        self._num_read = input_ids.shape[1]
        allowed = self._allowed(scores.shape[1]).to(scores.device)
        masked: Tensor = scores.masked_fill(~allowed, -torch.inf)
        return masked  # type: ignore[return-value]

    def _allowed(self, vocab_size: int) -> Tensor:
        """(vocab_size,) bool."""
        allowed = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        if self._matcher.is_stopped():
            allowed[self._eos_token_ids] = True
            return allowed
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1
        allowed[:] = bits.flatten()[:vocab_size].bool()
        return allowed
