"""What trainers put around a model's own forward, and what of it is known to leave the flat row of tokens alone."""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from accelerate.utils.operations import ConvertOutputsToFp32
from torch import nn

_DECORATED = ("torch.amp.autocast_mode", "decorate_autocast")
# By the module and the name under which a wrapping function was defined, the variable that holds what it calls. They
# are told by their code, for functools.wraps gives them the wrapped function's name and module.
_WRAPPED_BY = {
    # Mixed precision as accelerate prepares a model for it: autocast inside, fp32 outputs outside.
    _DECORATED: "func",
    ("accelerate.utils.operations", "forward"): "model_forward",
    # TRL's trainers: the model's own forward, unless the caller asks for log-probabilities in place of logits.
    ("trl.trainer.utils", "_fused_forward"): "original_forward",
}


def is_own_forward(module: nn.Module) -> bool:
    """Whether `module` is run by its class's forward, with nothing but known wrappers of trainers around it."""
    last: Any = None
    for last in _layers(module):
        if getattr(last, "__self__", module) is not module:
            return False  # a copied model's forward that still runs the original
    return getattr(last, "__func__", last) is type(module).forward


def autocast_of_forward(module: nn.Module) -> tuple[str, torch.dtype] | None:
    """The autocast that `module`'s forward runs itself under, as (device type, dtype), or None."""
    found = None
    for layer in _layers(module):
        function: Any = getattr(layer, "__func__", layer)
        if _defined(function) == _DECORATED:  # the innermost is in force
            autocast = _variable(function, "autocast_instance")
            found = (autocast.device, autocast.fast_dtype) if autocast._enabled else None
    return found


def _layers(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """A module's forward, what that calls, and so on inwards, as far as the wrappers are known."""
    layer: Any = module.forward
    while layer is not None:
        yield layer
        function: Any = getattr(layer, "__func__", layer)
        if isinstance(function, ConvertOutputsToFp32):
            layer = function.model_forward
        elif (defined := _defined(function)) in _WRAPPED_BY:
            layer = _variable(function, _WRAPPED_BY[defined])
        else:
            layer = None


def _defined(function: Any) -> tuple[str, str]:
    """The module and the name under which a function was written."""
    if not isinstance(function, FunctionType):
        return "", ""
    return str(function.__globals__.get("__name__")), function.__code__.co_name


def _variable(function: FunctionType, name: str) -> Any:
    """A function's variable from the function that it was defined in, None if it has none of that name."""
    names = function.__code__.co_freevars
    return (function.__closure__ or ())[names.index(name)].cell_contents if name in names else None
