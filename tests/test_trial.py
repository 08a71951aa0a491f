"""The record of a trial, and what is learnt about the machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import machine
from common.trial import RECORD_TYPE, Trial
from common.workloads import cnn_cifar10


def shown(trial: Trial) -> dict[str, object]:
    columns: dict[str, object] = trial.record()._repr_mimebundle_()[RECORD_TYPE]
    return columns


@pytest.fixture
def trial() -> Trial:
    return Trial(cnn_cifar10, "smoke", "cpu", threads=1, batch_size=0, seed=0)


def test_record_is_json_even_where_a_number_is_not_finite(trial: Trial) -> None:
    trial.note(forward_error=float("nan"))
    trial.steps([1.0] * 8, [1.0] * 7 + [float("inf")])
    columns = json.loads(json.dumps(shown(trial), allow_nan=False))
    assert (columns["forward_error"], columns["loss_last"], columns["step_losses"][-1]) == ("nan", "inf", None)


def test_nothing_noted_overrides_nothing(trial: Trial) -> None:
    trial.note(device_name=None)
    assert shown(trial)["device_name"] == machine.processor()


def test_record_shows_text_as_text(trial: Trial) -> None:
    trial.note(settings="<script>")
    assert "<script>" not in trial.record()._repr_mimebundle_()["text/html"]


def test_sections_are_timed(trial: Trial) -> None:
    with trial.timed("import_s"):
        time.sleep(0.05)
    assert 0.05 <= shown(trial)["import_s"] < 5  # type: ignore[operator]


def burn(trial: Trial, foreign: bool) -> dict[str, object]:
    """Time a run that does nothing while another process works: a stranger, or a child of this one."""
    command = [sys.executable, "-c", "while True: pass"]
    if foreign:  # the shell ends at once, and its child has another parent from then on
        shell = subprocess.run(
            ["sh", "-c", f"{shlex.join(command)} >/dev/null 2>&1 & echo $!"], capture_output=True, check=True
        )
        pid = int(shell.stdout)
    else:
        pid = subprocess.Popen(command).pid
    time.sleep(0.5)
    with trial.timed_run():
        time.sleep(1.5)
    os.kill(pid, signal.SIGKILL)
    return shown(trial)


needs_linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells what other processes do")


@needs_linux
def test_foreign_load_makes_a_trial_noisy(trial: Trial) -> None:
    columns = burn(trial, foreign=True)
    assert columns["noisy"] is True
    assert columns["foreign_load"] > 0.3  # type: ignore[operator]
    assert columns["cpu_per_wall"] < 0.2  # type: ignore[operator]


@needs_linux
def test_work_of_a_child_is_own_work(trial: Trial) -> None:
    columns = burn(trial, foreign=False)
    assert columns["cpu_per_wall"] > 0.3  # type: ignore[operator]


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 2), ("150000 100000", 1), ("50000 100000", 1)])
def test_quota_of_a_container_counts_as_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, cores: int
) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "cpu.max").write_text(quota)
    (tmp_path / "cgroup").write_text("0::/box\n")
    places = {"/proc/self/cgroup": tmp_path / "cgroup", "/sys/fs/cgroup": tmp_path}
    monkeypatch.setattr(machine, "Path", lambda path: places.get(path, Path(path)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/box", {"box/cpu.max": ""}),
        ("0::/box", {"box/cpu.max": "100000"}),
        ("0::/box", {"box/cpu.max": "100000 0"}),
        ("0::/box", {"box/cpu.max": "0 100000"}),
        ("0::/box", {"box/cpu.max": "a few"}),
        ("0::/box", {}),
        ("", {}),
        ("0", {}),
        ("0:cpu", {"cpu/cpu.cfs_quota_us": "a few", "cpu/cpu.cfs_period_us": "100000"}),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "50000"}),
    ],
)
def test_a_quota_that_cannot_be_read_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: str, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "cgroup").write_text(group + "\n")
    places = {"/proc/self/cgroup": "cgroup", "/sys/fs/cgroup": "", "/sys/fs/cgroup/cpu": "cpu"}
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / places[path] if path in places else Path(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert machine.usable_cores() == 2


def test_the_first_version_of_control_groups_has_quotas_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cgroup").write_text("9:memory:/\n4:cpu,cpuacct:/\n")
    places = {"/proc/self/cgroup": tmp_path / "cgroup", "/sys/fs/cgroup/cpu": tmp_path}
    monkeypatch.setattr(machine, "Path", lambda path: places.get(path, Path(path)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert machine.usable_cores() == 1


def test_inference_has_no_losses(trial: Trial) -> None:
    trial.steps([1.0] * 8)
    columns = shown(trial)
    assert columns["examples_per_s"] == 64
    assert not {"loss_first", "loss_last", "step_losses"} & columns.keys()
