"""Publishing: only what others can repeat, and nothing that is public is lost."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from common.trial import RECORD_TYPE
from harness import plan, project, publish, records, report
from harness.project import UserError


@pytest.fixture(autouse=True)
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place to publish to, and a README with the marks."""
    monkeypatch.setattr(project, "PUBLISHED", tmp_path / "published")
    monkeypatch.setattr(project, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"{report.README_BEGIN}\n{report.README_END}\n")
    return tmp_path / "published"


def make_run(folder: Path, workload: str = "cnn_cifar10", frameworks: str = "torch,mxnet", **changes: object) -> Path:
    """Make the folder of a run, one repeat of each framework in mode eager; `changes` go into every record."""
    options = plan.Options(
        workloads=[workload], frameworks=frameworks.split(","), modes=["eager"], profile="quick", device="cpu",
        repeats=1, threads=[2], data="real", timeout_s=None, interpreters={},
    )  # fmt: skip
    (folder / "trials").mkdir(parents=True)
    (folder / "run.json").write_text(options.model_dump_json())
    for trial in plan.plan(options):
        reported = {
            "framework_version": "1.0", "data": "real", "timed_s": 1.0, "steps": 3, "batch_size": 64, "threads": 2,
            "examples_per_s": 100.0, "seconds_per_1000": 10.0, "metric_value": 0.5, "step_losses": [3.0, 2.0, 1.0],
            "step_seconds": [0.5, 0.5, 0.5],
        }  # fmt: skip
        facts = {
            **trial.columns(), "run": folder.name,
            "machine": "m", "commit": "abc", "status": "ok", "notebook": "n", **changes,
        }  # fmt: skip
        output = nbformat.v4.new_output("display_data", {RECORD_TYPE: reported})
        cell = nbformat.v4.new_code_cell("trial.record()", outputs=[output])
        notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"rosetta": facts})
        nbformat.write(notebook, folder / "trials" / f"{trial.name}.ipynb")
    records.write_csv(records.collect(folder), folder / "results.csv")
    return folder


def test_a_run_is_published_under_its_machine_and_profile(tmp_path: Path, public: Path) -> None:
    folder = publish.publish(make_run(tmp_path / "run"))
    assert folder == public / "m" / "quick"
    assert {path.name for path in folder.iterdir()} == {
        "results.csv", "steps.parquet", "summary.csv", "summary.md", "trials", "cnn_cifar10.loss.svg",
    }  # fmt: skip
    assert len(records.collect(folder)) == 2
    assert "PyTorch 1.0" in project.README.read_text()
    assert [path.name for path in folder.parent.iterdir()] == ["quick"]


def test_it_replaces_its_own_workloads_and_leaves_the_others(tmp_path: Path) -> None:
    publish.publish(make_run(tmp_path / "first"))
    publish.publish(make_run(tmp_path / "second", "gru_imdb"))
    folder = publish.publish(make_run(tmp_path / "third", "gru_imdb", "torch,mxnet,chainer"))
    assert records.collect(folder).groupby("workload").run.agg(["first", "size"]).values.tolist() == [
        ["first", 2],
        ["third", 3],
    ]


def test_no_row_that_is_public_is_lost(tmp_path: Path, public: Path) -> None:
    publish.publish(make_run(tmp_path / "first"))
    with pytest.raises(UserError, match="lacks what is public now: cnn_cifar10 mxnet eager"):
        publish.publish(make_run(tmp_path / "second", frameworks="torch"))
    assert len(records.collect(public / "m" / "quick")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "failed", "error": "it broke"}, "not every trial went through"),
        ({"data": "synthetic"}, "synthetic data are for tests"),
        ({"commit": "abc-dirty"}, "changes that aren't committed"),
        ({"commit": None}, "changes that aren't committed"),
    ],
)
def test_what_nobody_could_rely_on_is_refused(
    tmp_path: Path, public: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        publish.publish(make_run(tmp_path / "run", **changes))
    assert not public.exists()


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "trials" / "cnn_cifar10.mxnet.eager.1.ipynb").unlink()
    records.write_csv(records.collect(folder), folder / "results.csv")
    with pytest.raises(UserError, match="not every trial went through"):
        publish.publish(folder)


def test_readme_shows_of_each_workload_the_machine_with_most_repeats_then_the_latest(tmp_path: Path) -> None:
    publish.publish(make_run(tmp_path / "old", machine="old", started="2026-01-01", framework_version="1.1"))
    publish.publish(make_run(tmp_path / "new", machine="new", started="2026-02-01", framework_version="1.2"))
    publish.publish(make_run(tmp_path / "many", "gru_imdb", machine="old", started="2026-01-01", repeat=2))
    publish.publish(make_run(tmp_path / "few", "gru_imdb", machine="new", started="2026-02-01"))
    shown = publish.for_readme(publish.published())
    assert dict(zip(shown.workload, shown.machine, strict=True)) == {"cnn_cifar10": "new", "gru_imdb": "old"}
    assert len(shown) == 4 < len(publish.published())


def test_what_is_published_is_no_run(tmp_path: Path) -> None:
    folder = publish.publish(make_run(tmp_path / "run"))
    with pytest.raises(UserError, match="not a run"):
        publish.publish(folder)
    assert len(records.collect(folder)) == 2


def test_loss_curves_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    folder = publish.publish(make_run(tmp_path / "run"))
    before = (folder / "cnn_cifar10.loss.svg").read_bytes()
    report.write_tables(records.collect(folder), folder)
    assert (folder / "cnn_cifar10.loss.svg").read_bytes() == before
    assert b"PyTorch, eager" in before
