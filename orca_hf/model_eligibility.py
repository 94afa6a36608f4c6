"""Which models Orca runs: every rule about a model and its state, with its reason in words."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from orca_hf.adapters import find_adapter
from orca_hf.attention_name import IMPLEMENTATION
from orca_hf.attention_sources import attention_reasons, mode_reasons
from orca_hf.known_code import KnownCode, places
from orca_hf.known_forwards import autocast_of_forward, is_own_forward
from orca_hf.patches import StandIn, attention_configs
from orca_hf.runner import input_device, uses_interface

# Attention that Orca's equals. Another, registered by a user or fetched as a kernel, may compute something else.
_STOCK_ATTENTION = frozenset({
    None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4",
})  # fmt: skip
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Methods of the native decoding loop, in whose place Orca's stands.
_LOOP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample")
# Models whose own prepare_inputs_for_generation changes nothing for text within the limits of length.
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
# Where accelerate has the hooks that move inputs and weights between devices, and do nothing else.
_MOVING_HOOKS = "accelerate.hooks"


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
    reasons += attention_reasons(modules) + mode_reasons()
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


def module_reasons(modules: tuple[nn.Module, ...], known: KnownCode) -> list[str]:
    """What a user has hung into one of a model's `modules` that would see a flat row of tokens instead of a batch."""
    everywhere = nn.modules.module
    if _foreign_hooks(everywhere._global_forward_hooks) or _foreign_hooks(everywhere._global_forward_pre_hooks):
        return ["a forward hook is registered for all modules"]
    weights_only: set[nn.Module] = set()
    for module in modules:
        # Most have none, and every call asks all of them.
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks and (_foreign_hooks(module._forward_hooks) or _foreign_hooks(module._forward_pre_hooks)):
            return [f"a {type(module).__name__} has a forward hook"]
        if module._compiled_call_impl is not None:
            # A compiler would trace Orca's attention too, and anew for every shape of an iteration.
            return [f"a {type(module).__name__} is compiled"]
        if isinstance(module, nn.utils.parametrize.ParametrizationList):
            weights_only.update(module.modules())  # they are given weights, never rows
        forward = module.__dict__.get("forward")
        if forward is None or isinstance(forward, StandIn):
            continue
        # In an adapted module, accelerate's forward would have the adapter's place.
        is_moved = _is_moved(module, known) and find_adapter(module) is None
        # Trainers wrap the forward of the whole model.
        if not (is_moved or (module is modules[0] and is_own_forward(module))):
            return [f"a {type(module).__name__} has a forward of its own"]
    unknown = known.unknown_in(module for module in modules if module not in weights_only)
    if unknown is None:
        return []
    advice = "which may look at more than one token at a time; if not, vouch for it by OrcaConfig(trust_modules=...)"
    return [f"{unknown} is code of your own, {advice}"]


def _is_moved(module: nn.Module, known: KnownCode) -> bool:
    """Whether a module's forward is accelerate's, around its class's own and one of accelerate's own hooks."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    if any(type(each).__module__ != _MOVING_HOOKS or not known.is_known(each) for each in (hook, *hooks)):
        return False
    own = getattr(module, "_old_forward", None)
    if getattr(own, "__func__", own) is not type(module).forward:
        return False
    return all(place == _MOVING_HOOKS for place in places(module.__dict__["forward"])[:1])


def _foreign_hooks(hooks: Mapping[int, Any]) -> bool:
    return any(not all(place.startswith(_HARMLESS_HOOKS) for place in places(hook)) for hook in hooks.values())


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


def training_reasons(model: PreTrainedModel, modules: tuple[nn.Module, ...]) -> list[str]:
    """Why `model` in its present mode would not give the same tokens twice."""
    if not model.training:
        return []
    reasons = []
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


def autocast_state(model: PreTrainedModel) -> tuple[str, torch.dtype] | None:
    """The autocast that `model` runs under, its own or the caller's, as (device type, dtype), or None."""
    device = model.device
    device_type = (input_device(model) if device.type == "meta" else device).type
    own = autocast_of_forward(model)
    if own is not None or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return own
    return device_type, torch.get_autocast_dtype(device_type)
