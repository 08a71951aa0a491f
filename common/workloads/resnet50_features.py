"""Specification of `resnet50_features`: image features from ResNet-50, inference.

ResNet-50 v1.5 (He et al., 2016, with the stride in each block's 3×3 convolution), cut after global average pooling:
2048 features of an image. Batch normalisation uses its running statistics, with epsilon 1e-5.

Parameters are named, shaped and laid out as in torchvision's file: convolutions OIHW, no biases. Each notebook
converts on load. The images are CIFAR-10's test images, enlarged: they have classes, so a metric can show what the
features are worth.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from common import data as datasets
from common.layouts import in_layout

TITLE = "ResNet-50 features, inference"
METRIC = "nearest-neighbour accuracy"

FEATURES = 2048
BATCH_SIZE = 32
SIZE = 224
EPSILON = 1e-5  # of batch normalisation
BLOCKS = (3, 4, 6, 3)  # bottleneck blocks in each of the four layers
WIDTHS = (64, 128, 256, 512)  # channels of a block's first two convolutions; its output has four times as many
MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # of ImageNet's RGB channels, pixels in [0, 1]
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


class Block(NamedTuple):
    """One bottleneck block: 1×1, 3×3 and 1×1 convolutions beside a shortcut."""

    name: str
    channels: int  # of its input
    width: int
    stride: int  # of the 3×3 convolution, and of the shortcut's
    shortcut: bool  # whether the shortcut has a convolution: where the shapes of input and output differ


def blocks() -> List[Block]:
    """Return the 16 blocks in the order of the forward pass."""
    found, channels = [], 64
    for layer, (count, width) in enumerate(zip(BLOCKS, WIDTHS), 1):
        for index in range(count):
            stride = 2 if layer > 1 and index == 0 else 1
            found.append(Block("layer{}.{}".format(layer, index), channels, width, stride, index == 0))
            channels = 4 * width
    return found


def _shapes() -> Iterator[Tuple[str, Tuple[int, ...], str]]:
    """Yield name and shape of each convolution in the order of the forward pass, and the name of its normalisation."""
    yield "conv1", (64, 3, 7, 7), "bn1"
    for name, channels, width, _, shortcut in blocks():
        yield name + ".conv1", (width, channels, 1, 1), name + ".bn1"
        yield name + ".conv2", (width, width, 3, 3), name + ".bn2"
        yield name + ".conv3", (4 * width, width, 1, 1), name + ".bn3"
        if shortcut:
            yield name + ".downsample.0", (4 * width, channels, 1, 1), name + ".downsample.1"


#: Canonical names and shapes of what is learnt, in the order of the forward pass.
PARAMETERS: Dict[str, Tuple[int, ...]] = {}
#: The running statistics of batch normalisation, which are not learnt.
STATISTICS: Dict[str, Tuple[int, ...]] = {}
for _convolution, _shape, _normalisation in _shapes():
    PARAMETERS[_convolution + ".weight"] = _shape
    PARAMETERS.update({_normalisation + end: _shape[:1] for end in (".weight", ".bias")})
    STATISTICS.update({_normalisation + end: _shape[:1] for end in (".running_mean", ".running_var")})


class Profile(NamedTuple):
    """How much work one trial does."""

    images: int  # of one pass, a multiple of the batch size
    steps: int  # batches in all, warm-up included; the images are passed through again and again
    warmup_steps: int  # the first batches, left out of the timing
    timeout_s: int  # a trial that takes longer is ended
    synthetic: bool  # whether synthetic images may stand in for CIFAR-10


PROFILES: Dict[str, Profile] = {
    "smoke": Profile(images=64, steps=3, warmup_steps=1, timeout_s=900, synthetic=True),
    "quick": Profile(images=128, steps=8, warmup_steps=2, timeout_s=1800, synthetic=True),
    "full": Profile(images=1280, steps=160, warmup_steps=40, timeout_s=3 * 3600, synthetic=False),
}

#: The largest error, relative to the float64 reference, with which a float32 trial is timed.
GATES: Dict[str, float] = {"forward": 1e-5}


def weights(seed: int = 0) -> Dict[str, np.ndarray]:
    """Return seeded parameters and running statistics by canonical name, float32.

    Uniform convolutions of variance 1 / (32 fan_in), an eighth of He's (2015) in size: variances are then as small as
    trained networks have them, and normalisation's epsilon shows. The statistics follow the signal: each
    running variance is near the variance that its convolution puts out, so that activations stay of order 1.
    Scales, shifts, means and variances are all drawn at random: none of them can be left out unnoticed.
    """
    random = np.random.RandomState(seed)
    found: Dict[str, np.ndarray] = {}

    def normalised(convolution: str, normalisation: str, second_moment: float, scale: float) -> None:
        """Draw a convolution whose inputs have this second moment, and a normalisation of about this scale."""
        shape = PARAMETERS[convolution + ".weight"]
        limit = np.sqrt(6.0 / np.prod(shape[1:])) / 8
        found[convolution + ".weight"] = random.uniform(-limit, limit, shape).astype(np.float32)
        drawn = {
            ".weight": scale * random.uniform(0.8, 1.2, shape[0]),
            ".bias": random.uniform(-0.2, 0.2, shape[0]),
            ".running_mean": random.uniform(-0.02, 0.02, shape[0]),
            ".running_var": second_moment / 32 * random.uniform(0.8, 1.2, shape[0]),
        }
        found.update({normalisation + end: array.astype(np.float32) for end, array in drawn.items()})

    normalised("conv1", "bn1", 1.0, 1.0)
    moment = 1.0  # of the block's input; about: ReLU halves a centred signal's, max-pooling raises it again
    for name, _, _, _, shortcut in blocks():
        normalised(name + ".conv1", name + ".bn1", moment, 1.0)
        normalised(name + ".conv2", name + ".bn2", 0.5, 1.0)
        normalised(name + ".conv3", name + ".bn3", 0.5, 0.5)
        if shortcut:
            normalised(name + ".downsample.0", name + ".downsample.1", moment, 1.0)
        moment = 0.65 if shortcut else moment + 0.2
    return {name: found[name] for name in (*PARAMETERS, *STATISTICS)}


def pretrained(choice: str = "auto") -> Optional[Dict[str, np.ndarray]]:
    """Return torchvision's ImageNet weights by canonical name, float32, or None where they can't be had.

    They are downloaded only where `choice` is "auto", and not even looked for where it is "synthetic". Raises
    `common.data.DataError` where the file is there but isn't what it should be.
    """
    return None if choice == "synthetic" else datasets.resnet50_weights(download=choice == "auto")


def flops_per_example() -> int:
    """Return floating-point operations of the forward pass for one image.

    A multiply-add counts as two. Only convolutions are counted.
    """

    def convolution(name: str, side: int) -> int:
        return 2 * int(np.prod(PARAMETERS[name + ".weight"])) * side * side

    total, side = convolution("conv1", SIZE // 2), SIZE // 4
    for name, _, _, stride, shortcut in blocks():
        total += convolution(name + ".conv1", side)
        side //= stride
        total += convolution(name + ".conv2", side) + convolution(name + ".conv3", side)
        total += convolution(name + ".downsample.0", side) if shortcut else 0
    return total


def prepare(profile: str, choice: str = "auto") -> str:
    """See to it that images and weights are at hand, downloading them if need be.

    Returns whether the images are "real" or "synthetic". Weights that can't be had are announced and do without.
    Raises `common.data.DataError` where there are no images to be had.
    """
    source: str = load(profile, choice).source
    pretrained("auto" if choice == "real" else choice)
    return source


def load(profile: str, choice: str = "auto") -> datasets.Images:
    """Return CIFAR-10 as uint8 images (count, 3, 32, 32) with int64 labels; the test images are the ones used.

    `choice` is "real", "synthetic" or "auto": real where it can be had, else synthetic if the
    profile allows it. Raises `common.data.DataError` where there are no data to be had.
    """
    spec = PROFILES[profile]
    images = datasets.cifar10("real" if choice == "auto" and not spec.synthetic else choice)
    return images._replace(test_images=images.test_images[: spec.images], test_labels=images.test_labels[: spec.images])


def batches(
    images: datasets.Images, profile: str, layout: str = "NCHW", batch_size: int = BATCH_SIZE
) -> Iterator[np.ndarray]:
    """Yield the batches of a trial: float32 (batch, 3, 224, 224) or, in layout NHWC, (batch, 224, 224, 3), contiguous.

    Pixels are enlarged 7 × 7, and scaled to ImageNet's mean and standard deviation.
    """
    spec = PROFILES[profile]
    for step in range(spec.steps):
        chosen = (step * batch_size + np.arange(batch_size)) % spec.images
        pixels = images.test_images[chosen].astype(np.float32) / np.float32(255)
        scaled = (pixels - MEAN.reshape(3, 1, 1)) / DEVIATION.reshape(3, 1, 1)
        yield in_layout(scaled.repeat(SIZE // 32, axis=2).repeat(SIZE // 32, axis=3), layout)


def check_inputs(layout: str = "NCHW") -> List[Tuple[np.ndarray]]:
    """Return the two batches on which the forward pass is held against the reference: two images, and one."""
    random = np.random.RandomState(1)
    return [(in_layout(random.standard_normal((count, 3, SIZE, SIZE)).astype(np.float32), layout),) for count in (2, 1)]
