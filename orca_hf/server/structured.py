"""Answers that follow a JSON schema: llguidance says which tokens may come next, the logits of all others go."""

import json
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from orca_hf.server.errors import ApiError, bad_request, shortened
from orca_hf.server.protocol import ResponseFormat

_FIELD = "response_format"
# Characters of a schema, of which the longest take some seconds.
_MAX_LENGTH = 2**17
_MAX_REMEMBERED = 64  # grammars
_MAX_LENGTHS = 8 * _MAX_LENGTH  # of their schemas together
_MAX_WORDS = 500  # characters of llguidance's errors, which may quote the whole grammar


class Grammar:
    """A schema, compiled.

    Args:
        matcher: llguidance's, at its start. It is copied for each answer, which costs next to nothing.
        eos_token_ids: What ends an answer.
    """

    def __init__(self, matcher: Any, eos_token_ids: list[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def processor(self, prompt_len: int) -> LogitsProcessor:
        """The processor of one answer."""
        return GrammarProcessor(self._matcher.deep_copy(), prompt_len, self._eos_token_ids)


class Grammars:
    """Compiles schemas, and remembers those that were asked for last. May be used by several threads.

    Args:
        tokenizer: The model's.
        vocab_size: Token ids that the model has logits for.
        eos_token_ids: What ends an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer: Any = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()  # guards what follows, and is not held while a schema is compiled
        self._vocabulary: Any = None
        self._remembered: OrderedDict[str, Grammar] = OrderedDict()  # by schema, the last used at the end

    def compiled(self, wanted: ResponseFormat) -> Grammar:
        """The grammar of an answer's format.

        Raises:
            ApiError: The schema cannot be followed, or llguidance is not installed.
        """
        schema = json.dumps(_schema(wanted))
        if len(schema) > _MAX_LENGTH:
            raise bad_request(f"The schema has {len(schema)} characters; at most {_MAX_LENGTH} are taken.", _FIELD)
        with self._lock:
            grammar = self._remembered.get(schema)
        if grammar is None:
            grammar = self._compile(schema, wanted)
        with self._lock:
            self._remembered[schema] = grammar
            self._remembered.move_to_end(schema)
            while len(self._remembered) > _MAX_REMEMBERED or sum(map(len, self._remembered)) > _MAX_LENGTHS:
                self._remembered.popitem(last=False)
        return grammar

    def _compile(self, schema: str, wanted: ResponseFormat) -> Grammar:
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
            matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        except ValueError as error:
            raise _cannot_be_followed(str(error)) from error
        if matcher.is_error():
            raise _cannot_be_followed(matcher.get_error())
        return Grammar(matcher, self._eos_token_ids)

    def _vocabulary_of_tokenizer(self) -> Any:
        """The vocabulary as llguidance sees it, made once."""
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


def _schema(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise bad_request("response_format.json_schema.schema is missing.", _FIELD)
    return wanted.json_schema.schema_


def _cannot_be_followed(why: str) -> ApiError:
    first = why.partition("\n")[0]  # its own stack may follow
    return bad_request(f"The schema cannot be followed: {shortened(first, _MAX_WORDS)}", _FIELD)


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
        """(1, known) tokens and (1, vocab_size) scores to scores.

        Raises:
            ApiError: No token is left: other options forbid what the grammar allows, or it has become too intricate.
        """
        for token in input_ids[0, self._num_read :].tolist():
            if not self._matcher.consume_token(token):
                raise _cannot_be_followed(f"token {token} is outside of it. {self._matcher.get_error()}")
        self._num_read = input_ids.shape[1]
        allowed = self._allowed(scores.shape[1]).to(scores.device)
        masked: Tensor = scores.masked_fill(~allowed, -torch.inf)
        if not masked.isfinite().any():
            raise _cannot_be_followed("other options forbid every token that it allows next.")
        return masked  # type: ignore[return-value]

    def _allowed(self, vocab_size: int) -> Tensor:
        """(vocab_size,) bool."""
        allowed = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        if self._matcher.is_stopped() and not self._matcher.is_error():  # llguidance takes an error for an end
            allowed[self._eos_token_ids] = True
            return allowed
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise _cannot_be_followed(self._matcher.get_error())
        bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1
        allowed[:] = bits.flatten()[:vocab_size].bool()
        return allowed
