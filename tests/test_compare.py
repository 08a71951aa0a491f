"""Comparing two results: what is faster, what can't be told, what changed, and the exit code that CI goes by."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from harness import compare, project, records
from harness.project import UserError
from tests.test_statistics import results


def verdicts(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, tuple[str, str]]:
    found = compare.compare(a, b)
    return {f"{row.framework}:{row['mode']}": (row.verdict, row.why) for _, row in found.iterrows()}


def steady(**rates: float) -> pd.DataFrame:
    """Results without the drift between repeats, which two runs don't share."""
    table = results(**rates)
    random = np.random.RandomState(sum(map(int, rates.values())))
    table["examples_per_s"] = [rates[row.framework] * random.lognormal(0, 0.02) for row in table.itertuples()]
    return table


def test_each_row_gets_its_verdict() -> None:
    a = steady(torch=100, mxnet=100, chainer=100, caffe=1)
    b = steady(torch=121, mxnet=80, chainer=100.1, nnabla=1)
    found = verdicts(a, b)
    assert found["torch:eager"] == ("faster", "")
    assert found["mxnet:eager"] == ("slower", "")
    assert found["chainer:eager"][0] == "no difference shown"
    assert "would have been" in found["chainer:eager"][1]
    assert found["caffe:eager"] == ("only in A", "")
    assert found["nnabla:eager"] == ("only in B", "")


def test_ratio_has_its_interval_and_says_how_many_times_as_fast_b_is() -> None:
    row = compare.compare(steady(torch=100), steady(torch=121)).iloc[0]
    assert row.ratio_low < row.ratio < row.ratio_high
    assert row.ratio == pytest.approx(1.21, rel=0.03)
    assert row.ratio == pytest.approx(row.b / row.a, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"profile": "full"}, "profile quick against full"),
        ({"batch_size": 1}, "batch size 64 against 1"),
        ({"precision": "float64"}, "precision float32 against float64"),
        ({"device": "cuda"}, "device cpu against cuda"),
        ({"status": "failed", "error": "it broke"}, "B: failed: it broke"),
    ],
)
def test_what_did_other_work_or_failed_is_not_comparable(change: dict[str, object], why: str) -> None:
    found = compare.compare(steady(torch=100), steady(torch=100).assign(**change))
    assert list(found.verdict) == ["not comparable"]
    assert list(found.why) == [why]
    assert found.ratio.isna().all()


def test_three_repeats_show_no_difference_whatever_the_ratio() -> None:
    found = verdicts(results(3, torch=100), results(3, torch=300))
    assert found["torch:eager"] == ("no difference shown", "3 repeats; a claim needs 6")


def test_environment_changes_are_told_and_do_not_prevent_a_verdict() -> None:
    after = steady(torch=121).assign(framework_version="2", threads=1, machine="n", data="synthetic")
    row = compare.compare(steady(torch=100), after).iloc[0]
    assert row.verdict == "faster"
    assert row.changes == {
        "machine": ("m", "n"), "framework_version": ("1", "2"), "threads": ("2", "1"), "data": ("real", "synthetic"),
    }  # fmt: skip


def test_rows_of_a_sweep_are_held_against_their_own_kind() -> None:
    swept = pd.concat([steady(torch=100), steady(torch=50).assign(threads=1)])
    found = compare.compare(swept, swept)
    assert sorted(found.threads) == [1, 2]
    assert (found.ratio == 1).all()


def test_csv_and_json_say_the_same() -> None:
    found = compare.compare(steady(torch=100, caffe=1), steady(torch=121).assign(machine="n"))
    table = pd.read_csv(io.StringIO(compare.as_csv(found)))
    objects = json.loads(compare.as_json(found))
    assert list(table.columns) == list(objects[0]) == compare.COLUMNS
    torch = next(row for row in objects if row["framework"] == "torch")
    assert torch["changes"] == {"machine": ["m", "n"]}
    assert torch["ratio"] == pytest.approx(table[table.framework == "torch"].ratio.iloc[0])
    assert next(row for row in objects if row["framework"] == "caffe")["ratio"] is None


def test_terminal_shows_text_as_text() -> None:
    console = Console(file=io.StringIO(), width=250)
    changed = steady(torch=121).assign(settings="[red]x[/red]")
    console.print(compare.terminal(compare.compare(steady(torch=100), changed)))
    assert "settings: (none) → [red]x[/red]" in console.file.getvalue()  # type: ignore[attr-defined]


def rosetta_compare(
    tmp_path: Path, a: pd.DataFrame, b: pd.DataFrame, *options: str
) -> subprocess.CompletedProcess[str]:
    for name, table in (("a", a), ("b", b)):
        records.write_csv(table, tmp_path / f"{name}.csv")
    command = [sys.executable, "-m", "harness", "compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), *options]
    return subprocess.run(command, cwd=project.ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("rate", "repeats", "option", "code", "said"),
    [
        (80, 10, "5%", 1, "slower by 5 % or more: cnn_cifar10 torch eager"),
        (80, 10, "30", 0, ""),
        (100, 10, "5", 0, ""),
        (120, 10, "5%", 0, ""),
        (80, 3, "5%", 2, "3 repeats; a claim needs 6"),
        (80, 10, "many", 2, "--fail-if-slower takes a percentage"),
    ],
)
def test_exit_code_is_what_ci_goes_by(
    tmp_path: Path, rate: float, repeats: int, option: str, code: int, said: str
) -> None:
    a, b = (table[table.repeat <= repeats] for table in (steady(torch=100), steady(torch=rate)))
    done = rosetta_compare(tmp_path, a, b, "--fail-if-slower", option)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_results_without_a_common_row_cannot_pass_silently(tmp_path: Path) -> None:
    done = rosetta_compare(tmp_path, steady(torch=100), steady(mxnet=100), "--fail-if-slower", "5%")
    assert done.returncode == 2
    assert "no row is in common" in done.stderr


def test_formats(tmp_path: Path) -> None:
    done = rosetta_compare(tmp_path, steady(torch=100), steady(torch=121), "--format", "json")
    assert json.loads(done.stdout)[0]["verdict"] == "faster"
    done = rosetta_compare(tmp_path, steady(torch=100), steady(torch=121), "--format", "xml")
    assert done.returncode == 2
    assert "--format takes table, csv, json" in done.stderr


def test_sources_are_runs_files_and_published_machines(tmp_path: Path) -> None:
    [machine] = [path.name for path in project.PUBLISHED.iterdir()]
    public = compare.read(machine)
    quick = compare.read(f"{machine}/quick")
    assert set(quick.profile) == {"quick"}
    assert len(quick) < len(public)
    assert len(compare.read(str(project.PUBLISHED / machine / "quick"))) == len(quick)
    with pytest.raises(UserError, match=f"neither a run's folder .* published: {machine}"):
        compare.read(str(tmp_path))
