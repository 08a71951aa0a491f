"""What on this machine will disturb a measurement, told before one is made. Entry point: `examine`.

Everything is read from /proc and /sys, for the cores that this process may use; what can't be read is "unknown".
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from common.trial import NOISY_LOAD

MEMORY_GIB = 4.0  # the largest trial needs so much: ResNet-50 in MXNet
STEAL_SINCE_BOOT = 0.01
HEAT_LEFT = 10.0  # °C below the temperature at which the clock is lowered
SHOWN_PROCESSES = 3

FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")

CPUS = "sys/devices/system/cpu"
NUMBER = r"\d{1,18}"
GOVERNORS = "performance|powersave|ondemand|conservative|schedutil|userspace"  # those of the kernel

Seen = tuple[bool, str, str]  # whether it disturbs, what was found, what to do if it disturbs


class Finding(NamedTuple):
    """What was seen of one subject, and what to do about it."""

    subject: str
    state: Literal["ok", "disturbs", "unknown"]
    found: str
    advice: str = ""


class _Unknown(Exception):
    """Something that can't be told: why, and perhaps what to do about it."""


class _Missing(_Unknown):
    """A file that isn't there."""


class _Counts(NamedTuple):
    """What the system had counted at one moment."""

    cores: dict[int, tuple[int, int, int]]  # ticks that each core was busy, idle, stolen by the hypervisor
    processes: dict[str, tuple[int, str]]  # ticks and name of each process, by its number and "self"
    swapped: list[int]  # pages, in and out


class _Machine(NamedTuple):
    """Where to look, for which cores, and what was counted before and after a while. Its methods raise `_Unknown`."""

    root: Path
    cores: list[int]
    before: _Counts
    after: _Counts

    def text(self, path: str, pattern: str = ".*") -> str:
        """Return a file's content, which must be of a pattern."""
        return _text(self.root / path, pattern)

    def number(self, path: str, name: str = "") -> int:
        """Return the number that a file holds; of a file with a name and a number in each line, that of `name`."""
        return _field(self.root / path, name) if name else int(self.text(path, NUMBER))

    def names(self, folder: str, pattern: str) -> list[str]:
        """Return the names of the files in a folder."""
        return _names(self.root / folder, pattern)

    def by_content(self, file: str, pattern: str) -> dict[str, list[int]]:
        """Return the cores by what this file of their folders says."""
        if not self.cores:
            raise _Unknown("this system doesn't tell which cores may be used")
        found: dict[str, list[int]] = {}
        for core in self.cores:
            found.setdefault(self.text(f"{CPUS}/cpu{core}/{file}", pattern), []).append(core)
        return found

    def spent(self) -> tuple[int, int, int, int]:
        """Return how many cores were watched, and their busy, idle and stolen ticks meanwhile."""
        both = [core for core in self.cores if core in self.before.cores and core in self.after.cores]
        pairs = [(self.before.cores[core], self.after.cores[core]) for core in both]
        # at least 0: idle time can run backwards, see proc(5)
        busy, idle, stolen = (sum(max(0, after[kind] - before[kind]) for before, after in pairs) for kind in range(3))
        if busy + idle + stolen == 0:
            raise _Unknown("/proc/stat counts nothing of the usable cores")
        return len(both), busy, idle, stolen


def examine(
    root: Path = Path("/"),
    seconds: float = 1.0,
    cores: set[int] | None = None,
    wait: Callable[[float], object] = time.sleep,
) -> list[Finding]:
    """Look at this machine for `seconds` and return a finding for each subject; nothing is raised for what isn't there.

    `root` is where /proc and /sys are looked for; `cores` are those that count, None the usable ones; `wait` lets the
    seconds pass.
    """
    if cores is None:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    before = _counts(root)
    wait(seconds)
    machine = _Machine(root, sorted(cores), before, _counts(root))
    return [_finding(subject, look, machine) for subject, look in SUBJECTS]


def terminal(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table for the terminal."""
    table = Table(title="What will disturb a measurement on this machine", title_justify="left", title_style="bold")
    for name in ("", "", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        style = {"disturbs": "yellow", "unknown": "dim"}.get(finding.state, "")
        table.add_row(*(Text(cell, style=style) for cell in finding))
    return table


def _governor(machine: _Machine) -> Seen:
    try:
        governors = machine.by_content("cpufreq/scaling_governor", GOVERNORS)
    except _Missing as reason:
        raise _Unknown(f"{reason}: the clock is the host's business") from None
    found = ", ".join(f"{governor} on {_shown(cores, machine)}" for governor, cores in governors.items())
    advice = f"echo performance | sudo tee /{CPUS}/cpu*/cpufreq/scaling_governor"
    return set(governors) != {"performance"}, found, advice


def _turbo(machine: _Machine) -> Seen:
    for path, off in ((f"{CPUS}/intel_pstate/no_turbo", "1"), (f"{CPUS}/cpufreq/boost", "0")):
        with suppress(_Missing):
            on = machine.text(path, "[01]") != off
            found = "on: the clock depends on heat and on how many cores are busy" if on else "off"
            return on, found, f"echo {off} | sudo tee /{path}"
    raise _Unknown(f"/{CPUS} has neither intel_pstate/no_turbo nor cpufreq/boost")


def _smt(machine: _Machine) -> Seen:
    physical = list(machine.by_content("topology/thread_siblings_list", r"\d{1,6}([,-]\d{1,6})*").values())
    found = f"cores: {len(machine.cores)} usable, {len(physical)} physical"
    advice = f"use one of each: taskset -c {_ranges([siblings[0] for siblings in physical])} rosetta run"
    return len(physical) < len(machine.cores), found, advice


def _load(machine: _Machine) -> Seen:
    watched, busy, idle, stolen = machine.spent()
    if "self" not in machine.before.processes or "self" not in machine.after.processes:
        raise _Unknown("/proc/self/stat doesn't tell this process's own load from that of others")
    risen = {
        process: (ticks - machine.before.processes.get(process, (0, ""))[0], f"{name} (process {process})")
        for process, (ticks, name) in machine.after.processes.items()
    }
    own, _ = risen.pop("self")
    foreign = max(0, busy - own) / (busy + idle + stolen) * watched
    busiest = [name for ticks, name in sorted(risen.values(), reverse=True)[:SHOWN_PROCESSES] if ticks > 0]
    names = f", busiest: {', '.join(busiest)}" if foreign > NOISY_LOAD and busiest else ""
    return foreign > NOISY_LOAD, f"{foreign:.2f} cores kept busy{names}", "end it, or wait"


def _steal(machine: _Machine) -> Seen:
    watched, busy, idle, stolen = machine.spent()
    now = stolen / (busy + idle + stolen)
    totals = [machine.after.cores[core] for core in machine.cores if core in machine.after.cores]
    since_boot = sum(total[2] for total in totals) / sum(map(sum, totals))
    disturbs = now * watched > NOISY_LOAD or since_boot > STEAL_SINCE_BOOT
    return disturbs, f"{now:.1%} now, {since_boot:.1%} since boot", "take a machine that doesn't share its cores"


def _swap(machine: _Machine) -> Seen:
    used = machine.number("proc/meminfo", "SwapTotal") - machine.number("proc/meminfo", "SwapFree")
    if not machine.before.swapped or not machine.after.swapped:
        raise _Unknown("/proc/vmstat doesn't tell how many pages are swapped")
    moved = sum(machine.after.swapped) - sum(machine.before.swapped)
    return moved > 0, f"{used / 2**20:.1f} GiB in use, {moved} pages moved just now", "end what needs memory"


def _heat(machine: _Machine) -> Seen:
    found, slowed, zones = [], 0, sorted(_zones(machine))
    for left, degrees, name in zones[:1]:
        found += [f"{name} at {degrees:.0f} °C of {degrees + left:.0f} °C"]
    with suppress(_Unknown):
        counts = machine.by_content("thermal_throttle/core_throttle_count", NUMBER)
        slowed = sum(int(count) * len(cores) for count, cores in counts.items())
        found += [f"cores slowed down {slowed} times since boot"]
    if not found:
        raise _Unknown("neither /sys/class/thermal nor the cores' thermal_throttle tells")
    return slowed > 0 or any(left < HEAT_LEFT for left, _, _ in zones), ", ".join(found), "see to cooling, or wait"


def _zones(machine: _Machine) -> Iterator[tuple[float, float, str]]:
    """Yield of each thermal zone how many °C it may still rise, its temperature, and its name."""
    for zone in machine.names("sys/class/thermal", "thermal_zone*"):
        folder, limits = f"sys/class/thermal/{zone}", []
        for trip in machine.names(folder, "trip_point_*_type"):
            with suppress(_Unknown):
                if machine.text(f"{folder}/{trip}") in ("passive", "hot", "critical"):
                    limits.append(machine.number(f"{folder}/{trip.replace('_type', '_temp')}") / 1000)
        with suppress(_Unknown):
            now = machine.number(f"{folder}/temp") / 1000
            if any(limits):  # 0 stands for none
                yield min(filter(None, limits)) - now, now, machine.text(f"{folder}/type")


def _virtual(machine: _Machine) -> Seen:
    flags = re.search(r"^flags\s*:(.*)$", machine.text("proc/cpuinfo"), re.MULTILINE)
    if not flags:
        raise _Unknown("/proc/cpuinfo has no flags: only an x86 processor tells")
    product = ""
    with suppress(_Unknown):
        product = f" ({machine.text('sys/class/dmi/id/product_name')})"
    if "hypervisor" not in flags.group(1).split():
        return False, f"no{product}", ""
    found = f"yes{product}: clocks and caches are shared with neighbours"
    return True, found, "more repeats; see steal and noisy in the results"


def _quota(machine: _Machine) -> Seen:
    quotas, throttled = [], 0
    for folder, files in _groups(machine):
        with suppress(_Missing):  # the root group has no quota, and a container may hide its parents
            said = " ".join(machine.text(f"{folder}/{file}") for file in files)
            if not re.fullmatch(rf"(max|-1|{NUMBER}) [1-9]\d{{0,17}}", said, re.ASCII):
                raise _Unknown(f"/{folder}/{files[0]} says {said[:40]!r}")
            if said.split()[0] not in ("max", "-1"):
                quotas.append(int(said.split()[0]) / int(said.split()[1]))
                throttled += machine.number(f"{folder}/cpu.stat", "nr_throttled")
    if not quotas:
        return False, "none", ""
    least, usable = min(quotas), len(machine.cores)
    found = f"{least:g} cores where {usable} are usable, reached {throttled} times so far"
    advice = "give the container whole cores instead: docker run --cpuset-cpus"
    return throttled > 0 or (least < usable and least % 1 > 0), found, advice


def _groups(machine: _Machine) -> Iterator[tuple[str, list[str]]]:
    """Yield this process's control group and its parents (cgroup v2, then v1), and the files that hold the quota."""
    named = re.findall(r"^\d+:([^:\n]*):/(.*)$", machine.text("proc/self/cgroup"), re.MULTILINE)
    if not named or not machine.names("sys/fs/cgroup", "*"):
        raise _Unknown("/proc/self/cgroup and /sys/fs/cgroup show no group of this process")
    for controllers, path in named:
        parts = path.split("/") if path and ".." not in path else []  # "..": outside what this process may see
        for depth in range(len(parts), -1, -1):
            if controllers == "":
                yield "/".join(["sys/fs/cgroup", *parts[:depth]]), ["cpu.max"]
            elif "cpu" in controllers.split(","):
                yield "/".join(["sys/fs/cgroup/cpu", *parts[:depth]]), ["cpu.cfs_quota_us", "cpu.cfs_period_us"]


def _memory(machine: _Machine) -> Seen:
    gib = machine.number("proc/meminfo", "MemAvailable") / 2**20
    return gib < MEMORY_GIB, f"{gib:.1f} GiB", f"end what needs memory: a trial takes up to {MEMORY_GIB:g} GiB"


def _power(machine: _Machine) -> Seen:
    folder = "sys/class/power_supply"
    types = {name: machine.text(f"{folder}/{name}/type") for name in machine.names(folder, "*")}
    if "Mains" not in types.values():
        raise _Unknown(f"/{folder} has no mains, as is usual of servers")
    # a laptop may be fed through USB instead
    online = [machine.number(f"{folder}/{name}/online") for name, kind in types.items() if kind in ("Mains", "USB")]
    return not any(online), "mains" if any(online) else "battery", "plug it in"


def _clock(machine: _Machine) -> Seen:
    source = machine.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source not in FAST_CLOCKS + SLOW_CLOCKS:
        raise _Unknown(f"{source[:40]!r}: how long it takes to read isn't known here")
    slow = source in SLOW_CLOCKS
    return (
        slow,
        f"{source}{': slow to read' if slow else ''}",
        "see why the kernel distrusts tsc: sudo dmesg | grep -i tsc",
    )


def _energy(machine: _Machine) -> Seen:
    folder = "sys/class/powercap"
    packages = [name for name in machine.names(folder, "*-rapl:[0-9]*") if name.count(":") == 1]
    if not packages:
        raise _Unknown(f"no RAPL in /{folder}: energy won't be recorded")
    try:
        for name in packages:
            machine.number(f"{folder}/{name}/energy_uj")
    except _Unknown as reason:
        advice = f"sudo chmod a+r /{folder}/*-rapl:*/energy_uj"
        raise _Unknown(f"{reason}: energy won't be recorded", advice) from None
    return False, f"{', '.join(packages)} can be read", ""


SUBJECTS = (
    ("CPU governor", _governor), ("turbo", _turbo), ("SMT", _smt), ("other load", _load), ("steal", _steal),
    ("swap", _swap), ("heat", _heat), ("virtual machine", _virtual), ("CPU quota", _quota), ("free memory", _memory),
    ("power supply", _power), ("clock source", _clock), ("energy", _energy),
)  # fmt: skip


def _finding(subject: str, look: Callable[[_Machine], Seen], machine: _Machine) -> Finding:
    try:
        disturbs, found, advice = look(machine)
    except _Unknown as reason:
        return Finding(subject, "unknown", *map(str, reason.args))
    found = "".join(char if char.isprintable() else "?" for char in found)  # a process's name may steer a terminal
    return Finding(subject, "disturbs", found, advice) if disturbs else Finding(subject, "ok", found)


def _counts(root: Path) -> _Counts:
    cores, processes = {}, {}
    with suppress(_Unknown):
        pattern = r"^cpu(\d{1,6}) +((?:\d{1,18} ?){8,})$"
        for core, ticks in re.findall(pattern, _text(root / "proc/stat"), re.MULTILINE | re.ASCII):
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, ticks.split()[:8])  # see proc(5)
            cores[int(core)] = user + nice + system + irq + softirq, idle + iowait, steal
    own = ""
    for name in ("self", *_names(root / "proc", "[0-9]*")):  # itself at once: the others take a while
        pattern = rf"({NUMBER}) \((.*)\) \S(?: \S+){{10}} ({NUMBER}) ({NUMBER}) .*"  # see proc(5)
        with suppress(_Unknown):  # it has ended meanwhile
            found = re.fullmatch(pattern, _text(root / "proc" / name / "stat"), re.DOTALL | re.ASCII)
            if found and found[1] != own:
                processes[name] = int(found[3]) + int(found[4]), found[2]
                own = found[1] if name == "self" else own
    swapped = []
    with suppress(_Unknown):
        swapped = [_field(root / "proc/vmstat", name) for name in ("pswpin", "pswpout")]
    return _Counts(cores, processes, swapped)


def _shown(cores: list[int], machine: _Machine) -> str:
    plural = "s" if len(cores) > 1 else ""
    return f"all {len(cores)} cores" if plural and cores == machine.cores else f"core{plural} {_ranges(cores)}"


def _ranges(cores: list[int]) -> str:
    """Return cores as the kernel writes them, for example "0-3,8"."""
    starts = sorted(core for core in cores if core - 1 not in cores)
    ends = sorted(core for core in cores if core + 1 not in cores)
    return ",".join(f"{start}-{end}" if start < end else f"{start}" for start, end in zip(starts, ends, strict=True))


def _text(path: Path, pattern: str = ".*") -> str:
    """Return a file's content without what surrounds it; raise `_Unknown` where it can't be read or isn't so."""
    try:
        text = path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise _Missing(f"{path} isn't there") from None
    except (OSError, ValueError) as error:  # ValueError: a file can't be named so
        raise _Unknown(f"{path} can't be read: {getattr(error, 'strerror', error)}") from None
    if not text or not re.fullmatch(pattern, text, re.DOTALL | re.ASCII):
        raise _Unknown(f"{path} says {text[:40]!r}")
    return text


def _field(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:?\s+({NUMBER})\b", _text(path), re.MULTILINE | re.ASCII)
    if not found:
        raise _Unknown(f"{path} doesn't tell {name}")
    return int(found[1])


def _names(folder: Path, pattern: str) -> list[str]:
    try:
        return sorted(path.name for path in folder.glob(pattern))
    except OSError:
        return []
