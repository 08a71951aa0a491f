"""The proof of identity: one implementation's numbers held against the float64 reference.

`check` runs the very model and step function that a notebook goes on to time, dropout off, and
compares forward pass, loss, gradients and ten optimizer steps with golden values in
`common/reference/<workload>.npz`. Golden tensors of more than 4,096 elements are kept as their
norm and a count sketch (Charikar, Chen and Farach-Colton, 2002), which estimates the norm of a
difference without the tensor: the files stay small, and a wrong element anywhere still shows.
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
        gated = {row.quantity + "_error": row.error for row in self.rows if row.gate > 0}
        return {"parameters": self.parameters, **gated}

    def __repr__(self) -> str:
        lines = ["{:<14} {:>8} {:>8}".format("quantity", "error", "gate")]
        lines += [
            "{:<14} {:>8.1e} {:>8.0e} {} {}".format(
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
            RECORD_TYPE: plain(self.columns()),
        }


def check(
    workload: ModuleType,
    *,
    layout: str,
    load_weights: Callable[[Arrays], None],
    read_weights: Callable[[], Arrays],
    forward: Callable[[np.ndarray], np.ndarray],
    gradients: Callable[[np.ndarray, np.ndarray], "tuple[float, Arrays]"],
    step: Callable[[np.ndarray, np.ndarray], float],
    dropout_step: Optional[Callable[[np.ndarray, np.ndarray], float]] = None,
) -> Report:
    """Hold a model against the float64 reference of its workload and return the errors.

    All callables take and return NumPy arrays; parameters and gradients are dictionaries by
    canonical name, in canonical layout; inputs are float32 in `layout`, labels int64.

    `load_weights` loads parameters and forgets the optimizer's state. `forward` returns logits in
    evaluation mode. `gradients` returns the loss and its gradients, `step` does one optimizer step and returns the
    loss before it: both with dropout off. `dropout_step` is the step with dropout on, where the model has any.

    An error is ‖a − reference‖ / ‖reference‖, the largest over inputs and parameters.
    """
    golden = _read(workload)
    load_weights(workload.weights())
    start = read_weights()
    wrong = [name for name, shape in workload.PARAMETERS.items() if name not in start or start[name].shape != shape]
    wrong += [name for name in start if name not in workload.PARAMETERS]
    parameters = sum(array.size for array in start.values())
    rows = [Row("parameters", float(len(wrong)), 0.0, ", ".join(wrong))]
    if wrong:
        return Report(parameters, rows)

    errors: Dict[str, List["tuple[float, str]"]] = {name: [] for name in ("forward", "loss", "gradient", "evaluation")}
    for index, (x, y) in enumerate(workload.check_inputs(layout)):
        case = "input {}".format(index + 1)
        logits = forward(x)
        errors["forward"].append((_error(logits, golden, "{}/forward".format(index)), case))
        errors["evaluation"].append((float(np.max(np.abs(forward(x) - logits))), case))
        loss, gradient = gradients(x, y)
        errors["loss"].append((_error(np.asarray(loss), golden, "{}/loss".format(index)), case))
        for name in workload.PARAMETERS:
            key = "{}/gradient/{}".format(index, name)
            errors["gradient"].append((_error(gradient[name], golden, key), "{}, {}".format(name, case)))

    load_weights(workload.weights())
    losses = [float(step(x, y)) for x, y in workload.check_batches(layout)]
    errors["steps"] = [(_error(np.asarray(losses), golden, "steps/losses"), "")]
    end = read_weights()
    errors["update"] = [
        (_error(end[name].astype(np.float64) - start[name], golden, "steps/update/" + name), name)
        for name in workload.PARAMETERS
    ]
    gates = {**workload.GATES, "evaluation": 0.0}
    rows += [Row(name, error, gates[name], where) for name, (error, where) in _largest(errors).items()]
    if dropout_step:
        rows.append(_dropout_row(workload, layout, load_weights, dropout_step))
    return Report(parameters, rows)


def write(workload: ModuleType, values: Arrays, folder: Union[Path, str] = REFERENCE) -> None:
    """Write golden values, float64 and keyed as `check` reads them, to `folder`/<workload>.npz.

    Keys: `<input>/forward`, `<input>/loss`, `<input>/gradient/<parameter>`, `steps/losses`,
    `steps/update/<parameter>`.
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


def _dropout_row(
    workload: ModuleType,
    layout: str,
    load_weights: Callable[[Arrays], None],
    dropout_step: Callable[[np.ndarray, np.ndarray], float],
) -> Row:
    """Two steps from the same weights on the same batch must draw different masks, and so differ in loss."""
    x, y = workload.check_batches(layout)[0]
    losses = []
    for _ in range(2):
        load_weights(workload.weights())
        losses.append(float(dropout_step(x, y)))
    frozen = losses[0] == losses[1]
    return Row("dropout", float(frozen), 0.0, "two steps, one mask" if frozen else "")


def path(workload: str, folder: Union[Path, str] = REFERENCE) -> Path:
    """Return where the golden values of a workload lie."""
    return Path(folder) / (workload + ".npz")


def _read(workload: ModuleType) -> Arrays:
    with np.load(str(path(_name(workload), REFERENCE))) as file:
        return {key: file[key] for key in file.files}


def _name(workload: ModuleType) -> str:
    return workload.__name__.rsplit(".", 1)[-1]
