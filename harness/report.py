"""What a run comes to: results.csv, the comparison table (terminal, Markdown), and each notebook as HTML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from nbconvert import HTMLExporter
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness import curves, frameworks, project, records, statistics
from harness.project import UserError

WORDS = ("framework", "mode", "optimizer")  # columns of words, not numbers
ERRORS = ("forward", "gradient", "update")  # quantities of the identity check that the table shows
README_BEGIN, README_END = "<!-- results: begin -->", "<!-- results: end -->"


def write(run: Path) -> pd.DataFrame:
    """Write results.csv, table.md, loss curves and each notebook's HTML into a run's folder; return the records."""
    table = records.collect(run)
    records.write_csv(table, run / "results.csv")
    records.write_whole(run / "table.md", markdown(table))
    curves.write(run)
    exporter = HTMLExporter()
    for notebook in sorted((run / "trials").glob("*.ipynb")):
        page = notebook.with_suffix(".html")
        if not page.exists() or page.stat().st_mtime < notebook.stat().st_mtime:
            body, _ = exporter.from_notebook_node(nbformat.read(notebook, as_version=4))
            records.write_whole(page, body)
    return table


def terminal(table: pd.DataFrame) -> Group:
    """Return the comparison table of a results.csv for the terminal."""
    parts: list[Any] = []
    for heading, header, rows, notes in _sections(table):
        shown = Table(title=heading, title_justify="left", title_style="bold")
        for name in header:
            shown.add_column(name, justify="left" if name in WORDS else "right", overflow="fold")
        for row in rows:
            shown.add_row(*map(Text, row))
        parts += [shown if rows else Text(heading, style="bold"), *map(Text, notes), Text("")]
    return Group(*parts)


def markdown(table: pd.DataFrame) -> str:
    """Return the comparison table of a results.csv as Markdown."""
    lines = []
    for heading, header, rows, notes in _sections(table):
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


def _sections(table: pd.DataFrame) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
    """Return, for each workload and set-up, its heading, header, rows and notes; last, what went wrong."""
    summary = statistics.summarize(table)
    sections = []
    setup = ["workload", "machine", "profile", "device", "precision", "threads", "batch_size", "data", "weights"]
    for _, group in summary.groupby(setup, dropna=False, sort=True):
        first = group.iloc[0]
        spec = project.specification(first.workload)
        words = [
            f"{first.machine}, {first.device}", _count(first.threads, "thread"), str(first.precision),
            f"batch size {first.batch_size}", f"profile {first.profile}",
            "SYNTHETIC DATA" if first.data == "synthetic" else f"{first.data} data",
            *([] if pd.isna(first.weights) else [f"{first.weights} weights"]),
        ]  # fmt: skip
        columns = _columns(group, spec.METRIC)
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        notes = ["Median (smallest–largest) over repeats, each a process of its own."]
        notes += ["Errors: the largest against the float64 reference, before anything was timed."]
        variants = getattr(spec, "OPTIMIZERS", {})
        notes += [f"{name}: {formula}." for name, formula in variants.items() if (group.optimizer == name).any()]
        if group.repeats.min() < statistics.EXPLORATORY_BELOW:
            few = f"below {statistics.EXPLORATORY_BELOW} repeats"
            notes += [f"Exploratory: {few}, differences are shown and no winner is named."]
        if group.noisy.any():
            notes += [
                "Noisy: other processes kept the machine busy during some trials; see `noisy` and `foreign_load`."
            ]
        if first.data == "synthetic":
            notes += ["The data are synthetic: times hold, the metric says nothing about real ones."]
        sections.append((f"{spec.TITLE}: {'; '.join(words)}", list(columns), rows, notes))
    failed = statistics.failures(table)
    if len(failed):
        notes = [
            f"{row.workload} {row.framework} {row['mode']} {row['repeat']}: {row.status}: {row.error}"
            for _, row in failed.iterrows()
        ]
        sections.append(("Trials that didn't go through", [], [], notes))
    return sections


def _columns(group: pd.DataFrame, metric: str) -> dict[str, list[str]]:
    """Return the columns of one table, shown as text, by name."""
    titles = {name: framework.title for name, framework in frameworks.load_all().items()}
    rows = [row for _, row in group.iterrows()]
    columns = {
        "framework": [f"{titles.get(row.framework, row.framework)} {row.framework_version}" for row in rows],
        "mode": [str(row["mode"]) for row in rows],
    }
    if group.optimizer.notna().any():
        columns["optimizer"] = ["" if pd.isna(row.optimizer) else str(row.optimizer) for row in rows]
    return {
        **columns,
        "examples/s": [_spread(row, "examples_per_s", 1) for row in rows],
        "s per 1000": [_spread(row, "seconds_per_1000", 2) for row in rows],
        "first step, s": [_spread(row, "first_step_s", 2) for row in rows],
        metric: [_spread(row, "metric_value", 3) for row in rows],
        "peak memory, MiB": [_spread(row, "peak_rss_mib", 0) for row in rows],
        **{
            f"{name} error": [_error(row, name) for row in rows]
            for name in ERRORS
            if group[f"{name}_error"].notna().any()
        },
        "repeats": [str(row.repeats) for row in rows],
    }


def _spread(row: Any, figure: str, digits: int) -> str:
    """Return "median (smallest–largest)", or the one figure of a single repeat."""
    low, middle, high = row[f"{figure}_min"], row[figure], row[f"{figure}_max"]
    if pd.isna(middle):
        return ""
    if row.repeats == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _error(row: Any, quantity: str) -> str:
    largest = row[f"{quantity}_error_max"]
    return "" if pd.isna(largest) else f"{largest:.0e}"


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def escape(text: str) -> str:
    """Return text that Markdown shows as it is, on one line of a table."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))
