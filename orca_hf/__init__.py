"""A plugin backend for the Hugging Face generation API: iteration-level scheduling after Orca (OSDI 2022)."""

from orca_hf.config import OrcaConfig
from orca_hf.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ModelError,
    OrcaError,
    RequestError,
    TokenIdError,
)
from orca_hf.loading import load
from orca_hf.pipelines import pipeline
from orca_hf.wrap import Explanation, explain, is_wrapped, release, unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Explanation",
    "ModelError",
    "OrcaConfig",
    "OrcaError",
    "RequestError",
    "TokenIdError",
    "explain",
    "is_wrapped",
    "load",
    "pipeline",
    "release",
    "unwrap",
    "wrap",
]
