"""Numbers on the command line: what is none is told in words that do not name a function of ours."""

import argparse
import math
from collections.abc import Callable

_SHOWN = 40  # characters of what was given


def whole(at_least: int | None = None) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `at_least` on."""
    allowed = "a whole number" if at_least is None else f"a whole number, at least {at_least}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise _wrong(allowed, text) from error
        if at_least is not None and number < at_least:
            raise _wrong(allowed, text)
        return number

    return parse


def real(*, above: float | None = None, at_least: float | None = None, finite: bool = True) -> Callable[[str], float]:
    """A type for argparse: numbers, fractions too."""
    bounds = [f"above {above:g}"] if above is not None else [f"at least {at_least:g}"] if at_least is not None else []
    allowed = ", ".join(["a finite number" if finite else "a number", *bounds])

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError as error:
            raise _wrong(allowed, text) from error
        fits = (above is None or number > above) and (at_least is None or number >= at_least)
        if math.isnan(number) or not fits or (finite and math.isinf(number)):
            raise _wrong(allowed, text)
        return number

    return parse


def _wrong(allowed: str, text: str) -> argparse.ArgumentTypeError:
    shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    return argparse.ArgumentTypeError(f"must be {allowed}, got {shown}")
