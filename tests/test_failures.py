"""One trial's end is never another's: each of these faults becomes a row, and the good trials' rows are complete."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Project, has_ended, interrupt

FOREVER = "import time\nwhile True:\n    time.sleep(1)"


def await_file(path: Path) -> None:
    """Wait until a notebook has written this file."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)


def assert_good(row: object) -> None:
    """The row of a trial that went through says so and is complete."""
    assert row.status == "ok", row.error  # type: ignore[attr-defined]
    for column in ("timed_s", "examples_per_s", "metric_value", "framework_version", "started", "notebook_hash"):
        assert getattr(row, column) == getattr(row, column), column
    assert row.steps == 8  # type: ignore[attr-defined]


def test_each_fault_is_a_row_and_the_others_are_complete(small: Project, good: str) -> None:
    small.add("good", good)
    small.add("raises", "raise ValueError('two\\nlines')")
    small.add("killed", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    small.add("segfault", "import ctypes\nctypes.string_at(0)")
    small.add("exits", "import os\nos._exit(3)")
    small.add("silent", "pass")
    small.add("differs", "from common.identity import NotIdentical\nraise NotIdentical('gradient error 1e-1')")
    small.add("refuses", "from common.trial import Unsupported\nraise Unsupported('no such device')")
    small.add("broken").write_text('{"cells": [')
    small.add("empty").write_text("{}")
    done = small.run()
    rows = small.results()
    assert_good(rows.loc["good"])
    expected = {
        "raises": ("failed", "Timed run: ValueError: two lines"),
        "killed": ("crashed", "Timed run: kernel ended by SIGKILL"),
        "segfault": ("crashed", "Timed run: kernel ended by SIGSEGV"),
        "exits": ("crashed", "Timed run: kernel exited with status 3"),
        "silent": ("failed", "record is not complete: the notebook ended without showing `trial.record()`"),
        "differs": ("not_identical", "gradient error 1e-1"),
        "refuses": ("unsupported", "no such device"),
    }
    for name, (status, error) in expected.items():
        assert (rows.loc[name].status, rows.loc[name].error) == (status, error)
    for name in ("broken", "empty"):
        assert rows.loc[name].status == "failed"
        assert "\n" not in rows.loc[name].error
    assert done.returncode == 1
    assert "1 done, 8 failed, 1 skipped" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_trial_that_fails_after_its_timing_shows_no_timing(small: Project, good: str) -> None:
    small.add("late", good, "raise RuntimeError('afterwards')")
    small.run()
    row = small.results().loc["late"]
    assert row.status == "failed"
    assert row[["timed_s", "examples_per_s", "step_median_s", "metric_value"]].isna().all()


def test_timeout_ends_the_trial_and_all_that_it_started(small: Project, good: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    small.add("good", good)
    small.add(
        "endless",
        f"""
        import os, pathlib, signal, subprocess
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen(["setsid", "sleep", "600"])
        pathlib.Path({str(pids)!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
        while True:
            pass
        """,
    )
    began = time.monotonic()
    small.run("--timeout", "8")
    assert time.monotonic() - began < 60
    rows = small.results()
    assert_good(rows.loc["good"])
    assert rows.loc["endless"].status == "timeout"
    assert rows.loc["endless"].error == "Timed run: exceeded its limit of 8 s"
    assert all(has_ended(int(pid)) for pid in pids.read_text().split())


def test_what_a_trial_leaves_running_is_ended(small: Project, good: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    daemon = f"""
        import pathlib, subprocess
        command = f"setsid sleep 600 & echo $! > {pid}"
        subprocess.run(["bash", "-c", command], check=True)
        """
    small.add("leaves", daemon, good)
    small.run()
    assert_good(small.results().loc["leaves"])
    assert has_ended(int(pid.read_text()))


def test_memory_limit_is_named(small: Project, good: str) -> None:
    small.add("good", good)
    small.add("eats", "blocks = []\nwhile True:\n    blocks.append(bytearray(2**28))")
    small.add("eats_numpy", "import numpy as np\nx = np.ones(2**40)")
    limit = 6 * 2**30

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    small.run(preexec_fn=limit_memory)
    rows = small.results()
    assert_good(rows.loc["good"])
    assert rows.loc["eats"].status == rows.loc["eats_numpy"].status == "out_of_memory"


def test_missing_interpreter_is_unavailable(small: Project, good: str, tmp_path: Path) -> None:
    small.add("good", good)
    small.add("missing", good)
    command = small.command()
    command = [part if "missing=" not in part else f"--python=missing={tmp_path}/no/python" for part in command]
    done = subprocess.run(command, cwd=small.root, env=small.environment(), capture_output=True, text=True, timeout=120)
    rows = small.results()
    assert_good(rows.loc["good"])
    assert rows.loc["missing"].status == "unavailable"
    assert f"{tmp_path}/no/python" in rows.loc["missing"].error
    assert "1 done, 0 failed, 1 skipped" in done.stdout


def test_missing_kernel_is_named(small: Project, good: str, tmp_path: Path) -> None:
    """An interpreter whose kernel doesn't start, though its packages look complete."""
    small.add("good", good)
    small.add("hollow", good)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exit 7\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    command = [f"--python=hollow={python}" if "hollow=" in part else part for part in small.command()]
    subprocess.run(command, cwd=small.root, env=small.environment(), capture_output=True, text=True, timeout=180)
    rows = small.results()
    assert_good(rows.loc["good"])
    assert rows.loc["hollow"].status in ("failed", "crashed")
    assert rows.loc["hollow"].error.startswith("Start of the kernel: ")


def test_interrupted_run_goes_on_where_it_stopped(small: Project, good: str, tmp_path: Path) -> None:
    began, flag, counter = tmp_path / "began", tmp_path / "flag", tmp_path / "counter"
    count = f"open({str(counter)!r}, 'a').write('x')"
    wait = f"""
        import os, pathlib, time
        pathlib.Path({str(began)!r}).touch()
        while not os.path.exists({str(flag)!r}):
            time.sleep(0.1)
        """
    small.add("one", count, good)
    small.add("two", count, wait, good)
    process = small.start("--output", tmp_path / "run")
    await_file(began)
    printed = interrupt(process)
    assert process.returncode == 130
    assert f"--resume {tmp_path / 'run'}" in printed
    assert "0 failed, 0 skipped" in printed
    assert " not run; interrupted" in printed
    assert "Traceback" not in printed
    first = small.results()
    assert first.loc["two"].status == "interrupted"

    flag.touch()
    executed_before = len(counter.read_text())
    done = small.run("--resume", tmp_path / "run")
    rows = small.results()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 done, 0 failed, 0 skipped" in done.stdout
    for name in ("one", "two"):
        assert_good(rows.loc[name])
    assert len(counter.read_text()) - executed_before == 2 - (first.status == "ok").sum()


def test_resume_runs_failed_and_changed_trials_again(small: Project, good: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    small.add("steady", good)
    small.add("mended", f"import os\nassert os.path.exists({str(flag)!r})", good)
    edited = small.add("edited", good)
    assert small.run("--output", tmp_path / "run").returncode == 1
    before = small.results()
    flag.touch()
    content = json.loads(edited.read_text())
    content["cells"][-1]["source"] = "x = 1\n" + "".join(content["cells"][-1]["source"])
    edited.write_text(json.dumps(content))
    time.sleep(1)
    assert small.run("--resume", tmp_path / "run").returncode == 0
    after = small.results()
    assert (after.status == "ok").all()
    assert after.loc["steady"].started == before.loc["steady"].started
    assert after.loc["edited"].started != before.loc["edited"].started


def test_resume_by_way_of_the_link_to_the_latest_run(small: Project, good: str) -> None:
    small.add("good", good)
    small.run()
    folder = small.latest
    (folder / "trials" / "cnn_cifar10.good.eager.1.ipynb").unlink()
    (folder / "trials" / ".ipynb_checkpoints").mkdir()  # JupyterLab leaves one where a notebook was opened
    assert small.run("--resume", small.root / "results" / "latest").returncode == 0
    assert small.latest == folder
    assert small.results().loc["good"].run == folder.name


def test_resume_takes_no_other_options(small: Project, good: str) -> None:
    small.add("good", good)
    small.run()
    done = small.run("--resume", small.latest, "--repeats", "2")
    assert done.returncode == 2
    assert "leave out --repeats" in done.stderr


def test_resume_runs_a_trial_again_whose_data_were_of_another_kind(small: Project, good: str) -> None:
    small.add("good", good.replace('data="synthetic"', 'data="real"'))
    small.run()
    before = small.results().loc["good"].started
    time.sleep(1)
    small.run("--resume", small.latest)
    assert small.results().loc["good"].started != before


def test_two_runs_in_one_folder(small: Project, tmp_path: Path, good: str) -> None:
    began, flag = tmp_path / "began", tmp_path / "flag"
    wait = f"import os, time\nwhile not os.path.exists({str(flag)!r}):\n    time.sleep(0.1)"
    small.add("waits", f"open({str(began)!r}, 'w').close()", wait, good)
    first = small.start("--output", tmp_path / "run")
    await_file(began)
    second = small.run("--resume", tmp_path / "run")
    third = small.run("--output", tmp_path / "run")
    flag.touch()
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert second.returncode == third.returncode == 2
    assert "another process runs the trials of this folder" in second.stderr
    assert "isn't empty" in third.stderr
    assert_good(small.results().loc["waits"])


def test_notebook_that_vanishes_during_the_run(small: Project, good: str) -> None:
    small.add("good", good)
    gone = small.add("gone", good)
    small.add("remover", f"import pathlib\npathlib.Path({str(gone)!r}).unlink(missing_ok=True)", good)
    small.run("--repeats", "2")
    rows = small.results()
    assert rows.loc["good", "status"].tolist() == ["ok", "ok"]
    assert rows.loc["gone", "status"].iloc[-1] == "failed"
    assert "there is no such notebook any more" in rows.loc["gone", "error"].iloc[-1]


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root may mount a tmpfs")
def test_full_disk(small: Project, good: str, tmp_path: Path) -> None:
    folder = tmp_path / "small-disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], check=False).returncode:
        pytest.skip("tmpfs can't be mounted here")
    try:
        small.add("good", good)
        small.add("also_good", good)
        small.add("large", "print('x' * 4_000_000)", good)
        done = small.run("--output", folder / "run")
        rows = small.results()
        assert_good(rows.loc["good"])
        assert_good(rows.loc["also_good"])
        assert rows.loc["large"].status == "failed"
        assert "No space left on device" in rows.loc["large"].error
        assert done.returncode == 1
        assert not list((folder / "run" / "trials").glob(".*"))
    finally:
        subprocess.run(["umount", folder], check=True)
        shutil.rmtree(folder)


def test_killed_harness_leaves_no_kernel_behind(small: Project, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    small.add("endless", f"import os, pathlib\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))", FOREVER)
    process = small.start()
    await_file(pid)
    process.kill()
    process.communicate()
    assert has_ended(int(pid.read_text()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--framework=nosuch"], "there is no framework 'nosuch'; there are: good"),
        (["--workload=nosuch"], "there is no workload 'nosuch'"),
        (["--mode=nosuch"], "there is no mode 'nosuch'"),
        (["--threads=4096"], "--threads 4096: this process may use"),
        (["--resume=nosuch"], "not a run: it has no run.json"),
    ],
)
def test_unusable_input_is_one_line_and_code_2(small: Project, good: str, arguments: list[str], message: str) -> None:
    small.add("good", good)
    done = small.run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
