"""Every step's time of a folder of trials, as one Parquet file beside its results.csv. The entry point is `write`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness import records

NAMES = ["run", "trial", "workload", "framework", "mode", "threads", "batch_size", "repeat"]

SCHEMA = pa.schema(
    [(name, pa.int64() if name in ("threads", "batch_size", "repeat") else pa.string()) for name in NAMES]
    + [("step", pa.int64()), ("warmup", pa.bool_()), ("seconds", pa.float64()), ("loss", pa.float64())]
)


def write(folder: Path) -> Path:
    """Write steps.parquet from the notebooks in `folder`/trials, whole or not at all, and return it.

    One row for each step of each trial that went through: the trial's names, `step` from 0, `warmup` (left out of the
    figures), `seconds`, and in training the `loss`. One trial is in memory at a time.
    """
    target = folder / "steps.parquet"
    with tempfile.TemporaryDirectory(prefix=".steps-", dir=folder) as scratch:
        temporary = Path(scratch) / target.name
        with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
            for path in sorted((folder / "trials").glob("*.ipynb")):
                record = records.read_trial(path)
                if record.status == "ok":
                    writer.write_table(_table(record, records.read_series(path)))
        temporary.replace(target)
    return target


def _table(record: records.Record, series: dict[str, list[float]]) -> pa.Table:
    seconds = series.get("step_seconds", [])
    columns = {name: [getattr(record, name)] * len(seconds) for name in NAMES}
    columns["step"] = list(range(len(seconds)))
    columns["warmup"] = [step < (record.warmup_steps or 0) for step in columns["step"]]
    columns["seconds"] = seconds
    columns["loss"] = series.get("step_losses") or [None] * len(seconds)
    return pa.table(columns, schema=SCHEMA)
