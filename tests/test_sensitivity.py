"""The harness tried on itself: the same is hardly ever called different, and a slowdown of 10 % is found."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

from harness import project, statistics

SCRIPT = project.ROOT / "benchmarks" / "sensitivity.py"
_spec = importlib.util.spec_from_file_location("sensitivity", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
sensitivity = importlib.util.module_from_spec(_spec)
sys.modules["sensitivity"] = sensitivity
_spec.loader.exec_module(sensitivity)

COMPARISONS = ["within_a_run", "between_runs"]


@pytest.fixture(scope="module")
def rates() -> np.ndarray:
    found: np.ndarray = sensitivity.noise()
    assert len(found) >= 20
    return found


@pytest.mark.slow
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_a_against_a_is_called_different_in_at_most_5_of_100(comparison: str, rates: np.ndarray) -> None:
    assert sensitivity.share(getattr(sensitivity, comparison), rates, 10, 0.0, 100) <= 0.05


@pytest.mark.slow
def test_a_slowdown_of_10_percent_within_a_run_is_found_in_at_least_90_of_100(rates: np.ndarray) -> None:
    assert sensitivity.share(sensitivity.within_a_run, rates, 10, 0.1, 100) >= 0.9


@pytest.mark.slow
def test_a_slowdown_of_10_percent_between_runs_is_found_where_the_machine_is_calm() -> None:
    """Runs share no repeats: what the machine does between them isn't cancelled, so that it must be calm."""
    calm = np.exp(np.random.RandomState(0).normal(0, 0.03, (20, 2)))
    assert sensitivity.share(sensitivity.between_runs, calm, 10, 0.1, 100) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_three_repeats_claim_nothing(comparison: str, rates: np.ndarray) -> None:
    assert sensitivity.share(getattr(sensitivity, comparison), rates, 3, 0.3, 100) == 0


@pytest.mark.slow
def test_of_many_rows_that_do_not_differ_hardly_any_table_names_one() -> None:
    """Twelve rows that are the same: in at most 5 of 100 tables any of them is called different."""
    random = np.random.RandomState(0)
    wrong = 0
    for _ in range(100):
        samples = [random.normal(0, 0.05, 10) for _ in range(11)]
        p = statistics.holm(list(statistics._signed_rank_test(samples)))
        wrong += min(p) <= statistics.LEVEL
    assert wrong <= 5


@pytest.mark.slow
def test_the_document_shows_what_the_experiment_finds(rates: np.ndarray) -> None:
    shown = sensitivity.DOCUMENT.read_text()
    for name, comparison in (("two rows of a run", "within_a_run"), ("a row of two runs", "between_runs")):
        wrong, found = (sensitivity.share(getattr(sensitivity, comparison), rates, 10, slow, 1000) for slow in (0, 0.1))
        assert f"| {name} | 10 | {wrong:.1%} | {found:.1%} |" in shown
