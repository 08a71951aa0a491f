"""Records summed up: one row for each workload, framework and mode, with the spread over repeats."""

from __future__ import annotations

import pandas as pd

#: Trials that differ in any of these are never summed up in one row.
KEYS = [
    "machine", "workload", "framework", "mode", "precision", "profile", "device", "threads", "batch_size",
    "data", "weights", "optimizer",
]  # fmt: skip

#: Below this many repeats no distribution-free 95 % interval of a median exists, so no winner is named.
EXPLORATORY_BELOW = 6

FIGURES = [
    "examples_per_s", "seconds_per_1000", "first_step_s", "metric_value", "peak_rss_mib",
    "forward_error", "gradient_error", "steps_error", "update_error", "cpu_per_wall",
]  # fmt: skip


def summarize(table: pd.DataFrame) -> pd.DataFrame:
    """Return median, minimum and maximum of each figure over the repeats that went through.

    One row for each combination of `KEYS` that occurs in `table`, a results.csv, with the columns
    `repeats` (how many went through), `framework_version`, `noisy` (whether any is), and for each figure
    `<figure>`, `<figure>_min`, `<figure>_max`.
    """
    good = table[table.status == "ok"]
    groups = good.groupby(KEYS, dropna=False, sort=True)
    columns = {"repeats": groups.size(), "noisy": groups.noisy.any()}
    columns["framework_version"] = groups.framework_version.first()
    for figure in FIGURES:
        columns[figure] = groups[figure].median()
        columns[f"{figure}_min"] = groups[figure].min()
        columns[f"{figure}_max"] = groups[figure].max()
    return pd.DataFrame(columns).reset_index()


def failures(table: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that didn't go through: workload, framework, mode, repeat, status, error."""
    columns = ["workload", "framework", "mode", "repeat", "status", "error"]
    return table.loc[table.status != "ok", columns].sort_values(columns[:4])
