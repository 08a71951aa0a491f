"""The specification of each workload: the numbers that all frameworks share."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from common.data import Images
from common.workloads import cnn_cifar10


def small_images(count: int = 200) -> Images:
    random = np.random.RandomState(0)
    pixels = random.randint(0, 256, (count, 3, 32, 32)).astype(np.uint8)
    return Images(pixels, np.arange(count) % 10, pixels[:160], np.arange(160) % 10, "synthetic")


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def test_parameters_add_up() -> None:
    assert sum(array.size for array in cnn_cifar10.weights().values()) == 3_441_592


def test_weights_are_glorot_uniform_and_frozen() -> None:
    weights = cnn_cifar10.weights(0)
    assert {name: array.shape for name, array in weights.items()} == cnn_cifar10.PARAMETERS
    assert all(array.dtype == np.float32 for array in weights.values())
    assert not any(weights[name].any() for name in weights if name.endswith("bias"))
    limit = np.sqrt(6 / (50 * 9 + 50 * 9))
    assert limit >= abs(weights["conv2.weight"]).max() > 0.99 * limit
    assert digest(*weights.values()) == "43b834c93e92852e"
    assert digest(*cnn_cifar10.weights(1).values()) != digest(*weights.values())


def test_batches_are_full_shuffled_and_frozen() -> None:
    images = small_images()
    batches = list(cnn_cifar10.batches(images, "smoke", seed=0))
    assert all(x.shape == (64, 3, 32, 32) and x.dtype == np.float32 and y.shape == (64,) for x, y in batches)
    assert all(x.min() >= 0 and x.max() <= 1 for x, _ in batches)
    assert len(batches) == 3  # one epoch of 200 images, full batches only
    assert len({tuple(image.ravel()) for x, _ in batches for image in x}) == 192
    assert digest(batches[0][1]) == "63636673eda95355"
    other = next(cnn_cifar10.batches(images, "smoke", seed=1))
    assert not np.array_equal(other[1], batches[0][1])


def test_every_epoch_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = cnn_cifar10.PROFILES["smoke"]._replace(epochs=2, steps=100)
    monkeypatch.setitem(cnn_cifar10.PROFILES, "smoke", profile)
    batches = [y for _, y in cnn_cifar10.batches(small_images(), "smoke")]
    assert len(batches) == 6
    assert not np.array_equal(batches[0], batches[3])


def test_full_profile_is_the_original_specification() -> None:
    full = cnn_cifar10.PROFILES["full"]
    assert full.steps == 10 * (50_000 // 64) == 7810
    assert full.test_images == 10_000
    assert not full.synthetic


@pytest.mark.parametrize(
    ("profile", "choice", "asked_for"),
    [
        ("smoke", "auto", "auto"),
        ("quick", "auto", "auto"),
        ("full", "auto", "real"),
        ("full", "synthetic", "synthetic"),
    ],
)
def test_full_takes_synthetic_data_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, profile: str, choice: str, asked_for: str
) -> None:
    asked = []
    monkeypatch.setattr("common.data.cifar10", lambda choice: asked.append(choice) or small_images())
    cnn_cifar10.prepare(profile, choice)
    cnn_cifar10.load(profile, choice)
    assert asked == [asked_for] * 2


@pytest.mark.parametrize("profile", cnn_cifar10.PROFILES.values())
def test_evaluation_batches_are_full(profile: cnn_cifar10.Profile) -> None:
    assert profile.test_images % cnn_cifar10.EVALUATION_BATCH_SIZE == 0


def test_layouts_hold_the_same_pixels() -> None:
    images = small_images(4).train_images
    nhwc = cnn_cifar10.in_layout(images, "NHWC")
    assert nhwc.flags.c_contiguous
    assert np.array_equal(nhwc.transpose(0, 3, 1, 2), images)
    with pytest.raises(ValueError, match="NCHW or NHWC"):
        cnn_cifar10.in_layout(images, "CHWN")


def test_flops_are_counted_by_formula() -> None:
    forward = 2 * (50 * 27 * 1024 + 50 * 450 * 1024 + 100 * 450 * 256 + 100 * 900 * 256 + 512 * 6400 + 10 * 512)
    assert cnn_cifar10.flops_per_example() == 3 * forward - 2 * 50 * 27 * 1024
