"""Specification of `cnn_cifar10`: a VGG-style CNN trained on CIFAR-10.

conv 3×3 3→50 same, ReLU; conv 50→50, max-pool 2, ReLU; dropout .25; conv 50→100, ReLU;
conv 100→100, max-pool 2, ReLU; dropout .25; flatten (6400); dense 512, ReLU; dropout .5;
dense 10. Softmax cross-entropy (mean over the batch), SGD with momentum.

Parameters are named, shaped and laid out as PyTorch does it: convolutions OIHW, dense layers
(out, in), and the flatten in channel-height-width order. Each notebook converts on load.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

from common import data as datasets
from common.batches import shuffled
from common.layouts import in_layout

TITLE = "CNN on CIFAR-10, training"
METRIC = "test accuracy"

CLASSES = 10
BATCH_SIZE = 64
EVALUATION_BATCH_SIZE = 80  # divides every profile's number of test images
# As float32 numbers, which is how some frameworks keep them whatever the precision: so float64 runs agree, too.
LEARNING_RATE = float(np.float32(0.01))
MOMENTUM = float(np.float32(0.9))
DROPOUT = (0.25, 0.25, 0.5)

#: Canonical parameter names and shapes, in the order of the forward pass.
PARAMETERS: Dict[str, Tuple[int, ...]] = {
    "conv1.weight": (50, 3, 3, 3),
    "conv1.bias": (50,),
    "conv2.weight": (50, 50, 3, 3),
    "conv2.bias": (50,),
    "conv3.weight": (100, 50, 3, 3),
    "conv3.bias": (100,),
    "conv4.weight": (100, 100, 3, 3),
    "conv4.bias": (100,),
    "dense1.weight": (512, 6400),
    "dense1.bias": (512,),
    "dense2.weight": (10, 512),
    "dense2.bias": (10,),
}


class Profile(NamedTuple):
    """How much work one trial does."""

    epochs: int  # at most; `steps` can end sooner
    steps: int  # optimizer steps in all, warm-up included
    warmup_steps: int  # the first steps, trained but left out of the timing
    test_images: int  # images in the evaluation
    timeout_s: int  # a trial that takes longer is ended
    synthetic: bool  # whether a synthetic set may stand in for CIFAR-10


PROFILES: Dict[str, Profile] = {
    "smoke": Profile(epochs=1, steps=8, warmup_steps=3, test_images=160, timeout_s=600, synthetic=True),
    "quick": Profile(epochs=1, steps=80, warmup_steps=10, test_images=2000, timeout_s=1800, synthetic=True),
    "full": Profile(epochs=10, steps=7810, warmup_steps=20, test_images=10000, timeout_s=6 * 3600, synthetic=False),
}

#: The largest error, relative to the float64 reference, with which a float32 trial is timed.
#: The update can't be held tighter: near-ties in ReLU and max-pool fall differently in float32.
GATES: Dict[str, float] = {"forward": 1e-5, "loss": 1e-5, "gradient": 2e-5, "steps": 1e-3, "update": 0.2}

#: Which of 256 random images take part in the check, as a bit mask; computed and tested in the reference notebook.
CHECK_IMAGES = "3108008b44800131909040201271800e30ac00a11003d900001822036045406a"
CHECK_MARGIN = 1e-6


def weights(seed: int = 0) -> Dict[str, np.ndarray]:
    """Return initial parameters by canonical name, float32: Glorot-uniform weights, zero biases.

    Glorot and Bengio (2010), equation 16: U(±sqrt(6 / (fan_in + fan_out))), where a
    convolution's fans count its receptive field.
    """
    random = np.random.RandomState(seed)
    parameters = {}
    for name, shape in PARAMETERS.items():
        if name.endswith("bias"):
            parameters[name] = np.zeros(shape, np.float32)
        else:
            field = int(np.prod(shape[2:]))
            limit = np.sqrt(6.0 / ((shape[0] + shape[1]) * field))
            parameters[name] = random.uniform(-limit, limit, shape).astype(np.float32)
    return parameters


def flops_per_example() -> int:
    """Return floating-point operations of one training step for one example.

    A multiply-add counts as two. Only convolutions and dense layers are counted; the backward
    pass costs twice the forward pass, less the input gradient of the first layer, which nobody needs.
    """
    side = {"conv1": 32, "conv2": 32, "conv3": 16, "conv4": 16, "dense1": 1, "dense2": 1}
    forward = {layer: 2 * int(np.prod(PARAMETERS[layer + ".weight"])) * size * size for layer, size in side.items()}
    return 3 * sum(forward.values()) - forward["conv1"]


def prepare(profile: str, choice: str = "auto") -> str:
    """See to it that the data are at hand, downloading them if need be, and return "real" or "synthetic".

    Raises `common.data.DataError` where there are no data to be had.
    """
    source: str = datasets.cifar10(_choice(profile, choice)).source
    return source


def load(profile: str, choice: str = "auto", layout: str = "NCHW") -> datasets.Images:
    """Return CIFAR-10 as uint8 images in `layout` ("NCHW" or "NHWC") with int64 labels.

    `choice` is "real", "synthetic" or "auto": real where it can be had, else synthetic if the
    profile allows it. Raises `common.data.DataError` where there are no data to be had.
    """
    spec = PROFILES[profile]
    images = datasets.cifar10(_choice(profile, choice))
    return images._replace(
        train_images=in_layout(images.train_images, layout),
        test_images=in_layout(images.test_images[: spec.test_images], layout),
        test_labels=images.test_labels[: spec.test_images],
    )


def batches(
    images: datasets.Images, profile: str, seed: int = 0, batch_size: int = BATCH_SIZE
) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """Yield the training batches of a trial: x float32 in [0, 1], y int64, full batches only.

    The order is reshuffled every epoch and depends on `seed` alone, so all frameworks see the
    same batches. Making a batch costs the same for all of them and stays outside the clock.
    """
    spec = PROFILES[profile]
    for chosen in shuffled(len(images.train_images), batch_size, spec.epochs, spec.steps, seed):
        yield scale(images.train_images[chosen]), images.train_labels[chosen]


def test_batches(images: datasets.Images) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """Yield the evaluation batches: x float32 in [0, 1], y int64."""
    for start in range(0, len(images.test_images), EVALUATION_BATCH_SIZE):
        chosen = slice(start, start + EVALUATION_BATCH_SIZE)
        yield scale(images.test_images[chosen]), images.test_labels[chosen]


def check_inputs(layout: str = "NCHW") -> List[Tuple[np.ndarray, np.ndarray]]:
    """Return the two batches on which forward pass, loss and gradients are held against the reference.

    One of the training batch size, of noise; one of a single image, smooth as photographs are. On none of these
    images is a ReLU or a max-pooling within `CHECK_MARGIN` of a tie, which two right implementations may
    break differently.
    """
    kept = np.unpackbits(np.frombuffer(bytes.fromhex(CHECK_IMAGES), np.uint8)).astype(bool)
    noise = np.random.RandomState(1).uniform(0, 1, (len(kept), 3, 32, 32)).astype(np.float32)[kept]
    sheet = np.random.RandomState(26).standard_normal((1, 3, 32, 32)).cumsum(axis=2).cumsum(axis=3)
    smooth = ((sheet - sheet.min()) / (sheet.max() - sheet.min())).astype(np.float32)
    return [
        (in_layout(noise, layout), np.arange(BATCH_SIZE) % CLASSES),
        (in_layout(smooth, layout), np.array([3])),
    ]


def check_batches(layout: str = "NCHW") -> List[Tuple[np.ndarray, np.ndarray]]:
    """Return the ten batches on which ten optimizer steps are held against the reference."""
    random = np.random.RandomState(2)
    return [
        (
            in_layout(random.uniform(0, 1, (BATCH_SIZE, 3, 32, 32)).astype(np.float32), layout),
            random.randint(0, CLASSES, BATCH_SIZE),
        )
        for _ in range(10)
    ]


def _choice(profile: str, choice: str) -> str:
    """Return "real" where only the real data will do: a full run takes a synthetic set only when asked for it."""
    return "real" if choice == "auto" and not PROFILES[profile].synthetic else choice


def scale(images: np.ndarray) -> np.ndarray:
    """Return uint8 pixels as float32 in [0, 1]."""
    return images.astype(np.float32) / np.float32(255)


def dropout_weights() -> Dict[str, np.ndarray]:
    """Return parameters under which one training step on one image shows what each dropout layer does.

    Every dropout layer gets inputs that are known: ones before the first two, and the same number everywhere
    before the third. The label's gradient reaches each channel of conv3 through one pixel alone.
    """
    parameters = {name: np.zeros(shape, np.float32) for name, shape in PARAMETERS.items()}
    for name in ("conv1.bias", "conv2.bias", "conv3.bias"):
        parameters[name] += 1
    channels = np.arange(100)
    parameters["conv4.weight"][channels, channels, 1, 1] = 1
    parameters["dense1.weight"][:, _probed_features()] = 0.01
    parameters["dense2.weight"][0] = 1 / 512
    return parameters


def dropout_batch(layout: str = "NCHW") -> Tuple[np.ndarray, np.ndarray]:
    """Return the batch of one image, of label 0, that goes with `dropout_weights`."""
    return in_layout(np.ones((1, 3, 32, 32), np.float32), layout), np.array([0])


def dropout_outputs(update: Dict[str, np.ndarray]) -> List[np.ndarray]:
    """Return what each dropout layer made of ones: flat arrays of 0 and 1 / (1 - rate).

    `update` is how one SGD step from `dropout_weights` on `dropout_batch` changed the parameters. With a batch of
    one, a weight's gradient is the output's times the input, and a bias's is the output's alone: their ratio
    is the layer's input.
    """
    reached = update["conv3.bias"] != 0
    first = update["conv3.weight"][reached] / update["conv3.bias"][reached].reshape(-1, 1, 1, 1)
    strongest = np.argmax(abs(update["dense1.bias"]))
    second = update["dense1.weight"][strongest] / update["dense1.bias"][strongest]
    third = update["dense2.weight"][1] / update["dense2.bias"][1]
    return [first.ravel(), second, third / (0.01 * second[_probed_features()].sum())]


def _probed_features() -> np.ndarray:
    """Return one position of the flattened features for each channel, away from the image's border."""
    channels = np.arange(100)
    row, column = 1 + channels % 6, 1 + channels // 6 % 6
    return np.asarray(channels * 64 + row * 8 + column)
