"""How often the harness is wrong about itself: one notebook run as two frameworks, resampled into many comparisons.

    .venv/bin/python benchmarks/sensitivity.py measure 20    # twenty repeats, a quarter of an hour: writes twins.csv
    .venv/bin/python benchmarks/sensitivity.py               # some minutes: renews the table in docs/measurement.md

Each simulated comparison draws repeats of the twins, swaps the two at random within each repeat (so that truly nothing
differs), slows one of them down by a known share, and asks `harness.statistics` for its verdict, as `rosetta summary`
and `rosetta compare` do.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from harness import environments, frameworks, project, records, statistics

TWINS = Path(__file__).with_name("twins.csv")
DOCUMENT = project.ROOT / "docs" / "measurement.md"
BEGIN, END = "<!-- sensitivity: begin -->", "<!-- sensitivity: end -->"

WORKLOAD, FRAMEWORK, TWIN = "gru_imdb", "torch", "twin"
REPEATS = (3, 6, 10)
SLOWDOWNS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)

Comparison = Callable[[np.random.RandomState, np.ndarray, int, float], statistics.Verdict]


def measure(repeats: int) -> None:
    """Run one notebook as two frameworks, in a copy of the project, and write their results to `TWINS`."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "rosetta"
        for part in ("common", "harness", "notebooks"):
            shutil.copytree(project.ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (root / "harness" / "frameworks").glob(f"{FRAMEWORK}.*"):
            shutil.copy(path, path.with_name(path.name.replace(FRAMEWORK, TWIN, 1)))
        notebook = root / "notebooks" / WORKLOAD / f"{FRAMEWORK}.ipynb"
        shutil.copy(notebook, notebook.with_name(f"{TWIN}.ipynb"))
        python = environments.inspect(frameworks.load(FRAMEWORK), "cpu").python
        command = [
            sys.executable, "-m", "harness", "run", "--workload", WORKLOAD, "--framework", f"{FRAMEWORK},{TWIN}",
            "--profile", "quick", "--device", "cpu", "--repeats", str(repeats), "--output", str(root / "run"),
            f"--python={FRAMEWORK}={python}", f"--python={TWIN}={python}",
        ]  # fmt: skip
        subprocess.run(command, cwd=root, check=True)
        shutil.copy(root / "run" / "results.csv", TWINS)


def noise() -> np.ndarray:
    """Return the throughput of the twins in each repeat, (repeats, 2)."""
    table = records.read_csv(TWINS)
    rates = table[table.status == "ok"].pivot_table(index="repeat", columns="framework", values="examples_per_s")
    return rates.dropna().to_numpy(float)


def within_a_run(random: np.random.RandomState, rates: np.ndarray, repeats: int, slowdown: float) -> statistics.Verdict:
    """Compare two rows of one run, paired by repeat."""
    chosen = rates[random.permutation(len(rates))[:repeats]]
    swapped = random.randint(0, 2, repeats)
    a, b = chosen[np.arange(repeats), swapped], chosen[np.arange(repeats), 1 - swapped]
    sides = [
        pd.DataFrame({"run": "r", "repeat": range(repeats), "examples_per_s": side}) for side in (b / (1 + slowdown), a)
    ]
    ratio = statistics.paired(*sides)
    return ratio.verdict(ratio.p, statistics.repeats_needed(1))


def between_runs(random: np.random.RandomState, rates: np.ndarray, repeats: int, slowdown: float) -> statistics.Verdict:
    """Compare the same row of two runs, which share no repeats."""
    chosen = random.permutation(rates.ravel())[: 2 * repeats]
    ratio = statistics.unpaired(chosen[:repeats] / (1 + slowdown), chosen[repeats:])
    return ratio.verdict(ratio.p, statistics.repeats_needed(1, paired=False))


def share(compare: Comparison, rates: np.ndarray, repeats: int, slowdown: float, comparisons: int) -> float:
    """Return in what share of so many comparisons a difference is claimed: with no slowdown, a wrong claim."""
    random = np.random.RandomState(0)
    verdicts = [compare(random, rates, repeats, slowdown) for _ in range(comparisons)]
    return float(np.mean([verdict in ("faster", "slower") for verdict in verdicts]))


def table(rates: np.ndarray, comparisons: int = 1000) -> str:
    """Return what was found as Markdown."""
    lines = ["| comparison | repeats | same called different | slowdown of 10 % found | smallest found 9 times in 10 |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for name, compare in (("two rows of a run", within_a_run), ("a row of two runs", between_runs)):
        for repeats in REPEATS:
            wrong, found = (share(compare, rates, repeats, slowdown, comparisons) for slowdown in (0.0, 0.1))
            fine = (
                slowdown
                for slowdown in SLOWDOWNS
                if share(compare, rates, repeats, slowdown, comparisons // 5) >= statistics.POWER
            )
            smallest = next((f"{slowdown:.0%}" for slowdown in fine), f"none up to {SLOWDOWNS[-1]:.0%}")
            lines.append(f"| {name} | {repeats} | {wrong:.1%} | {found:.1%} | {smallest} |")
    return "\n".join(lines)


def main() -> None:
    """Renew the table in the document."""
    shown = f"{BEGIN}\n{table(noise())}\n{END}"
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    DOCUMENT.write_text(pattern.sub(lambda _: shown, DOCUMENT.read_text()))
    print(shown)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(int(sys.argv[2]))
    else:
        main()
