"""Which calls of a model Orca runs: every rule about options and inputs, with its reason in words."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode

from orca_hf.attention_name import user_implementation
from orca_hf.model_eligibility import autocast_state
from orca_hf.runner import max_positions, uses_interface

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Inputs of a forward that generate() makes itself, or that say nothing about a text-only decoder's tokens.
_KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "use_cache", "return_dict", "labels"})
# What generate() takes by keyword beside the options of a configuration and a forward's inputs.
GENERATE_KEYWORDS = frozenset({"tokenizer", "assistant_tokenizer", "trust_remote_code"})


def call_reasons(
    model: PreTrainedModel, arguments: Mapping[str, Any], generation_config: GenerationConfig
) -> list[str]:
    """Why one generate() call cannot be run by Orca.

    Args:
        model: The model that it runs on.
        arguments: The call's arguments by name, what generate() takes by **kwargs under "kwargs".
        generation_config: The call's configuration, with everything merged that generate() merges.
    """
    reasons = []
    keywords = arguments.get("kwargs", {})
    mode = generation_config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in _MODES:
        reasons.append(f"generation mode {mode.value} is not run by Orca")
    if arguments.get("custom_generate") is not None:
        reasons.append("custom_generate replaces the decoding loop")
    if arguments.get("synced_gpus"):
        reasons.append("synced_gpus keeps processes in step, which a shared batch cannot")
    if (generation_config.guidance_scale or 1) != 1 or arguments.get("negative_prompt_ids") is not None:
        reasons.append("guidance_scale runs the model a second time")
    if generation_config.cache_implementation not in (None, "dynamic"):
        reasons.append(f"cache_implementation={generation_config.cache_implementation!r} asks for a cache of its own")
    if _returns_cache(generation_config) and autocast_state(model) is not None:
        reasons.append("the cache that is returned under autocast holds K and V wider than they are used")
    if generation_config.token_healing:
        reasons.append("token_healing rewrites the prompt")
    if generation_config.is_assistant:
        reasons.append("the model is an assistant of another")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name):
            reasons.append(f"{name} is not recorded by Orca")
    if generation_config.stop_strings is not None and (
        keywords.get("tokenizer") is None or model.generation_config.stop_strings is not None
    ):
        reasons.append("stop_strings are in the model's own generation_config, or come without a tokenizer")
    unknown = [
        name
        for name, value in keywords.items()
        if value is not None
        and name not in _KNOWN_INPUTS
        and name not in GENERATE_KEYWORDS
        and not hasattr(generation_config, name)
        and not _marks_text_only(model, name, value)
    ]
    if unknown:
        reasons.append(f"the model is given {', '.join(sorted(unknown))}")
    return reasons


def output_reasons(generation_config: GenerationConfig, has_native_cache: bool) -> list[str]:
    """Why Orca cannot give what a call asks for, of a model whose K/V it may keep in another form than native does."""
    if _returns_cache(generation_config) and not has_native_cache:
        return ["the native cache, which is to be returned, holds something else than attention's keys and values"]
    return []


def _returns_cache(generation_config: GenerationConfig) -> bool:
    return bool(generation_config.return_dict_in_generate) and generation_config.use_cache is not False


def _marks_text_only(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an input says of each token whether it is an image's, and that none is: processors add it to any text."""
    is_multimodal = model.config.get_text_config() is not model.config
    marks = is_multimodal and name in ("token_type_ids", "mm_token_type_ids") and isinstance(value, Tensor)
    return marks and not bool(value.any())


def input_reasons(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, max_length: int | None
) -> list[str]:
    """Why the rows themselves cannot be run by Orca.

    Args:
        model: The model that they run on.
        input_ids: (num_rows, prompt_len).
        attention_mask: (num_rows, prompt_len) or None if nothing is padded.
        max_length: Tokens of the longest row at its end, None if not known yet.
    """
    reasons = []
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        return [f"input_ids have the shape {tuple(input_ids.shape)}"]
    if input_ids.dtype not in (torch.int64, torch.int32):
        return [f"input_ids are {input_ids.dtype}"]
    own_length = input_ids.shape[1]
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            return [f"attention_mask has another shape, {tuple(attention_mask.shape)}, than the input"]
        if not bool((attention_mask == 1).all()):
            own_length = int((attention_mask != 0).sum(dim=1).max())
            reasons += _mask_reasons(attention_mask)
            if _overflows_at_padding(model):
                reasons.append("natively the mask of padded rows overflows in float64, and their logits are NaN")
    if max_length is not None:
        limit = max_positions(model)
        # Attention code of a model's own may have tables as long as its positions, which it reads at padding too.
        padding = input_ids.shape[1] - own_length if uses_interface(model) else 0
        if limit is not None and max_length - padding > limit:
            reasons.append(f"rows may grow beyond the model's {limit} positions")
        beyond = [words for limit, words in _length_limits(model).items() if max_length > limit]
        reasons += [f"rows may grow beyond {words}" for words in beyond]
    return reasons


def _overflows_at_padding(model: PreTrainedModel) -> bool:
    """Whether native attention adds the least float64 to a score where a row has nothing but padding to look at."""
    is_checked = uses_interface(model) and user_implementation(model.config.get_text_config()) == "sdpa"
    return model.dtype is torch.float64 and not is_checked


def _mask_reasons(attention_mask: Tensor) -> list[str]:
    reasons = []
    mask = attention_mask != 0
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        reasons.append("attention_mask has values other than 0 and 1")
    if not bool(mask.any(dim=1).all()):
        reasons.append("a row is nothing but padding")
    elif not bool(mask[:, -1].all()):
        # Natively such a row's first token is sampled at a padding position: odd, but it is native's answer.
        reasons.append("a row is padded on the right")
    elif bool((mask[:, 1:] < mask[:, :-1]).any()):
        reasons.append("attention_mask has holes")
    return reasons


def prepared_reasons(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    pad_token_id: Tensor | None,
    criteria: StoppingCriteriaList,
    max_length: int | None,
    vocab_size: int,
) -> list[str]:
    """Why Orca cannot run what generate() has prepared from a call.

    Args:
        input_ids: (num_rows, prompt_len).
        attention_mask: (num_rows, prompt_len), or None if nothing is padded.
        position_ids: (num_rows, prompt_len), or with dimensions before these, or None.
        pad_token_id: () or None.
        criteria: When a row ends.
        max_length: The length at which one of them ends it, None if none does.
        vocab_size: Token ids that the model has an embedding for.
    """
    reasons = []
    if position_ids is not None and position_ids.shape[-2:] != input_ids.shape:
        # generate() derives them from a mask of ones before it drops the mask.
        reasons.append("attention_mask has another shape than the input")
    elif position_ids is not None:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # At padding they may be anything.
        if bool(((position_ids != mask.cumsum(dim=-1) - 1) & (mask != 0)).any()):
            reasons.append("the model counts positions in a way of its own")
    if pad_token_id is not None and not 0 <= int(pad_token_id) < vocab_size:
        reasons.append(f"pad_token_id {int(pad_token_id)} is outside the vocabulary")
    if pad_token_id is None and any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        reasons.append("rows can end early and there is no pad_token_id")
    if max_length is None:
        reasons.append("no criterion limits the length")
    return reasons


def _length_limits(model: PreTrainedModel) -> dict[int, str]:
    """Lengths, padding included, up to which rows may grow by Orca, with the words for what lies beyond each.

    Beyond them, what a token computes depends on the longest row or the padding of its batch: natively on those of
    its call, by Orca it would be on its neighbours.
    """
    config = model.config.get_text_config()
    limits = {
        limit: f"{limit} positions, where its longrope frequencies change for all rows of a batch"
        for limit in _longrope_limits(getattr(config, "rope_parameters", None))
    }
    if getattr(config, "attn_temperature_tuning", False):
        limits[config.floor_scale] = f"{config.floor_scale} positions, where its attention temperature counts padding"
    return limits


def _longrope_limits(parameters: Any) -> set[int]:
    if not isinstance(parameters, Mapping):
        return set()
    if "rope_type" not in parameters:  # a set of parameters for each type of layer
        return {limit for nested in parameters.values() for limit in _longrope_limits(nested)}
    return {parameters["original_max_position_embeddings"]} if parameters["rope_type"] == "longrope" else set()
