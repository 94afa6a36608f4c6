"""Promise: whatever users do to a model and beside each other, calls come out as natively. `python -m tests.fuzz`."""

import pytest
from fuzz.case import Case, run_case

# Each some calls, with edits, threads and interrupts between them; chosen by nothing but their order.
SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_case_comes_out_as_natively(seed):
    report = run_case(Case.of(seed))
    assert report.fault is None, f"{report.script}\n{report.fault}"
