"""Deviations planted in copies of the notebooks: the gate must refuse each, and name the quantity that differs.

Each is planted in two frameworks at least, since the same mistake looks different in each of them; those at the end
exist in one framework only.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

from common import machine
from harness import environments, execute, frameworks, project

pytestmark = pytest.mark.notebooks

CNN, GRU, RESNET = "cnn_cifar10", "gru_imdb", "resnet50_features"


class Deviation(NamedTuple):
    """What is planted, the quantity that must be named, and for each framework the texts to replace."""

    what: str
    workload: str
    quantity: str
    plants: dict[str, list[tuple[str, str]]]


RESET_BEFORE_PRODUCT = """
        x, h = self.embedding(tokens), torch.zeros(len(tokens), spec.UNITS, dtype=dtype)
        u, c = self.gru.weight_hh_l0, self.gru.bias_hh_l0
        for t in range(spec.LENGTH):
            a = x[:, t] @ self.gru.weight_ih_l0.T + self.gru.bias_ih_l0
            r, z = torch.sigmoid(a[:, :200] + h @ u[:200].T + c[:200]).chunk(2, 1)
            n = torch.tanh(a[:, 200:] + (r * h) @ u[200:].T + c[200:])
            h = (1 - z) * n + z * h
        return self.dense(h)
"""

DEVIATIONS = [
    Deviation("ReLU left out", CNN, "forward", {
        "torch": [("F.relu(self.conv3(x))", "self.conv3(x)")],
        "chainer": [("F.relu(self.conv3(x))", "self.conv3(x)")],
    }),
    Deviation("average for max pooling", CNN, "forward", {
        "torch": [("F.max_pool2d(self.conv4", "F.avg_pool2d(self.conv4")],
        "tensorflow": [("MaxPooling2D(2)", "AveragePooling2D(2)")],
    }),
    Deviation("transposed images", CNN, "forward", {
        "torch": [(".permute(0, 3, 1, 2)", ".permute(0, 3, 2, 1)")],
        "mxnet": [("mx.nd.array(x, context, precision)", "mx.nd.array(x, context, precision).swapaxes(2, 3)")],
    }),
    Deviation("another flatten order", CNN, "forward", {
        "torch": [("torch.flatten(x, 1)", "torch.flatten(x.permute(0, 2, 3, 1), 1)")],
        "tensorflow": [("reshape(512, 100, 8, 8).transpose(2, 3, 1, 0)",
                        "reshape(512, 100, 8, 8).transpose(1, 2, 3, 0)")],
    }),
    Deviation("missing bias", CNN, "parameters", {
        "torch": [("nn.Conv2d(50, 50, 3, padding=1)", "nn.Conv2d(50, 50, 3, padding=1, bias=False)"),
                  ("for name, array in weights.items()})", "for name, array in weights.items()}, strict=False)")],
        "chainer": [("L.Convolution2D(50, 50, 3, pad=1)", "L.Convolution2D(50, 50, 3, pad=1, nobias=True)"),
                    ("parameters[name].array[...]", "if name in parameters: parameters[name].array[...]")],
    }),
    Deviation("dropout on at evaluation", CNN, "evaluation", {
        "torch": [("model.eval()  # dropout off", "model.train()")],
        "tensorflow": [("training=False)  # dropout off", "training=True)")],
    }),
    Deviation("one dropout layer left out", CNN, "dropout rate", {
        "torch": [("        x = self.dropout2(x)\n", "")],
        "tensorflow": [("        x = self.dropout2(x, training=training)\n", "")],
    }),
    Deviation("another dropout rate", CNN, "dropout rate", {
        "torch": [("nn.Dropout(rate)", "nn.Dropout(rate / 2)")],
        "mxnet": [("set_dropout(spec.DROPOUT)", "set_dropout((0.25, 0.25, 0.25))")],
    }),
    Deviation("dropout without scaling", CNN, "dropout scale", {
        "torch": [("x = self.dropout3(x)", "x = self.dropout3(x) * (0.5 if self.training else 1)")],
        "chainer": [("F.dropout(x, self.dropout3)", "F.dropout(x, self.dropout3) * (1 - 0.5 * chainer.config.train)")],
    }),
    Deviation("sum for mean loss", CNN, "loss", {
        "torch": [("nn.CrossEntropyLoss()", 'nn.CrossEntropyLoss(reduction="sum")')],
        "chainer": [("loss = criterion(model(x), y)", "loss = criterion(model(x), y) * len(x)")],
    }),
    Deviation("Nesterov momentum", CNN, "update", {
        "torch": [("fused=True)", "nesterov=True)")],
        "tensorflow": [("momentum=spec.MOMENTUM)", "momentum=spec.MOMENTUM, nesterov=True)")],
    }),
    Deviation("another learning rate", CNN, "update", {
        "torch": [("lr=spec.LEARNING_RATE", "lr=2 * spec.LEARNING_RATE")],
        "chainer": [("lr=spec.LEARNING_RATE", "lr=2 * spec.LEARNING_RATE")],
    }),
    Deviation("gradients not cleared", CNN, "gradient", {
        "torch": [("    optimizer.zero_grad()\n", "")],
        "chainer": [("    model.cleargrads()\n", "")],
    }),
    Deviation("reset gate before the product", GRU, "forward", {
        "torch": [("        return self.dense(state[-1])\n", RESET_BEFORE_PRODUCT)],
        "tensorflow": [("reset_after=True)", "reset_after=False)"),
                       ('np.stack([gates["gru.bias_ih"], gates["gru.bias_hh"]])', 'gates["gru.bias_ih"]'),
                       ("swap_gates(biases[0])", "swap_gates(biases)"),
                       ("swap_gates(biases[1])", "swap_gates(biases)")],
    }),
    Deviation("gates in another order", GRU, "forward", {
        "tensorflow": [("return np.concatenate([z, r, n])", "return np.concatenate([r, z, n])")],
        "chainer": [("[layer.w0, layer.w1, layer.w2]", "[layer.w1, layer.w0, layer.w2]")],
    }),
    Deviation("the last but one output", GRU, "forward", {
        "torch": [("self.gru(self.embedding(tokens))", "self.gru(self.embedding(tokens[:, :-1]))")],
        "mxnet": [("begin=-1, end=None", "begin=-2, end=-1")],
    }),
    Deviation("the other variant of Adam", GRU, "update", {
        "torch": [('optimizer="Adam"', 'optimizer="Adam, epsilon hat"')],
        "mxnet": [('optimizer="Adam, epsilon hat"', 'optimizer="Adam"')],
    }),
    Deviation("another epsilon", GRU, "update", {
        "tensorflow": [(", epsilon=spec.EPSILON", "")],
        "chainer": [("eps=spec.EPSILON", "eps=1e-7")],
    }),
    Deviation("sparse updates of the embedding", GRU, "update", {
        "tensorflow": [("tf.convert_to_tensor(gradient)", "gradient")],
        "mxnet": [("nn.Embedding(spec.VOCABULARY, spec.EMBEDDING)",
                   "nn.Embedding(spec.VOCABULARY, spec.EMBEDDING, sparse_grad=True)")],
    }),
    Deviation("stride in the first 1×1 convolution", RESNET, "forward", {
        "torch": [("nn.Conv2d(channels, width, 1, bias", "nn.Conv2d(channels, width, 1, stride, bias"),
                  ("width, 3, stride=stride,", "width, 3,")],
        "mxnet": [("nn.Conv2D(width, 1, use_bias", "nn.Conv2D(width, 1, stride, use_bias"),
                  ("nn.Conv2D(width, 3, stride,", "nn.Conv2D(width, 3,")],
    }),
    Deviation("the framework's own epsilon of batch normalisation", RESNET, "forward", {
        "tensorflow": [("BatchNormalization(epsilon=spec.EPSILON)", "BatchNormalization()")],
        "chainer": [(", eps=spec.EPSILON", "")],
    }),
    Deviation("batch normalisation as in training", RESNET, "forward", {
        "torch": [(".eval()", "")],
        "chainer": [("chainer.global_config.train = False", "chainer.global_config.train = True")],
    }),
    Deviation("shortcut left out", RESNET, "forward", {
        "torch": [("F.relu(y + self.downsample(x))", "F.relu(y + 0 * self.downsample(x))")],
        "mxnet": [("F.relu(y + self.downsample(x))", "F.relu(y + 0 * self.downsample(x))")],
    }),
    Deviation("gradients not divided by the batch size", CNN, "update", {
        "mxnet": [("trainer.step(len(x))", "trainer.step(1)")],
    }),
    Deviation("recorded in prediction mode", CNN, "gradient", {
        "mxnet": [("autograd.record():", "autograd.record(train_mode=False):")],
    }),
    Deviation("padding as little as possible", RESNET, "forward", {
        "tensorflow": [("if stride > 1 and size > 1 else None", "if False else None"),
                       ('"same" if stride == 1 else "valid"', '"same"')],
    }),
    Deviation("pooling that covers every pixel", RESNET, "forward", {
        "chainer": [(", cover_all=False", "")],
    }),
]  # fmt: skip

CASES = [
    pytest.param(deviation, framework, id=f"{deviation.workload}-{framework}-{deviation.what}")
    for deviation in DEVIATIONS
    for framework in deviation.plants
]


@pytest.mark.parametrize(("deviation", "framework"), CASES)
def test_planted_deviation_is_refused(tmp_path: Path, deviation: Deviation, framework: str) -> None:
    notebook = nbformat.read(project.notebook(deviation.workload, framework), as_version=4)
    for old, new in deviation.plants[framework]:
        planted = 0
        for cell in notebook.cells:
            if cell.cell_type == "code":
                source = cell.source + "\n"  # a text to replace may be whole lines
                planted += source.count(old)
                cell.source = source.replace(old, new).rstrip("\n")
        assert planted, f"the notebook no longer holds {old!r}"
    copy = tmp_path / f"{framework}.ipynb"
    nbformat.write(notebook, copy)
    environment = environments.inspect(frameworks.load(framework), "cpu")
    parameters: dict[str, str | int] = {"mode": "eager", "profile": "smoke", "data": "synthetic"}
    ending = execute.run_notebook(copy, parameters, environment, machine.usable_cores(), 600, tmp_path)
    assert ending.status == "not_identical", ending.error
    assert f"{deviation.quantity} error" in str(ending.error)


def test_twelve_deviations_are_planted_in_two_frameworks_each() -> None:
    assert sum(len(deviation.plants) >= 2 for deviation in DEVIATIONS) >= 12
