"""Whole runs of a small project: sweeps, what a trial costs beside its cells, and what lies beside results.csv."""

from __future__ import annotations

import pandas as pd

from harness import records
from tests.conftest import Project


def test_a_sweep_has_a_row_for_each_set_up_and_a_table_of_how_throughput_scales(small: Project, good: str) -> None:
    small.add("fast", good)
    done = small.run("--threads", "1,2", "--batch-size", "1,64", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    table = records.read_csv(small.latest / "results.csv")
    rows = table.groupby(["threads", "batch_size"])
    assert dict(rows.size()) == {(threads, size): 2 for threads in (1, 2) for size in (1, 64)}
    assert (table.examples_per_s == 100 * table.batch_size).all()
    assert (table.examples == 8 * table.batch_size).all()

    summary = pd.read_csv(small.latest / "summary.csv")
    assert len(summary) == 4
    assert (summary.repeats == 2).all()
    text = (small.latest / "summary.md").read_text()
    assert "1 thread; batch size 64" in text
    assert "2 threads; batch size 1" in text
    assert "| 100.0 (100.0–100.0) | 6400.0 (6400.0–6400.0), ×64.00 (64.00–64.00) |" in text


def test_a_trial_says_what_it_cost_beside_its_cells(small: Project, good: str) -> None:
    small.add("slow", "import time; time.sleep(3)", good)
    small.run()
    row = small.results().loc["slow"]
    assert 3 < row.trial_s < 60
    assert 0 < row.overhead_s < row.trial_s - 3


def test_every_step_lies_beside_the_table(small: Project, good: str) -> None:
    small.add("fast", good)
    small.add("broken", "raise ValueError('no')")
    small.run("--repeats", "2")
    steps = pd.read_parquet(small.latest / "steps.parquet")
    assert dict(steps.groupby(["framework", "repeat"]).size()) == {("fast", 1): 8, ("fast", 2): 8}
    one = steps[steps.repeat == 1].sort_values("step")
    assert list(one.step) == list(range(len(one)))
    assert (one.seconds == 0.01).all()
    assert list(one.loss.round(3)) == [round(2.5 - 0.1 * step, 3) for step in range(8)]
    warmup = int(small.results().loc["fast"].iloc[0].warmup_steps)
    assert list(one.warmup) == [step < warmup for step in range(8)]
