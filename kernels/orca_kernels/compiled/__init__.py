"""CPU kernels in C++, compiled once on the user's machine, where it has a compiler; everything works without them."""

from .bindings import DECODE_DTYPES, LINEAR_DTYPES, Library, PackedProduct, RmsNorm, can_read, library, loaded
from .build import CompileError, compile_library

__all__ = [
    "DECODE_DTYPES",
    "LINEAR_DTYPES",
    "CompileError",
    "Library",
    "PackedProduct",
    "RmsNorm",
    "can_read",
    "compile_library",
    "library",
    "loaded",
]
