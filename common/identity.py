"""The proof of identity: one implementation's numbers held against the float64 reference.

`check` runs the very model and step function that a notebook goes on to time, dropout off, and
compares forward pass, loss, gradients and ten optimizer steps with golden values in
`common/reference/<workload>.npz`. Dropout is then measured, with weights that lay its masks open.

Golden tensors of more than 4,096 elements are kept as their norm and a count sketch (Charikar, Chen and
Farach-Colton, 2002), which estimates the norm of a difference without the tensor: the files stay small, and a
wrong element anywhere still shows.
"""

from __future__ import annotations

import html
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Union

import numpy as np

from common.trial import RECORD_TYPE, plain

REFERENCE = Path(__file__).parent / "reference"
LARGEST_WHOLE = 4096
BUCKETS = 1024

#: The largest error of any quantity where the arithmetic is float64: nothing but rounding fits below it.
FLOAT64_GATE = 1e-8

#: Dropout is measured in this many steps. 4 × 512 units show a rate of .5 with a standard deviation of .011.
DROPOUT_STEPS = 4
DROPOUT_GATES = {"dropout rate": 0.05, "dropout scale": 0.01, "dropout mask": 0.0}

#: Quantities whose errors are columns of the record, in the order in which they are checked.
MEASURED = ("forward", "loss", "gradient", "steps", "update")

Arrays = Dict[str, np.ndarray]


class NotIdentical(Exception):
    """Raised where an implementation fails the check: it must not be timed."""


class Row(NamedTuple):
    """One quantity of the check: its error, the largest error allowed, and where it was found."""

    quantity: str
    error: float
    gate: float
    where: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.gate  # False for NaN too


class Report(NamedTuple):
    """The outcome of a check; shows itself as a table in a notebook."""

    parameters: int
    rows: List[Row]
    optimizer: Optional[str] = None  # the variant that was held to its own reference, where there are several

    @property
    def failures(self) -> List[str]:
        """One line for each quantity that failed."""
        return [
            "{} error {:.1e} exceeds {:.0e}{}".format(r.quantity, r.error, r.gate, r.where and " (" + r.where + ")")
            for r in self.rows
            if not r.passed
        ]

    def require(self) -> None:
        """Raise `NotIdentical` unless every quantity passed."""
        if self.failures:
            raise NotIdentical("; ".join(self.failures))

    def columns(self) -> Dict[str, Any]:
        """Return the measured errors as columns of the record."""
        measured = {row.quantity + "_error": row.error for row in self.rows if row.quantity in MEASURED}
        return {"parameters": self.parameters, "optimizer": self.optimizer, **measured}

    def __repr__(self) -> str:
        lines = ["{:<15} {:>8} {:>8}".format("quantity", "error", "gate")]
        lines += [
            "{:<15} {:>8.1e} {:>8.0e} {} {}".format(
                r.quantity, r.error, r.gate, "ok" if r.passed else "FAILED", r.where
            )
            for r in self.rows
        ]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Dict[str, Any]:
        cells = "".join(
            "<tr><td>{}</td><td>{:.1e}</td><td>{:.0e}</td><td>{}</td><td>{}</td></tr>".format(
                html.escape(r.quantity), r.error, r.gate, "ok" if r.passed else "<b>failed</b>", html.escape(r.where)
            )
            for r in self.rows
        )
        head = "<tr><th>quantity</th><th>error</th><th>gate</th><th></th><th>largest at</th></tr>"
        return {
            "text/plain": repr(self),
            "text/html": "<table><thead>{}</thead><tbody>{}</tbody></table>".format(head, cells),
            RECORD_TYPE: {**plain(self.columns()), "identity": [plain(row._asdict()) for row in self.rows]},
        }


def check(
    workload: ModuleType,
    *,
    precision: str,
    load_weights: Callable[[Arrays], None],
    read_weights: Callable[[], Arrays],
    forward: Callable[[np.ndarray], np.ndarray],
    gradients: Optional[Callable[[np.ndarray, np.ndarray], "tuple[float, Arrays]"]] = None,
    step: Optional[Callable[[np.ndarray, np.ndarray], float]] = None,
    optimizer: Optional[str] = None,
    dropout_step: Optional[Callable[[np.ndarray, np.ndarray], float]] = None,
    layout: Optional[str] = None,
    float64_gates: Optional[Dict[str, float]] = None,
) -> Report:
    """Hold a model against the float64 reference of its workload and return the errors.

    All callables take and return NumPy arrays; parameters and gradients are dictionaries by canonical name, in
    canonical layout, BN statistics among the parameters; inputs are of dtype `precision`, or int32 tokens; labels
    int64; images in `layout`.

    `load_weights` loads parameters and forgets the optimizer's state. `forward` returns logits or features in
    evaluation mode. `gradients` returns the loss and its gradients, `step` does one optimizer step and returns the
    loss before it: both with dropout off, both left out where the workload is inference. `optimizer` names the
    variant that `step` uses, where the workload has a reference for each. `dropout_step` is the step with dropout on,
    where the model has any. `float64_gates` are those that hold for single quantities in float64 instead of
    `FLOAT64_GATE`, where a framework computes part of them in float32; the notebook says which.

    An error is ‖a − reference‖ / ‖reference‖, the largest over inputs and parameters.
    """
    golden = _read(workload)
    batches = _Batches(workload, layout, precision)
    load_weights(workload.weights())
    start = read_weights()
    expected = {**workload.PARAMETERS, **getattr(workload, "STATISTICS", {})}
    wrong = [name for name, shape in expected.items() if name not in start or start[name].shape != shape]
    wrong += [name for name in start if name not in expected]
    parameters = sum(array.size for name, array in start.items() if name in workload.PARAMETERS)
    rows = [Row("parameters", float(len(wrong)), 0.0, ", ".join(wrong))]
    if wrong:
        return Report(parameters, rows, optimizer)

    errors: Dict[str, List["tuple[float, str]"]] = {}

    def found(quantity: str, error: float, where: str) -> None:
        errors.setdefault(quantity, []).append((error, where))

    for index, (x, *y) in enumerate(batches.check_inputs()):
        case = "input {}".format(index + 1)
        output = forward(x)
        found("forward", _error(output, golden, "{}/forward".format(index)), case)
        found("evaluation", float(np.max(np.abs(forward(x) - output))), case)
        if gradients:
            loss, gradient = gradients(x, *y)
            found("loss", _error(np.asarray(loss), golden, "{}/loss".format(index)), case)
            for name in workload.PARAMETERS:
                key = "{}/gradient/{}".format(index, name)
                found("gradient", _error(gradient[name], golden, key), "{}, {}".format(name, case))

    if step:
        steps = "steps/" + optimizer if optimizer else "steps"
        load_weights(workload.weights())
        losses = [float(step(x, y)) for x, y in batches.check_batches()]
        found("steps", _error(np.asarray(losses), golden, steps + "/losses"), "")
        for name, array in read_weights().items():
            change = array.astype(np.float64) - start[name]
            found("update", _error(change, golden, "{}/update/{}".format(steps, name)), name)

    gates = {**workload.GATES, "evaluation": 0.0}
    if precision == "float64":
        gates.update(dict.fromkeys(workload.GATES, FLOAT64_GATE), **(float64_gates or {}))
    rows += [Row(name, error, gates[name], where) for name, (error, where) in _largest(errors).items()]
    if dropout_step:
        rows += _dropout_rows(workload, batches.dropout_batch(), load_weights, read_weights, dropout_step)
    return Report(parameters, rows, optimizer)


class _Batches:
    """The inputs of the check in the layout and precision of one implementation."""

    def __init__(self, workload: ModuleType, layout: Optional[str], precision: str) -> None:
        self.workload, self.precision = workload, precision
        self.arguments = [layout] if layout else []

    def check_inputs(self) -> List[Any]:
        return [self._cast(batch) for batch in self.workload.check_inputs(*self.arguments)]

    def check_batches(self) -> List[Any]:
        return [self._cast(batch) for batch in self.workload.check_batches(*self.arguments)]

    def dropout_batch(self) -> Any:
        return self._cast(self.workload.dropout_batch(*self.arguments))

    def _cast(self, batch: "tuple[np.ndarray, ...]") -> "tuple[np.ndarray, ...]":
        x, *y = batch
        return (x.astype(self.precision) if x.dtype.kind == "f" else x, *y)


def write(workload: ModuleType, values: Arrays, folder: Union[Path, str] = REFERENCE) -> None:
    """Write golden values, float64 and keyed as `check` reads them, to `folder`/<workload>.npz.

    Keys: `<input>/forward`, `<input>/loss`, `<input>/gradient/<parameter>`, `steps/losses`,
    `steps/update/<parameter>`; with several variants of the optimizer `steps/<optimizer>/losses` and so on.
    """
    target = path(_name(workload), folder)
    compacted: Dict[str, Any] = {key: compact(np.asarray(value, np.float64)) for key, value in values.items()}
    np.savez(str(target), **compacted)


def compact(array: np.ndarray) -> np.ndarray:
    """Return a small array whole (float64), a large one as its norm and its count sketch (1 + 1,024 float64)."""
    array = np.asarray(array, np.float64)
    if array.size <= LARGEST_WHOLE:
        return array
    random = np.random.RandomState(array.size % 2**32)
    bucket = random.randint(0, BUCKETS, array.size)
    sign = random.randint(0, 2, array.size) * 2.0 - 1.0
    sketch = np.bincount(bucket, weights=sign * array.ravel(), minlength=BUCKETS)
    return np.concatenate([[np.linalg.norm(array)], sketch])


def _error(array: np.ndarray, golden: Arrays, key: str) -> float:
    """Return ‖array − reference‖ / ‖reference‖, from the sketch where the reference is one."""
    reference, array = golden[key], np.asarray(array, np.float64)
    if array.size > LARGEST_WHOLE:
        array, reference, norm = compact(array)[1:], reference[1:], reference[0]
    else:
        norm = np.linalg.norm(reference)
    if array.shape != reference.shape:
        return float("inf")
    return float(np.linalg.norm(array - reference) / norm)


def _largest(errors: Dict[str, List["tuple[float, str]"]]) -> Dict[str, "tuple[float, str]"]:
    """Return the largest error of each quantity; NaN counts as the largest of all."""
    return {
        name: max(found, key=lambda pair: np.inf if np.isnan(pair[0]) else pair[0]) for name, found in errors.items()
    }


def _dropout_rows(
    workload: ModuleType,
    batch: "tuple[np.ndarray, np.ndarray]",
    load_weights: Callable[[Arrays], None],
    read_weights: Callable[[], Arrays],
    dropout_step: Callable[[np.ndarray, np.ndarray], float],
) -> List[Row]:
    """Measure each dropout layer: the share of its inputs that it drops, what it makes of the others, new masks."""
    steps = []
    for _ in range(DROPOUT_STEPS):
        load_weights(workload.dropout_weights())
        start = read_weights()
        dropout_step(*batch)
        end = read_weights()
        steps.append(workload.dropout_outputs({name: end[name] - start[name] for name in end}))
    errors: Dict[str, List["tuple[float, str]"]] = {name: [] for name in DROPOUT_GATES}
    for index, rate in enumerate(workload.DROPOUT):
        masks = [step[index] for step in steps]
        outputs = np.concatenate(masks)
        kept = outputs[abs(outputs) > 0.1]
        dropped = 1 - len(kept) / len(outputs)
        scale = float(np.mean(kept)) if len(kept) else float("nan")
        layer = "layer {}".format(index + 1)
        errors["dropout rate"].append((abs(dropped - rate), "{} drops {:.3f}, not {}".format(layer, dropped, rate)))
        spread = float(np.max(abs(kept * (1 - rate) - 1))) if len(kept) else float("nan")
        errors["dropout scale"].append((spread, "{} multiplies by {:.3f}".format(layer, scale)))
        frozen = len(masks[0]) == len(masks[1]) and np.array_equal(abs(masks[0]) > 0.1, abs(masks[1]) > 0.1)
        errors["dropout mask"].append((float(frozen), "{} drops the same twice".format(layer) if frozen else ""))
    return [Row(name, error, DROPOUT_GATES[name], where) for name, (error, where) in _largest(errors).items()]


def path(workload: str, folder: Union[Path, str] = REFERENCE) -> Path:
    """Return where the golden values of a workload lie."""
    return Path(folder) / (workload + ".npz")


def _read(workload: ModuleType) -> Arrays:
    with np.load(str(path(_name(workload), REFERENCE))) as file:
        return {key: file[key] for key in file.files}


def _name(workload: ModuleType) -> str:
    return workload.__name__.rsplit(".", 1)[-1]
