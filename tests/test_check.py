"""Is an installation as fast as it should be: expectations follow the machine's peak, causes are looked for."""

from __future__ import annotations

import io

import pandas as pd
import pytest
from rich.console import Console

from harness import check
from tests.test_compare import steady


def installation(rate: float, gflops: float = 100, bandwidth: float = 20, **changes: object) -> pd.DataFrame:
    """Trials of PyTorch on a machine with this peak."""
    facts = {
        "peak_gflops": gflops, "peak_bandwidth_gbs": bandwidth, "cpu_per_wall": 1.9, "blas": "oneDNN 3.11, AVX2",
        "simd": "avx avx2 fma", "python": "3.11.7", "settings": "channels_last, debug=False", "numpy": "2.4.6",
        "foreign_load": 0.0, "steal": 0.0, "major_faults": 0, "throttled": 0, "cpu_mhz": 3000.0,
    }  # fmt: skip
    return steady(torch=rate).assign(**{**facts, **changes})


def judged(here: pd.DataFrame, *there: pd.DataFrame) -> pd.Series[str]:
    found = check.check(here, pd.concat(there))
    assert len(found) == 1
    return found.iloc[0]


def test_expectation_follows_the_peak_of_the_machine() -> None:
    public = installation(100, gflops=100, bandwidth=20)
    assert judged(installation(100), public).verdict == "as expected"
    assert judged(installation(200, gflops=200, bandwidth=40), public).verdict == "as expected"
    assert judged(installation(100, gflops=200, bandwidth=40), public).verdict == "slower than expected"
    assert judged(installation(100, gflops=200, bandwidth=20), public).verdict == "as expected"  # bound by memory
    assert judged(installation(200, gflops=100, bandwidth=20), public).verdict == "faster than expected"
    slow = judged(installation(50), public)
    assert slow.slower == pytest.approx(0.5, abs=0.03)


def test_the_nearest_machine_is_taken() -> None:
    small = installation(100, gflops=100, machine="small")
    large = installation(900, gflops=1000, bandwidth=200, machine="large")
    assert judged(installation(110, gflops=120), small, large).machine == "small"
    assert judged(installation(800, gflops=900, bandwidth=180), small, large).machine == "large"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"threads": 1}, "threads: 1, there 2"),
        ({"cpu_per_wall": 1.0}, "threads: kept 50% of its cores busy, there 95%"),
        ({"blas": "OpenBLAS 0.3.21 Prescott"}, "BLAS: code without AVX, which this processor has: OpenBLAS"),
        ({"blas": "oneDNN 3.11, NO AVX"}, "BLAS: code without AVX, which this processor has"),
        ({"blas": "Eigen"}, "oneDNN: not used, there it is"),
        ({"simd": "avx"}, "vector extensions: this processor lacks avx2 fma"),
        ({"python": "3.11.7 debug"}, "debug build: Python 3.11.7 debug"),
        ({"settings": "channels_last, debug=True"}, "debug build: the framework is one"),
        ({"throttled": 3}, "throttling: heat slowed cores down 30 times during 10 trials"),
        ({"foreign_load": 0.7}, "foreign load: other processes took up to 0.7 cores during 10 of 10 trials"),
        ({"steal": 0.4}, "foreign load: other virtual machines took up to 0.4 cores during 10 of 10 trials"),
        ({"major_faults": 500}, "swapping: 500 pages a second came from disk"),
        ({"framework_version": "0.9"}, "versions: framework version 0.9, there 1"),
        ({"settings": "contiguous, debug=False"}, "settings: contiguous, debug=False, there channels_last, debug"),
        ({"warmup": "no steady state"}, "steadiness: step times kept shifting in 10 of 10 trials"),
    ],
)  # fmt: skip
def test_causes_are_found_by_looking(changes: dict[str, object], cause: str) -> None:
    found = judged(installation(50, **changes), installation(100))
    assert found.verdict == "slower than expected"
    assert any(each.startswith(cause) for each in found.causes), found.causes


def test_missing_cudnn_is_found() -> None:
    public = installation(100, device="cuda", cudnn="9.1")
    assert "cuDNN: none found, there 9.1" in judged(installation(50, device="cuda"), public).causes


def test_what_is_as_expected_is_accused_of_nothing() -> None:
    assert judged(installation(100, throttled=3, blas="Eigen"), installation(100)).causes == []


def test_without_a_cause_what_was_looked_at_is_told() -> None:
    console = Console(file=io.StringIO(), width=250)
    console.print(check.terminal(check.check(installation(50), installation(100))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "none found; looked at foreign load, throttling" in shown
    assert "slower" in shown


def test_what_cannot_be_told_says_why() -> None:
    public = installation(100)
    assert judged(installation(100, profile="smoke"), public).verdict == "nothing is published of this row"
    assert judged(installation(100, peak_gflops=None), public).verdict == "no peak of this machine was measured"
    assert judged(installation(100), installation(100, peak_gflops=None)).verdict == "nothing is published of this row"
