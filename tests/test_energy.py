"""Energy: which counters are read, and what lies between two readings. All counters here are planted."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import energy
from common.energy import Counter


@pytest.fixture
def powercap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    return tmp_path


def plant(folder: Path, name: str, microjoules: str, span: str = "262143328850") -> None:
    folder.mkdir()
    for file, text in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", span)):
        (folder / file).write_text(text + "\n")


def test_each_package_is_counted_and_no_part_of_it(powercap: Path) -> None:
    plant(powercap / "intel-rapl:0", "package-0", "5000000")
    plant(powercap / "intel-rapl:0:0", "core", "4000000")
    plant(powercap / "intel-rapl:1", "package-1", "7500000", "10000000")
    (powercap / "intel-rapl").mkdir()
    assert energy.counters("cpu") == {
        "RAPL package-0": Counter(5.0, 262143.32885),
        "RAPL package-1": Counter(7.5, 10.0),
    }


@pytest.mark.parametrize("content", ["", "much"])
def test_a_counter_that_cannot_be_read_is_left_out(powercap: Path, content: str) -> None:
    plant(powercap / "intel-rapl:0", "package-0", content)
    plant(powercap / "intel-rapl:1", "package-1", "7500000")
    (powercap / "intel-rapl:2").mkdir()
    assert list(energy.counters("cpu")) == ["RAPL package-1"]


def test_without_counters_nothing_is_known(powercap: Path) -> None:
    found = energy.counters("cpu")
    assert found == {}
    assert energy.spent(found, found) is None


def test_energy_is_the_sum_over_the_counters() -> None:
    before = {"RAPL package-0": Counter(5.0, 100.0), "NVML": Counter(1.0, None)}
    after = {"RAPL package-0": Counter(7.0, 100.0), "NVML": Counter(4.5, None)}
    assert energy.spent(before, after) == 5.5


def test_a_counter_that_started_anew_has_gone_on() -> None:
    assert energy.spent({"RAPL": Counter(98.0, 100.0)}, {"RAPL": Counter(3.0, 100.0)}) == 5.0


def test_counters_that_changed_tell_nothing() -> None:
    assert energy.spent({"RAPL": Counter(1.0, 9.0)}, {}) is None


class FakeNvml:
    """NVML with one GPU that has used 12 J and holds 3 GiB; `broken` names a function that fails."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.asked: list[int] = []
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 999 if name == self.broken else getattr(self, "_" + name)(*arguments)

    def _nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def _nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        self.asked.append(index.value)
        return 0

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, answer: Any) -> int:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_ulonglong))[0] = 12_000
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, answer: Any) -> int:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_ulonglong))[2] = 3 * 2**30
        return 0


@pytest.mark.parametrize(("visible", "index"), [(None, 0), ("1", 1), ("2,0", 2), ("GPU-8932f937", 0)])
def test_the_gpu_in_use_is_asked(
    powercap: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int
) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(energy, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: nvml}))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert energy.counters("cuda") == {"NVML": Counter(12.0, None)}
    assert energy.gpu_memory_mib() == 3072
    assert nvml.asked == [index, index]
    assert nvml.open == 0
    assert energy.counters("cpu") == {}


@pytest.mark.parametrize(
    "broken",
    ["nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetMemoryInfo"],
)
def test_what_the_driver_refuses_is_unknown(powercap: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    nvml = FakeNvml(broken)
    monkeypatch.setattr(energy, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: nvml}))
    memory, joules = energy.gpu_memory_mib(), energy.counters("cuda")
    assert memory is None or broken == "nvmlDeviceGetTotalEnergyConsumption"
    assert joules == {} or broken == "nvmlDeviceGetMemoryInfo"
    assert nvml.open == 0


def test_without_a_driver_no_gpu_is_asked(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(energy, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": missing}))
    assert energy.gpu_memory_mib() is None
    assert energy.counters("cuda") == {}
