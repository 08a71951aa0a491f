"""Deviations planted in copies of the notebooks: the gate must refuse each, and name the quantity that differs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from common import machine
from harness import environments, execute, frameworks, project

pytestmark = pytest.mark.notebooks

#: What is planted, the text it replaces, the text in its place, the quantity that must be named.
DEVIATIONS = {
    "torch": [
        ("ReLU left out", "F.relu(self.conv3(x))", "self.conv3(x)", "forward"),
        ("average for max pooling", "F.max_pool2d(self.conv4", "F.avg_pool2d(self.conv4", "forward"),
        ("transposed images", ".permute(0, 3, 1, 2)", ".permute(0, 3, 2, 1)", "forward"),
        ("dropout on at evaluation", "model.eval()  # dropout off", "model.train()", "evaluation"),
        ("sum for mean loss", "nn.CrossEntropyLoss()", 'nn.CrossEntropyLoss(reduction="sum")', "loss"),
        ("Nesterov momentum", "fused=True)", "nesterov=True)", "update"),
        ("another learning rate", "lr=spec.LEARNING_RATE", "lr=2 * spec.LEARNING_RATE", "update"),
        ("no dropout at all", "nn.Dropout(rate)", "nn.Dropout(0 * rate)", "dropout"),
    ],
    "tensorflow": [
        ("another flatten order", "array.reshape(512, 100, 8, 8).transpose(2, 3, 1, 0)",
         "array.reshape(512, 100, 8, 8).transpose(1, 2, 3, 0)", "forward"),
        ("dropout on at evaluation", "training=False)  # dropout off", "training=True)", "evaluation"),
        ("Nesterov momentum", "momentum=spec.MOMENTUM)", "momentum=spec.MOMENTUM, nesterov=True)", "update"),
        ("loss in other units", "loss = criterion(", "loss = 1.01 * criterion(", "loss"),
    ],
    "mxnet": [
        ("gradients not divided by the batch size", "trainer.step(len(x))", "trainer.step(1)", "update"),
        ("recorded in prediction mode", "autograd.record():", "autograd.record(train_mode=False):", "gradient"),
    ],
    "chainer": [
        ("sum for mean loss", "loss = criterion(model(x), y)", "loss = criterion(model(x), y) * len(x)", "loss"),
        ("gradients not cleared", "    model.cleargrads()\n", "", "gradient"),
    ],
}  # fmt: skip
CASES = [pytest.param(name, *rest, id=f"{name}: {what}") for name, rows in DEVIATIONS.items() for what, *rest in rows]


@pytest.mark.parametrize(("framework", "old", "new", "quantity"), CASES)
def test_planted_deviation_is_refused(tmp_path: Path, framework: str, old: str, new: str, quantity: str) -> None:
    notebook = nbformat.read(project.notebook("cnn_cifar10", framework), as_version=4)
    planted = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            planted += cell.source.count(old)
            cell.source = cell.source.replace(old, new)
    assert planted, "the notebook no longer holds the text to replace"
    copy = tmp_path / f"{framework}.ipynb"
    nbformat.write(notebook, copy)
    environment = environments.inspect(frameworks.load(framework), "cpu")
    parameters: dict[str, str | int] = {"profile": "smoke", "data": "synthetic"}
    ending = execute.run_notebook(copy, parameters, environment, machine.usable_cores(), 600, tmp_path)
    assert ending.status == "not_identical", ending.error
    assert f"{quantity} error" in str(ending.error)
