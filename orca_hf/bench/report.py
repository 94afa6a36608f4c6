"""What every subcommand does with its points: a table, a JSON file, a progress bar."""

import json
import math
import platform
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from orca_hf import __version__
from orca_hf.demo import processor_name


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *others = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))  # noqa: B905
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "processor": processor_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "orca_hf": __version__,
    }


def write_json(path: str, arguments: Namespace, points: Sequence[Any]) -> None:
    """Writes {"bench", "settings", "machine", "points"}; a figure over repeats is {"median", "low", "high"}.

    JSON knows neither infinity, which becomes "inf", nor a mean of nothing, which becomes null.
    """
    settings = {name: value for name, value in vars(arguments).items() if name not in ("bench", "command")}
    result = {
        "bench": arguments.bench,
        "settings": settings,
        "machine": machine(),
        "points": [asdict(point) for point in points],
    }
    Path(path).write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def progress(total: int, unit: str) -> Any:
    """A bar on stderr."""
    return tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True)
