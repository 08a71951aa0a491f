"""One trial in a process of its own: papermill executes the notebook, events go to the parent.

Started by `harness.execute` as `python -m harness.worker JOB EVENTS`, where JOB is a JSON file and
EVENTS an inherited file descriptor to which each event is written as a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import papermill
import psutil
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from pydantic import BaseModel

KERNEL_NAME = "rosetta-trial"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class Job(BaseModel):
    """What the worker is to do: papermill's arguments and the cores that the kernel may use."""

    notebook: Path
    output: Path
    parameters: dict[str, str | int]
    folder: Path
    cores: list[int] | None


class _KernelManager(AsyncKernelManager):  # type: ignore[misc]  # jupyter_client carries no types
    """Remembers how the kernel ended, which nbclient forgets."""

    exit_code: int | None = None

    async def is_alive(self) -> bool:
        alive: bool = await super().is_alive()
        process = getattr(self.provisioner, "process", None)
        if not alive and process is not None:
            _KernelManager.exit_code = process.returncode
        return alive


def main(job: Job, events: int) -> None:
    """Execute the job's notebook; what went wrong in it is an event, not an exception."""
    _tie_to_parent()
    if job.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job.cores)

    def send(**event: Any) -> None:
        os.write(events, json.dumps(event).encode() + b"\n")

    def on_cell_start(cell: Any, cell_index: int) -> None:
        if cell.cell_type == "code":
            send(tags=cell.metadata.get("tags", []))
        elif headings := re.findall(r"^#+ +(.+)$", cell.source, re.MULTILINE):
            send(stage=headings[-1])

    try:
        papermill.execute_notebook(
            job.notebook,
            job.output,
            parameters=job.parameters,
            kernel_name=KERNEL_NAME,
            language="python",
            cwd=job.folder,
            progress_bar=False,
            autosave_cell_every=0,
            kernel_manager_class=_KernelManager,
            shutdown_kernel="immediate",  # nothing is left to be done: no second for a framework's own way out
            on_cell_start=on_cell_start,
        )
    except papermill.PapermillExecutionError as error:
        send(raised=error.ename, message=error.evalue)
    except DeadKernelError:
        send(kernel_exit=_KernelManager.exit_code)
    except Exception as error:  # a notebook that isn't one, a kernel that doesn't start, a disk that is full
        send(raised=type(error).__name__, message=str(error))
    finally:
        _kill_children()


def _tie_to_parent() -> None:
    """Let neither this process nor anything that the kernel starts outlive the harness (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end_all)


def _end_all(number: int, frame: FrameType | None) -> None:
    _kill_children()
    os._exit(128 + number)


def _kill_children() -> None:
    """End what the kernel may have left running: it would disturb the next trial."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


if __name__ == "__main__":
    main(Job.model_validate_json(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
