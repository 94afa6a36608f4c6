"""A generate() call, prepared by generate() itself, on its way through the engine and back."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, MaxLengthCriteria

from orca_hf import random_state
from orca_hf.engines import Engine
from orca_hf.errors import TokenIdError, UnsupportedError
from orca_hf.interruption import always
from orca_hf.known_code import KnownCode
from orca_hf.runner import CACHE_FIELD, dummy_layers
from orca_hf.sampling import Generation, Streamer
from orca_hf.sampling_options import SamplingOptions


class PreparedCall:
    """One call as generate() has prepared it: rows, processors, criteria, configuration.

    Attributes:
        fits: Whether all its rows can hold their K/V slots at once; known after `reasons`.
        has_tokens: Whether any row had a token when it ended.
    """

    def __init__(
        self,
        engine: Engine,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        known: KnownCode,
    ) -> None:
        self.engine = engine
        self._known = known
        self.input_ids = input_ids
        self.prompts = _own_tokens(input_ids, attention_mask)
        self.generation_config = generation_config
        pad = generation_config._pad_token_tensor
        max_length = max_length_of(stopping_criteria)
        assert max_length is not None
        self.options = SamplingOptions(
            processors=logits_processor,
            criteria=stopping_criteria,
            max_length=max_length,
            do_sample=bool(generation_config.do_sample),
            pad_token_id=None if pad is None else int(pad),
            output_scores=bool(generation_config.return_dict_in_generate and generation_config.output_scores),
            output_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
            output_cache=bool(generation_config.return_dict_in_generate and generation_config.use_cache),
        )
        self.fits = False
        self.has_tokens = False

    def reasons(self, has_streamer: bool) -> list[str]:
        """Why it cannot run: for want of memory, or for what its own code may do to tokens that have been computed.

        Raises:
            TokenIdError: A row has a token that the model has no embedding for.
            CapacityError: One of its rows could never hold its slots.
        """
        _check_token_ids(self.input_ids, self.engine.runner.vocab_size)
        max_new_tokens = self.options.max_new_tokens(self.input_ids.shape[1])
        if self.generation_config.use_cache is False and self._has_users_code:
            return ["without a cache, tokens that code of your own may have changed are computed again"]
        self.fits = self.engine.fits_at_once([len(prompt) for prompt in self.prompts], max_new_tokens)
        if self.fits or not self.options.must_lockstep(len(self.prompts), has_streamer):
            return []
        return ["its rows are looked at together and do not fit into the K/V memory at once"]

    def generation(self, streamer: Streamer | None, seed: int | None = None) -> Generation:
        """The call as the engine serves it; its random state is taken now."""
        num_rows = len(self.prompts)
        lockstep = self.options.must_lockstep(num_rows, streamer is not None)
        lockstep |= self.fits and self.options.wants_lockstep(num_rows)
        has_foreign_streamer = streamer is not None and not self._known.is_known(streamer)
        return Generation(
            self.input_ids,
            self.prompts,
            self.options,
            streamer=streamer,
            lockstep=lockstep,
            seed=seed,
            has_foreign_streamer=has_foreign_streamer,
            runs_users_code=has_foreign_streamer or self._has_users_code,
        )

    @property
    def _has_users_code(self) -> bool:
        return not all(map(self._known.is_known, (*self.options.processors, *self.options.criteria)))

    def run(self, streamer: Streamer | None) -> Tensor | GenerateDecoderOnlyOutput:
        """Serve it to its end, and return what generate() returns.

        Raises:
            BaseException: Whatever ended it; `has_tokens` says whether there were tokens by then.
        """
        made: list[Generation] = []

        def work() -> None:
            made.append(self.generation(streamer))
            self.engine.run(made[0])

        def close() -> None:
            for generation in made:
                self.has_tokens = any(request.generated for request in generation.requests)
                generation.close(discard=isinstance(generation.error, UnsupportedError) and not self.has_tokens)
            random_state.leave()

        always(work, close)
        (generation,) = made
        if not self.generation_config.return_dict_in_generate:
            return generation.sequences()
        fields: dict[str, Any] = {
            "sequences": generation.sequences(),
            "scores": tuple(generation.scores) if self.options.output_scores else None,
            "logits": tuple(generation.logits) if self.options.output_logits else None,
            CACHE_FIELD: _as_cache(generation, self.engine.runner.model),
        }
        return GenerateDecoderOnlyOutput(**fields)


def _own_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's tokens without its padding."""
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is None:
        return rows
    # Counted, not summed: a mask in bf16 would round 297 tokens to 296.
    lengths: list[int] = attention_mask.count_nonzero(dim=1).tolist()
    return [row[len(row) - length :] for row, length in zip(rows, lengths, strict=True)]


def _check_token_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Refuse what the model has no embedding for; at padding too, where native generate() looks it up as well."""
    wrong = (input_ids < 0) | (input_ids >= vocab_size)
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise TokenIdError(
            f"Row {row} has token id {int(input_ids[row, place])}, but the model's vocabulary is 0 to "
            f"{vocab_size - 1}; is this the model's own tokenizer?"
        )


def max_length_of(criteria: StoppingCriteriaList) -> int | None:
    """The shortest of the lengths that end a row, None if nothing does."""
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    return min(lengths, default=None)


def _as_cache(generation: Generation, model: PreTrainedModel) -> DynamicCache | None:
    if generation.kv_states is None:
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    dummies = dummy_layers(cache)
    for layer, (key, value) in enumerate(generation.kv_states):
        if layer not in dummies:
            cache.update(key, value, layer)
    return cache
