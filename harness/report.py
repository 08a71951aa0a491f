"""What a run comes to: results.csv, summary.csv, the comparison table (terminal, Markdown), each notebook as HTML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import nbformat
import pandas as pd
from nbconvert import HTMLExporter
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness import curves, frameworks, project, records, statistics, steps
from harness.project import UserError

WORDS = ("framework", "mode", "optimizer", "verdict")  # columns of words, not numbers
ERRORS = ("forward", "gradient", "update")  # quantities of the identity check that the table shows
README_BEGIN, README_END = "<!-- results: begin -->", "<!-- results: end -->"


def write(run: Path, baseline: str | None = None) -> pd.DataFrame:
    """Write all that a run comes to into its folder; return the records.

    That is results.csv, steps.parquet, summary.csv, summary.md, loss curves and each notebook's HTML. `baseline` as in
    `statistics.summarize`.
    """
    table = records.collect(run)
    write_tables(table, run, baseline)
    exporter = HTMLExporter()
    for notebook in sorted((run / "trials").glob("*.ipynb")):
        page = notebook.with_suffix(".html")
        if not page.exists() or page.stat().st_mtime < notebook.stat().st_mtime:
            body, _ = exporter.from_notebook_node(nbformat.read(notebook, as_version=4))
            records.write_whole(page, body)
    return table


def write_tables(table: pd.DataFrame, folder: Path, baseline: str | None = None) -> None:
    """Write the files that follow from the notebooks in a folder, except the notebooks' HTML."""
    records.write_csv(table, folder / "results.csv")
    steps.write(folder)
    write_summary(table, folder, baseline)
    curves.write(folder)


def write_summary(table: pd.DataFrame, folder: Path, baseline: str | None = None) -> None:
    """Write summary.csv and summary.md, the comparison table as data and as Markdown."""
    summary = statistics.summarize(table, baseline)
    records.write_whole(folder / "summary.csv", summary.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    records.write_whole(folder / "summary.md", _markdown(table, summary))


def terminal(table: pd.DataFrame, baseline: str | None = None) -> Group:
    """Return the comparison table of a results.csv for the terminal."""
    parts: list[Any] = []
    for heading, header, rows, notes in _sections(table, statistics.summarize(table, baseline)):
        shown = Table(title=heading, title_justify="left", title_style="bold")
        for name in header:
            shown.add_column(name, justify="left" if name in WORDS else "right", overflow="fold")
        for row in rows:
            shown.add_row(*map(Text, row))
        parts += [shown if rows else Text(heading, style="bold"), *map(Text, notes), Text("")]
    return Group(*parts)


def markdown(table: pd.DataFrame, baseline: str | None = None) -> str:
    """Return the comparison table of a results.csv as Markdown."""
    return _markdown(table, statistics.summarize(table, baseline))


def _markdown(table: pd.DataFrame, summary: pd.DataFrame) -> str:
    lines = []
    for heading, header, rows, notes in _sections(table, summary):
        lines += [f"**{escape(heading)}**", ""]
        if rows:
            lines += ["| " + " | ".join(header) + " |"]
            lines += ["| " + " | ".join("---" if name in WORDS else "---:" for name in header) + " |"]
            lines += ["| " + " | ".join(map(escape, row)) + " |" for row in rows]
            lines += [""]
        lines += [*(f"* {escape(note)}" for note in notes), ""]
    return "\n".join(lines).rstrip() + "\n"


def update_readme(readme: Path, table: pd.DataFrame) -> None:
    """Put the comparison table between the two marks in the README. Raises `UserError` where they're missing."""
    text = readme.read_text()
    pattern = re.compile(re.escape(README_BEGIN) + ".*?" + re.escape(README_END), re.DOTALL)
    if not pattern.search(text):
        raise UserError(f"{readme}: lacks the marks {README_BEGIN} and {README_END}")
    replacement = f"{README_BEGIN}\n{markdown(table)}{README_END}"
    records.write_whole(readme, pattern.sub(lambda _: replacement, text))


def _sections(table: pd.DataFrame, summary: pd.DataFrame) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
    """Return, for each workload and set-up, its heading, header, rows and notes; last, what went wrong."""
    sections = []
    for _, group in summary.groupby(statistics.TABLE, dropna=False, sort=False):
        columns = _columns(group)
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        heading = [*_setup(group.iloc[0]), _count(group.threads.iloc[0], "thread")]
        heading += [f"batch size {group.batch_size.iloc[0]}"]
        sections.append((_heading(group.iloc[0], heading), list(columns), rows, _notes(group)))
    sections += _scaling(table, "threads", "by number of threads") + _scaling(table, "batch_size", "by batch size")
    failed = statistics.failures(table)
    if len(failed):
        notes = [
            f"{row.workload} {row.framework} {row['mode']} {row['repeat']}: {row.status}: {row.error}"
            for _, row in failed.iterrows()
        ]
        sections.append(("Trials that didn't go through", [], [], notes))
    return sections


def _heading(row: Any, words: list[str]) -> str:
    return f"{project.specification(row.workload).TITLE}: {'; '.join(words)}"


def _title(row: Any) -> str:
    known = frameworks.load_all()
    return f"{known[row.framework].title if row.framework in known else row.framework} {row.framework_version}"


def _setup(row: Any) -> list[str]:
    """Return in words under what set-up a row was measured, threads and batch size left out."""
    return [
        f"{row.machine}, {row.device}", str(row.precision), f"profile {row.profile}",
        "SYNTHETIC DATA" if row.data == "synthetic" else f"{row.data} data",
        *([] if pd.isna(row.weights) else [f"{row.weights} weights"]),
    ]  # fmt: skip


def _columns(group: pd.DataFrame) -> dict[str, list[str]]:
    """Return the columns of one table, shown as text, by name."""
    rows = [row for _, row in group.iterrows()]
    columns = {
        "framework": [_title(row) for row in rows],
        "mode": [str(row["mode"]) for row in rows],
    }
    if group.optimizer.notna().any():
        columns["optimizer"] = ["" if pd.isna(row.optimizer) else str(row.optimizer) for row in rows]
    columns["examples/s"] = [_spread(row, "examples_per_s", 1) for row in rows]
    if group.examples_per_s_cv.notna().any():
        columns["CV"] = ["" if pd.isna(row.examples_per_s_cv) else f"{row.examples_per_s_cv:.1%}" for row in rows]
    if len(group) > 1 and group.baseline.notna().any():
        columns["times as fast"] = [_ratio(row) for row in rows]
        if (group.repeats >= group.repeats_needed).any():
            columns["verdict"] = ["fastest" if row.winner else str(row.verdict) for row in rows]
    columns["first step, s"] = [_spread(row, "first_step_s", 2) for row in rows]
    columns[project.specification(group.workload.iloc[0]).METRIC] = [_spread(row, "metric_value", 3) for row in rows]
    if group.mfu.notna().any():
        columns["of peak"] = ["" if pd.isna(row.mfu) else f"{row.mfu:.0%}" for row in rows]
    columns["peak memory, MiB"] = [_spread(row, "peak_rss_mib", 0) for row in rows]
    if group.peak_device_mib.notna().any():
        columns["on device, MiB"] = [_spread(row, "peak_device_mib", 0) for row in rows]
    if group.energy_j.notna().any():
        columns["energy, J"] = [_spread(row, "energy_j", 0) for row in rows]
    for name in ERRORS:
        if group[f"{name}_error"].notna().any():
            columns[f"{name} error"] = [_error(row, name) for row in rows]
    columns["repeats"] = [str(row.repeats) for row in rows]
    return columns


def _notes(group: pd.DataFrame) -> list[str]:
    """Return what a reader of one table must know."""
    spec = project.specification(group.workload.iloc[0])
    fewest, trials = int(group.repeats.min()), int(group.repeats.sum())
    notes = ["Median over repeats, each a process of its own."]
    if (group.repeats >= statistics.EXPLORATORY_BELOW).any():
        notes = [f"{notes[0][:-1]}, with its 95 % interval; other figures with their range."]
    elif fewest > 1:
        notes = [f"{notes[0][:-1]}, with its range."]
    if len(group) > 1:
        base, needed = group.baseline.iloc[0], int(group.repeats_needed.iloc[0])
        if pd.notna(base):
            notes += [f"Times as fast: as {base.replace(':', ', ')}, repeat by repeat."]
        if fewest < needed:
            missing = _count(needed - fewest, "repeat")
            notes += [
                f"Exploratory: no winner is named; with {len(group)} rows that takes {needed} repeats, {missing} more."
            ]
        elif group.detectable.notna().any():
            notes += [
                f"With this spread and {fewest} repeats, a row {group.detectable.max() - 1:.1%} faster than the"
                " baseline would be told from it nine times in ten."
            ]
    if group.mfu.notna().any():
        notes += [
            f"Of peak: achieved share of {group.peak_gflops.median():.0f} GFLOP/s, a matrix product's on this machine,"
            " measured in the same repeat with as many threads."
        ]
    notes += ["Errors: the largest against the float64 reference, before anything was timed."]
    variants = getattr(spec, "OPTIMIZERS", {})
    notes += [f"{name}: {formula}." for name, formula in variants.items() if (group.optimizer == name).any()]
    if group.noisy.any():
        notes += [f"Noisy: {group.noisy.sum()} of {trials} trials were disturbed by other load, heat or paging."]
    if group.unsteady.any():
        notes += [f"No steady state: the step times of {group.unsteady.sum()} of {trials} trials kept shifting."]
    if group.outliers.any():
        notes += [f"Outliers: {group.outliers.sum()} of {trials} trials, kept in all figures (Tukey's fences)."]
    if (group.data == "synthetic").any():
        notes += ["The data are synthetic: times hold, the metric says nothing about real ones."]
    return notes


def _scaling(
    table: pd.DataFrame, axis: Literal["threads", "batch_size"], title: str
) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
    """Return a section for each table that a run swept over `axis`: throughput, and times the smallest value's."""
    found = statistics.scaling(table, axis)
    sections = []
    setup = [key for key in statistics.TABLE if key != axis]
    for _, group in found.groupby(setup, dropna=False, sort=False) if len(found) else []:
        values = sorted(group[axis].unique())
        noun = "thread" if axis == "threads" else "batch size"
        header = ["framework", "mode"]
        header += [f"{_count(value, noun) if axis == 'threads' else f'{noun} {value}'}" for value in values]
        rows = []
        for names, row in group.groupby(statistics.ROW, dropna=False, sort=False):
            cells = row.set_index(axis)
            shown = [_step_up(cells.loc[value], value == values[0]) if value in cells.index else "" for value in values]
            rows.append([_title(row.iloc[0]), str(names[1]), *shown])
        other = "batch_size" if axis == "threads" else "threads"
        kept = f"batch size {group[other].iloc[0]}" if axis == "threads" else _count(group[other].iloc[0], "thread")
        notes = [f"examples/s (range), and how many times as fast as in the first column (interval or range), {title}."]
        sections.append((f"{_heading(group.iloc[0], [*_setup(group.iloc[0]), kept])}: {title}", header, rows, notes))
    return sections


def _step_up(row: Any, first: bool) -> str:
    rate, ratio = f"{row.examples_per_s:.1f}", f"×{row.ratio:.2f}"
    if row.repeats > 1:
        rate += f" ({row.examples_per_s_min:.1f}–{row.examples_per_s_max:.1f})"
        ratio += f" ({row.ratio_low:.2f}–{row.ratio_high:.2f})"
    return rate if first else f"{rate}, {ratio}"


def _spread(row: Any, figure: str, digits: int) -> str:
    """Return "median (interval)" where there is one, else "median (range)", or the one figure of a single repeat."""
    middle = row[figure]
    if pd.isna(middle):
        return ""
    if row.repeats == 1:
        return f"{middle:.{digits}f}"
    interval = row.get(f"{figure}_low"), row.get(f"{figure}_high")
    low, high = interval if pd.notna(interval[0]) else (row[f"{figure}_min"], row[f"{figure}_max"])
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _ratio(row: Any) -> str:
    """Return how many times as fast as the baseline a row is, "ratio (interval or range)"."""
    if pd.isna(row.ratio) or row.verdict == "baseline":
        return "1" if row.verdict == "baseline" else ""
    if row.repeats == 1:
        return f"{row.ratio:.2f}"
    return f"{row.ratio:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f})"


def _error(row: Any, quantity: str) -> str:
    largest = row[f"{quantity}_error_max"]
    return "" if pd.isna(largest) else f"{largest:.0e}"


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def escape(text: str) -> str:
    """Return text that Markdown shows as it is, on one line of a table."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))
