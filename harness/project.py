"""Where things lie in the project, and the hashes that tell whether they have changed."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
NOTEBOOKS = ROOT / "notebooks"
RUNS = ROOT / "results" / "runs"
LATEST = ROOT / "results" / "latest"
PUBLISHED = ROOT / "results" / "published"


class UserError(Exception):
    """Something that the user can mend; its message says what went wrong, where, and what to do."""


def workloads() -> list[str]:
    """Return the names of all workloads: those with a specification in `common.workloads`."""
    return sorted(path.stem for path in (ROOT / "common" / "workloads").glob("[a-z]*.py"))


def specification(workload: str) -> ModuleType:
    """Return the specification module of a workload."""
    return importlib.import_module(f"common.workloads.{workload}")


def notebook(workload: str, framework: str) -> Path:
    """Return the path at which the notebook of this workload and framework lies, if there is one."""
    return NOTEBOOKS / workload / f"{framework}.ipynb"


def notebook_hash(path: Path) -> str:
    """Return a hash of a notebook's cells, whatever its outputs and metadata; of its bytes where it isn't one.

    Empty where there is no such file.
    """
    if not path.is_file():
        return ""
    content = path.read_bytes()
    try:
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(content)["cells"]]
    except (ValueError, KeyError, TypeError):
        return _short_hash(content)
    return _short_hash(json.dumps(cells).encode())


def common_hash() -> str:
    """Return a hash of all that notebooks import: `common`'s modules and golden values."""
    files = sorted(path for pattern in ("**/*.py", "**/*.npz") for path in (ROOT / "common").glob(pattern))
    return _short_hash(b"".join(path.relative_to(ROOT).as_posix().encode() + path.read_bytes() for path in files))


def commit() -> str:
    """Return the git commit of the project, with "-dirty" where files differ from it; empty outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
