"""The data sets: found, or downloaded and verified, or made up and announced.

A data set is looked for in the folder that `ROSETTA_DATA` names, then in the project's cache
`data/`, then downloaded there from its official home. Every file is verified before a byte of it
is used, and nothing is unpickled.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import urllib.request
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

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
        except _Unavailable as reason:
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


class _Unavailable(Exception):
    """A data set can't be had here: its home can't be reached, or the cache is read-only."""


def _find(name: str) -> Optional[Path]:
    """Return where a data set lies already: in the folder of `ROSETTA_DATA` or in the cache."""
    given = os.environ.get("ROSETTA_DATA")
    if given:
        folder = Path(os.path.abspath(os.path.expanduser(given)))
        if not os.path.isdir(str(folder)):
            raise DataError("ROSETTA_DATA names {}, which is not a folder; correct it or unset it".format(folder))
        for candidate in (folder / name, folder):
            if candidate.name == name and _is_there(candidate):
                return candidate
    return CACHE / name if _is_there(CACHE / name) else None


def _is_there(path: Path) -> bool:
    """Return whether anything is there; a broken link is, so that it is reported instead of passed over."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError("{}: {}; set ROSETTA_DATA to a folder that can be read".format(path, error.strerror)) from None
    return True


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
    folder = CACHE / CIFAR10_FOLDER
    with _cache_to_ourselves():
        if not _is_there(folder):  # another process may have been faster
            archive = _download(CIFAR10_URL, CACHE / "cifar-10-binary.tar.gz", CIFAR10_SIZE, CIFAR10_SHA256)
            _extract(archive, folder, set(CIFAR10_FILES), CIFAR10_FILE_SIZE)
    return folder


@contextmanager
def _cache_to_ourselves() -> Iterator[None]:
    """Let one process at a time write to the cache; the lock ends with its process, so none is left behind."""
    path = CACHE / ".lock"
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        lock = os.open(str(path), os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _Unavailable("{}: {}".format(path, error.strerror)) from None
        raise _not_written(path, error) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another process that downloads to {}".format(CACHE), file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise _not_written(path, error) from None
        yield
    finally:
        os.close(lock)


def _not_written(path: Path, error: OSError) -> DataError:
    remedy = "make room there, or set ROSETTA_DATA to a folder that holds the data"
    return DataError("{}: can't be written: {}; {}".format(path, error.strerror or error, remedy))


def _download(url: str, target: Path, size: int, sha256: str) -> Path:
    """Return `target`, downloaded from `url` unless it is there already, and verified.

    What was downloaded before a break is kept beside it and resumed from. Raises `_Unavailable` where the server
    doesn't answer or has no such file, `DataError` where the content is wrong or can't be written.
    """
    part = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    try:
        if not target.exists():
            _fetch(url, part, size)
            os.replace(str(part), str(target))
        with open(str(target), "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
        if digest.hexdigest() != sha256:
            target.unlink()
            remedy = "try again, or set ROSETTA_DATA to a folder that holds the data"
            raise DataError("{}: is not the official file (SHA-256 differs), so deleted; {}".format(target, remedy))
    except OSError as error:
        raise _not_written(part, error) from None
    return target


def _fetch(url: str, part: Path, size: int) -> None:
    """Complete `part` from `url`, with a progress bar."""
    start = part.stat().st_size if part.exists() else 0
    if start == size:
        return
    with open(str(part), "ab") as file:
        for offset, block in _receive(url, start if start < size else 0, size):
            file.truncate(offset)  # a server that can't resume sends all of it again
            file.write(block)
            _show_progress(url, offset + len(block), size)


def _receive(url: str, start: int, size: int) -> Iterator[Tuple[int, bytes]]:
    """Yield what `url` sends as (offset, block), from `start` or, where the server can't resume, from 0.

    Whatever goes wrong on the network raises `_Unavailable`; faults of the disk are the caller's and stay apart.
    """
    request = urllib.request.Request(url, headers={"Range": "bytes={}-".format(start)} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            done = start if response.status == 206 else 0
            if response.length is not None and done + response.length != size:
                # a login page, say: not a byte of it may get into the file
                problem = "would send {:,} bytes instead of {:,}".format(done + response.length, size)
                raise _Unavailable("{}: {}".format(url, problem))
            while done < size:
                block = response.read(min(1 << 18, size - done))
                if not block:
                    problem = "broke off after {:,} of {:,} bytes; the next try resumes".format(done, size)
                    raise _Unavailable("{}: {}".format(url, problem))
                yield done, block
                done += len(block)
    except (OSError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise _Unavailable("{}: {}".format(url, " ".join(reason.split()))) from None


def _show_progress(url: str, done: int, size: int) -> None:
    if sys.stderr.isatty():
        bar = "#" * (30 * done // size)
        end = "\n" if done == size else "\r"  # the next bar, or a message, takes this one's place
        print("{} [{:<30}] {:3d} %".format(url, bar, 100 * done // size), file=sys.stderr, end=end, flush=True)


def _extract(archive: Path, target: Path, names: "set[str]", largest: int) -> None:
    """Write the named files of a tar archive to the folder `target`, whole or not at all, and nothing else anywhere.

    Members count by their last name alone, so no path in the archive can lead out of the folder. Raises `DataError`.
    """
    temporary = target.with_name(target.name + ".new")
    writing = target
    try:
        shutil.rmtree(str(temporary), ignore_errors=True)  # left by a process that was killed
        temporary.mkdir()
        with tarfile.open(str(archive)) as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                content = tar.extractfile(member) if member.isreg() and member.size <= largest else None
                if name in names and content is not None:
                    writing = target / name
                    with open(str(temporary / name), "wb") as file:
                        shutil.copyfileobj(content, file)
        missing = names - {path.name for path in temporary.iterdir()}
        if missing:
            raise DataError("{}: lacks {}; delete it to have it downloaded again".format(archive, sorted(missing)[0]))
        os.replace(str(temporary), str(target))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = "not a whole archive ({}); delete it to have it downloaded again".format(error)
        raise DataError("{}: {}".format(archive, problem)) from None
    except OSError as error:
        raise _not_written(writing, error) from None
    finally:
        shutil.rmtree(str(temporary), ignore_errors=True)
