"""The state of a serving engine at one moment."""

from dataclasses import dataclass

from orca_hf.work import IterationRecord


@dataclass(frozen=True, slots=True)
class ServingStats:
    """The state of a serving engine at one moment, and what it has done so far.

    The model's own `generate()` calls share its iterations and slots, and are counted in them.

    Attributes:
        is_healthy: See `ServingEngine.is_healthy`.
        is_accepting: Whether it takes requests.
        num_running: Requests that hold slots, or run natively.
        num_waiting: Requests that have not begun.
        num_slots: Slots there are.
        num_reserved: Slots reserved for running requests.
        num_used: Slots of these whose K/V are computed.
        num_iterations: Iterations run.
        num_prompt_tokens: Prompt tokens computed, by Orca.
        num_generated_tokens: Tokens generated, by Orca.
        num_draft_tokens: Guesses at tokens that were computed along; see `OrcaConfig.num_speculative_tokens`.
        num_accepted_tokens: Those of them that the model chose.
        num_native: Calls and requests that went to native generate().
        num_finished: Submitted requests that ended well.
        num_cancelled: Submitted requests that were cancelled or dropped, or whose deadline passed.
        num_failed: Submitted requests that ended with another error.
        recent: The last iterations, oldest first.
    """

    is_healthy: bool
    is_accepting: bool
    num_running: int
    num_waiting: int
    num_slots: int
    num_reserved: int
    num_used: int
    num_iterations: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_native: int
    num_finished: int
    num_cancelled: int
    num_failed: int
    recent: tuple[IterationRecord, ...]
