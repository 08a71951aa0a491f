"""The gate: a right implementation passes, each planted deviation is refused with the right quantity named."""

from __future__ import annotations

import types

import numpy as np
import pytest

from common import identity

N, CLASSES, FEATURES = 8, 3, 6000  # one weight tensor large enough to be sketched
RATE, MOMENTUM = 0.001, 0.9


def make_workload() -> types.ModuleType:
    """A linear classifier as a workload: small enough to be differentiated by hand."""
    spec = types.ModuleType("linear")
    spec.PARAMETERS = {"weight": (CLASSES, FEATURES), "bias": (CLASSES,)}
    spec.DROPOUT = (0.25,)
    spec.GATES = {"forward": 1e-5, "loss": 1e-5, "gradient": 2e-5, "steps": 1e-3, "update": 1e-3}

    def weights(seed: int = 0) -> dict[str, np.ndarray]:
        random = np.random.RandomState(seed)
        weight = random.uniform(-0.1, 0.1, (CLASSES, FEATURES)).astype(np.float32)
        return {"weight": weight, "bias": np.zeros(CLASSES, np.float32)}

    def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.RandomState(seed)
        return random.uniform(0, 1, (N, FEATURES)).astype(np.float32), random.randint(0, CLASSES, N)

    spec.weights = weights
    spec.dropout_weights = weights
    spec.dropout_batch = lambda layout="": batch(13)
    spec.dropout_outputs = lambda update: [update["weight"][0] / RATE]
    spec.check_inputs = lambda layout="": [batch(1), batch(2)]
    spec.check_batches = lambda layout="": [batch(seed) for seed in range(3, 13)]
    return spec


class Linear:
    """The linear classifier in NumPy, with deviations that a test can plant."""

    def __init__(self, spec: types.ModuleType, dtype: type = np.float32, deviation: str = "") -> None:
        self.spec, self.dtype, self.deviation = spec, dtype, deviation
        self.random = np.random.RandomState(0)

    def load(self, weights: dict[str, np.ndarray]) -> None:
        self.w = {name: array.astype(self.dtype) for name, array in weights.items()}
        self.v = {name: np.zeros_like(array) for name, array in self.w.items()}

    def read(self) -> dict[str, np.ndarray]:
        if self.deviation == "missing bias":
            return {"weight": self.w["weight"]}
        return {name: array.copy() for name, array in self.w.items()}

    def forward(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(self.dtype)
        if self.deviation == "noise in evaluation":
            x = x * (1 + 1e-8 * self.random.standard_normal(x.shape))
        if self.deviation == "reversed input":
            x = x[:, ::-1]
        return x @ self.w["weight"].T + self.w["bias"]

    def gradients(self, x: np.ndarray, y: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        z = self.forward(x)
        z = z - z.max(1, keepdims=True)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        losses = -np.log(p[np.arange(len(y)), y])
        p[np.arange(len(y)), y] -= 1
        p /= 1 if self.deviation == "sum loss gradient" else len(y)
        bias = 0 * p.sum(0) if self.deviation == "no bias gradient" else p.sum(0)
        loss = losses.sum() if self.deviation == "sum loss" else losses.mean()
        return float(loss), {"weight": p.T @ x.astype(self.dtype), "bias": bias}

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        loss, g = self.gradients(x, y)
        for name in self.w:
            self.v[name] = MOMENTUM * self.v[name] + g[name]
            ahead = g[name] + MOMENTUM * self.v[name] if self.deviation == "nesterov" else self.v[name]
            self.w[name] = self.w[name] - RATE * ahead
        return float("nan") if self.deviation == "nan" else loss


@pytest.fixture
def workload(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The linear workload with golden values computed in float64."""
    monkeypatch.setattr(identity, "REFERENCE", tmp_path)
    spec = make_workload()
    model = Linear(spec, np.float64)
    golden: dict[str, object] = {}
    model.load(spec.weights())
    for index, (x, y) in enumerate(spec.check_inputs()):
        golden[f"{index}/forward"] = model.forward(x)
        golden[f"{index}/loss"], gradients = model.gradients(x, y)
        golden.update({f"{index}/gradient/{name}": value for name, value in gradients.items()})
    start = model.read()
    for steps, deviation in (("steps", ""), ("steps/nesterov", "nesterov")):
        model.load(spec.weights())
        model.deviation = deviation
        golden[f"{steps}/losses"] = [model.step(x, y) for x, y in spec.check_batches()]
        golden.update({f"{steps}/update/{name}": model.w[name] - start[name] for name in start})
    identity.write(spec, golden, tmp_path)  # type: ignore[arg-type]
    return spec


def check(
    workload: types.ModuleType, deviation: str = "", precision: str = "float32", optimizer: str | None = None,
    dropped: object = None,
) -> identity.Report:  # fmt: skip
    model = Linear(workload, np.dtype(precision).type, deviation)

    def dropout_step(x: np.ndarray, y: np.ndarray) -> float:
        model.w["weight"][0] += RATE * dropped()  # type: ignore[operator]
        return 0.0

    return identity.check(
        workload, precision=precision, load_weights=model.load, read_weights=model.read, forward=model.forward,
        gradients=model.gradients, step=model.step, optimizer=optimizer,
        dropout_step=dropout_step if dropped else None,
    )  # fmt: skip


def test_right_implementation_passes(workload: types.ModuleType) -> None:
    report = check(workload)
    report.require()
    assert report.failures == []
    assert report.columns()["parameters"] == CLASSES * FEATURES + CLASSES
    assert 0 < report.columns()["gradient_error"] < 2e-5


@pytest.mark.parametrize(
    ("deviation", "quantity"),
    [
        ("missing bias", "parameters"),
        ("reversed input", "forward"),
        ("noise in evaluation", "evaluation"),
        ("sum loss", "loss"),
        ("sum loss gradient", "gradient"),
        ("no bias gradient", "gradient"),
        ("nesterov", "update"),
        ("nan", "steps"),
    ],
)
def test_deviation_is_refused(workload: types.ModuleType, deviation: str, quantity: str) -> None:
    report = check(workload, deviation)
    with pytest.raises(identity.NotIdentical, match=quantity):
        report.require()
    assert {row.quantity for row in report.rows if not row.passed} >= {quantity}
    assert quantity == "parameters" or "FAILED" in repr(report)


def test_float64_leaves_no_room_for_doubt(workload: types.ModuleType) -> None:
    report = check(workload, precision="float64")
    report.require()
    assert {row.gate for row in report.rows} == {0.0, identity.FLOAT64_GATE}
    assert report.columns()["gradient_error"] < 1e-13
    with pytest.raises(identity.NotIdentical, match="evaluation"):
        check(workload, "noise in evaluation", "float64").require()


def test_each_variant_of_the_optimizer_is_held_to_its_own_reference(workload: types.ModuleType) -> None:
    report = check(workload, "nesterov", optimizer="nesterov")
    report.require()
    assert report.columns()["optimizer"] == "nesterov"
    with pytest.raises(identity.NotIdentical, match="update"):
        check(workload, optimizer="nesterov").require()


def test_inference_is_held_to_its_forward_pass_alone(workload: types.ModuleType) -> None:
    model = Linear(workload)
    report = identity.check(
        workload, precision="float32", load_weights=model.load, read_weights=model.read, forward=model.forward
    )
    report.require()
    assert {row.quantity for row in report.rows} == {"parameters", "forward", "evaluation"}


def mask(rate: float, scale: float = 1 / 0.75, seed: int | None = None) -> object:
    """Return what draws the outputs of a dropout layer whose inputs are ones."""
    random = np.random.RandomState(seed or 0)

    def draw() -> np.ndarray:
        drawn = np.random.RandomState(seed) if seed else random
        return np.asarray(scale * (drawn.uniform(size=FEATURES) >= rate), np.float32)

    return draw


def test_right_dropout_passes(workload: types.ModuleType) -> None:
    check(workload, dropped=mask(0.25)).require()


@pytest.mark.parametrize(
    ("dropped", "quantity"),
    [
        (mask(0.5, scale=2), "dropout rate"),
        (mask(0.0, scale=1), "dropout rate"),
        (mask(1.0), "dropout rate"),
        (mask(0.25, scale=1), "dropout scale"),
        (mask(0.25, seed=1), "dropout mask"),
    ],
    ids=["another rate", "no dropout", "everything dropped", "not scaled", "frozen mask"],
)
def test_wrong_dropout_is_refused(workload: types.ModuleType, dropped: object, quantity: str) -> None:
    with pytest.raises(identity.NotIdentical, match=quantity):
        check(workload, dropped=dropped).require()


def test_sketch_estimates_the_error_of_a_large_tensor() -> None:
    random = np.random.RandomState(0)
    reference = random.standard_normal(200_000)
    for size in (1e-6, 1e-3, 1.0):
        changed = reference + size * random.standard_normal(200_000)
        exact = np.linalg.norm(changed - reference) / np.linalg.norm(reference)
        estimate = identity._error(changed, {"x": identity.compact(reference)}, "x")
        assert estimate == pytest.approx(exact, rel=0.15)
    one_wrong = reference.copy()
    one_wrong[123_456] += 1
    exact = 1 / np.linalg.norm(reference)
    assert identity._error(one_wrong, {"x": identity.compact(reference)}, "x") == pytest.approx(exact, rel=1e-6)


def test_wrong_shape_is_an_infinite_error() -> None:
    assert identity._error(np.zeros(3), {"x": np.ones(4)}, "x") == float("inf")
