"""The proof alone: executed up to the check and no further, its errors beside their gates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from tests.conftest import Project

CHECKED = """
from common import identity
rows = [
    identity.Row("parameters", 0.0, 0.0),
    identity.Row("forward", 1e-6, 1e-5, "input 1"),
    identity.Row("gradient", {error}, 2e-5, "conv1.bias, input 2"),
    identity.Row("evaluation", 0.0, 0.0, "input 1"),
]
identity.Report(3_441_592, rows)
"""


def add(small: Project, name: str, cell: str) -> None:
    """Add a framework whose notebook holds this cell before its timed run, and fails in the timed run."""
    path = small.add(name, "raise RuntimeError('this is the timed run')")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(2, nbformat.v4.new_code_cell(cell))
    nbformat.write(notebook, path)


def verify(small: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    interpreters = [f"--python={name}={sys.executable}" for name in small.frameworks]
    return subprocess.run(
        [sys.executable, "-m", "harness", "verify", "--device=cpu", *interpreters, *arguments],
        cwd=small.root, env=small.environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_identical_implementations_pass_without_being_timed(small: Project, tmp_path: Path) -> None:
    add(small, "one", CHECKED.format(error="4e-6"))
    done = verify(small, f"--output={tmp_path / 'proof'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ok" in done.stdout  # float32 and float64
    assert "4e-06 conv1.bias" in done.stdout
    assert "3,441,592" in done.stdout
    table = pd.read_csv(tmp_path / "proof" / "identity.csv")
    assert set(table.precision) == {"float32", "float64"}
    assert set(table.status) == {"ok"}
    assert "| 4e-06 conv1.bias |" in (tmp_path / "proof" / "identity.md").read_text()
    assert list(table[table.precision == "float32"].quantity) == ["parameters", "forward", "gradient", "evaluation"]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (CHECKED.format(error="3e-5"), "not_identical"),
        (CHECKED.format(error="float('nan')"), "not_identical"),
        ("1 / 0", "ZeroDivisionError"),
        ("'no report'", "without showing a report"),
    ],
    ids=["error beyond its gate", "not a number", "notebook that fails", "notebook without a check"],
)
def test_others_are_refused_and_the_rest_goes_on(small: Project, cell: str, message: str) -> None:
    add(small, "wrong", cell)
    add(small, "right", CHECKED.format(error="4e-6"))
    done = verify(small, "--precision=float32")
    assert done.returncode == 1
    assert message in done.stdout
    assert "1 ok" in done.stdout
    assert "identical" in done.stdout


def test_a_gate_of_its_own_is_shown(small: Project) -> None:
    add(small, "one", CHECKED.format(error="4e-6"))
    add(small, "two", CHECKED.format(error="4e-6").replace("1e-5", "1e-3"))
    done = verify(small, "--precision=float32")
    assert done.stdout.count("(gate 1e-03)") == 1


def test_unknown_precision_is_named(small: Project) -> None:
    add(small, "one", CHECKED.format(error="4e-6"))
    done = verify(small, "--precision=float16")
    assert done.returncode == 2
    assert "--precision takes float32, float64, not 'float16'" in done.stderr
