"""The machine's peak: measured for real, briefly, and refused where it can't be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness import peak
from harness.project import UserError


def test_both_peaks_are_measured() -> None:
    single, double = (peak.measure(1, precision) for precision in ("float32", "float64"))
    assert 0.1 < double.peak_gflops < single.peak_gflops < 1e5
    assert 0.1 < single.peak_bandwidth_gbs < 1e4


def test_a_measurement_that_fails_says_why() -> None:
    with pytest.raises(UserError, match=r"peak can't be measured: .*float31"):
        peak.measure(1, "float31")


@pytest.mark.parametrize("content", [None, "", "none", "1024K\n"])
def test_bandwidth_is_measured_whatever_is_known_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    monkeypatch.setattr(peak, "CACHE", tmp_path / "size")
    monkeypatch.setattr(peak, "SECONDS", 0.01)
    if content is not None:
        (tmp_path / "size").write_text(content)
    assert np.isfinite(peak._bandwidth(2))
