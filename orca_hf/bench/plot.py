"""Figures that can be read in print: each line has a marker and a dash pattern of its own, each axis its unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orca_hf.errors import OrcaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX*<>ph"
_DASHES = ("-", "--", "-.", ":")
_HATCHES = ("", "//", "..", "xx")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a figure."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. The labels carry the units."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


def require_matplotlib() -> Any:
    """The Figure class; called before anything is measured, so that no measurement is lost for want of it.

    Raises:
        OrcaError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OrcaError("--plot needs matplotlib: pip install 'orca-hf[bench]'.") from error
    return Figure


def draw_lines(path: str, panels: Sequence[Panel]) -> None:
    """Writes panels of lines, side by side."""
    figure = require_matplotlib()(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, ax in zip(panels, axes, strict=True):
        for index, line in enumerate(panel.lines):
            marker, dash = _MARKERS[index % len(_MARKERS)], _DASHES[index % len(_DASHES)]
            ax.plot(line.xs, line.ys, label=line.label, marker=marker, markersize=5, linestyle=dash)
        ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.log_x:
            ax.set_xscale("log", base=2)
            ticks = sorted({x for line in panel.lines for x in line.xs})
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if panel.log_y:
            ax.set_yscale("log")
        ax.grid(visible=True, linewidth=0.4)
        ax.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def draw_bars(
    path: str, labels: Sequence[str], values: Sequence[tuple[float, float, float]], x_label: str, mark: float | None
) -> None:
    """Writes a bar for each label: (value, lowest, highest), and a vertical line at `mark`."""
    figure = require_matplotlib()(figsize=(7, 1.2 + 0.4 * len(labels)), layout="constrained")
    ax: Axes = figure.subplots()
    errors = [[value - low for value, low, _ in values], [high - value for value, _, high in values]]
    bars = ax.barh(labels, [value for value, _, _ in values], xerr=errors, color="lightgrey", edgecolor="black")
    for index, bar in enumerate(bars):
        bar.set_hatch(_HATCHES[index % len(_HATCHES)])
    if mark is not None:
        ax.axvline(mark, color="black", linestyle="--", linewidth=1)
    ax.set_xlabel(x_label)
    ax.invert_yaxis()
    ax.grid(visible=True, axis="x", linewidth=0.4)
    figure.savefig(path, dpi=150)
