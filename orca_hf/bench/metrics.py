"""What the bench reports, as pure functions of times. Seconds everywhere."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request as its client saw it.

    Attributes:
        arrival: When it arrived, queueing not yet begun.
        tokens: When each of its tokens came; at least one.
        end: When its answer was there as a whole.
    """

    arrival: float
    tokens: tuple[float, ...]
    end: float

    @property
    def normalised_latency(self) -> float:
        """End-to-end seconds an output token (the paper's y axis)."""
        return (self.end - self.arrival) / len(self.tokens)

    @property
    def ttft(self) -> float:
        """Seconds to the first token, queueing included."""
        return self.tokens[0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, to the end; None of a single token."""
        return (self.end - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in pairwise(self.tokens)]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over all repeats."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Spread":
        """In another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        if self.low == self.high:
            return _short(self.median)
        return f"{_short(self.median)} ({_short(self.low)}..{_short(self.high)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(values: Iterable[float]) -> Spread:
    """Median, lowest and highest."""
    found = list(values)
    return Spread(median(found), min(found), max(found))


def percentile(values: Iterable[float], percent: float) -> float:
    """By nearest rank: the smallest value that at least `percent` of them do not exceed; NaN of none."""
    found = sorted(values)
    return found[max(math.ceil(percent / 100 * len(found)), 1) - 1] if found else math.nan


def throughput(timelines: Sequence[Timeline]) -> float:
    """Requests a second, from the first arrival to the last end."""
    return len(timelines) / (max(line.end for line in timelines) - min(line.arrival for line in timelines))


def share_within(timelines: Sequence[Timeline], ttft_limit: float, tpot_limit: float) -> float:
    """Share of requests inside both limits; a single token has no time between tokens to exceed."""
    inside = [line.ttft <= ttft_limit and (line.tpot or 0.0) <= tpot_limit for line in timelines]
    return sum(inside) / len(inside)


def goodput(points: Iterable[tuple[float, float]], at_least: float = 0.9) -> float:
    """The highest rate of (rate, share within limits) whose share is `at_least`; 0 if there is none."""
    return max((rate for rate, share in points if share >= at_least), default=0.0)


def mean_over_time(samples: Sequence[tuple[float, float]]) -> float:
    """Mean of (time, value), each value holding until the next time; NaN where no time passes."""
    held = [(then - now, value) for (now, value), (then, _) in pairwise(samples)]
    total = sum(seconds for seconds, _ in held)
    return sum(seconds * value for seconds, value in held) / total if total else math.nan


def over(timelines: Iterable[Timeline], value: Callable[[Timeline], float | None]) -> list[float]:
    """`value` of each request that has it."""
    return [found for line in timelines if (found := value(line)) is not None]


def summary(timelines: Sequence[Timeline], ttft_limit: float, tpot_limit: float) -> dict[str, float]:
    """All figures of one run; `trace.Point` says what they are."""
    latencies = over(timelines, lambda line: line.normalised_latency)
    return {
        "throughput": throughput(timelines),
        "latency_median": median(latencies),
        "latency_mean": fmean(latencies),
        "ttft_median": median(line.ttft for line in timelines),
        "ttft_p99": percentile((line.ttft for line in timelines), 99),
        "tpot_median": percentile(over(timelines, lambda line: line.tpot), 50),
        "gap_p99": percentile((gap for line in timelines for gap in line.gaps), 99),
        "within_limits": share_within(timelines, ttft_limit, tpot_limit),
    }
