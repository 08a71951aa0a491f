"""One trial: its notebook executed through papermill in a process group of its own, however that ends.

Whatever happens, `execute` leaves one notebook in the run's folder, whole, with the trial's facts and
status in its metadata: the executed one, what was executed before it broke off, or the source.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import psutil

from harness import environments, frameworks, project, records
from harness.environments import Environment
from harness.plan import Trial
from harness.worker import KERNEL_NAME, Job

#: Compilation is slow: the cell tagged "first-step" has this limit, and its time doesn't count towards the trial's.
FIRST_STEP_TIMEOUT_S = 1200.0

EXECUTED = "executed.ipynb"

_OUT_OF_MEMORY = re.compile(
    r"MemoryError|out of memory|OutOfMemory|ResourceExhausted|bad_alloc|[Cc]an(?:no|')t allocate memory"
)


class Ending(NamedTuple):
    """How a trial ended."""

    status: records.Status
    error: str | None = None


def execute(
    trial: Trial, environment: Environment, run: Path, facts: Mapping[str, Any], on_stage: Callable[[str], None]
) -> records.Record:
    """Execute one trial and return its record, which is also in the notebook that it leaves in `run`/trials.

    `facts` go into the record as they are. `on_stage` is told each heading of the notebook as it is reached.
    Raises `OSError` where not even a notebook that tells of the failure can be written. When
    interrupted, records that and raises `KeyboardInterrupt`.
    """
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    target = run / "trials" / f"{trial.name}.ipynb"
    with tempfile.TemporaryDirectory(prefix="rosetta-", ignore_cleanup_errors=True) as scratch_name:
        scratch = Path(scratch_name)
        interrupted = None
        ending = obstacle(trial, environment)
        if ending is None:
            try:
                ending = run_notebook(
                    trial.notebook, trial.parameters(), environment, trial.threads, trial.timeout_s, scratch, on_stage
                )
            except KeyboardInterrupt as interrupt:
                interrupted, ending = interrupt, Ending("interrupted", "interrupted by the user")
        notebook = _first_valid(scratch / EXECUTED, trial.notebook)
        columns = {
            **trial.columns(),
            **facts,
            "started": started,
            "notebook": trial.notebook.relative_to(project.ROOT).as_posix(),
            "notebook_hash": project.notebook_hash(trial.notebook),
            "lock_hash": environment.lock_hash,
        }
    if ending.status == "ok":
        trial_s = time.perf_counter() - clock
        columns.update(trial_s=trial_s, overhead_s=trial_s - _cell_seconds(notebook))
    else:
        columns.update(threads=trial.threads)  # it may not have come to telling them
    record = _write(notebook, columns, ending, target)
    if interrupted:
        raise interrupted
    return record


def obstacle(trial: Trial, environment: Environment) -> Ending | None:
    """Return why the trial can't even be tried on this machine, if so."""
    if not trial.notebook.is_file():
        return Ending("failed", f"{trial.notebook.relative_to(project.ROOT)}: there is no such notebook any more")
    if environment.status == "unsupported":
        return Ending("unsupported", environment.reason)
    if environment.status != "ready":
        return Ending("unavailable", environment.reason)
    programs = frameworks.load(trial.framework).modes[trial.mode].programs
    if programs and not any(shutil.which(program) for program in programs):
        return Ending("unsupported", f"mode {trial.mode} needs one of these programs: {', '.join(programs)}")
    return None


def run_notebook(
    notebook: Path,
    parameters: Mapping[str, str | int],
    environment: Environment,
    threads: int,
    timeout_s: float,
    scratch: Path,
    on_stage: Callable[[str], None] = lambda heading: None,
) -> Ending:
    """Execute a notebook as `scratch`/executed.ipynb and tell how it ended.

    Runs in a worker process to its end, to its time limit, or to an interrupt; nothing that it started lives on.
    """
    framework = frameworks.load(environment.framework)
    job = Job(
        notebook=notebook,
        output=scratch / EXECUTED,
        parameters=dict(parameters),
        folder=notebook.parent,
        cores=sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else None,
    )
    (scratch / "job.json").write_text(job.model_dump_json())
    kernel = scratch / "jupyter" / "kernels" / KERNEL_NAME
    kernel.mkdir(parents=True)
    assert environment.python is not None
    argv = environments.kernel_command(environment.python)
    spec = {
        "argv": argv,
        "display_name": framework.title,
        "language": "python",
        "env": {"PYTHONPATH": str(project.ROOT)},
    }
    (kernel / "kernel.json").write_text(json.dumps(spec))
    variables = {
        **environments.kernel_environment(os.environ, framework, threads),
        "JUPYTER_PATH": str(scratch / "jupyter"),
        "JUPYTER_NO_CONFIG": "1",
        **{name: str(scratch / name.lower()) for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "KERAS_HOME", "TMPDIR")},
    }
    (scratch / "tmpdir").mkdir()

    events, writer = os.pipe()
    kills_before = _oom_kills()
    with (scratch / "log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "harness.worker", str(scratch / "job.json"), str(writer)],
            cwd=project.ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writer],
            start_new_session=True,
        )
    os.close(writer)
    try:
        stage, last, timed_out = _follow(events, timeout_s, on_stage)
    finally:
        os.close(events)
        _end(worker)
    if timed_out:
        return Ending("timeout", f"{stage}: exceeded its limit of {timed_out:g} s")
    log_lines = (scratch / "log").read_text(errors="replace").strip().splitlines()
    return _ending(stage, last, worker.returncode, log_lines, _oom_kills() > kills_before)


def _follow(
    events: int, timeout_s: float, on_stage: Callable[[str], None]
) -> tuple[str, dict[str, Any] | None, float | None]:
    """Block until the worker ends or exceeds a limit.

    Returns the stage that it reached, its last word if it had one, and the limit in seconds if it exceeded one.
    """
    stage, last, pending = "Start of the kernel", None, b""
    deadline, first_step_started = time.monotonic() + timeout_s, None
    while True:
        limit = deadline if first_step_started is None else first_step_started + FIRST_STEP_TIMEOUT_S
        readable, _, _ = select.select([events], [], [], max(0.0, limit - time.monotonic()))
        if not readable:
            return stage, None, timeout_s if first_step_started is None else FIRST_STEP_TIMEOUT_S
        received = os.read(events, 65536)
        if not received:
            return stage, last, None
        if first_step_started is not None:
            deadline += time.monotonic() - first_step_started
            first_step_started = None
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "stage" in event:
                stage = event["stage"]
                on_stage(stage)
            elif "tags" not in event:
                last = event
            first_step_started = time.monotonic() if "first-step" in event.get("tags", []) else None


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker and all that it started, at once; the worker adopts orphans, so none is missed (Linux)."""
    try:
        everything = [*psutil.Process(worker.pid).children(recursive=True), psutil.Process(worker.pid)]
    except psutil.NoSuchProcess:
        everything = []
    for process in everything:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(everything, timeout=10)
    worker.wait()


def _ending(
    stage: str, last: dict[str, Any] | None, worker_exit: int, log_lines: list[str], oom_killed: bool
) -> Ending:
    """Tell how a trial ended from the worker's last word, its exit status and what was written to its log."""
    if last is None and worker_exit == 0:
        return Ending("ok")
    if last is not None and "raised" in last:
        name, message = last["raised"], _one_line(last["message"])
        if name == "NotIdentical":
            return Ending("not_identical", message)
        if name == "Unsupported":
            return Ending("unsupported", message)
        status: records.Status = "out_of_memory" if _OUT_OF_MEMORY.search(f"{name} {message}") else "failed"
        return Ending(status, f"{stage}: {name}: {message}" if message else f"{stage}: {name}")
    who, code = ("kernel", last["kernel_exit"]) if last is not None else ("worker", worker_exit)
    how = (
        f"{who} ended by {_signal_name(-code)}" if code is not None and code < 0 else f"{who} exited with status {code}"
    )
    if code == -signal.SIGKILL and oom_killed:
        return Ending("out_of_memory", f"{stage}: {how}: the system ran out of memory")
    hints = [line for line in log_lines[-20:] if _OUT_OF_MEMORY.search(line)]
    if hints:
        return Ending("out_of_memory", f"{stage}: {how}: {_one_line(hints[-1])}")
    said = f": {_one_line(log_lines[-1])}" if log_lines and who == "worker" else ""
    return Ending("crashed", f"{stage}: {how}{said}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _one_line(text: str) -> str:
    """Return the gist of a message: one line, no terminal colours, at most 300 characters."""
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    return words if len(words) <= 300 else words[:299] + "…"


def _oom_kills() -> int:
    """Return how many processes the Linux kernel has killed so far for lack of memory; 0 where it doesn't tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


def _first_valid(*paths: Path) -> nbformat.NotebookNode:
    """Return the first of these notebooks that can be read, or an empty one."""
    for path in paths:
        try:
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)
            return notebook
        except (OSError, ValueError, AttributeError, KeyError, nbformat.ValidationError):
            continue
    return nbformat.v4.new_notebook()


def _cell_seconds(notebook: nbformat.NotebookNode) -> float:
    """Return how long the cells of an executed notebook took, in seconds: what is left of a trial is the harness's."""
    return sum(float(cell.metadata.get("papermill", {}).get("duration") or 0) for cell in notebook.cells)


def _write(notebook: nbformat.NotebookNode, columns: dict[str, Any], ending: Ending, target: Path) -> records.Record:
    """Write the executed notebook, or, where there's no room for it, one that says so; return its record."""
    if "papermill" in notebook.metadata:  # these name folders of this machine
        notebook.metadata.papermill.pop("input_path", None)
        notebook.metadata.papermill.pop("output_path", None)

    def write() -> records.Record:
        notebook.metadata.rosetta = {**columns, **ending._asdict()}
        records.write_whole(target, nbformat.writes(notebook))
        return records.read_trial(target)

    try:
        return write()
    except OSError as error:
        ending = Ending("failed", f"executed notebook can't be written: {error.strerror}")
        notebook = nbformat.v4.new_notebook(metadata=notebook.metadata)
    except project.UserError as error:  # it ended well but reported nothing valid
        ending = Ending("failed", str(error).removeprefix(f"{target}: "))
    return write()
