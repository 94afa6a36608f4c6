"""The request: one output row, from its prompt to its last token."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from orca_hf.errors import RequestError


class RequestState(IntEnum):
    """Where a request stands. Everything from FINISHED up is over and holds no memory."""

    WAITING = 0  # in the pool, nothing reserved (INITIATION in the paper)
    READY = 1  # admitted: its slots are reserved (INCREMENT)
    IN_FLIGHT = 2  # in an iteration that has not returned (RUNNING)
    FINISHED = 3
    CANCELLED = 4


class Request:
    """One output row.

    There is no prefill and no decode phase: a request has `computed` tokens, whose K/V are in memory, and `known`
    tokens, prompt and generated. A step lets the first catch up with the second; a request whose `computed` equals
    its `known` waits for its next token.

    Attributes:
        request_id: Arrival number, given by the scheduler at submit; -1 before.
        prompt: The prompt's token ids.
        max_new_tokens: Most tokens to generate.
        generated: Tokens generated so far.
        computed: Tokens whose K/V are in memory.
        state: See `RequestState`.
        blocks: K/V blocks reserved for it, in order; empty unless admitted.
        cancelled: A cancel arrived while it was in flight; it ends when its iteration returns.
        owner: Whoever reads its tokens; opaque to the scheduler.
    """

    __slots__ = (
        "blocks",
        "cancelled",
        "computed",
        "first_slot",
        "generated",
        "max_new_tokens",
        "owner",
        "prompt",
        "request_id",
        "state",
    )

    def __init__(self, prompt: Sequence[int], max_new_tokens: int, owner: Any = None) -> None:
        if len(prompt) == 0:
            raise RequestError("The prompt has no tokens; give at least one (for instance the BOS token).")
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}, but must be at least 1.")
        self.request_id = -1
        self.prompt: list[int] = list(prompt)
        self.max_new_tokens = max_new_tokens
        self.generated: list[int] = []
        self.computed = 0
        self.state = RequestState.WAITING
        self.blocks: tuple[int, ...] = ()
        self.first_slot: int | None = None
        self.cancelled = False
        self.owner = owner

    @property
    def known(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.prompt) + len(self.generated)

    @property
    def uncomputed(self) -> int:
        """Known tokens whose K/V are not in memory yet; 0 while it waits for its next token."""
        return len(self.prompt) + len(self.generated) - self.computed

    @property
    def max_slots(self) -> int:
        """Slots that suffice to its end. The K/V of the last generated token are never read, hence the - 1."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether it is over, in whichever way."""
        return self.state >= RequestState.FINISHED

    def reset(self) -> None:
        """Be as before it was submitted, but for its tokens: their K/V are to be computed anew, in other blocks."""
        self.computed = 0
        self.state = RequestState.WAITING
        self.blocks = ()
        self.first_slot = None
        self.cancelled = False

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens [start, stop), over prompt and generated alike."""
        boundary = len(self.prompt)
        if start >= boundary:
            return self.generated[start - boundary : stop - boundary]
        if stop <= boundary:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.generated[: stop - boundary]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.state.name}, computed {self.computed} of {self.known}, "
            f"{len(self.generated)} of {self.max_new_tokens} generated)"
        )
