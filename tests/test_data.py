"""The data: real ones verified, downloads resumed and checked, hostile archives harmless, synthetic ones announced."""

from __future__ import annotations

import errno
import hashlib
import http.server
import io
import os
import resource
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from common import data, download
from tests import test_unpickle

RECORDS = 4  # in each of the small files that stand for CIFAR-10's


def binary(seed: int) -> bytes:
    """A file in CIFAR-10's binary layout: four records of a label and 3,072 pixels."""
    random = np.random.RandomState(seed)
    rows = random.randint(0, 256, (RECORDS, 3073)).astype(np.uint8)
    rows[:, 0] %= 10
    return rows.tobytes()


FILES = {name: binary(seed) for seed, name in enumerate(data.CIFAR10_FILES)}


def archive(
    extra: dict[str, bytes] | None = None,
    leave_out: str = "",
    link: tuple[str, str] | None = None,
    kind: bytes = tarfile.SYMTYPE,
) -> bytes:
    """A tar.gz laid out as the official one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in {
            **{f"cifar-10-batches-bin/{name}": c for name, c in FILES.items()},
            **(extra or {}),
        }.items():
            if leave_out and name.endswith(leave_out):
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        if link:
            member = tarfile.TarInfo(link[0])
            member.type, member.linkname = kind, link[1]
            tar.addfile(member)
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves one file; can ignore ranges, break off, and take its time."""

    content = b""
    ranges = True
    break_after: int | None = None
    delay_s = 0.0
    requests: list[str | None]

    class RequestHandlerClass(http.server.BaseHTTPRequestHandler):
        server: Server

        def do_GET(self) -> None:
            asked = self.headers["Range"]
            self.server.requests.append(asked)
            time.sleep(self.server.delay_s)
            start = int(asked.strip("bytes=-")) if asked and self.server.ranges else 0
            body = self.server.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: self.server.break_after])

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Server.RequestHandlerClass)
    server.requests = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no way to the internet."""
    monkeypatch.setattr(download, "CACHE", tmp_path / "cache")
    for url in ("CIFAR10_URL", "IMDB_URL", "RESNET50_URL"):
        monkeypatch.setattr(data, url, f"http://127.0.0.1:9/{Path(getattr(data, url)).name}")
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(autouse=True)
def small_cifar10(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """CIFAR-10 of four images a file, and no ROSETTA_DATA."""
    if request.node.name.startswith("test_real_"):
        return
    monkeypatch.delenv("ROSETTA_DATA", raising=False)
    monkeypatch.setattr(data, "CIFAR10_FILE_SIZE", RECORDS * 3073)
    monkeypatch.setattr(data, "CIFAR10_FILES", {name: hashlib.sha256(c).hexdigest() for name, c in FILES.items()})


def serve(server: Server, monkeypatch: pytest.MonkeyPatch, content: bytes, what: str = "CIFAR10") -> None:
    server.content = content
    name = Path(getattr(data, f"{what}_URL")).name
    monkeypatch.setattr(data, f"{what}_URL", f"http://127.0.0.1:{server.server_address[1]}/{name}")
    expect(monkeypatch, content, what)


def expect(monkeypatch: pytest.MonkeyPatch, content: bytes, what: str) -> None:
    """Take `content` for the official one."""
    monkeypatch.setattr(data, f"{what}_SIZE", len(content))
    monkeypatch.setattr(data, f"{what}_SHA256", hashlib.sha256(content).hexdigest())


def lay_out(folder: Path) -> Path:
    (folder / data.CIFAR10_FOLDER).mkdir(parents=True)
    for name, content in FILES.items():
        (folder / data.CIFAR10_FOLDER / name).write_bytes(content)
    return folder


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let the kernel refuse to make any file larger than `size`, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def expect_small_cifar10(images: data.Images) -> None:
    assert images.source == "real"
    assert images.train_images.shape == (5 * RECORDS, 3, 32, 32)
    assert images.test_images.shape == (RECORDS, 3, 32, 32)
    first = np.frombuffer(FILES["data_batch_1.bin"], np.uint8).reshape(RECORDS, 3073)
    assert np.array_equal(images.train_images[0].ravel(), first[0, 1:])
    assert images.train_labels.dtype == np.int64
    assert images.train_labels[:RECORDS].tolist() == first[:, 0].tolist()


@pytest.mark.parametrize("inside", ["", data.CIFAR10_FOLDER])
def test_folder_of_rosetta_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    monkeypatch.setenv("ROSETTA_DATA", str(lay_out(tmp_path / "given") / inside))
    expect_small_cifar10(data.cifar10("auto"))


def test_folder_of_rosetta_data_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lay_out(tmp_path) / data.CIFAR10_FOLDER)
    monkeypatch.setenv("ROSETTA_DATA", ".")
    expect_small_cifar10(data.cifar10("auto"))


def test_cache_is_next_where_the_folder_of_rosetta_data_holds_other_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(download.CACHE)
    (tmp_path / "given").mkdir()
    monkeypatch.setenv("ROSETTA_DATA", str(tmp_path / "given"))
    expect_small_cifar10(data.cifar10("auto"))


def test_broken_link_in_rosetta_data_is_named_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(download.CACHE)
    (tmp_path / data.CIFAR10_FOLDER).symlink_to(tmp_path / "unmounted")
    monkeypatch.setenv("ROSETTA_DATA", str(tmp_path))
    with pytest.raises(data.DataError, match=r"cifar-10-batches-bin/data_batch_1\.bin: No such file"):
        data.cifar10("auto")


def test_folder_of_rosetta_data_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSETTA_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(data.DataError, match=r"nowhere, which is not a folder"):
        data.cifar10("auto")


@pytest.mark.parametrize("fault", ["truncated", "tampered", "missing"])
def test_faulty_file_is_named_and_never_replaced_by_synthetic_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path = lay_out(tmp_path) / data.CIFAR10_FOLDER / "data_batch_3.bin"
    content = path.read_bytes()
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if fault == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setenv("ROSETTA_DATA", str(tmp_path))
    with pytest.raises(data.DataError) as caught:
        data.cifar10("auto")
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert {"truncated": "12,291 bytes instead of 12,292", "tampered": "SHA-256", "missing": "No such file"}[
        fault
    ] in message


def test_download_is_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, archive())
    expect_small_cifar10(data.cifar10("auto"))
    expect_small_cifar10(data.cifar10("auto"))
    assert server.requests == [None]


@pytest.mark.parametrize("ranges", [True, False])
def test_download_that_broke_off_is_resumed(server: Server, monkeypatch: pytest.MonkeyPatch, ranges: bool) -> None:
    serve(server, monkeypatch, archive())
    server.break_after = 1000
    with pytest.raises(data.DataError, match="not at hand"):
        data.cifar10("real")
    server.break_after, server.ranges = None, ranges
    expect_small_cifar10(data.cifar10("real"))
    assert server.requests == [None, "bytes=1000-"]


def test_part_that_is_too_long_is_downloaded_anew(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, archive())
    download.CACHE.mkdir()
    (download.CACHE / "cifar-10-binary.tar.gz.part").write_bytes(bytes(len(server.content) + 1))
    expect_small_cifar10(data.cifar10("real"))
    assert server.requests == [None]


def test_two_at_once_download_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(server, monkeypatch, archive())
    server.delay_s = 0.5
    with ThreadPoolExecutor(2) as pool:
        for images in pool.map(data.cifar10, ["real", "real"]):
            expect_small_cifar10(images)
    assert server.requests == [None]
    assert "Waiting for another process" in capsys.readouterr().err


def test_what_a_killed_process_left_behind_is_in_nobody_s_way(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, archive())
    (download.CACHE / (data.CIFAR10_FOLDER + ".new") / "half").mkdir(parents=True)
    (download.CACHE / ".lock").touch()
    expect_small_cifar10(data.cifar10("real"))
    assert {path.name for path in (download.CACHE / data.CIFAR10_FOLDER).iterdir()} == set(FILES)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "timed out"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nabc", "timed out"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n", "IncompleteRead"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "Not Found"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nlogin", "would send 5 bytes instead of 5,000"),
    ],
)
def test_server_that_misbehaves_is_as_good_as_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: bytes, reason: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(data, "CIFAR10_URL", f"http://127.0.0.1:{listener.getsockname()[1]}/cifar-10-binary.tar.gz")
        monkeypatch.setattr(data, "CIFAR10_SIZE", 5000)
        monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
        with ThreadPoolExecutor(1) as pool:
            images = pool.submit(data.cifar10, "auto")
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)
                assert images.result(timeout=30).source == "synthetic"
    announced = capsys.readouterr().err
    assert reason in announced
    assert announced.count("\n") == 1
    assert b"login" not in (download.CACHE / "cifar-10-binary.tar.gz.part").read_bytes()


def test_download_of_something_else_is_refused_and_deleted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, archive())
    server.content = server.content[:-1] + b"x"
    with pytest.raises(data.DataError, match="is not the official file"):
        data.cifar10("auto")
    assert not list(download.CACHE.glob("*.tar.gz*"))


@pytest.mark.parametrize(
    "hostile",
    [
        {
            "extra": {
                "../../escaped": b"x",
                "/tmp/escaped-from-rosetta": b"x",
                "cifar-10-batches-bin/../../escaped": b"x",
            }
        },
        {"link": ("cifar-10-batches-bin/link", "/etc/passwd")},
        {"link": ("cifar-10-batches-bin/../../escaped", "data_batch_1.bin"), "kind": tarfile.LNKTYPE},
        {"link": ("cifar-10-batches-bin/device", ""), "kind": tarfile.CHRTYPE},
        {"extra": {"cifar-10-batches-bin/large": bytes(100_000)}},
    ],
)
def test_hostile_archive_writes_nothing_but_the_six_files(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hostile: dict[str, object]
) -> None:
    serve(server, monkeypatch, archive(**hostile))  # type: ignore[arg-type]
    expect_small_cifar10(data.cifar10("real"))
    written = {path.name for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()}
    assert written == {*FILES, "cifar-10-binary.tar.gz", ".lock"}
    assert not Path("/tmp/escaped-from-rosetta").exists()


def test_link_in_the_place_of_a_file_is_not_followed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(
        server,
        monkeypatch,
        archive(leave_out="test_batch.bin", link=("cifar-10-batches-bin/test_batch.bin", "/etc/passwd")),
    )
    with pytest.raises(data.DataError, match=r"lacks test_batch\.bin"):
        data.cifar10("real")
    assert not (download.CACHE / data.CIFAR10_FOLDER).exists()


def test_full_disk_names_the_download(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, archive())
    with files_up_to(5000), pytest.raises(data.DataError, match=r"\.part: can't be written: File too large"):
        data.cifar10("auto")
    expect_small_cifar10(data.cifar10("auto"))
    assert server.requests == [None, "bytes=5000-"]


def test_full_disk_names_the_file_that_is_extracted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, archive())
    download.CACHE.mkdir()
    (download.CACHE / "cifar-10-binary.tar.gz").write_bytes(server.content)
    with files_up_to(5000), pytest.raises(data.DataError, match=r"data_batch_1\.bin: can't be written: File too large"):
        data.cifar10("auto")
    assert {path.name for path in download.CACHE.iterdir()} == {"cifar-10-binary.tar.gz", ".lock"}


def test_file_in_the_cache_s_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(data.DataError, match=r"cache.*can't be written"):
        data.cifar10("auto")


def test_read_only_cache_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)  # root, who runs CI, may write anywhere
    assert data.cifar10("auto").source == "synthetic"
    with pytest.raises(data.DataError, match="Read-only file system; set ROSETTA_DATA"):
        data.cifar10("real")


def test_synthetic_data_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    images = data.cifar10("auto")
    assert images.source == "synthetic"
    assert "SYNTHETIC DATA" in capsys.readouterr().err


def test_refused_where_only_real_data_will_do() -> None:
    with pytest.raises(data.DataError, match="set ROSETTA_DATA to a folder that holds cifar-10-batches-bin"):
        data.cifar10("real")


def test_synthetic_data_are_of_the_same_shapes_and_frozen() -> None:
    images = data.cifar10("synthetic")
    assert images.train_images.shape == (50_000, 3, 32, 32)
    assert images.test_images.shape == (10_000, 3, 32, 32)
    assert images.train_images.dtype == np.uint8
    assert images.train_labels.dtype == np.int64
    assert set(images.train_labels) == set(range(10))
    assert hashlib.sha256(images.train_images.tobytes()).hexdigest()[:16] == "730f416676897097"
    rest = b"".join(array.tobytes() for array in (images.train_labels, images.test_images, images.test_labels))
    assert hashlib.sha256(rest).hexdigest()[:16] == "33466e668adbadc5"


def test_synthetic_labels_can_be_learnt() -> None:
    images = data.synthetic_images(2000, 500)
    x = images.train_images.reshape(2000, -1).astype(np.float64) / 255
    weights = np.linalg.solve(x.T @ x + 10 * np.eye(3072), x.T @ np.eye(10)[images.train_labels])
    predicted = (images.test_images.reshape(500, -1) / 255 @ weights).argmax(1)
    assert (predicted == images.test_labels).mean() > 0.8


REVIEWS = {
    "x_train": [[5] * 20, [1, 2, 3], [16, 17, 18, 19], list(range(1, 9)), [], [1], list(range(1, 7))],
    "y_train": [1, 0, 1, 0, 1, 0, 1],
    "x_test": [[4, 88_584, 4, 30_000, 1], [2, 1]],
    "y_test": [0, 1],
}


def imdb_npz(reviews: dict[str, list[list[int]]] | dict[str, list[int]], compressed: bool = False) -> bytes:
    """A file laid out as Keras'."""
    file = io.BytesIO()
    arrays = {
        name: test_unpickle.object_array(values) if name.startswith("x") else np.array(values, np.int64)  # type: ignore[arg-type]
        for name, values in reviews.items()
    }
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def content_digest(reviews: dict[str, list]) -> str:
    """SHA-256 of words end to end, lengths and labels, as int32."""
    digest = hashlib.sha256()
    for part in ("train", "test"):
        texts = reviews[f"x_{part}"]
        for numbers in ([word for text in texts for word in text], list(map(len, texts)), reviews[f"y_{part}"]):
            digest.update(np.array(numbers, "<i4").tobytes())
    return digest.hexdigest()


def as_keras_does(text: list[int], vocabulary: int, length: int) -> list[int]:
    """What Keras' `load_data` and `pad_sequences` make of a review, word by word."""
    tokens = [1, *(word + 3 for word in text)]
    tokens = [token if token < vocabulary else 2 for token in tokens]
    return ([0] * length + tokens)[-length:]


def lay_out_imdb(folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("ROSETTA_DATA", str(folder))
    (folder / "imdb.npz").write_bytes(content)
    return folder / "imdb.npz"


def expect_small_imdb(reviews: data.Reviews, vocabulary: int = 21, length: int = 6) -> None:
    assert reviews.source == "real"
    for part, tokens, labels in (
        ("train", reviews.train_tokens, reviews.train_labels),
        ("test", reviews.test_tokens, reviews.test_labels),
    ):
        assert tokens.tolist() == [as_keras_does(text, vocabulary, length) for text in REVIEWS[f"x_{part}"]]  # type: ignore[arg-type]
        assert tokens.dtype == np.int32
        assert labels.tolist() == REVIEWS[f"y_{part}"]
        assert labels.dtype == np.int64


@pytest.mark.parametrize(("vocabulary", "length"), [(21, 6), (30_000, 150), (5, 1), (100_000, 3)])
def test_reviews_are_numbered_cut_and_padded_as_keras_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: int, length: int
) -> None:
    content = imdb_npz(REVIEWS)
    lay_out_imdb(tmp_path, content, monkeypatch)
    monkeypatch.setattr(data, "IMDB_SHA256", hashlib.sha256(content).hexdigest())
    expect_small_imdb(data.imdb("auto", vocabulary, length), vocabulary, length)


def test_the_same_reviews_packed_otherwise_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "IMDB_CONTENT_SHA256", content_digest(REVIEWS))
    lay_out_imdb(tmp_path, imdb_npz(REVIEWS, compressed=True), monkeypatch)
    expect_small_imdb(data.imdb("real", 21, 6))


@pytest.mark.parametrize(
    "change",
    [
        {"x_train": [[5] * 20, [1, 2, 3], [16, 17, 18, 20], list(range(1, 9)), [], [1], list(range(1, 7))]},
        {"x_train": [[5] * 21, [2, 3], [16, 17, 18, 19], list(range(1, 9)), [], [1], list(range(1, 7))]},
        {"y_train": [1, 0, 1, 0, 1, 1, 0]},
        {"x_test": [[], []]},
        {"x_test": [], "y_test": []},
    ],
)
def test_other_reviews_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, list[list[int]]]
) -> None:
    monkeypatch.setattr(data, "IMDB_CONTENT_SHA256", content_digest(REVIEWS))
    path = lay_out_imdb(tmp_path, imdb_npz({**REVIEWS, **change}), monkeypatch)
    with pytest.raises(data.DataError, match=r"not the official one \(SHA-256 differs\); delete it") as caught:
        data.imdb("auto")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("way", test_unpickle.hostile("", test_unpickle.Code()))
def test_hostile_reviews_run_nothing_and_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    ran = tmp_path / "ran"
    pickled, named = test_unpickle.hostile(f"touch {ran}", test_unpickle.name("numpy", "ndarray"))[way]
    members = {"x_train.npy": test_unpickle.npy(pickled, (1,)), "y_train.npy": test_unpickle.npy(bytes(8), (1,), "<i8")}
    path = lay_out_imdb(tmp_path / "given", test_unpickle.zipped(members), monkeypatch)
    with pytest.raises(data.DataError) as caught:
        data.imdb("auto")
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not ran.exists()


@pytest.mark.parametrize("fault", ["truncated", "empty", "folder", "broken link"])
def test_reviews_that_can_t_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    path = lay_out_imdb(tmp_path, imdb_npz(REVIEWS)[:-1] if fault == "truncated" else b"", monkeypatch)
    if fault in ("folder", "broken link"):
        path.unlink()
        path.mkdir() if fault == "folder" else path.symlink_to(tmp_path / "unmounted")
    reason = {"folder": "Is a directory", "broken link": "No such file"}.get(fault, "no readable array of lists")
    with pytest.raises(data.DataError, match=rf"imdb\.npz: .*{reason}.*; delete it"):
        data.imdb("auto")


def test_download_of_reviews_is_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, imdb_npz(REVIEWS), "IMDB")
    server.break_after = 1000
    with pytest.raises(
        data.DataError, match=r"IMDB is not at hand: .*; set ROSETTA_DATA to a folder that holds imdb\.npz"
    ):
        data.imdb("real")
    server.break_after = None
    for _ in range(2):
        expect_small_imdb(data.imdb("auto", 21, 6))
    assert server.requests == [None, "bytes=1000-"]
    assert {path.name for path in download.CACHE.iterdir()} == {"imdb.npz", ".lock"}


def test_download_of_other_reviews_never_gets_its_name(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, imdb_npz(REVIEWS), "IMDB")
    server.content = server.content[:-1] + b"x"
    with pytest.raises(data.DataError, match="is not the official file"):
        data.imdb("auto")
    assert {path.name for path in download.CACHE.iterdir()} == {".lock"}


def test_synthetic_reviews_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert data.imdb("auto").source == "synthetic"
    announced = capsys.readouterr().err
    assert announced.startswith("SYNTHETIC DATA: IMDB could not be had")
    assert announced.count("\n") == 1
    assert data.imdb("synthetic").source == "synthetic"
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="choice must be"):
        data.imdb("fake")


def test_synthetic_reviews_are_of_the_same_shapes_and_frozen() -> None:
    reviews = data.imdb("synthetic")
    for tokens, labels in (
        (reviews.train_tokens, reviews.train_labels),
        (reviews.test_tokens, reviews.test_labels),
    ):
        assert tokens.shape == (25_000, 150)
        assert tokens.dtype == np.int32
        assert tokens.max() < 30_000
        assert labels.dtype == np.int64
        assert np.bincount(labels).tolist() == [12_500, 12_500]
        assert 0.3 < (tokens[:, 0] == 0).mean() < 0.7  # padded
        assert 0.3 < (tokens[:, 0] > 1).mean() < 0.7  # cut
        assert 0.001 < (tokens == 2).mean() < 0.05
        counts = np.bincount(tokens.ravel())
        assert 5 < counts[4] / counts[13] < 20  # the first word and the tenth
    digest = hashlib.sha256(b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in reviews[:4]))
    assert digest.hexdigest()[:16] == "194e907471ac1946"


def test_labels_of_synthetic_reviews_can_be_learnt() -> None:
    reviews = data.synthetic_reviews(5000, 1000, 30_000, 150)
    counts = [
        np.bincount(reviews.train_tokens[reviews.train_labels == label].ravel(), minlength=30_000) for label in (0, 1)
    ]
    evidence = np.log(counts[1] + 1) - np.log(counts[0] + 1)
    predicted = evidence[reviews.test_tokens].sum(1) > 0
    assert (predicted == reviews.test_labels).mean() > 0.9


PTH = test_unpickle.zip_format(
    test_unpickle.state(
        **{
            "conv1.weight": test_unpickle.tensor(),
            "bn1.running_mean": test_unpickle.tensor((2,), (1,)),
            "bn1.num_batches_tracked": test_unpickle.tensor((), ()),
            "fc.weight": test_unpickle.tensor(),
            "fc.bias": test_unpickle.tensor((2,), (1,)),
        }
    )
)


def expect_small_weights(found: dict[str, np.ndarray] | None) -> None:
    assert found is not None
    assert {name: value.tolist() for name, value in found.items()} == {
        "conv1.weight": [[0, 1, 2], [3, 4, 5]],
        "bn1.running_mean": [0, 1],
    }


@pytest.mark.parametrize("wanted", [True, False])
def test_weights_of_rosetta_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    expect(monkeypatch, PTH, "RESNET50")
    monkeypatch.setenv("ROSETTA_DATA", str(tmp_path))
    (tmp_path / data.RESNET50_FILE).write_bytes(PTH)
    expect_small_weights(data.resnet50_weights(download=wanted))


def test_weights_are_downloaded_only_where_that_is_wanted(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(server, monkeypatch, PTH, "RESNET50")
    assert data.resnet50_weights(download=False) is None
    assert not server.requests
    expect_small_weights(data.resnet50_weights(download=True))
    expect_small_weights(data.resnet50_weights(download=False))
    assert server.requests == [None]
    assert not capsys.readouterr().err


def test_weights_that_can_t_be_had_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert data.resnet50_weights(download=True) is None
    announced = capsys.readouterr().err
    assert announced.startswith("SEEDED WEIGHTS: ")
    assert announced.count("\n") == 1
    assert data.RESNET50_FILE in announced


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (PTH[:-1] + b"x", "SHA-256"),
        (PTH[:-1], "bytes instead of"),
        (b"", "has 0 bytes instead of"),
    ],
)
def test_weights_that_are_not_the_official_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    expect(monkeypatch, PTH, "RESNET50")
    monkeypatch.setenv("ROSETTA_DATA", str(tmp_path))
    (tmp_path / data.RESNET50_FILE).write_bytes(content)
    for wanted in (True, False):
        with pytest.raises(data.DataError, match=rf"{data.RESNET50_FILE}: .*{reason}.*; delete it"):
            data.resnet50_weights(download=wanted)


def test_official_weights_that_can_t_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(monkeypatch, b"something", "RESNET50")
    monkeypatch.setenv("ROSETTA_DATA", str(tmp_path))
    (tmp_path / data.RESNET50_FILE).write_bytes(b"something")
    with pytest.raises(data.DataError, match=rf"{data.RESNET50_FILE}: it holds no readable state dict"):
        data.resnet50_weights(download=False)


@pytest.mark.skipif("ROSETTA_DATA" not in os.environ, reason="ROSETTA_DATA doesn't name a folder with the real data")
def test_real_cifar10() -> None:
    images = data.cifar10("real")
    assert images.train_images.shape == (50_000, 3, 32, 32)
    assert images.train_labels[:4].tolist() == [6, 9, 9, 4]
    assert images.test_labels[:4].tolist() == [3, 8, 8, 0]
    assert np.bincount(images.train_labels).tolist() == [5000] * 10


@pytest.mark.skipif("ROSETTA_DATA" not in os.environ, reason="ROSETTA_DATA doesn't name a folder with the real data")
def test_real_imdb() -> None:
    reviews = data.imdb("real", length=2500)  # longer than any
    lengths = (reviews.train_tokens != 0).sum(1)
    assert (lengths.min(), lengths.max()) == (11, 2494)
    assert reviews.train_tokens[0, -6:].tolist() == [51, 6, 2240, 15, 12, 218]  # "what a pity that it isn't"
    assert reviews.test_tokens[0, -6:].tolist() == [140, 67, 12, 159, 25, 1919]  # "go see it before you judge"
    assert [np.bincount(labels).tolist() for labels in (reviews.train_labels, reviews.test_labels)] == [
        [12_500] * 2
    ] * 2
