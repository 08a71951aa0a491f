"""Warm-up: the label follows the shape of the series, whatever its noise and its outliers."""

from __future__ import annotations

import numpy as np
import pytest

from harness.warmup import classify


def series(*segments: tuple[int, float], noise: float = 0.03, seed: int = 0) -> list[float]:
    """Step times of these lengths and means, with noise as relative standard deviation."""
    random = np.random.RandomState(seed)
    means = np.concatenate([np.full(length, mean) for length, mean in segments])
    return list(means * random.lognormal(0, noise, len(means)))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("segments", "kind", "steady"),
    [
        ([(80, 0.1)], "flat", 0),
        ([(10, 0.3), (70, 0.1)], "warm-up", 10),
        ([(20, 0.1), (60, 0.15)], "slowdown", 20),
        ([(70, 0.1), (10, 0.15)], "no steady state", None),
        ([(20, 0.1), (20, 0.2), (25, 0.1), (15, 0.2)], "no steady state", None),
        ([(40, 0.102), (40, 0.1)], "flat", 0),  # too small a shift to matter
    ],
)
def test_label_follows_the_shape(segments: list[tuple[int, float]], kind: str, steady: int | None, seed: int) -> None:
    found = classify(series(*segments, seed=seed))
    assert found.warmup == kind
    assert (found.steady_step is None) == (steady is None)
    assert steady is None or abs(found.steady_step - steady) <= 2  # type: ignore[operator]


def test_single_slow_steps_are_no_change() -> None:
    seconds = series((80, 0.1))
    seconds[0] = seconds[17] = seconds[60] = 5.0
    assert classify(seconds).warmup == "flat"


def test_equal_times_are_flat() -> None:
    assert classify([0.01] * 80).warmup == "flat"
    assert classify([0.02] * 40 + [0.01] * 40) == ("warm-up", 40)


def test_a_short_series_tells_nothing() -> None:
    assert classify([0.1] * 8) == (None, None)
    assert classify([]) == (None, None)


def test_a_long_series_is_classified() -> None:
    assert classify(series((800, 0.12), (7010, 0.1))).warmup == "warm-up"
