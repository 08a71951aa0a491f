"""What this machine can do at most, with as many threads as a trial has: a matrix product and a copy in memory.

As in STREAM (McCalpin, 1995), the best of several counts: a peak is what the machine can do, not what it mostly does.
`measure` runs `python -m harness.peak` in a fresh process, since a BLAS reads its number of threads when it is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from harness import environments, project
from harness.project import UserError

SIDE = 2048  # of the matrices: 17 GFLOP, far beyond any cache's help
SECONDS = 1.0  # each measurement goes on for so long
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


class Peak(NamedTuple):
    """The most that was reached; its fields are columns of the record."""

    peak_gflops: float  # 10⁹ floating-point operations per second, a multiply-add counted as two
    peak_bandwidth_gbs: float  # 10⁹ bytes per second, read and written


def measure(threads: int, precision: str) -> Peak:
    """Measure both with `threads` threads on as many cores, matrices in `precision`. Takes some seconds.

    Raises `UserError` where the process that measures fails.
    """
    variables = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    variables.update(dict.fromkeys(environments.THREAD_VARIABLES, str(threads)))
    command = [sys.executable, "-m", "harness.peak", str(threads), precision]
    done = subprocess.run(command, cwd=project.ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UserError(f"the machine's peak can't be measured: {said[-1] if said else f'exit {done.returncode}'}")
    return Peak(**json.loads(done.stdout))


def _main(threads: int, precision: str) -> Peak:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    return Peak(_gflops(precision), _bandwidth(threads))


def _gflops(precision: str) -> float:
    random = np.random.RandomState(0)
    a, b = (random.uniform(-1, 1, (SIDE, SIDE)).astype(precision) for _ in range(2))
    c = np.empty_like(a)
    return 2 * SIDE**3 / _shortest(lambda: np.matmul(a, b, out=c)) / 1e9


def _bandwidth(threads: int) -> float:
    """Copy between arrays four times as large as the last cache, as STREAM asks, each thread a part of its own."""
    try:
        cache = int(CACHE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        cache = 32 * 2**20
    size = min(4 * cache, psutil.virtual_memory().available // 8)
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:  # NumPy copies without holding the interpreter's lock
        return 2 * size / _shortest(lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))) / 1e9


def _shortest(work: Callable[[], object]) -> float:
    """Return the shortest time of `work`, in seconds."""
    shortest, ends = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < ends:
        started = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


if __name__ == "__main__":
    print(json.dumps(_main(int(sys.argv[1]), sys.argv[2])._asdict()))
