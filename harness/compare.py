"""Two results held against each other, row by row: two machines, two versions, before and after. Entry: `compare`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness import project, records, statistics
from harness.project import UserError

#: What identifies a row on both sides. `threads` is among it only where a side has the row at several counts.
ROW = ["workload", "framework", "mode"]
#: Rows that differ in any of these did different work: their times aren't compared.
WORK = ["profile", "device", "precision", "batch_size"]
#: What may have changed in the environment, and is told beside the verdict.
ENVIRONMENT = [
    "machine", "device_name", "os", "python", "numpy", "framework_version", "threads", "blas", "simd", "cuda", "cudnn",
    "driver", "settings", "optimizer", "data", "weights", "notebook_hash", "common_hash", "lock_hash", "commit",
]  # fmt: skip

COLUMNS = [
    *ROW, *WORK, "threads", "a", "b", "a_repeats", "b_repeats", "ratio", "ratio_low", "ratio_high", "p", "detectable",
    "verdict", "why", "changes",
]  # fmt: skip


def read(source: str) -> pd.DataFrame:
    """Return the records of a run's folder, a results.csv, or what is published of a machine (or machine/profile).

    Raises `UserError` where it is none of these.
    """
    path = Path(source)
    if path.is_file():
        return records.read_csv(path)
    if (path / "trials").is_dir():
        return records.collect(path)
    if (path / "results.csv").is_file():
        return records.read_csv(path / "results.csv")
    folder = project.PUBLISHED / source
    found = [folder / "results.csv", *sorted(folder.glob("*/results.csv"))] if source and folder.is_dir() else []
    tables = [records.read_csv(file) for file in found if file.is_file()]
    if tables:
        return pd.concat(tables, ignore_index=True)
    public = ", ".join(sorted(entry.name for entry in project.PUBLISHED.glob("*") if entry.is_dir())) or "none"
    raise UserError(f"{source}: neither a run's folder nor a results.csv nor a published machine; published: {public}")


def compare(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Return one row of `COLUMNS` for each row of either table: how many times as fast B is as A, and what that shows.

    `a` and `b` are the medians of examples per second, `ratio` is b / a with its 95 % interval, `verdict` is "faster",
    "slower", "no difference shown", "not comparable", "only in A" or "only in B"; `why` gives the reason, and `changes`
    a dictionary of what differs in the environment, (A, B) by column.
    """
    rows = []
    for names, trials_a, trials_b in _pairs(a, b):
        row: dict[str, Any] = dict(zip(ROW, names, strict=True))
        for side, trials in (("a", trials_a), ("b", trials_b)):
            good = trials[trials.status == "ok"]
            row[side] = good.examples_per_s.astype(float).median()
            row[f"{side}_repeats"] = len(good)
        known = trials_b if len(trials_b) else trials_a
        row |= {key: known[key].iloc[0] for key in (*WORK, "threads")}
        row["changes"] = _changes(trials_a, trials_b) if len(trials_a) and len(trials_b) else {}
        row["verdict"], row["why"] = _obstacle(trials_a, trials_b)
        if not row["verdict"]:
            row["_ratio"] = statistics.unpaired(*(_rates(trials) for trials in (trials_b, trials_a)))
        rows.append(row)
    _judge([row for row in rows if "_ratio" in row])
    return pd.DataFrame(rows, columns=COLUMNS)


def slower_than(found: pd.DataFrame, percent: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of a comparison that are shown to be slower by so many per cent or more, and the undecidable.

    Slower by 5 % means 5 % less throughput. Undecidable is a row in common that can't be compared or lacks repeats.
    """
    slower = found[(found.verdict == "slower") & (found.ratio <= 1 - percent / 100)]
    few = (found.verdict == "no difference shown") & found.why.str.contains("repeats")
    return slower, found[few | (found.verdict == "not comparable")]


def terminal(found: pd.DataFrame) -> Group:
    """Return a comparison for the terminal: a table, then what changed in the environment."""
    table = Table(title="B against A, examples/s", title_justify="left", title_style="bold")
    varied = [key for key in (*WORK, "threads") if found[key].nunique() > 1]
    for name in (*ROW, *varied):
        table.add_column(name.replace("_", " "), overflow="fold")
    for name in ("A", "B", "B times as fast"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    style = {"slower": "red", "faster": "green"}
    for _, row in found.iterrows():
        ratio = "" if pd.isna(row.ratio) else f"{row.ratio:.3f} ({row.ratio_low:.3f}–{row.ratio_high:.3f})"
        rates = ["" if pd.isna(row[side]) else f"{row[side]:.1f} (n = {row[f'{side}_repeats']})" for side in "ab"]
        verdict = f"{row.verdict}: {row.why}" if row.why else row.verdict
        cells = [*(row[key] for key in (*ROW, *varied)), *rates, ratio]
        table.add_row(*map(Text, map(str, cells)), Text(verdict, style=style.get(row.verdict, "")))
    parts: list[Any] = [table, Text("Median; ratio of medians with its 95 % interval, below 6 repeats its range.")]
    changes = _shared_changes(found)
    if changes:
        parts += [Text("\nWhat changed, A → B:", style="bold"), *map(Text, changes)]
    return Group(*parts)


def as_json(found: pd.DataFrame) -> str:
    """Return a comparison as JSON: a list of objects, with null where there is no figure."""
    rows = [{name: _plain(value) for name, value in row.items()} for row in found.to_dict("records")]
    return json.dumps(rows, indent=1, ensure_ascii=False)


def as_csv(found: pd.DataFrame) -> str:
    """Return a comparison as CSV; changes as JSON in their column."""
    changes = [json.dumps(change, ensure_ascii=False) if change else "" for change in found.changes]
    return found.assign(changes=changes).to_csv(index=False, lineterminator="\n")


def _pairs(a: pd.DataFrame, b: pd.DataFrame) -> Iterable[tuple[tuple[str, ...], pd.DataFrame, pd.DataFrame]]:
    """Yield what belongs together: the names of a row, and its trials in A and in B, either of them perhaps empty.

    Rows that agree in everything are paired first; of what remains, a single row on each side is paired, too, so
    that one can be told why it can't be compared.
    """
    fine = [*ROW, *WORK, "threads"]
    sides: list[dict[Any, pd.DataFrame]] = [
        dict(iter(_without_gaps(table).groupby(fine, dropna=False))) for table in (a, b)
    ]
    empty = a.iloc[:0]
    pairs: list[tuple[Any, Any]] = [(key, key) for key in sides[0] if key in sides[1]]
    left = [[key for key in side if (key, key) not in pairs] for side in sides]
    for key in list(left[0]):
        partners = [other for other in left[1] if other[:3] == key[:3]]
        if len(partners) == 1 and sum(other[:3] == key[:3] for other in left[0]) == 1:
            pairs.append((key, partners[0]))
            left[0].remove(key)
            left[1].remove(partners[0])
    pairs += [(key, None) for key in left[0]] + [(None, key) for key in left[1]]
    for one, other in sorted(pairs, key=lambda pair: tuple(map(str, pair[0] or pair[1]))):
        yield (one or other)[:3], sides[0].get(one, empty), sides[1].get(other, empty)


def _without_gaps(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with threads and batch size of trials that never told them taken from their row's others."""
    columns = ["threads", "batch_size"]
    filled = table.groupby(ROW, dropna=False)[columns].transform(lambda values: values.ffill().bfill())
    return table.assign(**{name: filled[name].fillna(0) for name in columns})


def _obstacle(a: pd.DataFrame, b: pd.DataFrame) -> tuple[str, str]:
    """Return the verdict on two sets of trials that can't be compared, and why; two empty texts if they can."""
    if not len(a) or not len(b):
        return f"only in {'A' if len(a) else 'B'}", ""
    for name, trials in (("A", a), ("B", b)):
        if not (trials.status == "ok").any():
            first = trials.iloc[0]
            return "not comparable", f"{name}: {first.status}" + ("" if pd.isna(first.error) else f": {first.error}")
    differences = [
        f"{key.replace('_', ' ')} {a[key].iloc[0]} against {b[key].iloc[0]}"
        for key in WORK
        if a[key].iloc[0] != b[key].iloc[0]
    ]
    return ("not comparable", ", ".join(differences)) if differences else ("", "")


def _judge(rows: list[dict[str, Any]]) -> None:
    """Fill in ratio, interval and verdict of all rows that can be compared, corrected for their number."""
    ratios: list[statistics.Ratio] = [row.pop("_ratio") for row in rows]
    needed = statistics.repeats_needed(len(rows), paired=False)
    for row, ratio, p in zip(rows, ratios, statistics.holm([ratio.p for ratio in ratios]), strict=True):
        row |= {"ratio": ratio.ratio, "ratio_low": ratio.low, "ratio_high": ratio.high, "p": p}
        row["detectable"] = ratio.detectable(len(rows))
        verdict = ratio.verdict(p, needed)
        if verdict == "too few repeats":
            row["verdict"], row["why"] = "no difference shown", f"{ratio.repeats} repeats; a claim needs {needed}"
        else:
            row["verdict"] = verdict
            if verdict == "no difference shown":
                row["why"] = f"one of {row['detectable'] - 1:.1%} would have been"


def _changes(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return what differs in the environment: the values in A and in B by column."""
    found = {}
    for column in ENVIRONMENT:
        values = [" / ".join(sorted(map(str, trials[column].dropna().unique()))) for trials in (a, b)]
        if values[0] != values[1]:
            found[column] = (values[0], values[1])
    return found


def _shared_changes(found: pd.DataFrame) -> list[str]:
    """Return a line for each change, naming the rows that it holds for, unless it holds for all that are in common."""
    rows: dict[tuple[str, tuple[str, str]], list[str]] = {}
    for _, row in found.iterrows():
        for column, values in row.changes.items():
            rows.setdefault((column, values), []).append(f"{row.workload} {row.framework} {row['mode']}")
    common = int((~found.verdict.str.startswith("only in")).sum())
    return [
        f"{column}: {a or '(none)'} → {b or '(none)'}" + ("" if len(names) == common else f"  [{', '.join(names)}]")
        for (column, (a, b)), names in rows.items()
    ]


def _rates(trials: pd.DataFrame) -> list[float]:
    return [float(rate) for rate in trials[trials.status == "ok"].examples_per_s]


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, dict):
        return value
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value
