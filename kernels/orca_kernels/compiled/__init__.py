"""CPU kernels in C++, compiled once on the user's machine, where it has a compiler; everything works without them."""

from .bindings import Library, library, loaded
from .build import CompileError, compile_library

__all__ = ["CompileError", "Library", "compile_library", "library", "loaded"]
