"""The specification of each workload: the numbers that all frameworks share."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from common.data import Images, Reviews
from common.workloads import cnn_cifar10, gru_imdb, resnet50_features


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


def test_dropout_is_read_from_one_step() -> None:
    """With masks of our own, the gradients as calculus has them lead back to the masks."""
    random = np.random.RandomState(0)
    first, second, third = (
        (random.uniform(size=shape) >= rate) / (1 - rate)
        for shape, rate in zip([(50, 16, 16), (100, 8, 8), 512], cnn_cifar10.DROPOUT, strict=True)
    )
    w = {name: array.astype(float) for name, array in cnn_cifar10.dropout_weights().items()}
    features = second.ravel()  # what convolutions and pooling make of the ones is one everywhere
    hidden = w["dense1.weight"] @ features
    logits = w["dense2.weight"] @ (hidden * third)
    error = np.exp(logits) / np.exp(logits).sum() - np.eye(10)[0]
    hidden_error = (w["dense2.weight"].T @ error) * third
    reached = (w["dense1.weight"].T @ hidden_error).reshape(100, 8, 8) * second
    g = {name: np.zeros(shape) for name, shape in cnn_cifar10.PARAMETERS.items()}
    g["dense2.weight"], g["dense2.bias"] = np.outer(error, hidden * third), error
    g["dense1.weight"], g["dense1.bias"] = np.outer(hidden_error, features), hidden_error
    padded = np.pad(first, ((0, 0), (1, 1), (1, 1)))
    for channel, row, column in zip(*np.nonzero(reached), strict=True):
        window = padded[:, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]  # the pooling passes on its first pixel
        g["conv3.weight"][channel] += reached[channel, row, column] * window
        g["conv3.bias"][channel] += reached[channel, row, column]
    found = cnn_cifar10.dropout_outputs({name: -0.01 * array for name, array in g.items()})
    np.testing.assert_allclose(found[1], second.ravel(), atol=1e-9)
    np.testing.assert_allclose(found[2], third, atol=1e-9)
    assert set(np.round(found[0], 9)) == {0.0, round(4 / 3, 9)}
    assert np.mean(found[0] == 0) == pytest.approx(0.25, abs=0.03)


def test_reviews_parameters_add_up_and_are_frozen() -> None:
    weights = gru_imdb.weights(0)
    assert sum(array.size for array in weights.values()) == 3_818_302
    assert sum(array.size for name, array in weights.items() if name.startswith("gru")) == 68_100
    assert all(array.dtype == np.float32 for array in weights.values())
    limit = np.sqrt(6 / (125 + 100))  # each gate is a matrix of its own
    assert limit >= abs(weights["gru.weight_ih"]).max() > 0.99 * limit
    assert 0.05 >= abs(weights["embedding.weight"]).max() > 0.0499
    assert not any(weights[name].any() for name in weights if "bias" in name)
    assert digest(*weights.values()) == "7478bd9cf619a0a3"


def test_reviews_come_in_full_batches() -> None:
    tokens = np.arange(200 * 150, dtype=np.int32).reshape(200, 150)
    reviews = Reviews(tokens, np.arange(200) % 2, tokens, np.arange(200) % 2, "synthetic")
    batches = list(gru_imdb.batches(reviews, "smoke"))
    assert all(x.shape == (64, 150) and x.dtype == np.int32 and y.shape == (64,) for x, y in batches)
    assert len(batches) == 3
    assert not np.array_equal(batches[0][0], next(gru_imdb.batches(reviews, "smoke", seed=1))[0])
    assert all(profile.test_reviews % gru_imdb.EVALUATION_BATCH_SIZE == 0 for profile in gru_imdb.PROFILES.values())
    assert gru_imdb.PROFILES["full"].steps == 3 * (25_000 // 64) == 1170


def test_residual_network_is_resnet50() -> None:
    spec = resnet50_features
    assert sum(int(np.prod(shape)) for shape in spec.PARAMETERS.values()) == 23_508_032
    assert sum(int(np.prod(shape)) for shape in spec.STATISTICS.values()) == 2 * 26_560
    assert len(spec.blocks()) == 16
    assert [block.stride for block in spec.blocks() if block.stride > 1] == [2, 2, 2]
    assert spec.flops_per_example() == 2 * 4_087_136_256
    weights = spec.weights(0)
    assert {name: array.shape for name, array in weights.items()} == {**spec.PARAMETERS, **spec.STATISTICS}
    assert all(array.dtype == np.float32 for array in weights.values())
    assert digest(*weights.values()) == "f74c08bfd46d43f2"


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_images_are_enlarged_scaled_and_passed_through_again(layout: str) -> None:
    spec = resnet50_features
    images = small_images(64)._replace(test_images=small_images(64).train_images)
    batches = list(spec.batches(images, "smoke", layout))
    assert len(batches) == 3
    assert all(x.flags.c_contiguous and x.dtype == np.float32 for x in batches)
    np.testing.assert_array_equal(batches[0], batches[2])
    first = batches[0] if layout == "NCHW" else batches[0].transpose(0, 3, 1, 2)
    assert first.shape == (32, 3, 224, 224)
    pixels = (images.test_images[:32] / 255 - spec.MEAN.reshape(3, 1, 1)) / spec.DEVIATION.reshape(3, 1, 1)
    np.testing.assert_allclose(first[:, :, 3::7, 3::7], pixels, atol=1e-6)
    assert np.ptp(first[:, :, :7, :7], axis=(2, 3)).max() == 0


def test_trained_weights_are_downloaded_only_where_nothing_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("common.data.resnet50_weights", lambda download: asked.append(download))
    for choice in ("auto", "real", "synthetic"):
        assert resnet50_features.pretrained(choice) is None
    assert asked == [True, False]
