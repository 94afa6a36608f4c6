"""What Prometheus reads: gauges and counters of the engine at the moment of asking, histograms of what has ended."""

import math
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orca_hf.serving import ServingStats, Timings

# Seconds. A long prompt's first token takes some on a CPU, a small model's iteration on a GPU a thousandth.
_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

# Of the engine's stats: the metric's name and what it says.
_GAUGES = {
    "num_running": ("orca_requests_running", "Requests that hold K/V slots, or run natively"),
    "num_waiting": ("orca_requests_waiting", "Requests that have not begun"),
    "num_slots": ("orca_slots", "K/V slots there are"),
    "num_reserved": ("orca_slots_reserved", "K/V slots reserved"),
    "num_used": ("orca_slots_used", "K/V slots that hold keys and values"),
}
_COUNTERS = {
    "num_iterations": ("orca_iterations", "Iterations run"),
    "num_prompt_tokens": ("orca_prompt_tokens", "Prompt tokens computed"),
    "num_generated_tokens": ("orca_generated_tokens", "Tokens generated"),
    "num_draft_tokens": ("orca_draft_tokens", "Guesses at tokens that were computed along"),
    "num_accepted_tokens": ("orca_accepted_tokens", "Guesses that the model chose"),
    "num_native": ("orca_native_fallbacks", "Calls and requests that went to native generate()"),
    "num_finished": ("orca_requests_finished", "Requests that ended well"),
    "num_cancelled": ("orca_requests_cancelled", "Requests that were cancelled"),
    "num_failed": ("orca_requests_failed", "Requests that failed"),
}


class Metrics:
    """The server's metrics, in a registry of their own.

    Args:
        stats: The engine's `stats`.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, stats: Callable[[], ServingStats]) -> None:
        self._stats = stats
        self._last_iteration = -math.inf
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", _LATENCIES)
        self._per_token = self._histogram("time_per_output_token_seconds", "Between tokens after the first", _STEPS)
        self._request = self._histogram("request_seconds", "Arrival to end", _LATENCIES)
        self._iteration = self._histogram(
            "iteration_seconds", "Forwards, of the last iterations before each scrape", _STEPS
        )
        self._responses = Counter(
            "orca_http_responses", "Responses by route and status", ("route", "status"), registry=self._registry
        )

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"orca_{name}", about, buckets=buckets, registry=self._registry)

    def answered(self, route: str, status: int) -> None:
        """A response has gone out."""
        self._responses.labels(route, str(status)).inc()

    def ended(self, timings: Timings, end: float, num_tokens: int) -> None:
        """An answer is over.

        Args:
            timings: Its handle's.
            end: When, on the same clock; a stop string ends an answer before its request.
            num_tokens: How many it has.
        """
        self._request.observe(end - timings.arrival)
        if timings.first_token is not None:
            self._first_token.observe(timings.first_token - timings.arrival)
            if num_tokens > 1:
                self._per_token.observe((end - timings.first_token) / (num_tokens - 1))

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        for iteration in self._stats().recent:
            if iteration.started > self._last_iteration:
                self._last_iteration = iteration.started
                self._iteration.observe(iteration.duration)
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], ServingStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for field, (name, about) in _GAUGES.items():
            yield GaugeMetricFamily(name, about, value=getattr(stats, field))
        for field, (name, about) in _COUNTERS.items():
            yield CounterMetricFamily(name, about, value=getattr(stats, field))
