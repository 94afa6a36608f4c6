"""What Orca runs and what goes to the native path: every rule, with its reason in words."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from orca_hf.adapters import find_adapter
from orca_hf.attention import IMPLEMENTATION
from orca_hf.known_forwards import autocast_of_forward, is_own_forward
from orca_hf.patches import StandIn, attention_configs
from orca_hf.runner import input_device, max_positions, uses_interface

# Model types whose tokens the tests hold against native generate().
TESTED_MODEL_TYPES = frozenset({
    "biogpt",
    "bloom",
    "codegen",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gpt_neox_japanese",
    "gptj",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "stablelm",
    "xglm",
})  # fmt: skip
# Attention that Orca's equals. Another, registered by a user or fetched as a kernel, may compute something else.
_STOCK_ATTENTION = frozenset({
    None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4",
})  # fmt: skip
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Methods of the native decoding loop, in whose place Orca's stands.
_LOOP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample")
# Models whose own prepare_inputs_for_generation changes nothing for text within `length_limits`.
_HARMLESS_PREPARE_INPUTS = frozenset({
    "CTRLLMHeadModel",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Phi3ForCausalLM",
    "Phi4MultimodalForCausalLM",
    "PhimoeForCausalLM",
    "RoCBertForCausalLM",
})  # fmt: skip
# Hooks that transformers leaves in a model change no value: they record outputs, or mark them for gradients.
_HARMLESS_HOOKS = "transformers."
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Inputs of a forward that generate() makes itself, or that say nothing about a text-only decoder's tokens.
_KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "use_cache", "return_dict", "labels"})


def model_reasons(model: PreTrainedModel, modules: tuple[nn.Module, ...]) -> list[str]:
    """Why `model` as such cannot be run by Orca; empty if nothing speaks against trying."""
    if getattr(type(model), "generate", None) is not GenerationMixin.generate:
        return [f"{type(model).__name__} has a generate() of its own"]
    config = model.config
    if config.is_encoder_decoder:
        return ["encoder-decoder models are not run by Orca"]
    text_config = config.get_text_config()
    reasons = []
    for name in _LOOP_METHODS:
        if name in model.__dict__:
            reasons.append(f"{name} has been replaced on this model (prompt tuning does that)")
        elif not _is_known_loop_method(getattr(type(model), name, None), name):
            reasons.append(f"{type(model).__name__} has a {name} of its own")
    if model.main_input_name != "input_ids":
        reasons.append(f"the model's input is {model.main_input_name}")
    if getattr(model, "_is_stateful", False):
        reasons.append("models with a recurrent state are not run by Orca")
    if not uses_interface(model) and all(find_adapter(module) is None for module in modules):
        reasons.append(
            f"{type(model).__name__} does not use transformers' attention interface, and Orca has no adapter for the "
            "attention that it has instead"
        )
    other_layers = set(getattr(text_config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if other_layers:
        reasons.append(f"layers of type {', '.join(sorted(map(str, other_layers)))} are not run by Orca")
    attention = {each._attn_implementation for each in attention_configs(modules)}
    # A name in use by an iteration at this moment compares equal to ours; it stands for a stock one.
    if other_attention := attention - _STOCK_ATTENTION - {IMPLEMENTATION}:
        reasons.append(f"attention implementation {', '.join(sorted(map(str, other_attention)))} may be another")
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        reasons.append("parameters are sharded over processes (ZeRO-3 or FSDP)")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        reasons.append("tensor parallelism is not run by Orca")
    return reasons


def _is_known_loop_method(method: Any, name: str) -> bool:
    if method is getattr(GenerationMixin, name):
        return True
    return (
        name == "prepare_inputs_for_generation"
        and method.__module__.startswith("transformers.models.")
        and method.__qualname__.partition(".")[0] in _HARMLESS_PREPARE_INPUTS
    )


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


def module_reasons(modules: tuple[nn.Module, ...]) -> list[str]:
    """What a user has hung into one of a model's `modules` that would see a flat row of tokens instead of a batch."""
    everywhere = nn.modules.module
    if _foreign_hooks(everywhere._global_forward_hooks) or _foreign_hooks(everywhere._global_forward_pre_hooks):
        return ["a forward hook is registered for all modules"]
    for module in modules:
        # Most have none, and every call asks all of them.
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks and (_foreign_hooks(module._forward_hooks) or _foreign_hooks(module._forward_pre_hooks)):
            return [f"a {type(module).__name__} has a forward hook"]
        if module._compiled_call_impl is not None:
            # A compiler would trace Orca's attention too, and anew for every shape of an iteration.
            return [f"a {type(module).__name__} is compiled"]
        forward = module.__dict__.get("forward")
        # accelerate moves inputs and weights between devices that way, and nothing else; but in an adapted module it
        # would have the adapter's place.
        is_moved = hasattr(module, "_hf_hook") and find_adapter(module) is None
        if forward is None or is_moved or isinstance(forward, StandIn):
            continue
        if not (module is modules[0] and is_own_forward(module)):  # trainers wrap the forward of the whole model
            return [f"a {type(module).__name__} has a forward of its own"]
    return []


def _foreign_hooks(hooks: Mapping[int, Any]) -> bool:
    return any(not str(getattr(hook, "__module__", None)).startswith(_HARMLESS_HOOKS) for hook in hooks.values())


def quantization_reasons(model: PreTrainedModel, modules: tuple[nn.Module, ...]) -> list[str]:
    """Why quantised activations would not give native's tokens. Quantised weights alone do.

    With one scale for a whole tensor a row's tokens depend on its neighbours, whom Orca chooses. With a scale for each
    token they do not; but rounding to a few bits makes a visible step of the last bit in which fp32 results of
    different batch shapes differ.
    """
    each_token = False
    for module in modules:
        threshold = getattr(getattr(module, "state", None), "threshold", None)  # LLM.int8(), of bitsandbytes
        if threshold:
            return [f"a {type(module).__name__} looks for outliers in all rows together"]
        each_token |= threshold is not None
        for weight in module._parameters.values():
            if weight is None or type(weight) is nn.Parameter:
                continue
            options = getattr(weight, "act_quant_kwargs", None)  # torchao
            dynamic = getattr(weight, "act_quant_scale", None) is None
            if dynamic and type(getattr(options, "granularity", None)).__name__ == "PerTensor":
                return [f"a {type(module).__name__} quantises its input with one scale for all rows"]
            each_token |= options is not None or getattr(weight, "activation_quantization", None) is not None
    if each_token and model.dtype in (torch.float32, torch.float64):
        return [f"its activations are quantised from {model.dtype}, where a last bit can move a token"]
    return []


def training_reasons(model: PreTrainedModel) -> list[str]:
    """Why `model` in its present mode would not give the same tokens twice."""
    if not model.training:
        return []
    reasons = []
    modules = tuple(model.modules())
    if any(getattr(module, "gradient_checkpointing", False) for module in modules):
        # Some models (GPT-2) then forget their cache from one step to the next, and their tokens with it.
        reasons.append("the model is in training mode with gradient checkpointing")
    dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)
    # A batch norm, and a parametrization such as the spectral norm, count their forwards.
    statistics = (nn.modules.batchnorm._BatchNorm, nn.utils.parametrize.ParametrizationList)
    for module in modules:
        if isinstance(module, dropout) and module.p > 0 and module.training:
            return [*reasons, "the model is in training mode and has dropout"]
        if isinstance(module, statistics) and module.training:
            return [*reasons, f"the model is in training mode and has a {type(module).__name__}"]
    config = model.config.get_text_config()
    rates = (
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "layerdrop",
        "router_jitter_noise",
    )
    active = [rate for rate in rates if isinstance(getattr(config, rate, None), float) and getattr(config, rate) > 0]
    if active:
        reasons.append(f"the model is in training mode and its {', '.join(active)} is not 0")
    return reasons


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
    if (
        generation_config.return_dict_in_generate
        and generation_config.use_cache is not False
        and autocast_state(model) is not None
    ):
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
        and name not in ("tokenizer", "assistant_tokenizer", "trust_remote_code")
        and not hasattr(generation_config, name)
        and not _marks_text_only(model, name, value)
    ]
    if unknown:
        reasons.append(f"the model is given {', '.join(sorted(unknown))}")
    return reasons


def output_reasons(generation_config: GenerationConfig, has_native_cache: bool) -> list[str]:
    """Why Orca cannot give what a call asks for, of a model whose K/V it may keep in another form than native does."""
    if generation_config.return_dict_in_generate and generation_config.use_cache is not False and not has_native_cache:
        return ["the native cache, which is to be returned, holds something else than attention's keys and values"]
    return []


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
        mask = attention_mask != 0
        own_length = int(mask.sum(dim=1).max())
        if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
            reasons.append("attention_mask has values other than 0 and 1")
        if not bool(mask.any(dim=1).all()):
            reasons.append("a row is nothing but padding")
        elif not bool(mask[:, -1].all()):
            # Natively such a row's first token is sampled at a padding position: odd, but it is native's answer.
            reasons.append("a row is padded on the right")
        elif bool((mask[:, 1:] < mask[:, :-1]).any()):
            reasons.append("attention_mask has holes")
    if max_length is not None:
        limit = max_positions(model)
        # Attention code of a model's own may have tables as long as its positions, which it reads at padding too.
        padding = input_ids.shape[1] - own_length if uses_interface(model) else 0
        if limit is not None and max_length - padding > limit:
            reasons.append(f"rows may grow beyond the model's {limit} positions")
        beyond = [words for limit, words in _length_limits(model).items() if max_length > limit]
        reasons += [f"rows may grow beyond {words}" for words in beyond]
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


def autocast_state(model: PreTrainedModel) -> tuple[str, torch.dtype] | None:
    """The autocast that `model` runs under, its own or the caller's, as (device type, dtype), or None."""
    device = model.device
    device_type = (input_device(model) if device.type == "meta" else device).type
    own = autocast_of_forward(model)
    if own is not None or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return own
    return device_type, torch.get_autocast_dtype(device_type)
