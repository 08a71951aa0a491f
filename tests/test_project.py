"""What the project promises about itself: its layers, its lists of packages, and the shape of its notebooks."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from common import identity
from common.trial import Trial
from harness import frameworks, project

NOTEBOOKS = sorted(project.NOTEBOOKS.glob("*/*.ipynb"))
TRIALS = [path for path in NOTEBOOKS if path.stem != "reference"]
HEADINGS = [
    "Parameters", "Imports and versions", "Data", "Model", "Weights", "Training step", "Check against the reference",
    "Timed run", "Evaluation", "Record",
]  # fmt: skip
INFERENCE_HEADINGS = [heading.replace("Training", "Inference") for heading in HEADINGS]


def imports(path: Path) -> set[str]:
    """Return the top-level packages that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def trains(path: Path) -> bool:
    """Whether a notebook's workload is training, which has gradients to be checked; inference has none."""
    return "gradient" in project.specification(path.parent.name).GATES


def identifier(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", sorted((project.ROOT / "common").rglob("*.py")), ids=str)
def test_common_needs_numpy_and_the_standard_library_only(path: Path) -> None:
    assert imports(path) <= {*sys.stdlib_module_names, "numpy", "common"}


@pytest.mark.parametrize("path", sorted((project.ROOT / "common").rglob("*.py")), ids=str)
def test_common_is_written_for_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("path", sorted((project.ROOT / "harness").rglob("*.py")), ids=str)
def test_harness_imports_no_framework(path: Path) -> None:
    distributions = {"torch", "tensorflow", "keras", "mxnet", "chainer", "jax", "flax", "optax", "nnabla", "paddle"}
    assert not imports(path) & distributions


def test_conda_environment_and_pyproject_name_the_same_packages() -> None:
    listed = re.findall(r"^  - ([\w-]+)", (project.ROOT / "environment.yml").read_text(), re.MULTILINE)
    conda = {name.replace("_", "-") for name in listed} - {"conda-forge", "python", "pip"}
    declared = tomllib.loads((project.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert conda == {re.split(r"[<>=!~ ]", name)[0] for name in declared}


def test_lock_pins_every_declared_package() -> None:
    locked = re.findall(r"^([\w-]+)==", (project.ROOT / "requirements.lock").read_text(), re.MULTILINE)
    declared = tomllib.loads((project.ROOT / "pyproject.toml").read_text())["project"]
    assert {*declared["dependencies"], *declared["optional-dependencies"]["test"]} <= set(locked)


@pytest.mark.parametrize("path", TRIALS, ids=identifier)
def test_notebooks_of_a_workload_can_be_laid_side_by_side(path: Path) -> None:
    text = "\n".join(cells(path, "markdown"))
    titles = re.findall(r"^# (.+)$", text, re.MULTILINE)
    assert len(titles) == 1
    assert frameworks.load(path.stem).title in titles[0]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == (HEADINGS if trains(path) else INFERENCE_HEADINGS)


@pytest.mark.parametrize("path", TRIALS, ids=identifier)
def test_notebooks_use_the_same_names(path: Path) -> None:
    source = "\n".join(cells(path, "code"))
    tree = ast.parse(source)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    loop = {"train", "predict", "gradients"} if trains(path) else {"infer"}
    assert {"load_weights", "read_weights", "step", "synchronize", "evaluate", *loop} <= defined
    assert {"trial", "model", "report", "seconds", "accuracy", "losses" if trains(path) else "features"} <= assigned
    assert assigned & {"images", "reviews"}
    assert "report.require()" in source


@pytest.mark.parametrize("path", TRIALS, ids=identifier)
def test_parameters_are_those_that_the_plan_sets(path: Path) -> None:
    tagged = [
        cell for cell in json.loads(path.read_text())["cells"] if "parameters" in cell["metadata"].get("tags", [])
    ]
    assert len(tagged) == 1
    tree = ast.parse("".join(tagged[0]["source"]))
    names = [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]
    assert names == ["mode", "precision", "profile", "device", "data", "threads", "batch_size", "seed"]


@pytest.mark.parametrize("path", TRIALS, ids=identifier)
def test_first_step_is_timed_apart(path: Path) -> None:
    tagged = [
        cell for cell in json.loads(path.read_text())["cells"] if "first-step" in cell["metadata"].get("tags", [])
    ]
    assert len(tagged) == 1
    assert "first_step_s" in "".join(tagged[0]["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=identifier)
def test_notebook_is_committed_without_outputs_and_on_its_own_kernel(path: Path) -> None:
    content = json.loads(path.read_text())
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in content["cells"])
    framework = "torch" if path.stem == "reference" else path.stem
    assert content["metadata"]["kernelspec"]["name"] == f"rosetta-{framework}"


@pytest.mark.parametrize("path", TRIALS, ids=identifier)
def test_every_column_that_a_notebook_notes_is_in_the_schema(path: Path) -> None:
    from harness.records import Record

    noted = set()
    for node in ast.walk(ast.parse("\n".join(cells(path, "code")))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "note":
            noted |= {keyword.arg for keyword in node.keywords}
    assert noted <= set(Record.model_fields)
    assert {"framework_version", "threads", "data", "metric_value"} <= noted


def test_every_framework_has_a_notebook() -> None:
    assert {path.stem for path in TRIALS} == set(frameworks.load_all())


def test_trial_resolves_threads() -> None:
    from common import machine
    from common.workloads import cnn_cifar10

    assert Trial(cnn_cifar10, "smoke", "cpu", threads=0, batch_size=0, seed=0).threads == machine.usable_cores()
    assert Trial(cnn_cifar10, "smoke", "cpu", threads=1, batch_size=0, seed=0).threads == 1


def test_readme_names_the_gates_that_hold() -> None:
    section = (project.ROOT / "README.md").read_text().split("## Proven identical")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    workloads = [name.strip("`") for name in rows[0][1:-1]]
    assert sorted(workloads) == project.workloads()
    quantities = [("forward", "loss"), ("gradient",), ("steps",), ("update",)]
    for row, names in zip(rows[2:6], quantities, strict=True):
        for workload, cell in zip(workloads, row[1:-1], strict=True):
            gates = project.specification(workload).GATES
            named = {gates[name] for name in names if name in gates}
            assert named == ({float(cell.split()[0])} if cell else set()), (workload, names)
        assert float(row[-1]) == identity.FLOAT64_GATE
    dropout = [identity.DROPOUT_GATES[name] for name in ("dropout rate", "dropout scale")]
    assert [float(gate) for gate in rows[7][1].split(",")] == dropout


def test_what_the_readme_links_to_exists() -> None:
    text = (project.ROOT / "README.md").read_text()
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
        for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        assert (project.ROOT / path).exists(), target
        assert not anchor or path or anchor in headings, target
