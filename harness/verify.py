"""The proof of identity alone: each notebook executed up to its check, and what the check measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from rich.console import Group
from rich.table import Table
from rich.text import Text

from common.trial import RECORD_TYPE
from harness import execute, frameworks, project, records, report
from harness.environments import Environment
from harness.plan import Trial

#: The heading after which a notebook measures times: the proof ends before it.
TIMING = "## Timed run"

#: The columns of the table: the quantities that each of them shows the worst of.
SHOWN = {
    "forward": ["forward"],
    "loss": ["loss"],
    "gradient": ["gradient"],
    "steps": ["steps"],
    "update": ["update"],
    "evaluation": ["evaluation"],
    "dropout": ["dropout rate", "dropout scale", "dropout mask"],
}

COLUMNS = [
    "workload", "framework", "framework_version", "mode", "precision", "device", "optimizer", "parameters", "status",
    "message", "quantity", "error", "gate", "where",
]  # fmt: skip


def verify(
    trial: Trial, environment: Environment, on_stage: Callable[[str], None] = lambda heading: None
) -> pd.DataFrame:
    """Execute a notebook up to its check and return what that measured, one row for each quantity.

    `status` is "ok", "not_identical", or how the notebook ended otherwise, in a single row without a quantity.
    """
    with tempfile.TemporaryDirectory(prefix="rosetta-", ignore_cleanup_errors=True) as scratch_name:
        scratch = Path(scratch_name)
        ending = execute.obstacle(trial, environment)
        if ending is None:
            shortened = scratch / trial.notebook.name
            nbformat.write(up_to_the_check(nbformat.read(trial.notebook, as_version=4)), shortened)
            ending = execute.run_notebook(
                shortened, trial.parameters(), environment, trial.threads, trial.timeout_s, scratch, on_stage
            )
        reported = _reported(scratch / execute.EXECUTED) if ending.status == "ok" else {}
    rows: list[dict[str, Any]] = reported.pop("identity", [])
    for row in rows:
        row["error"] = float(row["error"])  # "nan" and "inf" come as text
    status, message = ending.status, ending.error
    if status == "ok" and not rows:
        status, message = "failed", "the notebook ended without showing a report of its check"
    elif any(not row["error"] <= row["gate"] for row in rows):
        status = "not_identical"
    facts = {
        **trial.model_dump(include={"workload", "framework", "mode", "precision", "device"}),
        **{name: reported.get(name) for name in ("optimizer", "parameters")},
        "framework_version": frameworks.load(trial.framework).version(trial.device),
        "status": status,
        "message": message,
    }
    return pd.DataFrame([{**facts, **row} for row in rows or [{}]]).reindex(columns=COLUMNS)


def terminal(table: pd.DataFrame) -> Group:
    """Return the measured errors for the terminal, a table for each workload and precision, beside their gates."""
    parts: list[Any] = []
    for heading, header, rows in _sections(table):
        shown = Table(title=heading, title_justify="left", title_style="bold")
        for name in header:
            shown.add_column(name, overflow="fold")
        for row in rows:
            shown.add_row(*(Text(cell, style="bold red" if "✗" in cell else "") for cell in row))
        parts += [shown, Text("")]
    return Group(*parts)


def write(table: pd.DataFrame, folder: Path) -> None:
    """Write what was measured to `folder`, as identity.csv and as a table, identity.md."""
    folder.mkdir(parents=True, exist_ok=True)
    records.write_whole(folder / "identity.csv", table.to_csv(index=False, lineterminator="\n"))
    records.write_whole(folder / "identity.md", markdown(table))


def markdown(table: pd.DataFrame) -> str:
    """Return the measured errors as Markdown, a table for each workload and precision, beside their gates."""
    lines = []
    for heading, header, rows in _sections(table):
        lines += [f"**{report.escape(heading)}**", "", "| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
        lines += ["| " + " | ".join(map(report.escape, row)) + " |" for row in rows]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def up_to_the_check(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a notebook without what comes after its check."""
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown" and cell.source.startswith(TIMING):
            notebook.cells = notebook.cells[:position]
            break
    return notebook


def _reported(path: Path) -> dict[str, Any]:
    """Return what the outputs of an executed notebook report."""
    cells = json.loads(path.read_text())["cells"]
    found = [output.get("data", {}).get(RECORD_TYPE, {}) for cell in cells for output in cell.get("outputs", [])]
    return {name: value for part in found for name, value in part.items()}


def _sections(table: pd.DataFrame) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return heading, header and rows for each workload and precision; the first row holds the gates."""
    titles = {name: framework.title for name, framework in frameworks.load_all().items()}
    sections = []
    for (workload, precision), part in table.groupby(["workload", "precision"], sort=False):
        measured = {name: quantities for name, quantities in SHOWN.items() if part.quantity.isin(quantities).any()}
        variants = part.optimizer.notna().any()
        header = ["framework", "mode", *(["optimizer"] if variants else []), "parameters", *measured, "verdict"]
        gates = part.groupby("quantity").gate.min()
        rows = [
            [
                "gate",
                "",
                *([""] if variants else []),
                "",
                *(f"{gates[names[0]]:.0e}" for names in measured.values()),
                "",
            ]
        ]
        for (framework, mode), one in part.groupby(["framework", "mode"], sort=False):
            first = one.iloc[0]
            wrong = one[(one.quantity == "parameters") & (one.error > 0)]
            number = "" if pd.isna(first.parameters) else f"{int(first.parameters):,}"
            rows.append(
                [
                    f"{titles.get(str(framework), framework)} {first.framework_version}",
                    str(mode),
                    *([str(first.optimizer) if pd.notna(first.optimizer) else ""] if variants else []),
                    f"{number} ✗ {wrong.iloc[0]['where']}" if len(wrong) else number,
                    *(_cell(one[one.quantity.isin(names)], gates) for names in measured.values()),
                    "identical"
                    if first.status == "ok"
                    else f"✗ {first.status}" + (f": {first.message}" if first.message else ""),
                ]
            )
        sections.append((f"{project.specification(str(workload)).TITLE}, {precision}", header, rows))
    return sections


def _cell(rows: pd.DataFrame, gates: pd.Series[float]) -> str:
    """Return the error that comes nearest to its gate or exceeds it farthest, where, and a gate of its own."""
    if rows.empty:
        return ""
    ratios = [error / gate if gate else float(error > 0) for error, gate in zip(rows.error, rows.gate, strict=True)]
    worst = rows.iloc[
        max(range(len(ratios)), key=lambda index: float("inf") if pd.isna(ratios[index]) else ratios[index])
    ]
    failed = not worst.error <= worst.gate
    where = f" {worst['where'].split(',')[0]}" if worst.quantity in ("gradient", "update") or failed else ""
    own = f" (gate {worst.gate:.0e})" if worst.gate != gates[worst.quantity] else ""
    return f"{worst.error:.0e}{where}{own}{' ✗' if failed else ''}"
