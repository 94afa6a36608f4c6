"""`python -m tests.fuzz`: many cases, each in a process that may die or hang without ending the run."""

from __future__ import annotations

import argparse
import concurrent.futures
import faulthandler
import logging
import multiprocessing
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch
import transformers
from fuzz.case import Case, Report, run_case

_PATIENCE_S = 150.0
_MOST_CHARS = 3000  # of a fault: tensors can be long


def _start() -> None:
    """Begin a process: one thread computes, as cases are tiny, and nobody reads what is logged."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("orca_hf").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def _run(case: Case) -> Report:
    """Run a case; where all threads stand is printed if it takes so long that it will be given up."""
    faulthandler.dump_traceback_later(_PATIENCE_S - 10)
    try:
        return run_case(case)
    finally:
        faulthandler.cancel_dump_traceback_later()


class Workers:
    """One process after the other; a new one where the last has died, or hangs."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def run(self, case: Case) -> Report:
        """What came of a case."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_start)
        try:
            report = self._pool.submit(_run, case).result(timeout=_PATIENCE_S)
        except BrokenProcessPool:
            report = Report(case, "the process died", f"python -m tests.fuzz --seed {case.seed}\n  {case}", hangs=True)
        except concurrent.futures.TimeoutError:
            report = Report(case, "the process hangs", f"python -m tests.fuzz --seed {case.seed}\n  {case}", hangs=True)
        if report.hangs:
            self.close()
        return report

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            for process in list(self._pool._processes.values()):
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def shrink(report: Report, workers: Workers) -> Report:
    """The report of a smaller case that fails too: operations are left out one by one."""
    for index in report.case.kept:
        smaller = workers.run(report.case.without(index))
        if smaller.fault is not None:
            report = smaller
    return report


def main() -> int:
    """Run the cases; 0 if none fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random cases, held against native.")
    parser.add_argument("--cases", type=int, default=None, help="how many; 1 with --seed, else 200")
    parser.add_argument("--seed", type=int, default=None, help="the first case's seed; 0")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    parser.add_argument("--only", default=None, help="indices of the operations to run, with commas between")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they are")
    options = parser.parse_args()
    num_cases = options.cases or (200 if options.seed is None else 1)
    first, began = options.seed or 0, time.monotonic()
    workers, reports = Workers(), []
    for seed in range(first, first + num_cases):
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            break
        case = Case.of(seed)
        if options.only is not None:
            case = replace(case, kept=tuple(map(int, options.only.split(","))))
        report = workers.run(case)
        reports.append(report)
        if report.fault is not None:
            _say(report if options.no_shrink else shrink(report, workers))
        elif num_cases == 1:
            _print(report.script)
        if len(reports) % 50 == 0:
            _sum_up(reports, began)
    workers.close()
    _sum_up(reports, began)
    return int(any(report.fault is not None for report in reports))


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _say(report: Report) -> None:
    _print(f"\nFAILS: {report.script}\n  {(report.fault or '')[:_MOST_CHARS]}\n")


def _sum_up(reports: list[Report], began: float) -> None:
    calls, by_orca, near = (
        sum(getattr(report, name) for report in reports) for name in ("num_calls", "num_by_orca", "num_near_ties")
    )
    failed = sum(report.fault is not None for report in reports)
    _print(
        f"{len(reports)} cases, {failed} fail; {calls} calls, {by_orca} by Orca, {near} near ties; "
        f"{len(reports) / (time.monotonic() - began):.2f} cases/s"
    )


if __name__ == "__main__":
    sys.exit(main())
