"""The doctor: what disturbs is found on planted machines, and what can't be read is unknown, never an error."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from harness import doctor

CPUS = "sys/devices/system/cpu"
ZONE = "sys/class/thermal/thermal_zone0"
SUPPLY = "sys/class/power_supply"
CLOCK = "sys/devices/system/clocksource/clocksource0/current_clocksource"
ENERGY = "sys/class/powercap/intel-rapl:0/energy_uj"
PROCESS = "{} ({}) S 1 1 1 0 -1 0 0 0 0 0 {} 0 0 0 20 0 1 0 0"

#: A quiet machine of two cores, as files.
QUIET = {
    f"{CPUS}/cpu0/cpufreq/scaling_governor": "performance\n",
    f"{CPUS}/cpu1/cpufreq/scaling_governor": "performance\n",
    f"{CPUS}/intel_pstate/no_turbo": "1\n",
    f"{CPUS}/cpu0/topology/thread_siblings_list": "0,2\n",
    f"{CPUS}/cpu1/topology/thread_siblings_list": "1,3\n",
    f"{CPUS}/cpu0/thermal_throttle/core_throttle_count": "0\n",
    f"{CPUS}/cpu1/thermal_throttle/core_throttle_count": "0\n",
    f"{ZONE}/type": "x86_pkg_temp\n",
    f"{ZONE}/temp": "45000\n",
    f"{ZONE}/trip_point_0_type": "active\n",
    f"{ZONE}/trip_point_0_temp": "40000\n",
    f"{ZONE}/trip_point_1_type": "passive\n",
    f"{ZONE}/trip_point_1_temp": "95000\n",
    f"{ZONE}/trip_point_2_type": "critical\n",
    f"{ZONE}/trip_point_2_temp": "0\n",
    "proc/stat": "cpu 1 0 1 9 0 0 0 0\ncpu0 100 0 10 9000 0 0 0 0 0 0\ncpu1 100 0 10 9000 0 0 0 0 0 0\nintr 1 2\n",
    "proc/self/stat": PROCESS.format(5, "python", 10),
    "proc/5/stat": PROCESS.format(5, "python", 10),
    "proc/77/stat": PROCESS.format(77, "a [b] (c)\x1b", 10),
    "proc/meminfo": "MemAvailable: 16777216 kB\nSwapTotal: 2097152 kB\nSwapFree: 1048576 kB\n",
    "proc/vmstat": "pswpin 3\npswpout 4\n",
    "proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2\n",
    "proc/self/cgroup": "0::/box\n",
    "sys/fs/cgroup/box/cpu.max": "max 100000\n",
    f"{SUPPLY}/AC/type": "Mains\n",
    f"{SUPPLY}/AC/online": "1\n",
    CLOCK: "tsc\n",
    ENERGY: "123\n",
}

#: What is counted a second later, at 100 ticks a second, if nothing happens but the doctor's own 20 ticks.
LATER = {
    "proc/stat": "cpu0 120 0 10 9080 0 0 0 0 0 0\ncpu1 100 0 10 9100 0 0 0 0 0 0\n",
    "proc/self/stat": PROCESS.format(5, "python", 30),
    "proc/5/stat": PROCESS.format(5, "python", 30),
}

SUBJECTS = [
    "CPU governor", "turbo", "SMT", "other load", "steal", "swap", "heat", "virtual machine", "CPU quota",
    "free memory", "power supply", "clock source", "energy",
]  # fmt: skip

V1 = {"proc/self/cgroup": "3:cpu,cpuacct:/box\n0::/\n", "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n"}
V1_QUOTA = "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us"


def plant(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def examine(
    root: Path, files: dict[str, str], later: dict[str, str], cores: frozenset[int] = frozenset({0, 1})
) -> dict[str, doctor.Finding]:
    """Return what is found, by subject, on a machine of `files` on which `later` are written meanwhile."""
    plant(root, files)
    findings = doctor.examine(root, 0, set(cores), wait=lambda seconds: plant(root, later))
    assert [finding.subject for finding in findings] == SUBJECTS
    return {finding.subject: finding for finding in findings}


def test_a_quiet_machine_disturbs_nothing(tmp_path: Path) -> None:
    found = examine(tmp_path, QUIET, LATER)
    assert [finding for finding in found.values() if finding.state != "ok" or finding.advice] == []
    assert found["CPU governor"].found == "performance on all 2 cores"
    assert found["other load"].found == "0.00 cores kept busy"
    assert found["swap"].found == "1.0 GiB in use, 0 pages moved just now"
    assert found["heat"].found == "x86_pkg_temp at 45 °C of 95 °C, cores slowed down 0 times since boot"
    assert found["free memory"].found == "16.0 GiB"


@pytest.mark.parametrize(
    ("files", "subject", "said"),
    [
        ({f"{CPUS}/cpu1/cpufreq/scaling_governor": "powersave"}, "CPU governor", "powersave on core 1"),
        ({f"{CPUS}/intel_pstate/no_turbo": "0"}, "turbo", "on: "),
        ({f"{CPUS}/cpu{core}/topology/thread_siblings_list": "0-1" for core in (0, 1)}, "SMT", "2 usable, 1 physical"),
        ({f"{CPUS}/cpu0/thermal_throttle/core_throttle_count": "7"}, "heat", "slowed down 7 times"),
        ({f"{ZONE}/temp": "92000"}, "heat", "92 °C of 95 °C"),
        ({f"{ZONE}/trip_point_2_temp": "50000"}, "heat", "45 °C of 50 °C"),
        ({"proc/meminfo": "MemAvailable: 1048576 kB\n"}, "free memory", "1.0 GiB"),
        ({"proc/cpuinfo": "flags : fpu hypervisor\n", "sys/class/dmi/id/product_name": "KVM\n"}, "virtual machine",
         "yes (KVM)"),
        ({"sys/fs/cgroup/box/cpu.max": "150000 100000"}, "CPU quota", "1.5 cores where 2"),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, "CPU quota", "0.5 cores where 2"),
        ({"sys/fs/cgroup/box/cpu.max": "100000 100000", "sys/fs/cgroup/box/cpu.stat": "nr_periods 9\nnr_throttled 3\n"},
         "CPU quota", "reached 3 times"),
        ({**V1, V1_QUOTA: "150000"}, "CPU quota", "1.5 cores where 2"),
        ({f"{SUPPLY}/AC/online": "0"}, "power supply", "battery"),
        ({CLOCK: "hpet"}, "clock source", "hpet"),
    ],
)  # fmt: skip
def test_what_disturbs_is_found(tmp_path: Path, files: dict[str, str], subject: str, said: str) -> None:
    finding = examine(tmp_path, {**QUIET, **files}, LATER)[subject]
    assert finding.state == "disturbs"
    assert said in finding.found
    assert finding.advice


@pytest.mark.parametrize(
    ("files", "subject", "said"),
    [
        ({"sys/fs/cgroup/box/cpu.max": "100000 100000"}, "CPU quota", "1 cores where 2"),
        ({"sys/fs/cgroup/box/cpu.max": "350000 100000"}, "CPU quota", "3.5 cores where 2"),
        ({**V1, V1_QUOTA: "-1"}, "CPU quota", "none"),
        ({"proc/self/cgroup": "0::/../elsewhere\n"}, "CPU quota", "none"),
        ({f"{SUPPLY}/AC/online": "0", f"{SUPPLY}/port/type": "USB", f"{SUPPLY}/port/online": "1"}, "power supply",
         "mains"),
        ({CLOCK: "kvm-clock"}, "clock source", "kvm-clock"),
    ],
)  # fmt: skip
def test_what_does_not_disturb_is_ok(tmp_path: Path, files: dict[str, str], subject: str, said: str) -> None:
    finding = examine(tmp_path, {**QUIET, **files}, LATER)[subject]
    assert finding.state == "ok"
    assert said in finding.found


def test_load_steal_and_swapping_are_what_happens_meanwhile(tmp_path: Path) -> None:
    later = {
        **LATER,
        "proc/stat": "cpu0 200 0 10 9000 0 0 0 0 0 0\ncpu1 100 0 10 9080 0 0 0 20 0 0\n",
        "proc/77/stat": PROCESS.format(77, "a [b] (c)\x1b", 80),
        "proc/78/stat": PROCESS.format(78, "new", 10),
        "proc/vmstat": "pswpin 8\npswpout 11\n",
    }
    found = examine(tmp_path, QUIET, later)
    assert {found[subject].state for subject in ("other load", "steal", "swap")} == {"disturbs"}
    assert found["other load"].found == "0.80 cores kept busy, busiest: a [b] (c)? (process 77), new (process 78)"
    assert found["steal"].found == "10.0% now, 0.1% since boot"
    assert "12 pages moved" in found["swap"].found


def test_steal_since_boot_disturbs(tmp_path: Path) -> None:
    stat = "cpu0 {} 0 0 800 0 0 0 100\ncpu1 100 0 0 800 0 0 0 100\n"
    found = examine(tmp_path, {**QUIET, "proc/stat": stat.format(50)}, {**LATER, "proc/stat": stat.format(100)})
    assert found["steal"][1:3] == ("disturbs", "0.0% now, 10.0% since boot")


def test_only_usable_cores_count(tmp_path: Path) -> None:
    busy = {
        "proc/stat": "cpu0 120 0 10 9080 0 0 0 0 0 0\ncpu1 200 0 10 9000 0 0 0 99 0 0\n",
        f"{CPUS}/cpu1/cpufreq/scaling_governor": "powersave",
        f"{CPUS}/cpu0/topology/thread_siblings_list": "0-1",
        f"{CPUS}/cpu1/topology/thread_siblings_list": "0-1",
        f"{CPUS}/cpu1/thermal_throttle/core_throttle_count": "9",
    }
    found = examine(tmp_path, QUIET, {**LATER, **busy}, cores=frozenset({0}))
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["CPU governor"].found == "performance on core 0"


def test_where_nothing_can_be_read_all_is_unknown(tmp_path: Path) -> None:
    for cores in (frozenset({0, 1}), frozenset[int]()):
        found = examine(tmp_path, {}, {}, cores)
        assert {finding.state for finding in found.values()} == {"unknown"}
        assert all(finding.found for finding in found.values())


@pytest.mark.parametrize("content", ["", "x", "-1", "\x00\xff", "²", "9" * 5000, "0::/\x00", "0::/" + "a" * 5000])
def test_malformed_files_are_unknown_and_no_error(tmp_path: Path, content: str) -> None:
    found = examine(tmp_path, dict.fromkeys(QUIET, content), {})
    assert {finding.state for finding in found.values()} == {"unknown"}


@pytest.mark.parametrize("content", ["1 0", "100000 0", "150000", "max", "² 100000", "9 9 9"])
def test_a_malformed_quota_is_unknown(tmp_path: Path, content: str) -> None:
    finding = examine(tmp_path, {**QUIET, "sys/fs/cgroup/box/cpu.max": content}, LATER)["CPU quota"]
    assert finding.state == "unknown"
    assert content in finding.found


def test_files_that_cannot_be_read_are_unknown_and_say_so(tmp_path: Path) -> None:
    for name in QUIET:
        (tmp_path / name).mkdir(parents=True)  # unlike a mode, this stops root too
    found = examine(tmp_path, {}, {})
    assert {finding.state for finding in found.values()} == {"unknown"}
    assert f"{ENERGY} can't be read: Is a directory" in found["energy"].found
    assert "chmod" in found["energy"].advice


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    finding = examine(tmp_path, {}, {})["CPU governor"]
    assert f"{CPUS}/cpu0/cpufreq/scaling_governor isn't there: the clock is the host's business" in finding.found


def test_the_table_shows_names_as_they_are(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    console.print(doctor.terminal([doctor.Finding("other load", "disturbs", "[red]a[/] [b] [/c]", "wait")]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]a[/] [b] [/c]" in shown
    assert "\x1b[33mdisturbs" in shown


def test_this_machine_is_examined() -> None:
    assert [finding.subject for finding in doctor.examine(seconds=0.1)] == SUBJECTS
