"""Answers as OpenAI's JSON: whole, or chunk by chunk. Joined, the chunks are the whole."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from orca_hf.server.answers import Piece
from orca_hf.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs


def usage(num_prompt_tokens: int, num_answer_tokens: int) -> dict[str, int]:
    """What a request has used."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
    }


def joined(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one answer as one."""
    return Piece(
        pieces[0].index,
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        pieces[-1].finish_reason,
    )


class _Writer(ABC):
    """What both kinds have in common: a head that says which answer to which request it is."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model_name: str, texts: TokenTexts, *, with_logprobs: bool) -> None:
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model_name}

    def whole(self, choices: Sequence[Piece], used: dict[str, int]) -> dict[str, Any]:
        """The answers at once, for `in_pieces`; each choice is joined from its pieces."""
        written = [self._choice(piece) for piece in choices]
        return {**self._head, "object": self.whole_object, "choices": written, "usage": used}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One piece of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": [self._delta(piece)]}

    def usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        """The end of a stream that is to tell what it used."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": used}

    @abstractmethod
    def _choice(self, piece: Piece) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def _delta(self, piece: Piece) -> dict[str, Any]:
        """A piece of a stream."""


class CompletionWriter(_Writer):
    """Completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = completion_logprobs(self._texts, piece.logprobs) if self._with_logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    _delta = _choice


class ChatWriter(_Writer):
    """Chat completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model_name: str, texts: TokenTexts, *, with_logprobs: bool) -> None:
        super().__init__(model_name, texts, with_logprobs=with_logprobs)
        self._begun: set[int] = set()

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {**self._common(piece), "message": message}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        role = {} if piece.index in self._begun else {"role": "assistant"}
        self._begun.add(piece.index)
        common = self._common(piece)
        if common["logprobs"] is not None:
            common["logprobs"]["content"] = list(common["logprobs"]["content"])
        return {**common, "delta": {**role, "content": piece.text}}

    def _common(self, piece: Piece) -> dict[str, Any]:
        logprobs = chat_logprobs(self._texts, piece.logprobs) if self._with_logprobs else None
        return {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish_reason}
