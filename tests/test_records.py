"""Records: the schema of results.csv, read from notebooks and written so that it can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from common.trial import RECORD_TYPE, Trial
from common.workloads import cnn_cifar10
from harness import records
from harness.project import UserError

PLANNED = {
    "run": "r", "trial": "cnn_cifar10.torch.eager.1", "workload": "cnn_cifar10", "framework": "torch", "mode": "eager",
    "precision": "float32", "profile": "smoke", "device": "cpu", "repeat": 1, "seed": 0, "status": "ok", "error": None,
    "notebook": "notebooks/cnn_cifar10/torch.ipynb",
}  # fmt: skip


def reported() -> dict[str, object]:
    trial = Trial(cnn_cifar10, "smoke", "cpu", threads=2, batch_size=0, seed=0)
    trial.note(framework_version="2.13.0", data="synthetic", threads=2, metric_value=0.1 + 0.2)
    trial.steps([1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5], [2.0] * 7 + [float("nan")])
    return trial.record()._repr_mimebundle_()[RECORD_TYPE]


def write_notebook(folder: Path, *parts: dict[str, object], **planned: object) -> Path:
    cells = [
        nbformat.v4.new_code_cell("", outputs=[nbformat.v4.new_output("display_data", data={RECORD_TYPE: part})])
        for part in parts
    ]
    columns = {**PLANNED, **planned}
    path = folder / "trials" / f"{columns['trial']}.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"rosetta": columns}), path)
    return path


def test_columns_are_those_of_the_schema_in_order() -> None:
    expected = """run trial workload framework framework_version mode precision profile device device_name repeat seed
        status error started machine os python numpy threads batch_size examples steps data weights import_s data_s
        build_s first_step_s warmup_steps step_median_s step_p05_s step_p95_s timed_s examples_per_s seconds_per_1000
        evaluate_s metric metric_value loss_first loss_last parameters forward_error loss_error gradient_error
        steps_error peak_rss_mib peak_device_mib energy_j flops_per_example achieved_gflops peak_gflops mfu
        foreign_load noisy cuda cudnn driver blas settings notebook notebook_hash common_hash lock_hash commit"""
    assert list(records.Record.model_fields)[: len(expected.split())] == expected.split()


def test_timing_leaves_the_warm_up_out(tmp_path: Path) -> None:
    record = records.read_trial(write_notebook(tmp_path, reported()))
    assert record.timed_s == 2.5
    assert record.examples_per_s == pytest.approx(5 * 64 / 2.5)
    assert record.seconds_per_1000 == pytest.approx(1000 * 2.5 / (5 * 64))
    assert (record.steps, record.warmup_steps, record.step_median_s) == (8, 3, 0.5)


def test_csv_is_rebuilt_byte_for_byte_and_read_back(tmp_path: Path) -> None:
    write_notebook(tmp_path, reported())
    write_notebook(
        tmp_path,
        trial="cnn_cifar10.mxnet.graph.1",
        framework="mxnet",
        status="failed",
        error='a "quoted", odd\u00e9 error',
    )
    table = records.collect(tmp_path)
    records.write_csv(table, tmp_path / "results.csv")
    first = (tmp_path / "results.csv").read_bytes()
    records.write_csv(records.collect(tmp_path), tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_bytes() == first
    again = records.read_csv(tmp_path / "results.csv")
    pd.testing.assert_frame_equal(again, table)
    assert again.metric_value[1] == 0.1 + 0.2
    assert pd.isna(again.loss_last[1])


def test_later_parts_override_and_the_plan_overrides_the_notebook(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, {"forward_error": 1.0}, {**reported(), "forward_error": 2.0, "framework": "other"})
    record = records.read_trial(path)
    assert (record.forward_error, record.framework) == (2.0, "torch")


def test_failed_trial_shows_no_timing_but_its_errors(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, {"gradient_error": 0.5}, reported(), status="not_identical", error="gradient")
    record = records.read_trial(path)
    assert record.gradient_error == 0.5
    assert record.timed_s is record.examples_per_s is record.metric_value is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "many"}, "steps"),
        ({"colour": "blue"}, "colour"),
        ({"data": "imaginary"}, "data"),
    ],
)
def test_invalid_record_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_notebook(tmp_path, {**reported(), **change})
    with pytest.raises(UserError, match=message):
        records.read_trial(path)


def test_incomplete_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"without showing `trial\.record\(\)`"):
        records.read_trial(write_notebook(tmp_path))


def test_notebook_without_a_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ipynb"
    for content in ("", "{", "{}", json.dumps({"cells": [], "metadata": {}})):
        path.write_text(content)
        with pytest.raises(UserError, match="no record in this notebook"):
            records.read_trial(path)


def test_older_csv_without_the_last_columns_is_read(tmp_path: Path) -> None:
    write_notebook(tmp_path, reported())
    table = records.collect(tmp_path).drop(columns=["update_error", "cpu_per_wall"])
    records.write_csv(table, tmp_path / "old.csv")
    again = records.read_csv(tmp_path / "old.csv")
    assert list(again.columns) == list(records.Record.model_fields)
    assert again.update_error.isna().all()


def test_other_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"not a results\.csv"):
        records.read_csv(tmp_path / "other.csv")


def test_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    records.write_whole(target, "before")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        records.write_whole(target, "after")
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]
