"""The record of a trial: what one executed notebook reports about itself.

A notebook makes one `Trial`, times its sections with it, notes facts, and shows `trial.record()`
in its last cell. What is shown carries the record as JSON under `RECORD_TYPE`, so that the
executed notebook holds everything that the results need.
"""

from __future__ import annotations

import html
import platform
import sysconfig
import time
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np

from common import energy, machine

#: The MIME type of a notebook output that holds (part of) a record. Later parts override earlier ones.
RECORD_TYPE = "application/vnd.rosetta.record+json"


#: A trial is noisy where, during its timed run, other processes and other virtual machines together took more of its
#: cores than this, in cores, or where heat slowed a core down, or where pages came from disk at this rate, per second.
NOISY_LOAD = 0.1
NOISY_FAULTS = 10


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

    `threads` is the number of threads asked for; 0 stands for every core that the process may use. `batch_size` is the
    number of examples of a step; 0 stands for the specification's. Raises `KeyError` for a profile that the
    workload doesn't have.
    """

    def __init__(
        self, workload: ModuleType, profile: str, device: str, threads: int, batch_size: int, seed: int
    ) -> None:
        self.profile = workload.PROFILES[profile]
        self.device = device
        self.threads = threads or machine.usable_cores()
        self.batch_size = batch_size or workload.BATCH_SIZE
        self._columns: Dict[str, Any] = {
            "python": platform.python_version() + (" debug" if sysconfig.get_config_var("Py_DEBUG") else ""),
            "numpy": np.__version__,
            "os": machine.operating_system(),
            "device_name": machine.processor(),
            "simd": machine.simd(),
            "seed": seed,
            "batch_size": self.batch_size,
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
        """Enclose the timed run: notes how many cores it kept busy, what disturbed it, and the energy spent."""
        before, energy_before = _Reading.take(), energy.counters(self.device)
        yield
        after, energy_after = _Reading.take(), energy.counters(self.device)
        wall = after.clock - before.clock
        self.note(
            cpu_per_wall=(after.own - before.own) / wall,
            cpu_mhz=machine.clock_mhz(),
            energy_j=energy.spent(energy_before, energy_after),
            energy_source=" + ".join(energy_before) or None,
            major_faults=after.faults - before.faults,
        )
        heat = 0
        if before.throttled is not None and after.throttled is not None:
            heat = after.throttled - before.throttled
            self.note(throttled=heat)
        if before.cores is not None and after.cores is not None:
            own = after.own - before.own
            foreign_load = max(0.0, after.cores.busy - before.cores.busy - own) / wall
            steal = (after.cores.stolen - before.cores.stolen) / wall
            faults = (after.faults - before.faults) / wall
            noisy = foreign_load + steal > NOISY_LOAD or heat > 0 or faults > NOISY_FAULTS
            self.note(foreign_load=foreign_load, steal=steal, noisy=noisy)

    def note(self, **columns: Any) -> None:
        """Note facts of this trial by column name; None is no fact."""
        self._columns.update({name: value for name, value in columns.items() if value is not None})

    def steps(self, seconds: List[float], losses: Sequence[float] = ()) -> None:
        """Note the timed run: each step's seconds and, in training, loss, in order, warm-up included."""
        warm = np.asarray(seconds[self.profile.warmup_steps :])
        rate = len(warm) * self.batch_size / float(warm.sum())
        self.note(
            steps=len(seconds),
            examples=len(seconds) * self.batch_size,
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
        if self.device == "cuda":
            self.note(gpu_memory_mib=energy.gpu_memory_mib())
        return Record(dict(self._columns))


class _Reading(NamedTuple):
    """What the system counts, at one moment."""

    clock: float
    own: float
    cores: Optional[machine.CoreSeconds]
    faults: int
    throttled: Optional[int]

    @classmethod
    def take(cls) -> "_Reading":
        return cls(
            time.perf_counter(), machine.own_seconds(), machine.core_seconds(), machine.major_faults(),
            machine.throttle_count(),
        )  # fmt: skip


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
