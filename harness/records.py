"""Executed notebooks read back as records, and records as results.csv. The notebooks are the only truth."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.trial import RECORD_TYPE
from harness.project import UserError
from harness.warmup import Kind, classify

Status = Literal[
    "ok", "not_identical", "failed", "timeout", "crashed", "out_of_memory", "unsupported", "unavailable", "interrupted"
]

#: Columns that say something only when the trial went through: a trial that didn't shows no timing.
RESULTS = {
    "first_step_s", "step_median_s", "step_p05_s", "step_p95_s", "timed_s", "examples_per_s", "seconds_per_1000",
    "evaluate_s", "metric_value", "loss_first", "loss_last", "achieved_gflops", "mfu", "energy_j", "cpu_per_wall",
    "foreign_load", "steal", "noisy", "cpu_mhz", "throttled", "major_faults",
}  # fmt: skip

#: What a notebook reports beside the columns: a value for each step, a row for each quantity of the check.
SERIES = {"step_seconds", "step_losses", "identity"}


class Record(BaseModel):
    """What one trial reports: one row of results.csv. The order of the fields is the order of the columns."""

    model_config = ConfigDict(extra="forbid")

    run: str
    trial: str
    workload: str
    framework: str
    framework_version: str | None = None
    mode: str
    precision: str
    profile: str
    device: str
    device_name: str | None = None
    repeat: int
    seed: int
    status: Status
    error: str | None = None
    started: str | None = Field(None, description="UTC, ISO 8601")
    machine: str | None = None
    os: str | None = None
    python: str | None = None
    numpy: str | None = None
    threads: int | None = Field(None, description="as the framework reports them, or asked for where it doesn't")
    batch_size: int | None = None
    examples: int | None = None
    steps: int | None = None
    data: Literal["real", "synthetic"] | None = None
    weights: Literal["pretrained", "seeded"] | None = None
    import_s: float | None = None
    data_s: float | None = None
    build_s: float | None = None
    first_step_s: float | None = None
    warmup_steps: int | None = None
    step_median_s: float | None = None
    step_p05_s: float | None = None
    step_p95_s: float | None = None
    timed_s: float | None = None
    examples_per_s: float | None = None
    seconds_per_1000: float | None = None
    evaluate_s: float | None = None
    metric: str | None = None
    metric_value: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    parameters: int | None = None
    forward_error: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    steps_error: float | None = None
    peak_rss_mib: float | None = None
    peak_device_mib: float | None = None
    energy_j: float | None = None
    flops_per_example: int | None = None
    achieved_gflops: float | None = None
    peak_gflops: float | None = None
    mfu: float | None = None
    foreign_load: float | None = None
    noisy: bool | None = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    blas: str | None = None
    settings: str | None = None
    notebook: str
    notebook_hash: str | None = None
    common_hash: str | None = None
    lock_hash: str | None = None
    commit: str | None = None
    update_error: float | None = None
    cpu_per_wall: float | None = None
    optimizer: str | None = None
    warmup: Kind | None = Field(None, description="what the series of step times shows; see harness/warmup.py")
    steady_step: int | None = Field(None, description="the step from which on times are steady, counted from 0")
    peak_bandwidth_gbs: float | None = None
    steal: float | None = Field(None, description="cores that the hypervisor took away during the timed run")
    cpu_mhz: float | None = Field(None, description="at the end of the timed run, mean of the usable cores")
    throttled: int | None = Field(None, description="how often heat slowed a core down during the timed run")
    major_faults: int | None = Field(None, description="pages read from disk during the timed run")
    energy_source: str | None = None
    gpu_memory_mib: float | None = Field(None, description="in use as the GPU's driver counts it, at the end")
    simd: str | None = None
    trial_s: float | None = Field(None, description="wall-clock of the whole trial")
    overhead_s: float | None = Field(None, description="what of it no cell of the notebook took")


def read_trial(path: Path) -> Record:
    """Return the record of one executed notebook. Raises `UserError` where it holds none that is valid."""
    try:
        notebook = json.loads(path.read_text())
        reported = {name: value for part in _parts(notebook) for name, value in part.items()}
        series = {name: reported.pop(name) for name in SERIES & reported.keys()}
        columns = {**reported, **notebook["metadata"]["rosetta"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no record in this notebook ({type(error).__name__}: {error})") from None
    if columns.get("status") == "ok":
        columns.update(_derived(columns, series.get("step_seconds", [])))
    else:
        columns.update(dict.fromkeys(RESULTS & columns.keys()))
    try:
        record = Record.model_validate(columns)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{path}: record is not valid: {where}: {problem['msg']}") from None
    if record.status == "ok" and any(
        getattr(record, name) is None for name in ("timed_s", "steps", "framework_version")
    ):
        raise UserError(f"{path}: record is not complete: the notebook ended without showing `trial.record()`")
    return record


def _derived(columns: dict[str, Any], step_seconds: list[float]) -> dict[str, Any]:
    """Return the columns that follow from what a trial reported."""
    found: dict[str, Any] = classify(step_seconds)._asdict() if step_seconds else {}
    if columns.get("peak_gflops") and columns.get("achieved_gflops"):
        found["mfu"] = columns["achieved_gflops"] / columns["peak_gflops"]
    return found


def read_series(path: Path) -> dict[str, list[Any]]:
    """Return the series that an executed notebook reports beside its columns, such as `step_seconds`, by name."""
    parts = _parts(json.loads(path.read_text()))
    return {name: value for part in parts for name, value in part.items() if name in SERIES}


def _parts(notebook: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield the parts of the record that the notebook's outputs show, in order."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if RECORD_TYPE in output.get("data", {}):
                yield output["data"][RECORD_TYPE]


def collect(run: Path) -> pd.DataFrame:
    """Return the records of a run, one row a trial, rebuilt from its executed notebooks alone."""
    paths = sorted((run / "trials").glob("*.ipynb"))
    if not paths:
        raise UserError(f"{run}: no executed notebooks in its folder `trials`")
    return frame([read_trial(path) for path in paths])


def frame(records: Iterable[Record]) -> pd.DataFrame:
    """Return records as a table with the columns and types of the schema, in a stable order."""
    rows = sorted(records, key=lambda r: (r.workload, r.framework, r.mode, r.device, r.repeat, r.run))
    return pd.DataFrame(
        {name: pd.array([getattr(row, name) for row in rows], dtype=dtype) for name, dtype in _dtypes().items()}
    )


def _dtypes() -> dict[str, Any]:
    """Return the pandas type of each column."""
    types: dict[Any, str] = {int: "Int64", float: "Float64", bool: "boolean"}
    columns = {}
    for name, field in Record.model_fields.items():
        kinds = [kind for kind in (*get_args(field.annotation), field.annotation) if kind in types]
        columns[name] = types[kinds[0]] if kinds else "string"
    return columns


def write_csv(records: pd.DataFrame, path: Path) -> None:
    """Write results.csv, whole or not at all."""
    write_whole(path, records.to_csv(index=False, lineterminator="\n"))


def read_csv(path: Path) -> pd.DataFrame:
    """Return a results.csv with the types of the schema; columns that an older file lacks are empty.

    Raises `UserError` where the file can't be read or lacks the columns that name a trial.
    """
    try:
        table = pd.read_csv(path, dtype="string", keep_default_na=False, na_values=[""])
        missing = {"run", "trial", "workload", "framework", "mode", "status"} - set(table.columns)
        if missing:
            raise UserError(f"{path}: not a results.csv: it lacks the columns {', '.join(sorted(missing))}")
        dtypes = _dtypes()
        known = {name: _typed(table[name], dtype) for name, dtype in dtypes.items() if name in table}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read as results.csv: {error}") from None
    empty = {name: pd.array([None] * len(table), dtype=dtype) for name, dtype in dtypes.items() if name not in table}
    return pd.DataFrame({**known, **empty})[list(dtypes)]


def _typed(column: pd.Series[str], dtype: Any) -> Any:
    if dtype == "boolean":
        return column.map({"True": True, "False": False}).astype("boolean")
    return column if dtype == "string" else pd.to_numeric(column).astype(dtype)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
