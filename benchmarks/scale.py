"""Whether the harness keeps up with 10,000 trials: time and memory to plan, collect and summarise them.

    .venv/bin/python benchmarks/scale.py [TRIALS]

Makes a run of that many executed notebooks out of the published ones in a temporary folder, and measures each stage in
a process of its own. They should take less than 30 seconds and 500 MB.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from harness import plan, project, records, report, steps

REPEATS = 10
STAGES = ("plan", "collect", "summarise")


def make_run(folder: Path, trials: int) -> None:
    """Write executed notebooks that differ in run, trial, framework and repeat, from the published quick ones."""
    (folder / "trials").mkdir()
    published = min(project.PUBLISHED.glob("*/quick"))
    templates = [json.loads(path.read_text()) for path in sorted(published.glob("trials/*.1.ipynb"))]
    for number in range(trials):
        row, repeat = divmod(number, REPEATS)
        notebook = templates[row % len(templates)]
        facts = notebook["metadata"]["rosetta"]
        name = f"{facts['framework'].split('-')[0]}-{row // len(templates)}"
        facts |= {
            "framework": name,
            "repeat": repeat + 1,
            "trial": f"{facts['workload']}.{name}.{facts['mode']}.{repeat}",
        }
        (folder / "trials" / f"{facts['trial']}.ipynb").write_text(json.dumps(notebook))


def stage(name: str, folder: Path, trials: int) -> None:
    """Carry out one stage."""
    if name == "plan":
        rows = len(plan.plan(options(1)))
        planned = plan.plan(options(-(-trials // rows)))
        assert len(planned) >= trials
    elif name == "collect":
        records.write_csv(records.collect(folder), folder / "results.csv")
        steps.write(folder)
    else:
        table = records.read_csv(folder / "results.csv")
        report.write_summary(table, folder)
        assert len(pd.read_csv(folder / "summary.csv")) == -(-trials // REPEATS)


def options(repeats: int) -> plan.Options:
    """Return the options of a quick run in all modes."""
    return plan.Options(
        workloads=[], frameworks=[], modes=["all"], profile="quick", device="cpu", repeats=repeats, threads=[2],
        data="real", timeout_s=None, interpreters={},
    )  # fmt: skip


def main(trials: int) -> None:
    """Measure all stages and print a line for each."""
    with tempfile.TemporaryDirectory() as scratch:
        make_run(Path(scratch), trials)
        total = 0.0
        for name in STAGES:
            started = time.perf_counter()
            command = [sys.executable, __file__, name, scratch, str(trials)]
            subprocess.run(command, check=True)
            total += time.perf_counter() - started
            print(f"{name:<10} {time.perf_counter() - started:6.1f} s")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
        print(f"{trials:,} trials: {total:.1f} s, at most {peak:.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in STAGES:
        stage(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 10_000)
