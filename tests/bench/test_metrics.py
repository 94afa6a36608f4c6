"""Promise: the bench's figures are what their names say, by cases worked out by hand."""

import math

import pytest

from orca_hf.bench import metrics
from orca_hf.bench.metrics import Spread, Timeline

# Arrives at 10, tokens at 12, 13 and 15, answered at 16: 6 seconds for 3 tokens.
THREE = Timeline(10.0, (12.0, 13.0, 15.0), 16.0)
ONE = Timeline(11.0, (11.5,), 12.0)


def test_a_timeline():
    assert THREE.normalised_latency == 2.0
    assert THREE.ttft == 2.0
    assert THREE.tpot == 2.0  # (16 - 12) / 2
    assert THREE.gaps == [1.0, 2.0]
    assert (ONE.normalised_latency, ONE.ttft, ONE.tpot, ONE.gaps) == (1.0, 0.5, None, [])


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([4, 1, 3, 2], 50, 2),
        ([4, 1, 3, 2], 51, 3),
        ([4, 1, 3, 2], 100, 4),
        ([4, 1, 3, 2], 0, 1),
        (range(1, 101), 99, 99),
        (range(1, 202), 99, 199),
        ([7], 99, 7),
    ],
)
def test_percentile_by_nearest_rank(values, percent, expected):
    assert metrics.percentile(values, percent) == expected


def test_percentile_of_nothing_is_not_a_number():
    assert math.isnan(metrics.percentile([], 50))


def test_throughput_counts_from_the_first_arrival_to_the_last_end():
    assert metrics.throughput([THREE, ONE]) == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("ttft_limit", "tpot_limit", "share"),
    [(2.0, 2.0, 1.0), (1.9, 2.0, 0.5), (2.0, 1.9, 0.5), (0.5, 0.0, 0.5), (0.4, 9.0, 0.0)],
)
def test_share_within_both_limits(ttft_limit, tpot_limit, share):
    assert metrics.share_within([THREE, ONE], ttft_limit, tpot_limit) == share


@pytest.mark.parametrize(
    ("points", "expected"),
    [([(1, 1.0), (2, 0.9), (4, 0.89)], 2), ([(1, 0.5)], 0), ([], 0), ([(1, 0.5), (3, 0.95)], 3)],
)
def test_goodput_is_the_highest_rate_with_nine_of_ten_inside(points, expected):
    assert metrics.goodput(points) == expected


def test_a_mean_over_time_weighs_each_value_by_how_long_it_held():
    assert metrics.mean_over_time([(0, 10), (1, 40), (4, 99)]) == (1 * 10 + 3 * 40) / 4
    assert math.isnan(metrics.mean_over_time([(0, 10)]))
    assert math.isnan(metrics.mean_over_time([(0, 10), (0, 20)]))


def test_spread():
    found = metrics.spread([3.0, 1.0, 2.0, 5.0])
    assert found == Spread(2.5, 1.0, 5.0)
    assert found.scaled(2) == Spread(5.0, 2.0, 10.0)
    assert str(found) == "2.5 (1..5)"
    assert str(metrics.spread([1234.5])) == "1234"


def test_a_summary_has_median_and_mean():
    late = Timeline(0.0, (1.0, 3.0), 8.0)  # normalised 4, TTFT 1, TPOT 7, a gap of 2
    assert metrics.summary([THREE, ONE, late], ttft_limit=1.0, tpot_limit=7.0) == {
        "throughput": 3 / 16,
        "latency_median": 2.0,
        "latency_mean": pytest.approx((2 + 1 + 4) / 3),
        "ttft_median": 1.0,
        "ttft_p99": 2.0,
        "tpot_median": 2.0,
        "gap_p99": 2.0,
        "within_limits": pytest.approx(2 / 3),
    }
