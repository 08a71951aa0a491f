"""A run: one folder, its trials one at a time, and what they come to. The entry point is `carry_out`."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from pydantic import ValidationError

from harness import devices, peak, project, records, report
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


def carry_out(folder: Path, trials: Sequence[Trial], environments: dict[str, Environment], progress: Progress) -> None:
    """Execute the trials of a run that aren't done yet, and write its results.

    Results are written also when the run is interrupted, before `KeyboardInterrupt` goes on. Raises `UserError`
    where another process works in the same folder or nothing more can be written there.
    """
    try:
        with FileLock(folder / ".lock", timeout=0):
            _carry_out(folder, trials, environments, progress)
    except Timeout:
        raise UserError(f"{folder}: another process runs the trials of this folder; wait for it to end") from None
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where}: {error.strerror}; mend that and go on with: rosetta run --resume {folder}") from None


def count(folder: Path, trials: Sequence[Trial]) -> dict[str, int]:
    """Return how many trials of a run are done, failed, skipped (not possible on this machine), and not run."""
    results = folder / "results.csv"
    statuses = list(records.read_csv(results).status) if results.exists() else []
    found = Counter(statuses)
    done, skipped = found["ok"], found["unsupported"] + found["unavailable"]
    not_run = len(trials) - len(statuses) + found["interrupted"]
    return {"done": done, "failed": len(trials) - done - skipped - not_run, "skipped": skipped, "not run": not_run}


def _carry_out(folder: Path, trials: Sequence[Trial], environments: dict[str, Environment], progress: Progress) -> None:
    facts = {
        "run": folder.name,
        "machine": devices.machine_name(),
        "common_hash": project.common_hash(),
        "commit": project.commit(),
        **({"driver": driver} if (driver := devices.nvidia_driver()) else {}),
    }
    peaks: dict[tuple[int, int, str], peak.Peak] = {}  # measured anew in each repeat: the machine drifts
    for leftover in (folder / "trials").glob(".*.ipynb.*"):  # a writer that was killed
        leftover.unlink()
    try:
        for position, trial in enumerate(trials, 1):
            environment = environments[trial.framework]
            if is_done(folder, trial, environment, facts["common_hash"]):
                continue
            with _machine_to_itself(progress):
                progress.begin(position, len(trials), trial)
                setting = (trial.repeat, trial.threads, trial.precision)
                if trial.device == "cpu" and setting not in peaks:
                    peaks[setting] = peak.measure(trial.threads, trial.precision)
                reached = peaks[setting]._asdict() if setting in peaks else {}
                record = execute(trial, environment, folder, {**facts, **reached}, progress.stage)
            progress.end(trial, record)
    finally:
        if any((folder / "trials").glob("*.ipynb")):
            report.write(folder)
            _point_latest_to(folder)


def is_done(folder: Path, trial: Trial, environment: Environment, common_hash: str) -> bool:
    """Return whether the trial needs no execution: a valid record says "ok" and all that it rests on is unchanged.

    That includes the kind of its data, which may have become available or unavailable since.
    """
    try:
        record = records.read_trial(folder / "trials" / f"{trial.name}.ipynb")
    except UserError:
        return False
    hashes = (record.notebook_hash, record.common_hash, record.lock_hash)
    return (
        record.status == "ok"
        and record.data == trial.data
        and hashes
        == (
            project.notebook_hash(trial.notebook),
            common_hash,
            environment.lock_hash,
        )
    )


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
