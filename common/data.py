"""The data sets: found, or downloaded and verified, or made up and announced.

A data set is looked for in the folder that `ROSETTA_DATA` names, then in the project's cache
`data/`, then downloaded there from its official home. Every file is verified before its content
is used, and what is pickled is read without running it.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Callable, Dict, NamedTuple, Optional, Tuple, TypeVar

import numpy as np

from common import unpickle
from common.download import DataError, Unavailable, fetch_file, fetch_folder, find

__all__ = [
    "DataError",
    "Images",
    "Reviews",
    "cifar10",
    "imdb",
    "resnet50_weights",
    "synthetic_images",
    "synthetic_reviews",
]

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SIZE = 170_052_171
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_FILE_SIZE = 30_730_000
CIFAR10_FILES: Dict[str, str] = {  # SHA-256
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

IMDB_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/imdb.npz"
IMDB_SIZE = 17_464_789
IMDB_SHA256 = "69664113be75683a8fe16e3ed0ab59fda8886cb3cd7ada244f7d9544e4676b9f"
IMDB_FILE = "imdb.npz"
# Of the arrays themselves, as int32: the same ones can be pickled and zipped in many ways.
IMDB_CONTENT_SHA256 = "2f4a2166fc664c8bae119b65e9dd167872c86e7e759750b2b04d848d18187e37"

RESNET50_URL = "https://download.pytorch.org/models/resnet50-0676ba61.pth"
RESNET50_SIZE = 102_530_333
RESNET50_SHA256 = "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a"
RESNET50_FILE = "resnet50-0676ba61.pth"

DataSet = TypeVar("DataSet")


class Images(NamedTuple):
    """Labelled images: uint8 (count, channels, height, width) with int64 labels (count,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str  # "real" or "synthetic"


class Reviews(NamedTuple):
    """Labelled reviews: int32 tokens (count, length) with int64 labels (count,), 1 for a positive review."""

    train_tokens: np.ndarray
    train_labels: np.ndarray
    test_tokens: np.ndarray
    test_labels: np.ndarray
    source: str  # "real" or "synthetic"


def cifar10(choice: str = "auto") -> Images:
    """Return CIFAR-10: 50,000 training and 10,000 test images of 3×32×32.

    `choice` is "real", "synthetic" (made up, no network touched), or "auto": real where it can be
    had, else synthetic with an announcement on stderr. Raises `DataError` where real data are asked for and can't
    be had, and wherever a file is there but isn't what it should be.
    """
    return _real(choice, "CIFAR-10", CIFAR10_FOLDER, _download_cifar10, _read_cifar10) or synthetic_images(
        50_000, 10_000
    )


def imdb(choice: str = "auto", vocabulary: int = 30_000, length: int = 150) -> Reviews:
    """Return IMDB's film reviews, 25,000 for training and 25,000 for testing, each cut or padded to `length` tokens.

    Tokens are numbered as Keras does it: 0 is padding, 1 the start of a review, 2 a word out of the vocabulary; the
    others, from 4 up, are words, the more frequent the lower, and all below `vocabulary`. Long reviews lose their
    beginning, short ones are padded in front. `choice` and what is raised are as for `cifar10`.
    """

    def read(path: Path) -> Reviews:
        return _read_imdb(path, vocabulary, length)

    return _real(choice, "IMDB", IMDB_FILE, _download_imdb, read) or synthetic_reviews(
        25_000, 25_000, vocabulary, length
    )


def resnet50_weights(download: bool) -> Optional[Dict[str, np.ndarray]]:
    """Return ResNet-50's ImageNet weights (torchvision's V1) without the classifier, float32 by PyTorch's names.

    Where they are not at hand they are downloaded if `download` says so; None, announced on stderr, where they can't
    be had. Raises `DataError` where the file is there but isn't what it should be.
    """
    path = find(RESNET50_FILE)
    if path is None and download:
        try:
            path = fetch_file(RESNET50_URL, RESNET50_SIZE, RESNET50_SHA256)
        except Unavailable as reason:
            print(
                "SEEDED WEIGHTS: ResNet-50's could not be had ({}). The speed is the same; the features mean nothing. "
                "Set ROSETTA_DATA to a folder that holds {}.".format(reason, RESNET50_FILE),
                file=sys.stderr,
            )
    if path is None:
        return None
    content = _read_verified(path, "delete it", RESNET50_SIZE, RESNET50_SHA256)
    try:
        found = unpickle.state_dict(content)
    except unpickle.UnpickleError as error:
        raise _wrong(path, str(error), "delete it") from None
    return {
        name: found[name] for name in found if not name.startswith("fc.") and not name.endswith(".num_batches_tracked")
    }


def synthetic_images(train: int, test: int) -> Images:
    """Return made-up images of CIFAR-10's shapes, the same on every machine, whose ten labels can be learnt.

    Each class has a smooth pattern; an image is its class's pattern, shifted and drowned in noise.
    """
    random = np.random.RandomState(0)
    patterns = random.uniform(0, 1, (10, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
    shifted = np.stack([np.roll(patterns, shift, axis=3) for shift in range(-4, 5, 2)], axis=1)
    # One long strip of noise, entered at a random place for each image, costs a tenth of fresh noise.
    noise = random.randint(0, 160, 1_000_000 + 3072).astype(np.uint8)

    def draw(count: int) -> Tuple[np.ndarray, np.ndarray]:
        labels = random.randint(0, 10, count)
        images = (shifted * 95).astype(np.uint8)[labels, random.randint(0, shifted.shape[1], count)]
        for image, start in zip(images, random.randint(0, 1_000_000, count)):
            image += noise[start : start + 3072].reshape(3, 32, 32)
        return images, labels.astype(np.int64)

    return Images(*draw(train), *draw(test), "synthetic")


def synthetic_reviews(train: int, test: int, vocabulary: int, length: int) -> Reviews:
    """Return made-up reviews, numbered as `imdb` does it, the same on every machine, whose labels can be learnt.

    Word n is drawn in proportion to 1 / n, as in real text. Frequent words come in pairs, of which
    positive reviews prefer one and negative reviews the other.
    """
    random = np.random.RandomState(0)
    words = np.arange(1, 40_001, dtype=np.int32)
    lottery = np.repeat(words, len(words) // words)  # whole numbers, since logarithms differ between machines
    by_class = np.stack([lottery, lottery])
    partisan = np.flatnonzero((lottery >= 50) & (lottery < 1000))[::2]
    by_class[:, partisan] = lottery[partisan] & ~1 | np.array([[0], [1]])

    def draw(count: int) -> Tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % 2
        lengths = random.randint(20, 280, count)
        drawn = random.randint(0, len(lottery), lengths.sum())
        return _indexed(by_class[labels.repeat(lengths), drawn], lengths, vocabulary, length), labels.astype(np.int64)

    return Reviews(*draw(train), *draw(test), "synthetic")


def _real(
    choice: str, title: str, name: str, download: Callable[[], Path], read: Callable[[Path], DataSet]
) -> Optional[DataSet]:
    """Return a data set found or downloaded, or None, announced, where a synthetic one has to do."""
    if choice not in ("auto", "real", "synthetic"):
        raise ValueError("choice must be auto, real or synthetic, not {}".format(choice))
    if choice == "synthetic":
        return None
    try:
        return read(find(name) or download())
    except Unavailable as reason:
        if choice == "real":
            problem = "{} is not at hand: {}; set ROSETTA_DATA to a folder that holds {}".format(title, reason, name)
            raise DataError(problem) from None
        print(
            "SYNTHETIC DATA: {} could not be had ({}). The shapes are the same; the accuracy means nothing. "
            "Set ROSETTA_DATA to a folder that holds {}.".format(title, reason, name),
            file=sys.stderr,
        )
    return None


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _wrong(path, str(error.strerror), remedy) from None


def _read_verified(path: Path, remedy: str, size: int, sha256: str) -> bytes:
    content = _read(path, remedy)
    if len(content) != size:
        raise _wrong(path, "has {:,} bytes instead of {:,}".format(len(content), size), remedy)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise _wrong(path, "its content is not the official one (SHA-256 differs)", remedy)
    return content


def _wrong(path: Path, problem: str, remedy: str) -> DataError:
    advice = "{} to have it downloaded again, or set ROSETTA_DATA to a good copy".format(remedy)
    return DataError("{}: {}; {}".format(path, problem, advice))


def _download_cifar10() -> Path:
    return fetch_folder(
        CIFAR10_URL, CIFAR10_SIZE, CIFAR10_SHA256, CIFAR10_FOLDER, set(CIFAR10_FILES), CIFAR10_FILE_SIZE
    )


def _read_cifar10(folder: Path) -> Images:
    """Return the data set in `folder`, each file verified."""
    parts = [_read_cifar10_file(folder / name, digest) for name, digest in CIFAR10_FILES.items()]
    images = [images for images, _ in parts]
    labels = [labels for _, labels in parts]
    return Images(np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1], "real")


def _read_cifar10_file(path: Path, sha256: str) -> Tuple[np.ndarray, np.ndarray]:
    """Return images and labels of one binary file: records of a label byte and 3,072 pixel bytes."""
    content = _read_verified(path, "delete the folder", CIFAR10_FILE_SIZE, sha256)
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3072)
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _download_imdb() -> Path:
    return fetch_file(IMDB_URL, IMDB_SIZE, IMDB_SHA256)


def _read_imdb(path: Path, vocabulary: int, length: int) -> Reviews:
    """Return the reviews in `path`, verified."""
    content = _read(path, "delete it")
    try:
        parts = [
            (*unpickle.integer_lists(content, "x_" + part), unpickle.integers(content, "y_" + part))
            for part in ("train", "test")
        ]
    except unpickle.UnpickleError as error:
        raise _wrong(path, str(error), "delete it") from None
    digest = hashlib.sha256(b"".join(array.astype("<i4").tobytes() for part in parts for array in part))
    if digest.hexdigest() != IMDB_CONTENT_SHA256 and hashlib.sha256(content).hexdigest() != IMDB_SHA256:
        raise _wrong(path, "its content is not the official one (SHA-256 differs)", "delete it")
    (train_tokens, train_labels), (test_tokens, test_labels) = (
        (_indexed(words, lengths, vocabulary, length), labels.astype(np.int64)) for words, lengths, labels in parts
    )
    return Reviews(train_tokens, train_labels, test_tokens, test_labels, "real")


def _indexed(words: np.ndarray, lengths: np.ndarray, vocabulary: int, length: int) -> np.ndarray:
    """Return the last `length` tokens of each review, int32 (count, length), given its words end to end, int32."""
    ends = lengths.cumsum()[:, np.newaxis]
    starts = ends - lengths[:, np.newaxis]
    chosen = ends + np.arange(-length, 0)
    tokens = words[np.maximum(chosen, 0)] + np.int32(3)
    tokens[tokens >= vocabulary] = 2
    tokens[chosen == starts - 1] = 1
    tokens[chosen < starts - 1] = 0
    return tokens
