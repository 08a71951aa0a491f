"""A run: one folder, its trials one at a time, and what they come to. The entry point is `carry_out`."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from pydantic import ValidationError

from common import machine
from harness import project, records, report
from harness.environments import Environment
from harness.execute import execute
from harness.plan import Options, Trial
from harness.project import UserError

OPTIONS_FILE = "run.json"


class Progress(NamedTuple):
    """What a caller is told while a run goes on."""

    begin: Callable[[int, int, Trial], None]  # position, total, trial
    stage: Callable[[str], None]  # heading of the notebook
    end: Callable[[Trial, records.Record], None]
    waiting: Callable[[], None]  # another run keeps this machine busy


def create(options: Options, folder: Path | None) -> Path:
    """Create the folder of a new run and return it. Raises `UserError` where there is something already."""
    if folder is None:
        name = f"{datetime.now():%Y-%m-%dT%H-%M-%S}-{options.profile}-{options.device}"
        folder = project.RUNS / name
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder}: this folder isn't empty; choose another, or resume it with --resume")
        (folder / "trials").mkdir()
        records.write_whole(folder / OPTIONS_FILE, options.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{folder}: can't be written: {error.strerror}") from None
    return folder


def options_of(folder: Path) -> Options:
    """Return what a run was asked for. Raises `UserError` where the folder holds no run."""
    try:
        return Options.model_validate_json((folder / OPTIONS_FILE).read_text())
    except OSError:
        raise UserError(f"{folder}: not a run: it has no {OPTIONS_FILE}") from None
    except ValidationError as error:
        raise UserError(f"{folder / OPTIONS_FILE}: not valid: {error.errors()[0]['msg']}") from None


def carry_out(
    folder: Path, trials: Sequence[Trial], environments: dict[str, Environment], progress: Progress
) -> Counter[str]:
    """Execute the trials of a run that aren't done yet, write its results, and return how many ended in which status.

    Results are written also when the run is interrupted, before `KeyboardInterrupt` goes on. Trials
    that were done before count as "ok"; those that were never begun are absent. Raises `UserError` where
    another process works in the same folder.
    """
    try:
        with FileLock(folder / ".lock", timeout=0):
            return _carry_out(folder, trials, environments, progress)
    except Timeout:
        raise UserError(f"{folder}: another process runs the trials of this folder; wait for it to end") from None


def _carry_out(
    folder: Path, trials: Sequence[Trial], environments: dict[str, Environment], progress: Progress
) -> Counter[str]:
    facts = {
        "run": folder.name,
        "machine": machine_name(),
        "common_hash": project.common_hash(),
        "commit": project.commit(),
        "driver": nvidia_driver(),
    }
    for leftover in (folder / "trials").glob(".*"):  # a writer that was killed
        leftover.unlink()
    statuses: Counter[str] = Counter()
    try:
        for position, trial in enumerate(trials, 1):
            environment = environments[trial.framework]
            if is_done(folder, trial, environment, facts["common_hash"]):
                statuses["ok"] += 1
                continue
            with _machine_to_itself(progress):
                progress.begin(position, len(trials), trial)
                try:
                    record = execute(trial, environment, folder, facts, progress.stage)
                except OSError as error:
                    raise UserError(
                        f"{folder}: can't be written: {error.strerror}; make room and go on with --resume {folder}"
                    ) from None
            statuses[record.status] += 1
            progress.end(trial, record)
    finally:
        if any((folder / "trials").glob("*.ipynb")):
            report.write(folder)
            _point_latest_to(folder)
    return statuses


def is_done(folder: Path, trial: Trial, environment: Environment, common_hash: str) -> bool:
    """Return whether the trial needs no execution: a valid record says "ok" and all that it rests on is unchanged."""
    try:
        record = records.read_trial(folder / "trials" / f"{trial.name}.ipynb")
    except UserError:
        return False
    hashes = (record.notebook_hash, record.common_hash, record.lock_hash)
    return record.status == "ok" and hashes == (
        project.notebook_hash(trial.notebook),
        common_hash,
        environment.lock_hash,
    )


def machine_name() -> str:
    """Return a name for this kind of machine: its processor, cores and GPU, for example "amd-epyc-2-cores"."""
    name = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", " ", machine.processor())
    words = [*name.split(), str(machine.usable_cores()), "cores", *nvidia_gpu().split()]
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words)


def nvidia_gpu() -> str:
    """Return the name of the first NVIDIA GPU, or an empty text where there is none that works."""
    return _nvidia_smi("name")


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver, or an empty text."""
    return _nvidia_smi("driver_version")


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.strip().splitlines()[0].strip() if shown.strip() else ""


@contextmanager
def _machine_to_itself(progress: Progress) -> Iterator[None]:
    """Hold the lock under which a trial runs: one at a time on this machine, whatever the run."""
    lock = FileLock(Path(tempfile.gettempdir()) / f"rosetta-{os.getuid()}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.waiting()
        lock.acquire(poll_interval=1)
    try:
        yield
    finally:
        lock.release()


def _point_latest_to(folder: Path) -> None:
    """Let results/latest point to the run."""
    project.LATEST.parent.mkdir(exist_ok=True)
    temporary = project.LATEST.with_name(f".latest-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(folder, project.LATEST.parent))
    temporary.replace(project.LATEST)


def usable_device(asked: str) -> str:
    """Return "cpu" or "cuda" for what was asked: "auto" takes an NVIDIA GPU where one works."""
    if asked == "auto":
        return "cuda" if nvidia_gpu() else "cpu"
    if asked not in ("cpu", "cuda"):
        raise UserError(f"--device takes auto, cpu or cuda, not {asked!r}")
    if asked == "cuda" and not nvidia_gpu():
        raise UserError("--device cuda: nvidia-smi finds no NVIDIA GPU on this machine")
    return asked
