"""Runs a subcommand: measure, print the table, write the files."""

from argparse import Namespace
from collections.abc import Callable
from importlib import import_module

from orca_hf.bench.plot import require_matplotlib
from orca_hf.bench.report import write_json


def run_bench(arguments: Namespace, write: Callable[[str], object]) -> int:
    """Measures as `arguments` say, and returns the exit status: 1 if tokens differ or a peer failed.

    A subcommand's module has `measure(arguments)`, which returns its points, `table(points)`, `draw(path, points)`
    and `passed(points)`.
    """
    if arguments.plot:
        require_matplotlib()
    bench = import_module(f"orca_hf.bench.{arguments.bench}")
    points = bench.measure(arguments)
    if arguments.out:
        write_json(arguments.out, arguments, points)
    write(bench.table(points))
    if arguments.plot:
        bench.draw(arguments.plot, points)
    return 0 if bench.passed(points) else 1
