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

from harness import frameworks, project, records, statistics
from harness.project import UserError

HEADER = [
    "framework",
    "mode",
    "examples/s",
    "s per 1000",
    "first step, s",
    "metric",
    "peak memory, MiB",
    "identity error",
    "repeats",
]
README_BEGIN, README_END = "<!-- results: begin -->", "<!-- results: end -->"


def write(run: Path) -> pd.DataFrame:
    """Write results.csv, table.md and the HTML of each executed notebook into a run's folder; return the records."""
    table = records.collect(run)
    records.write_csv(table, run / "results.csv")
    records.write_whole(run / "table.md", markdown(table))
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
    for heading, rows, notes in _sections(table):
        shown = Table(title=heading, title_justify="left", title_style="bold")
        for position, name in enumerate(HEADER):
            shown.add_column(name, justify="left" if position < 2 else "right", overflow="fold")
        for row in rows:
            shown.add_row(*map(Text, row))
        parts += [shown if rows else Text(heading, style="bold"), *map(Text, notes), Text("")]
    return Group(*parts)


def markdown(table: pd.DataFrame) -> str:
    """Return the comparison table of a results.csv as Markdown."""
    lines = []
    for heading, rows, notes in _sections(table):
        lines += [f"**{_escape(heading)}**", ""]
        if rows:
            lines += ["| " + " | ".join(HEADER) + " |", "| --- | --- |" + " ---: |" * (len(HEADER) - 2)]
            lines += ["| " + " | ".join(map(_escape, row)) + " |" for row in rows]
            lines += [""]
        lines += [*(f"* {_escape(note)}" for note in notes), ""]
    return "\n".join(lines).rstrip() + "\n"


def update_readme(readme: Path, table: pd.DataFrame) -> None:
    """Put the comparison table between the two marks in the README. Raises `UserError` where they're missing."""
    text = readme.read_text()
    pattern = re.compile(re.escape(README_BEGIN) + ".*?" + re.escape(README_END), re.DOTALL)
    if not pattern.search(text):
        raise UserError(f"{readme}: lacks the marks {README_BEGIN} and {README_END}")
    replacement = f"{README_BEGIN}\n{markdown(table)}{README_END}"
    records.write_whole(readme, pattern.sub(lambda _: replacement, text))


def _sections(table: pd.DataFrame) -> list[tuple[str, list[list[str]], list[str]]]:
    """Return, for each workload and set-up, its heading, the rows of its table, and notes; last, what went wrong."""
    summary = statistics.summarize(table)
    titles = {name: framework.title for name, framework in frameworks.load_all().items()}
    sections = []
    setup = ["workload", "machine", "profile", "device", "precision", "threads", "batch_size", "data", "weights"]
    for _, group in summary.groupby(setup, dropna=False, sort=True):
        first = group.iloc[0]
        spec = project.specification(first.workload)
        words = [
            f"{first.machine}, {first.device}", _count(first.threads, "thread"), str(first.precision),
            f"batch size {first.batch_size}", f"profile {first.profile}",
            "SYNTHETIC DATA" if first.data == "synthetic" else f"{first.data} data",
        ]  # fmt: skip
        rows = [
            [
                f"{titles.get(row.framework, row.framework)} {row.framework_version}",
                row["mode"],
                _spread(row, "examples_per_s", 1),
                _spread(row, "seconds_per_1000", 2),
                _spread(row, "first_step_s", 2),
                _spread(row, "metric_value", 3),
                _spread(row, "peak_rss_mib", 0),
                _error(row),
                str(row.repeats),
            ]
            for _, row in group.iterrows()
        ]
        notes = [f"Median (smallest–largest) over repeats, each a process of its own. Metric: {spec.METRIC}."]
        notes += ["Identity error: the largest against the float64 reference, of forward pass and gradients."]
        if group.repeats.min() < statistics.EXPLORATORY_BELOW:
            few = f"below {statistics.EXPLORATORY_BELOW} repeats"
            notes += [f"Exploratory: {few}, differences are shown and no winner is named."]
        if group.noisy.any():
            notes += [
                "Noisy: other processes kept the machine busy during some trials; see `noisy` and `foreign_load`."
            ]
        if first.data == "synthetic":
            notes += ["The data are synthetic: times hold, the metric says nothing about real images."]
        sections.append((f"{spec.TITLE}: {'; '.join(words)}", rows, notes))
    failed = statistics.failures(table)
    if len(failed):
        notes = [
            f"{row.workload} {row.framework} {row['mode']} {row['repeat']}: {row.status}: {row.error}"
            for _, row in failed.iterrows()
        ]
        sections.append(("Trials that didn't go through", [], notes))
    return sections


def _spread(row: Any, figure: str, digits: int) -> str:
    """Return "median (smallest–largest)", or the one figure of a single repeat."""
    low, middle, high = row[f"{figure}_min"], row[figure], row[f"{figure}_max"]
    if pd.isna(middle):
        return ""
    if row.repeats == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _error(row: Any) -> str:
    measured = [error for error in (row.forward_error_max, row.gradient_error_max) if not pd.isna(error)]
    return f"{max(measured):.0e}" if measured else ""


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _escape(text: str) -> str:
    """Return text that Markdown shows as it is, on one line of a table."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))
