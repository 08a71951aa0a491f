"""The data sets: found, or downloaded and verified, or made up and announced.

A data set is looked for in the folder that `ROSETTA_DATA` names, then in the project's cache
`data/`, then downloaded there from its official home. Every file is verified before a byte of it
is used, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Dict, NamedTuple, Optional

import numpy as np

CACHE = Path(__file__).resolve().parent.parent / "data"
TIMEOUT_S = 15.0  # without a byte from the server

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


class DataError(RuntimeError):
    """Data that can't be had or can't be trusted; its message names the file and says what to do."""


class Images(NamedTuple):
    """Labelled images: uint8 (count, channels, height, width) with int64 labels (count,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str  # "real" or "synthetic"


def cifar10(choice: str = "auto") -> Images:
    """Return CIFAR-10: 50,000 training and 10,000 test images of 3×32×32.

    `choice` is "real", "synthetic" (made up, no network touched), or "auto": real where it can be
    had, else synthetic with an announcement on stderr. Raises `DataError` where real data are asked for and can't
    be had, and wherever a file is there but isn't what it should be.
    """
    if choice not in ("auto", "real", "synthetic"):
        raise ValueError("choice must be auto, real or synthetic, not {}".format(choice))
    if choice != "synthetic":
        folder = _find(CIFAR10_FOLDER)
        try:
            return _read_cifar10(folder or _download_cifar10())
        except _NotReachable as reason:
            if choice == "real":
                raise DataError(
                    "CIFAR-10 is not at hand: {}; set ROSETTA_DATA to a folder that holds {}".format(
                        reason, CIFAR10_FOLDER
                    )
                ) from None
            print(
                "SYNTHETIC DATA: CIFAR-10 could not be had ({}). The shapes are the same; the accuracy means nothing. "
                "Set ROSETTA_DATA to a folder that holds {}.".format(reason, CIFAR10_FOLDER),
                file=sys.stderr,
            )
    return synthetic_images(50_000, 10_000)


def synthetic_images(train: int, test: int) -> Images:
    """Return made-up images of CIFAR-10's shapes, the same on every machine, whose ten labels can be learnt.

    Each class has a smooth pattern; an image is its class's pattern, shifted and drowned in noise.
    """
    random = np.random.RandomState(0)
    patterns = random.uniform(0, 1, (10, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
    shifted = np.stack([np.roll(patterns, shift, axis=3) for shift in range(-4, 5, 2)], axis=1)
    # One long strip of noise, entered at a random place for each image, costs a tenth of fresh noise.
    noise = random.randint(0, 160, 1_000_000 + 3072).astype(np.uint8)

    def draw(count: int) -> "tuple[np.ndarray, np.ndarray]":
        labels = random.randint(0, 10, count)
        images = (shifted * 95).astype(np.uint8)[labels, random.randint(0, shifted.shape[1], count)]
        for image, start in zip(images, random.randint(0, 1_000_000, count)):
            image += noise[start : start + 3072].reshape(3, 32, 32)
        return images, labels.astype(np.int64)

    return Images(*draw(train), *draw(test), "synthetic")


class _NotReachable(Exception):
    """The official home of a data set can't be reached."""


def _find(name: str) -> Optional[Path]:
    """Return where a data set lies already: in the folder of `ROSETTA_DATA` or in the cache."""
    given = os.environ.get("ROSETTA_DATA")
    if given:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise DataError("ROSETTA_DATA names {}, which is not a folder; correct it or unset it".format(folder))
        for candidate in (folder / name, folder):
            if candidate.name == name and candidate.exists():
                return candidate
    return CACHE / name if (CACHE / name).exists() else None


def _read_cifar10(folder: Path) -> Images:
    """Return the data set in `folder`, each file verified."""
    parts = [_read_cifar10_file(folder / name, digest) for name, digest in CIFAR10_FILES.items()]
    images = [images for images, _ in parts]
    labels = [labels for _, labels in parts]
    return Images(np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1], "real")


def _read_cifar10_file(path: Path, sha256: str) -> "tuple[np.ndarray, np.ndarray]":
    """Return images and labels of one binary file: records of a label byte and 3,072 pixel bytes."""
    remedy = "delete the folder to have it downloaded again, or set ROSETTA_DATA to a good copy"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError("{}: {}; {}".format(path, error.strerror, remedy)) from None
    if len(content) != CIFAR10_FILE_SIZE:
        problem = "has {:,} bytes instead of {:,}".format(len(content), CIFAR10_FILE_SIZE)
        raise DataError("{}: {}; {}".format(path, problem, remedy))
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError("{}: its content is not the official one (SHA-256 differs); {}".format(path, remedy))
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3072)
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _download_cifar10() -> Path:
    """Download and extract CIFAR-10 into the cache and return its folder."""
    archive = _download(CIFAR10_URL, CACHE / "cifar-10-binary.tar.gz", CIFAR10_SIZE, CIFAR10_SHA256)
    return _extract(archive, CACHE / CIFAR10_FOLDER, set(CIFAR10_FILES), CIFAR10_FILE_SIZE)


def _download(url: str, target: Path, size: int, sha256: str) -> Path:
    """Return `target`, downloaded from `url` unless it is there already, and verified.

    What was downloaded before a break is kept beside it and resumed from. Raises `_NotReachable` where the server
    doesn't answer, `DataError` where the content is wrong or can't be written.
    """
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            _fetch(url, part, size)
            os.replace(str(part), str(target))
    except urllib.error.URLError as error:
        raise _NotReachable("{}: {}".format(url, getattr(error, "reason", error))) from None
    except (ConnectionError, TimeoutError) as error:
        raise _NotReachable("{}: {}".format(url, error)) from None
    except OSError as error:
        raise DataError("{}: can't be written: {}".format(part, error.strerror or error)) from None
    digest = hashlib.sha256()
    with open(str(target), "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != sha256:
        target.unlink()
        raise DataError("{}: what {} sent is not the official file (SHA-256 differs); deleted".format(target, url))
    return target


def _fetch(url: str, part: Path, size: int) -> None:
    """Complete `part` from `url`, with a progress bar; start anew where the server can't resume."""
    done = part.stat().st_size if part.exists() else 0
    if done == size:
        return
    request = urllib.request.Request(url, headers={"Range": "bytes={}-".format(done)} if done else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        resumed = response.status == 206
        with open(str(part), "ab" if resumed else "wb") as file:
            done = done if resumed else 0
            for block in iter(lambda: response.read(1 << 18), b""):
                file.write(block)
                done += len(block)
                _show_progress(url, done, size)
    if done < size:
        raise ConnectionError("broke off after {:,} of {:,} bytes; the next try resumes".format(done, size))


def _show_progress(url: str, done: int, size: int) -> None:
    if sys.stderr.isatty():
        bar = "#" * (30 * done // size)
        end = "\n" if done >= size else ""
        print("\r{} [{:<30}] {:3d} %".format(url, bar, 100 * done // size), file=sys.stderr, end=end, flush=True)


def _extract(archive: Path, target: Path, names: "set[str]", largest: int) -> Path:
    """Write the named files of a tar archive to the folder `target`, whole or not at all, and nothing else anywhere.

    Members count by their last name alone, so no path in the archive can lead out of the folder.
    """
    temporary = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=str(target.parent)))
    try:
        with tarfile.open(str(archive)) as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                content = tar.extractfile(member) if member.isreg() and member.size <= largest else None
                if name in names and content is not None:
                    with open(str(temporary / name), "wb") as file:
                        shutil.copyfileobj(content, file)
        missing = names - {path.name for path in temporary.iterdir()}
        if missing:
            raise DataError("{}: lacks {}; delete it to have it downloaded again".format(archive, sorted(missing)[0]))
        if not target.exists():  # another process may have been faster
            os.replace(str(temporary), str(target))
    except (tarfile.TarError, EOFError) as error:
        raise DataError("{}: not a whole archive ({}); delete it".format(archive, error)) from None
    except OSError as error:
        raise DataError("{}: can't be written: {}".format(target, error.strerror)) from None
    finally:
        shutil.rmtree(str(temporary), ignore_errors=True)
    return target
