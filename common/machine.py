"""What can be learnt about the computer with the standard library: cores, processor, memory, load."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from pathlib import Path
from typing import Iterator, NamedTuple, Optional

CPUS = Path("/sys/devices/system/cpu")

VECTOR_EXTENSIONS = ("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, or a container's CPU quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _cpu_quotas())]))


def _cpu_quotas() -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's control group and its parents (cgroup v2, then v1)."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = [*line.split(":", 2), "none", ""][:3]
        if controllers == "":
            root, quota_file, period_file = Path("/sys/fs/cgroup"), "cpu.max", None
        elif "cpu" in controllers.split(","):
            root, quota_file, period_file = Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us", "cpu.cfs_period_us"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if root != folder and root not in folder.parents:
                break
            try:
                words = (folder / quota_file).read_text().split()
                words += (folder / period_file).read_text().split() if period_file else []
            except OSError:  # the root group has no quota, and a container may hide its parents
                continue
            quota, period = words if len(words) == 2 and all(map(str.isdigit, words)) else ("0", "0")
            if int(quota) > 0 and int(period) > 0:  # "max" and -1 mean none
                yield int(quota) / int(period)


def processor() -> str:
    """Return the processor's name, for example "AMD EPYC 7763 64-Core Processor"."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def operating_system() -> str:
    """Return the operating system's name, for example "Linux 6.1.0 x86_64"."""
    return "{} {} {}".format(platform.system(), platform.release(), platform.machine())


def peak_rss_mib() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes on macOS, KiB elsewhere


class CoreSeconds(NamedTuple):
    """Processor seconds spent so far on the cores that this process may use."""

    busy: float  # by whatever process of this system
    stolen: float  # by the hypervisor, for other virtual machines


def core_seconds() -> Optional[CoreSeconds]:
    """Return the processor seconds spent so far; None where the system doesn't tell (Linux alone does)."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    usable = {"cpu{}".format(core) for core in os.sched_getaffinity(0)}
    busy = stolen = 0
    for line in lines:
        name, *fields = line.split()
        if name in usable:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])  # see proc(5)
            busy += user + nice + system + irq + softirq
            stolen += steal
    ticks = os.sysconf("SC_CLK_TCK")
    return CoreSeconds(busy / ticks, stolen / ticks)


def major_faults() -> int:
    """Return how many pages this process has had to read from disk so far, from a swap file for instance."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def clock_mhz() -> Optional[float]:
    """Return the present clock of the cores that this process may use, their mean in MHz; None where nothing tells."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    clocks = [_number(CPUS / "cpu{}".format(core) / "cpufreq" / "scaling_cur_freq") for core in cores]  # kHz
    found = [clock / 1000 for clock in clocks if clock is not None]
    if not found:
        listed = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
        found = [float(listed[core]) for core in cores if core < len(listed)]
    return sum(found) / len(found) if found else None


def throttle_count() -> Optional[int]:
    """Return how often heat has slowed down the cores that this process may use, so far; None where nothing tells."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else []
    found = [_number(CPUS / "cpu{}".format(core) / "thermal_throttle" / "core_throttle_count") for core in cores]
    known = [int(count) for count in found if count is not None]
    return sum(known) if known else None


def simd() -> str:
    """Return the vector extensions of this processor that matrix products profit from, for example "avx2 fma"."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return " ".join(name for name in VECTOR_EXTENSIONS if name in flags)


def _read(path: Path) -> str:
    """Return a text file's content; empty where it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> Optional[float]:
    """Return the number that a file of /sys holds; None where it holds none."""
    try:
        return float(_read(path))
    except ValueError:
        return None


def own_seconds() -> float:
    """Return the processor seconds spent so far by this process, its children and theirs (Linux; else its own)."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # after the name; see proc(5)
        except OSError:  # it has ended meanwhile
            continue
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        ticks[process] = sum(map(int, fields[11:15]))  # user and system time, and that of children that ended
    family = {os.getpid()}
    while True:
        children = {process for process, parent in parents.items() if parent in family} - family
        if not children:
            break
        family |= children
    if os.getpid() not in ticks:
        return time.process_time()
    return sum(ticks.get(process, 0) for process in family) / os.sysconf("SC_CLK_TCK")
