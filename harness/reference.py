"""The float64 golden values in `common/reference`, written by executing a workload's reference notebook."""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import identity, machine
from harness import execute, project
from harness.environments import Environment
from harness.project import UserError

TIMEOUT_S = 1800.0


def write(workload: str, environment: Environment, folder: Path) -> Path:
    """Execute a workload's reference notebook in PyTorch's environment and return the file that it wrote to `folder`.

    Raises `UserError` where the notebook doesn't go through.
    """
    notebook = project.notebook(workload, "reference")
    if environment.status != "ready":
        raise UserError(f"the reference needs PyTorch's environment: {environment.reason}")
    with tempfile.TemporaryDirectory(prefix="rosetta-") as scratch:
        ending = execute.run_notebook(
            notebook, {"folder": str(folder)}, environment, machine.usable_cores(), TIMEOUT_S, Path(scratch)
        )
    if ending.status != "ok":
        raise UserError(f"{notebook}: {ending.error}")
    return identity.path(workload, folder)
