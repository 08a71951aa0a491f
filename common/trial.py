"""The record of a trial: what one executed notebook reports about itself.

A notebook makes one `Trial`, times its sections with it, notes facts, and shows `trial.record()`
in its last cell. What is shown carries the record as JSON under `RECORD_TYPE`, so that the
executed notebook holds everything that the results need.
"""

from __future__ import annotations

import html
import platform
import time
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Dict, Iterator, List, Sequence

import numpy as np

from common import machine

#: The MIME type of a notebook output that holds (part of) a record. Later parts override earlier ones.
RECORD_TYPE = "application/vnd.rosetta.record+json"


#: A trial is noisy where other processes kept more of its cores busy than this, in cores, during the timed run.
NOISY_LOAD = 0.1


class Unsupported(Exception):
    """Raised by a notebook where this machine can't run what was asked for, for example a GPU that isn't there."""


class Record:
    """Columns of results.csv and the series behind them; shows itself as a table in a notebook."""

    def __init__(self, columns: Dict[str, Any]) -> None:
        self.columns = columns

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Dict[str, Any]:
        shown = {name: _shown(value) for name, value in self.columns.items() if not isinstance(value, list)}
        cells = "".join(
            "<tr><th>{}</th><td>{}</td></tr>".format(html.escape(name), html.escape(value))
            for name, value in shown.items()
        )
        return {
            "text/plain": "\n".join("{:<20} {}".format(name, value) for name, value in shown.items()),
            "text/html": "<table><tbody>{}</tbody></table>".format(cells),
            RECORD_TYPE: plain(self.columns),
        }


class Trial:
    """One notebook executed once: collects the columns of its record.

    `threads` is the number of threads asked for; 0 stands for every core that the process may use.
    Raises `KeyError` for a profile that the workload doesn't have.
    """

    def __init__(self, workload: ModuleType, profile: str, threads: int, seed: int) -> None:
        self.profile = workload.PROFILES[profile]
        self.threads = threads or machine.usable_cores()
        self._columns: Dict[str, Any] = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "os": machine.operating_system(),
            "device_name": machine.processor(),
            "seed": seed,
            "batch_size": workload.BATCH_SIZE,
            "flops_per_example": workload.flops_per_example(),
            "metric": workload.METRIC,
        }

    @contextmanager
    def timed(self, column: str) -> Iterator[None]:
        """Time the block under this column, for example `with trial.timed("import_s"):`."""
        started = time.perf_counter()
        yield
        self._columns[column] = time.perf_counter() - started

    @contextmanager
    def timed_run(self) -> Iterator[None]:
        """Enclose the timed run: keeps how many cores it kept busy, and how many others did meanwhile."""
        started, own_started, all_started = time.perf_counter(), machine.own_seconds(), machine.busy_seconds()
        yield
        wall, own, everything = (
            time.perf_counter() - started,
            machine.own_seconds() - own_started,
            machine.busy_seconds(),
        )
        self.note(cpu_per_wall=own / wall)
        if all_started is not None and everything is not None:
            foreign_load = max(0.0, everything - all_started - own) / wall
            self.note(foreign_load=foreign_load, noisy=foreign_load > NOISY_LOAD)

    def note(self, **columns: Any) -> None:
        """Note facts of this trial by column name; None is no fact."""
        self._columns.update({name: value for name, value in columns.items() if value is not None})

    def steps(self, seconds: List[float], losses: Sequence[float] = ()) -> None:
        """Note the timed run: each step's seconds and, in training, loss, in order, warm-up included."""
        warm = np.asarray(seconds[self.profile.warmup_steps :])
        batch_size = self._columns["batch_size"]
        rate = len(warm) * batch_size / float(warm.sum())
        self.note(
            steps=len(seconds),
            examples=len(seconds) * batch_size,
            warmup_steps=self.profile.warmup_steps,
            step_median_s=float(np.median(warm)),
            step_p05_s=float(np.percentile(warm, 5)),
            step_p95_s=float(np.percentile(warm, 95)),
            timed_s=float(warm.sum()),
            examples_per_s=rate,
            seconds_per_1000=1000 / rate,
            achieved_gflops=rate * self._columns["flops_per_example"] / 1e9,
            step_seconds=[float(value) for value in seconds],
        )
        if len(losses):
            self.note(
                loss_first=float(losses[0]),
                loss_last=float(losses[-1]),
                step_losses=[float(value) if np.isfinite(value) else None for value in losses],
            )

    def record(self) -> Record:
        """Return the record, to be shown in the notebook's last cell."""
        self.note(peak_rss_mib=machine.peak_rss_mib())
        return Record(dict(self._columns))


def plain(columns: Dict[str, Any]) -> Dict[str, Any]:
    """Return the columns as JSON can hold them: numbers that aren't finite become "nan", "inf" or "-inf"."""
    return {
        name: str(value) if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in columns.items()
    }


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return "{:.6g}".format(value) if isinstance(value, float) else str(value)
