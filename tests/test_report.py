"""The comparison table: medians with their spread, failures with their reason, nothing that breaks out of a cell."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from harness import project, records, report, statistics
from harness.project import UserError


def results(**changes: object) -> pd.DataFrame:
    """Three repeats of PyTorch with times 1, 2 and 4, one failed trial of MXNet."""
    common = {
        "run": "r", "workload": "cnn_cifar10", "mode": "eager", "precision": "float32", "profile": "quick",
        "device": "cpu", "seed": 0, "machine": "m", "threads": 2, "batch_size": 64, "data": "real",
        "notebook": "n", "metric": "test accuracy", "steps": 80, "framework_version": "1.0",
    }  # fmt: skip
    rows = [
        records.Record(
            **{
                **common, "trial": f"t{repeat}", "framework": "torch", "repeat": repeat, "status": "ok",
                "timed_s": seconds, "seconds_per_1000": seconds, "examples_per_s": 1000 / seconds,
                "metric_value": 0.5, "forward_error": 1e-6, "gradient_error": 4e-6, **changes,
            }
        )
        for repeat, seconds in enumerate([1.0, 2.0, 4.0], 1)
    ]  # fmt: skip
    failed = {**common, "trial": "f", "framework": "mxnet", "repeat": 1, "status": "failed", "error": "a | <b> `c`"}
    return records.frame([*rows, records.Record(**failed)])


def shown(table: pd.DataFrame) -> str:
    console = Console(file=StringIO(), width=250)
    console.print(report.terminal(table))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_summary_is_median_and_range_over_repeats_that_went_through() -> None:
    summary = statistics.summarize(results())
    assert len(summary) == 1
    row = summary.iloc[0]
    assert (row.repeats, row.seconds_per_1000, row.seconds_per_1000_min, row.seconds_per_1000_max) == (3, 2, 1, 4)


def test_trials_of_different_set_ups_are_never_summed_up_together() -> None:
    table = results()
    table.loc[table.repeat == 3, "data"] = "synthetic"
    assert len(statistics.summarize(table)) == 2
    table.loc[table.repeat == 2, "threads"] = 1
    assert len(statistics.summarize(table)) == 3


@pytest.mark.parametrize("render", [shown, report.markdown])
def test_table_shows_spread_and_failures(render: object) -> None:
    text = render(results())  # type: ignore[operator]
    assert "500.0 (250.0–1000.0)" in text
    assert "4e-06" in text
    assert "each a process of its own, with its range" in text
    assert "failed" in text
    assert "SYNTHETIC" not in text
    assert "SYNTHETIC DATA" in render(results(data="synthetic"))  # type: ignore[operator]


def test_nothing_breaks_out_of_a_markdown_cell() -> None:
    text = report.markdown(results(framework_version="<script>|[x](y)"))
    assert "<script>" not in text
    assert r"\<script\>\|\[x\](y)" in text
    assert r"a \| \<b\> \`c\`" in text


def test_readme_table_is_replaced_between_its_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.README_BEGIN}\nold\n{report.README_END}\nafter\n")
    report.update_readme(readme, results())
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "500.0 (250.0–1000.0)" in text
    report.update_readme(readme, results())
    assert readme.read_text() == text


def test_readme_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(UserError, match="lacks the marks"):
        report.update_readme(tmp_path / "README.md", results())


@pytest.mark.filterwarnings("error")
def test_the_example_in_the_documentation_works(capsys: pytest.CaptureFixture[str]) -> None:
    code = (project.ROOT / "docs" / "measurement.md").read_text().split("```python\n")[1].split("```")[0]
    steps = min(project.PUBLISHED.glob("*/quick/steps.parquet"))
    exec(code.replace("results/latest/steps.parquet", str(steps)), {})
    assert "cnn_cifar10" in capsys.readouterr().out
