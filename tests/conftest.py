"""A small project for the tests: the harness and `common` copied beside a framework that takes no time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pytest

from harness import project, records

# Where a background job of a shell ignores Ctrl-C, what the tests start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

TINY_FRAMEWORK = """
title = "Tiny"
homepage = "https://example.org"
package = "numpy"
import_name = "numpy"
python = ["3.11"]
default_mode = { cpu = "eager" }

[modes.eager]
about = "as it is"

[devices.cpu]
requirements = ["numpy==2.4.6", "ipykernel==7.4.0"]
"""

GOOD_TRIAL = """
from common.trial import Trial
from common.workloads import cnn_cifar10 as spec

trial = Trial(spec, profile, device, threads, batch_size, seed)
trial.note(framework_version="1.0", data="synthetic", metric_value=0.5, threads=trial.threads)
trial.steps([0.01] * 8, [2.5 - 0.1 * step for step in range(8)])
trial.record()
"""


def notebook(*cells: str) -> nbformat.NotebookNode:
    """Return a notebook of these code cells under the headings Parameters, Timed run, Record."""
    parameters = 'mode, profile, device, data, threads, batch_size, seed = "eager", "smoke", "cpu", "auto", 0, 0, 0'
    body: list[nbformat.NotebookNode] = [
        nbformat.v4.new_markdown_cell("# Tiny\n\n## Parameters"),
        nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        nbformat.v4.new_markdown_cell("## Timed run"),
        *(nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in cells),
    ]
    kernel = {"kernelspec": {"name": "rosetta-tiny", "display_name": "Tiny", "language": "python"}}
    return nbformat.v4.new_notebook(cells=body, metadata=kernel)


class Project:
    """A copy of the harness in a folder of its own, with frameworks that the test makes up."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignored = shutil.ignore_patterns("__pycache__")
        for package in ("common", "harness"):
            shutil.copytree(project.ROOT / package, root / package, ignore=ignored)
        for shipped in (root / "harness" / "frameworks").glob("*.[tl]o[mc]*"):
            shipped.unlink()
        self.frameworks: list[str] = []
        self.started: list[subprocess.Popen[str]] = []

    def add(self, name: str, *cells: str) -> Path:
        """Add a framework with one notebook for `cnn_cifar10`; return the notebook's path."""
        self.frameworks.append(name)
        folder = self.root / "harness" / "frameworks"
        (folder / f"{name}.toml").write_text(TINY_FRAMEWORK)
        (folder / f"{name}.cpu.lock").write_text("numpy==2.4.6\nipykernel==7.4.0\n")
        path = self.root / "notebooks" / "cnn_cifar10" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook(*cells), path)
        return path

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the command line of `rosetta run` on this project, with this interpreter as every framework's.

        A run that is resumed keeps the options that it was begun with.
        """
        interpreters = [f"--python={name}={sys.executable}" for name in self.frameworks]
        options = ["--profile=smoke", "--data=synthetic", "--device=cpu", *interpreters]
        resumed = any(str(argument).startswith("--resume") for argument in arguments)
        return [sys.executable, "-m", "harness", "run", *map(str, arguments), *([] if resumed else options)]

    def run(self, *arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        """Run `rosetta run` to its end and return what it printed."""
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            self.command(*arguments),
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=180,
            **options,
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start `rosetta run` and return at once."""
        process = subprocess.Popen(
            self.command(*arguments), cwd=self.root, env=self.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.started.append(process)
        return process

    def environment(self) -> dict[str, str]:
        """Return the environment of a command: temporary files apart, so that no test waits for another."""
        temporary = self.root / "tmp"
        temporary.mkdir(exist_ok=True)
        return {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": ""}

    @property
    def latest(self) -> Path:
        """The folder of the latest run."""
        return (self.root / "results" / "latest").resolve()

    def results(self) -> pd.DataFrame:
        """Return the latest run's results.csv, one row a framework."""
        return records.read_csv(self.latest / "results.csv").set_index("framework")


def interrupt(process: subprocess.Popen[str]) -> str:
    """Send what Ctrl-C sends, wait, and return what was printed."""
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)[0]


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or does within five seconds; one that only waits to be reaped has."""
    for _ in range(50):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Project]:
    """A small project without frameworks; what it started ends with the test."""
    project = Project(tmp_path / "project")
    yield project
    for process in project.started:
        process.kill()
        process.wait()


@pytest.fixture
def good() -> str:
    """The cell of a trial that goes through."""
    return GOOD_TRIAL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the fast tests first, the shipped notebooks last."""
    order: Callable[[pytest.Item], bool] = lambda item: item.get_closest_marker("notebooks") is not None  # noqa: E731
    items.sort(key=order)
