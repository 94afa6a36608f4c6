"""Serving from Python: requests one by one, each with a handle, in the batch that `model.generate()` shares."""

from orca_hf.serving.handle import RequestHandle
from orca_hf.serving.logprobs import TokenLogprobs
from orca_hf.serving.serving_engine import ServingEngine, engine
from orca_hf.serving.stats import ServingStats
from orca_hf.serving.stream import Timings

__all__ = ["RequestHandle", "ServingEngine", "ServingStats", "Timings", "TokenLogprobs", "engine"]
