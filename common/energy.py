"""Energy spent, where the machine tells: RAPL counts a processor's, NVML that of an NVIDIA GPU.

Both are counters, read before and after a timed run; on many machines RAPL can be read by root alone.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

POWERCAP = Path("/sys/class/powercap")  # Linux, Documentation/power/powercap/powercap.rst


class Counter(NamedTuple):
    """A counter of energy, in joules, which starts anew from 0 after `span` (None: never)."""

    joules: float
    span: Optional[float]


def counters(device: str) -> Dict[str, Counter]:
    """Return the counters that can be read, by source: of the processors, and for device "cuda" of the GPU."""
    found = {}
    for zone in sorted(POWERCAP.glob("*-rapl:[0-9]*")):
        if zone.name.count(":") > 1:  # cores and memory are parts of their package
            continue
        try:
            name = (zone / "name").read_text().strip()
            joules = int((zone / "energy_uj").read_text()) / 1e6
            span = int((zone / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):  # not readable by everyone
            continue
        found["RAPL " + name] = Counter(joules, span)
    if device == "cuda":
        millijoules = _gpu_millijoules()
        if millijoules is not None:
            found["NVML"] = Counter(millijoules / 1000, None)
    return found


def spent(before: Dict[str, Counter], after: Dict[str, Counter]) -> Optional[float]:
    """Return the joules spent between two readings of the same counters; None where there are none."""
    if not before or before.keys() != after.keys():
        return None
    total = 0.0
    for source, start in before.items():
        joules = after[source].joules - start.joules
        total += joules + start.span if joules < 0 and start.span else joules
    return total


def gpu_memory_mib() -> Optional[float]:
    """Return the memory in use on the GPU as its driver counts it, whoever uses it, in MiB; None without NVML."""
    usage = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used, in bytes
    return usage[2] / 2**20 if _ask_gpu("nvmlDeviceGetMemoryInfo", usage) else None


def _gpu_millijoules() -> Optional[int]:
    joules = ctypes.c_ulonglong()
    return joules.value if _ask_gpu("nvmlDeviceGetTotalEnergyConsumption", joules) else None


def _ask_gpu(function: str, answer: Any) -> bool:
    """Let a function of NVML fill in `answer` for the GPU in use; return whether it did. See NVML's API reference."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != 0:
        return False
    try:
        index = ctypes.c_uint(int(visible) if visible.isdigit() else 0)
        return bool(
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            and getattr(nvml, function)(handle, ctypes.byref(answer)) == 0
        )
    finally:
        nvml.nvmlShutdown()
