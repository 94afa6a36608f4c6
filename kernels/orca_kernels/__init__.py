"""Attention over a ragged batch of requests (the selective batching of Orca, OSDI 2022, section 3.2).

Depends on torch alone; Triton is imported when a kernel is first used.
"""

from .attention import selective_attention, store_kv
from .ragged import RaggedBatch

__all__ = ["RaggedBatch", "selective_attention", "store_kv"]
