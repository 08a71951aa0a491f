"""Where data come from: found in a folder, or downloaded, resumed, verified and safely extracted into the cache.

One process at a time writes to the cache; what is there is whole.
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
from typing import Iterator, Optional, Set, Tuple

CACHE = Path(__file__).resolve().parent.parent / "data"
TIMEOUT_S = 15.0  # without a byte from the server


class DataError(RuntimeError):
    """Data that can't be had or can't be trusted; its message names the file and says what to do."""


class Unavailable(Exception):
    """A file can't be had here: its home can't be reached, or the cache is read-only."""


def find(name: str) -> Optional[Path]:
    """Return where a file or folder lies already: in the folder of `ROSETTA_DATA` or in the cache; None if in neither.

    Raises `DataError` where `ROSETTA_DATA` names no folder, or one that can't be searched.
    """
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


def fetch_file(url: str, size: int, sha256: str) -> Path:
    """Return the cache's copy of the file at `url`, downloaded unless it is there already, and verified.

    Raises `Unavailable` where it can't be had, `DataError` where its content is wrong or can't be written.
    """
    with _cache_to_ourselves():
        return _download(url, size, sha256)


def fetch_folder(url: str, size: int, sha256: str, name: str, files: Set[str], largest: int) -> Path:
    """Return the folder `name` of the cache, made of the named files in the tar archive at `url`.

    No file may have more than `largest` bytes. Raises as `fetch_file` does.
    """
    folder = CACHE / name
    with _cache_to_ourselves():
        if not _is_there(folder):  # another process may have been faster
            _extract(_download(url, size, sha256), folder, files, largest)
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
            raise Unavailable("{}: {}".format(path, error.strerror)) from None
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


def _download(url: str, size: int, sha256: str) -> Path:
    """Return the file of that name in the cache, downloaded from `url` unless it is there already, and verified.

    What was downloaded before a break is kept beside it and resumed from. Raises `Unavailable` where the server
    doesn't answer or has no such file, `DataError` where the content is wrong or can't be written.
    """
    target = CACHE / url.rsplit("/", 1)[-1]
    part = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    try:
        path = target if target.exists() else _complete(url, part, size)
        with open(str(path), "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
        if digest.hexdigest() != sha256:
            path.unlink()
            remedy = "try again, or set ROSETTA_DATA to a folder that holds the data"
            raise DataError("{}: is not the official file (SHA-256 differs), so deleted; {}".format(path, remedy))
        os.replace(str(path), str(target))
    except OSError as error:
        raise _not_written(part, error) from None
    return target


def _complete(url: str, part: Path, size: int) -> Path:
    """Return `part`, completed from `url`, with a progress bar."""
    start = part.stat().st_size if part.exists() else 0
    if start != size:
        with open(str(part), "ab") as file:
            for offset, block in _receive(url, start if start < size else 0, size):
                file.truncate(offset)  # a server that can't resume sends all of it again
                file.write(block)
                _show_progress(url, offset + len(block), size)
    return part


def _receive(url: str, start: int, size: int) -> Iterator[Tuple[int, bytes]]:
    """Yield what `url` sends as (offset, block), from `start` or, where the server can't resume, from 0.

    Whatever goes wrong on the network raises `Unavailable`; faults of the disk are the caller's and stay apart.
    """
    request = urllib.request.Request(url, headers={"Range": "bytes={}-".format(start)} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            done = start if response.status == 206 else 0
            if response.length is not None and done + response.length != size:
                # a login page, say: not a byte of it may get into the file
                problem = "would send {:,} bytes instead of {:,}".format(done + response.length, size)
                raise Unavailable("{}: {}".format(url, problem))
            while done < size:
                block = response.read(min(1 << 18, size - done))
                if not block:
                    problem = "broke off after {:,} of {:,} bytes; the next try resumes".format(done, size)
                    raise Unavailable("{}: {}".format(url, problem))
                yield done, block
                done += len(block)
    except (OSError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise Unavailable("{}: {}".format(url, " ".join(reason.split()))) from None


def _show_progress(url: str, done: int, size: int) -> None:
    if sys.stderr.isatty():
        bar = "#" * (30 * done // size)
        end = "\n" if done == size else "\r"  # the next bar, or a message, takes this one's place
        print("{} [{:<30}] {:3d} %".format(url, bar, 100 * done // size), file=sys.stderr, end=end, flush=True)


def _extract(archive: Path, target: Path, names: Set[str], largest: int) -> None:
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
