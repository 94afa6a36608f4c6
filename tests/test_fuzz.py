"""Promise: whatever users do to a model, and beside each other, calls come out as natively. `python -m tests.fuzz`."""

import pytest
from fuzz.case import Case, run_case

from orca_hf.outcome import Outcome

# Each some calls, with edits, threads and interrupts between them; chosen by nothing but their order.
SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_case_comes_out_as_natively(seed):
    report = run_case(Case.of(seed))
    assert report.fault is None, f"{report.script}\n{report.fault}"


def test_most_calls_are_run_by_orca():
    """Else nothing would be compared but native generate() with itself."""
    reports = [run_case(Case.of(seed)) for seed in range(60, 68)]
    assert 2 * sum(report.num_by_orca for report in reports) > sum(report.num_calls for report in reports) > 10


class Shifted(Outcome):
    """Takes every token's logit for its neighbour's, after the model's trial has looked at them."""

    def __init__(self, logits, *more):
        super().__init__(logits.roll(1, dims=-1), *more)


def test_what_is_wrong_is_found(monkeypatch):
    monkeypatch.setattr("orca_hf.engines.Outcome", Shifted)
    reports = [run_case(Case.of(seed)) for seed in range(60, 64)]
    assert all(report.fault is not None for report in reports if report.num_by_orca)
    assert sum(report.num_by_orca for report in reports) > 0
