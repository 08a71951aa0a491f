"""A run made public: its notebooks and results copied to results/published, the README's table renewed from them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pandas as pd

from harness import plan, project, records, report, run
from harness.project import UserError

ROW = ["workload", "framework", "mode", "threads", "batch_size"]


def publish(folder: Path) -> Path:
    """Copy a run's executed notebooks and results to results/published/<machine>/<profile>, and return that folder.

    There they replace what was public of the same workloads. Raises `UserError` unless every trial of the run went
    through, on one machine, with real data, from committed files, and no row of the table would be lost.
    """
    table = _publishable(folder)
    target: Path = project.PUBLISHED / table.machine.iloc[0] / table.profile.iloc[0]
    kept = []
    if target.exists():
        public = records.collect(target)
        replaced = public.workload.isin(table.workload)
        lost = set(public.loc[replaced, ROW].itertuples(index=False, name=None)) - set(
            table[ROW].itertuples(index=False, name=None)
        )
        if lost:
            rows = ", ".join(sorted(" ".join(map(str, row[:3])) for row in lost))
            raise UserError(f"{folder}: lacks what is public now: {rows}; run these, too, or delete {target}")
        kept = [target / "trials" / f"{trial}.ipynb" for trial in public.trial[~replaced]]

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as scratch:
        new = Path(scratch) / target.name
        (new / "trials").mkdir(parents=True)
        for notebook in [*kept, *(folder / "trials").glob("*.ipynb")]:
            shutil.copyfile(notebook, new / "trials" / notebook.name)
        report.write_tables(records.collect(new), new)
        if target.exists():
            target.rename(Path(scratch) / "old")
        new.rename(target)
    report.update_readme(project.README, for_readme(published()))
    return target


def published() -> pd.DataFrame:
    """Return all results that are public, of all machines and profiles."""
    tables = [records.read_csv(path) for path in sorted(project.PUBLISHED.glob("*/*/results.csv"))]
    return pd.concat(tables, ignore_index=True)


def for_readme(table: pd.DataFrame) -> pd.DataFrame:
    """Return of what is public one machine for each workload and profile: most repeats first, then latest."""
    key = ["workload", "profile"]
    ranked = table.groupby([*key, "machine"]).agg(repeats=("repeat", "max"), started=("started", "max")).reset_index()
    best = ranked.sort_values(["repeats", "started"]).drop_duplicates(key, keep="last")
    return table.merge(best[[*key, "machine"]], on=[*key, "machine"], how="inner")


def _publishable(folder: Path) -> pd.DataFrame:
    """Return the records of a run that may be made public. Raises `UserError` that says what is against it."""
    options = run.options_of(folder)
    table = records.collect(folder)
    counted = run.count(folder, plan.plan(options))
    if counted["done"] < sum(counted.values()):
        raise UserError(f"{folder}: not every trial went through; resume it first: rosetta run --resume {folder}")
    if options.profile == "smoke" or (table.data != "real").any():
        raise UserError(
            f"{folder}: profile smoke and synthetic data are for tests; publish quick or full, on real data"
        )
    if table.commit.isna().any() or table.commit.str.endswith("-dirty").any():
        raise UserError(
            f"{folder}: ran with changes that aren't committed, so nobody could repeat it; commit and run again"
        )
    if table.machine.nunique() != 1:
        raise UserError(f"{folder}: holds trials of several machines: {', '.join(table.machine.unique())}")
    return table
