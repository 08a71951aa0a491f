"""A run made public: its notebooks and results copied to results/published, the README's table renewed from them."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness import project, records, report
from harness.project import UserError


def publish(run: Path) -> Path:
    """Copy a run's executed notebooks, results.csv and table to results/published/<machine>, replacing what was there.

    Returns that folder. Raises `UserError` unless every trial went through, on one machine, from committed files.
    """
    table = records.collect(run)
    if (table.status != "ok").any():
        raise UserError(f"{run}: not every trial went through; resume it first: rosetta run --resume {run}")
    if table.commit.isna().any() or table.commit.str.endswith("-dirty").any():
        raise UserError(
            f"{run}: ran with changes that aren't committed, so nobody could repeat it; commit and run again"
        )
    machines = table.machine.unique()
    if len(machines) != 1:
        raise UserError(f"{run}: holds trials of several machines: {', '.join(machines)}")
    target: Path = project.PUBLISHED / machines[0]
    shutil.rmtree(target, ignore_errors=True)
    (target / "trials").mkdir(parents=True)
    for notebook in sorted((run / "trials").glob("*.ipynb")):
        shutil.copyfile(notebook, target / "trials" / notebook.name)
    records.write_csv(table, target / "results.csv")
    records.write_whole(target / "table.md", report.markdown(table))
    report.update_readme(project.ROOT / "README.md", table)
    return target
