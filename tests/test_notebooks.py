"""Every notebook for real, in the smoke profile, in its framework's environment, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest

from common import identity
from harness import environments, execute, frameworks, plan, project, publish, records, report, verify

pytestmark = pytest.mark.notebooks

OPTIONS = plan.Options(
    workloads=project.workloads(), frameworks=[], modes=["all"], profile="smoke", device="cpu", repeats=1, threads=[1],
    data="auto", timeout_s=None, interpreters={},
)  # fmt: skip
ROWS = [f"{trial.workload}.{trial.framework}.{trial.mode}" for trial in plan.plan(OPTIONS)]


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One smoke run of everything: all workloads, frameworks and modes on the CPU."""
    folder = tmp_path_factory.mktemp("smoke") / "run"
    data = "real" if os.environ.get("ROSETTA_DATA") else "synthetic"
    command = [
        sys.executable, "-m", "harness", "run", "--profile", "smoke", "--mode", "all", "--device", "cpu",
        "--data", data, "--output", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=project.ROOT, text=True, check=False)
    assert done.returncode in (0, 1)
    return folder


@pytest.mark.parametrize("row", sorted(ROWS))
def test_notebook_goes_through_and_is_identical(smoke: Path, row: str) -> None:
    record = records.read_trial(smoke / "trials" / f"{row}.1.ipynb")
    assert record.status == "ok", record.error
    spec = project.specification(record.workload)
    assert record.parameters == sum(int(np.prod(shape)) for shape in spec.PARAMETERS.values())
    for quantity, gate in spec.GATES.items():
        error = getattr(record, f"{quantity}_error")
        assert 0 < error <= gate, quantity
    assert record.steps == spec.PROFILES["smoke"].steps
    assert record.framework_version
    assert record.framework_version.split("+")[0] == frameworks.load(record.framework).version("cpu")
    required = [*REQUIRED, *(TRAINING if "gradient" in spec.GATES else ["weights"])]
    missing = [name for name in required if getattr(record, name) is None]
    assert not missing


@pytest.fixture(scope="session")
def proof(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """What `rosetta verify` measures of everything in float64."""
    folder = tmp_path_factory.mktemp("proof")
    command = [
        sys.executable, "-m", "harness", "verify", "--mode", "all", "--precision", "float64", "--device", "cpu",
        "--output", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=project.ROOT, text=True, check=False)
    assert done.returncode in (0, 1)
    return pd.read_csv(folder / "identity.csv")


@pytest.mark.parametrize("row", sorted(ROWS))
def test_nothing_but_rounding_is_left_in_float64(proof: pd.DataFrame, row: str) -> None:
    workload, framework, mode = row.split(".")
    found = proof[(proof.workload == workload) & (proof.framework == framework) & (proof["mode"] == mode)]
    assert set(found.status) == {"ok"}, found.message.iloc[0]
    spec = project.specification(workload)
    assert {*spec.GATES, "parameters", "evaluation"} <= set(found.quantity)
    assert ({"dropout rate", "dropout scale", "dropout mask"} <= set(found.quantity)) == hasattr(spec, "DROPOUT")
    exact = found[found.quantity.isin(spec.GATES)]
    assert (exact.error <= 1e-7).all()
    assert (exact[~exact.quantity.isin(["update"])].gate == identity.FLOAT64_GATE).all()


REQUIRED = [
    "started", "machine", "os", "python", "numpy", "threads", "batch_size", "examples", "data", "import_s",
    "data_s", "build_s", "first_step_s", "step_median_s", "step_p05_s", "step_p95_s", "timed_s", "examples_per_s",
    "seconds_per_1000", "evaluate_s", "metric", "metric_value", "parameters",
    "peak_rss_mib", "flops_per_example", "achieved_gflops", "blas", "settings", "notebook_hash", "common_hash",
    "lock_hash", "cpu_per_wall", "peak_gflops", "peak_bandwidth_gbs", "mfu", "trial_s", "overhead_s", "major_faults",
]  # fmt: skip
TRAINING = ["loss_first", "loss_last"]


def test_frameworks_see_the_same_batches(smoke: Path) -> None:
    """The loss before the first step depends on weights, batch and dropout mask alone, so it can hardly differ."""
    table = records.read_csv(smoke / "results.csv")
    for _, rows in table.groupby("workload"):
        assert rows.loss_first.isna().all() or rows.loss_first.max() - rows.loss_first.min() < 0.1


def test_csv_is_rebuilt_from_the_notebooks_alone(smoke: Path, tmp_path: Path) -> None:
    before = (smoke / "results.csv").read_bytes()
    records.write_csv(records.collect(smoke), tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_bytes() == before


def test_every_trial_leaves_a_page_and_the_run_a_table(smoke: Path) -> None:
    assert {path.stem for path in (smoke / "trials").glob("*.html")} == {f"{row}.1" for row in ROWS}
    assert (smoke / "summary.md").read_text() == report.markdown(records.read_csv(smoke / "results.csv"))


def test_notebooks_are_quiet(smoke: Path) -> None:
    """No warnings in what readers browse."""
    for path in sorted((smoke / "trials").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            noise = [
                "".join(output.get("text", "")) for output in cell.get("outputs", []) if output.get("name") == "stderr"
            ]
            assert not noise, f"{path.name}: {noise}"


#: A cell that shows how many FLOPs PyTorch's own counter counts for one example.
COUNT_FLOPS = """
from torch.utils.flop_counter import FlopCounterMode

batch = {batch}
with FlopCounterMode(display=False) as counter:
    step(*batch)
print(counter.get_total_flops() / len(batch[0]))
"""


@pytest.mark.parametrize(
    ("workload", "batch"),
    [
        ("cnn_cifar10", 'spec.check_batches("NHWC")[0]'),
        ("gru_imdb", "spec.check_batches()[0]"),
        ("resnet50_features", '[to_device(spec.check_inputs("NHWC")[0][0])]'),
    ],
)
def test_flops_by_formula_are_those_that_a_second_count_finds(workload: str, batch: str, tmp_path: Path) -> None:
    notebook = verify.up_to_the_check(nbformat.read(project.notebook(workload, "torch"), as_version=4))
    notebook.cells.append(nbformat.v4.new_code_cell(COUNT_FLOPS.format(batch=batch)))
    nbformat.write(notebook, tmp_path / "torch.ipynb")
    environment = environments.inspect(frameworks.load("torch"), "cpu")
    trial = next(each for each in plan.plan(OPTIONS) if (each.workload, each.framework) == (workload, "torch"))
    parameters = {**trial.parameters(), "mode": "eager", "data": "synthetic"}
    ending = execute.run_notebook(tmp_path / "torch.ipynb", parameters, environment, 1, 600, tmp_path)
    assert ending.status == "ok", ending.error
    [output] = nbformat.read(tmp_path / execute.EXECUTED, as_version=4).cells[-1].outputs
    counted = float(output.text)
    assert project.specification(workload).flops_per_example() == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("workload", project.workloads())
def test_golden_values_are_what_the_reference_computes(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = dict(np.load(identity.path(workload)))
    done = subprocess.run(
        [sys.executable, "-m", "harness", "reference", workload, "--output", str(tmp_path)],
        cwd=project.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    again = dict(np.load(tmp_path / identity.path(workload).name))
    assert again.keys() == committed.keys()
    for name in committed:
        np.testing.assert_allclose(again[name], committed[name], rtol=1e-7, atol=1e-10, err_msg=name)
    assert identity.path(workload).stat().st_size < 2**20


def test_readme_table_is_generated_from_the_published_results() -> None:
    readme = (project.ROOT / "README.md").read_text()
    table = publish.published()
    assert set(table.workload) == set(project.workloads())
    shown = readme.split(report.README_BEGIN)[1].split(report.README_END)[0].strip()
    assert shown == report.markdown(publish.for_readme(table)).strip()


@pytest.mark.parametrize(
    "folder",
    sorted(path.parent for path in project.PUBLISHED.glob("*/*/results.csv")),
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_published_results_are_rebuilt_from_their_notebooks(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / folder.name
    shutil.copytree(folder / "trials", copy / "trials")
    report.write_tables(records.collect(copy), copy)
    assert {path.name for path in copy.iterdir()} == {path.name for path in folder.iterdir()}
    pd.testing.assert_frame_equal(*(pd.read_parquet(place / "steps.parquet") for place in (copy, folder)))
    for path in copy.glob("*.[csm]*"):
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
