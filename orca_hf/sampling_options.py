"""What one generate() call asks of the sampling, and whether its rows may be looked at one by one."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from orca_hf.warping import STACKABLE

# Processors and criteria that treat each row by itself and keep nothing between calls: they may be shown any of a
# call's rows, at any time. Everything else, a user's own above all, is shown all rows of its call at once, as natively.
_ROW_BY_ROW_PROCESSORS = frozenset({
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
})  # fmt: skip
_ROW_BY_ROW_CRITERIA = frozenset({EosTokenCriteria, MaxLengthCriteria, StopStringCriteria})


@dataclass(frozen=True)  # without slots: what is derived is kept, for it is asked for at every step
class SamplingOptions:
    """What one generate() call asks for, as generate() itself prepared it.

    Attributes:
        processors: Applied to the logits in turn.
        criteria: Whether a row is done.
        max_length: Tokens of the longest row, padding and prompt included.
        do_sample: Draw from the distribution, or take its maximum.
        pad_token_id: Fills rows that end early; None only where no row can.
        output_scores: Keep the processed scores of every step.
        output_logits: Keep the raw logits of every step.
        output_cache: Keep the K/V states of the whole call.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    max_length: int
    do_sample: bool = False
    pad_token_id: int | None = None
    output_scores: bool = False
    output_logits: bool = False
    output_cache: bool = False

    def max_new_tokens(self, prompt_len: int) -> int:
        """Most tokens of a row whose prompt, padding included, has `prompt_len`.

        A criterion of the user's may be below the prompt already; the native loop looks at it after a first token.
        """
        return max(1, self.max_length - prompt_len)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a row."""
        return frozenset(
            token
            for criterion in self.criteria
            if type(criterion) is EosTokenCriteria
            for token in torch.as_tensor(criterion.eos_token_id, dtype=torch.long, device="cpu").reshape(-1).tolist()
        )

    @cached_property
    def ends_by_eos(self) -> bool:
        """Whether a row that ended is continued by pad tokens; natively so only with an EOS criterion."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the largest logit, and only length and EOS end a row."""
        return not (self.do_sample or self.processors or self.needs_all_rows) and self._ends_only_by(
            {EosTokenCriteria, MaxLengthCriteria}
        )

    @property
    def is_plain_sampling(self) -> bool:
        """Whether the next token is drawn from what a row's own logits give, and only length and EOS end a row."""
        return (
            self.do_sample
            and not self.needs_all_rows
            and {type(processor) for processor in self.processors} <= STACKABLE
            and self._ends_only_by({EosTokenCriteria, MaxLengthCriteria})
        )

    @cached_property
    def has_foreign_code(self) -> bool:
        """Whether a processor or criterion takes part of which nothing is known."""
        return self._has_foreign_processor or not self._ends_only_by(_ROW_BY_ROW_CRITERIA | {MaxTimeCriteria})

    @cached_property
    def needs_all_rows(self) -> bool:
        """Whether even a row that ended must be computed on: someone is shown its logits or K/V, or it goes on."""
        return (
            self.output_scores
            or self.output_logits
            or self.output_cache
            or self._has_foreign_processor
            or (not self.ends_by_eos and not self._ends_only_by({MaxLengthCriteria}))
        )

    @property
    def _has_foreign_processor(self) -> bool:
        return not {type(processor) for processor in self.processors} <= _ROW_BY_ROW_PROCESSORS

    def _ends_only_by(self, kinds: AbstractSet[type]) -> bool:
        return {type(criterion) for criterion in self.criteria} <= kinds

    def must_lockstep(self, num_rows: int, has_streamer: bool) -> bool:
        """Whether someone looks at all rows together, who must find them at the same token."""
        return self.needs_all_rows or (num_rows > 1 and (has_streamer or self.has_foreign_code))

    def wants_lockstep(self, num_rows: int) -> bool:
        """Whether rows in step give native's very result, where rows apart would give an equally good one.

        These are the order of random draws, and the moment at which `max_time` ends a row.
        """
        return num_rows > 1 and (self.do_sample or any(type(c) is MaxTimeCriteria for c in self.criteria))
