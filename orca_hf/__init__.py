"""A plugin backend for the Hugging Face generation API: iteration-level scheduling after Orca (OSDI 2022)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orca_hf.config import OrcaConfig
from orca_hf.errors import (
    CancelledError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    ForwardError,
    ModelError,
    OrcaError,
    RequestError,
    StoppedError,
    TokenIdError,
)

if TYPE_CHECKING:
    from orca_hf.loading import load
    from orca_hf.pipelines import pipeline
    from orca_hf.serving import RequestHandle, ServingEngine, ServingStats, Timings, TokenLogprobs, engine
    from orca_hf.wrapping import Explanation, explain, is_wrapped, release, unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "CancelledError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeadlineError",
    "Explanation",
    "ForwardError",
    "ModelError",
    "OrcaConfig",
    "OrcaError",
    "RequestError",
    "RequestHandle",
    "ServingEngine",
    "ServingStats",
    "StoppedError",
    "Timings",
    "TokenIdError",
    "TokenLogprobs",
    "engine",
    "explain",
    "is_wrapped",
    "load",
    "pipeline",
    "release",
    "unwrap",
    "wrap",
]

# What needs PyTorch and transformers' model code is imported on first use, as transformers does it itself.
_MODULES = {
    "orca_hf.loading": ("load",),
    "orca_hf.pipelines": ("pipeline",),
    "orca_hf.serving": ("RequestHandle", "ServingEngine", "ServingStats", "Timings", "TokenLogprobs", "engine"),
    "orca_hf.wrapping": ("Explanation", "explain", "is_wrapped", "release", "unwrap", "wrap"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # A submodule must never take the name of one of these: importing it would put the module in the function's place.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
