"""What users change for the whole process, or a thread, around some calls."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel

# From a model and random numbers to what is changed in words, and the change.
Scope = Callable[[PreTrainedModel, Random], tuple[str, AbstractContextManager[Any]] | None]


def _scaled(function: Callable[..., Any], factor: float = 1.25) -> Callable[..., Any]:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    return scaled


# Functions that forwards use; none with which generate() makes tokens, whose numbers a patch would change.
FUNCTIONS = [
    (nn.functional, "silu"),
    (nn.functional, "gelu"),
    (nn.functional, "linear"),
    (nn.functional, "layer_norm"),
    (nn.functional, "scaled_dot_product_attention"),
    (nn.functional, "embedding"),
    (torch, "rsqrt"),
    (torch, "matmul"),
    (torch.Tensor, "pow"),
    (torch.Tensor, "mean"),
    (nn.Linear, "forward"),
    (nn.Module, "__call__"),
]


def function(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """A function of PyTorch is another."""
    owner, name = draw.choice(FUNCTIONS)
    return f"{owner.__name__}.{name} scales", patch.object(owner, name, _scaled(getattr(owner, name)))


def class_forward(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """A class of the model's has another forward, or another method that its forward calls."""
    classes = {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.")}
    wanted = [
        c for c in classes if any(part in c.__name__.lower() for part in ("norm", "mlp", "attention", "activation"))
    ]
    wanted = sorted(wanted, key=lambda c: c.__name__) or [nn.Linear]
    owner = draw.choice(wanted)
    methods = [name for name in ("forward", "_norm") if name in vars(owner)] or ["forward"]
    name = draw.choice(methods)
    return f"{owner.__name__}.{name} scales", patch.object(owner, name, _scaled(getattr(owner, name)))


def file_function(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]] | None:
    """A function of the model's file is another."""
    module = sys.modules[type(model).__module__]
    names = [name for name in ("eager_attention_forward", "rotate_half", "repeat_kv") if hasattr(module, name)]
    if not names:
        return None
    name = draw.choice(names)
    return f"{module.__name__}.{name} scales", patch.object(module, name, _scaled(getattr(module, name)))


def interface(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """A user's function in the place of sdpa attention."""
    mine = _scaled(AttentionInterface._global_mapping["sdpa"])
    return "AttentionInterface.register('sdpa', mine)", patch.dict(AttentionInterface._global_mapping, sdpa=mine)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 1.25 if func is nn.functional.linear else output


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 1.25 if func is torch.ops.aten.mm.default else output


def function_mode(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """Every call of PyTorch goes through a user's hands."""
    if draw.random() < 0.5:
        return "a TorchFunctionMode", _Functions()
    return "a TorchDispatchMode", _Dispatched()


@contextmanager
def _set(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """A setting of PyTorch's within the block, and what it was before after it."""
    change(value)
    try:
        yield
    finally:
        change(before)


def default_dtype(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """Tensors are made in another type."""
    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float64])
    return f"set_default_dtype({dtype})", _set(torch.set_default_dtype, dtype, torch.get_default_dtype())


def deterministic(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """PyTorch fills memory before it is used."""
    before = torch.are_deterministic_algorithms_enabled()
    return "use_deterministic_algorithms(True)", _set(torch.use_deterministic_algorithms, True, before)


def threads(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """Two threads compute."""
    return "set_num_threads(2)", _set(torch.set_num_threads, 2, torch.get_num_threads())


def gradients(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """One of autograd's modes."""
    made = draw.choice([torch.inference_mode, torch.no_grad, torch.enable_grad])
    return f"{made.__name__}()", made()


def without_mkldnn(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """oneDNN is switched off."""
    return "mkldnn.flags(enabled=False)", torch.backends.mkldnn.flags(enabled=False)


def everywhere(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """A forward hook for all modules."""
    return "a hook for all modules", _hooked_everywhere()


@contextmanager
def _hooked_everywhere() -> Iterator[None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        return output * 1.25 if type(module) is nn.Linear else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def autocast(model: PreTrainedModel, draw: Random) -> tuple[str, AbstractContextManager[Any]]:
    """Products in bfloat16."""
    return "autocast(bfloat16)", torch.autocast("cpu", dtype=torch.bfloat16)


SCOPES: tuple[Scope, ...] = (
    autocast, class_forward, default_dtype, deterministic, everywhere, file_function, function, function, function_mode,
    gradients, interface, threads, without_mkldnn,
)  # fmt: skip
