"""Reading what a safetensors checkpoint says of itself: headers and JSON files, never tensor data."""

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orca_hf.errors import CheckpointError

# Bits per element, as the safetensors format defines them. A type that is not here is left to safetensors.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_BITS |= {f"{kind}{bits}": bits for kind in "UIF" for bits in (16, 32, 64)} | {"BF16": 16, "C64": 64}

_POINTER = b"version https://git-lfs."  # how a file begins that git-lfs has left in another's place

_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit


def read_header(path: str) -> dict[str, tuple[int, int]]:
    """Reads the header of a safetensors file and checks that the file is as long as the header says.

    Args:
        path: The file. None of its tensor data is read.

    Returns:
        Where each tensor lies: its first byte and the byte after its last, counted from the end of the header.

    Raises:
        CheckpointError: The file is truncated or its header is malformed.
    """
    _refuse_pointer(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length > _MAX_HEADER:
            raise CheckpointError(f"{path} is not a safetensors file: its header would be {length:,} bytes long.")
        text = file.read(length)
    if len(prefix) < 8 or len(text) < length:
        raise CheckpointError(f"{path} is truncated: it ends in its header, at {size:,} bytes. Download it again.")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({error}).") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object.")
    header.pop("__metadata__", None)

    end = 0
    data = size - 8 - length
    places = {name: _place(path, name, entry) for name, entry in header.items()}
    for name, (start, stop) in sorted(places.items(), key=lambda item: item[1]):
        if start != end:
            raise CheckpointError(f"{path} is malformed: {name} starts at byte {start:,} of the data, not at {end:,}.")
        if stop > data:
            raise CheckpointError(
                f"{path} is truncated: {name} ends at byte {stop:,} of the data, of which there are {data:,}. "
                "Download it again."
            )
        end = stop
    if end != data:
        raise CheckpointError(f"{path} is malformed: {data - end:,} bytes follow the last tensor. Download it again.")
    return places


def _place(path: str, name: str, entry: object) -> tuple[int, int]:
    """Checks one tensor's line of the header."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
            0 <= start <= stop and all(isinstance(size, int) and size >= 0 for size in shape)
        ):
            needed = math.prod(shape) * _BITS.get(dtype, 0) / 8
        case _:
            raise CheckpointError(f"{path} is malformed: the header's entry for {name} is {entry!r}.")
    if dtype in _BITS and needed != stop - start:
        raise CheckpointError(
            f"{path} is malformed: {name} is {dtype} of shape {shape}, which is {needed:,.0f} bytes, but it lies at "
            f"{start:,} to {stop:,}, which is {stop - start:,}."
        )
    return start, stop


def read_json(path: str) -> dict[str, Any]:
    """Reads a JSON object from a file of a checkpoint.

    Raises:
        CheckpointError: It is something else.
    """
    _refuse_pointer(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object. Download it again.")
    return content


def check_files(folder: str, names: Iterable[str]) -> None:
    """Looks at those files of a folder that are there: whether they are themselves, and JSON where they are called so.

    Raises:
        CheckpointError: One is not.
    """
    for path in (os.path.join(folder, name) for name in names):
        if os.path.isfile(path):
            if path.endswith(".json"):
                read_json(path)
            else:
                _refuse_pointer(path)


def _refuse_pointer(path: str) -> None:
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(
                f"{path} is a pointer of git-lfs, which stands for the file and is not it: the repository was cloned "
                "without git-lfs. Install that and run `git lfs pull` in the folder, or download the file itself."
            )
