"""The data: real ones verified, downloads resumed and checked, hostile archives harmless, synthetic ones announced."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common import data

RECORDS = 4  # in each of the small files that stand for CIFAR-10's


def binary(seed: int) -> bytes:
    """A file in CIFAR-10's binary layout: four records of a label and 3,072 pixels."""
    random = np.random.RandomState(seed)
    rows = random.randint(0, 256, (RECORDS, 3073)).astype(np.uint8)
    rows[:, 0] %= 10
    return rows.tobytes()


FILES = {name: binary(seed) for seed, name in enumerate(data.CIFAR10_FILES)}


def archive(extra: dict[str, bytes] | None = None, leave_out: str = "", link: tuple[str, str] | None = None) -> bytes:
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
            member.type, member.linkname = tarfile.SYMTYPE, link[1]
            tar.addfile(member)
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves one file; can ignore ranges and can break off."""

    content = b""
    ranges = True
    break_after: int | None = None
    requests: list[str | None]

    class RequestHandlerClass(http.server.BaseHTTPRequestHandler):
        server: Server

        def do_GET(self) -> None:
            asked = self.headers["Range"]
            self.server.requests.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
            body = self.server.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: self.server.break_after])

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/cifar.tar.gz"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Server.RequestHandlerClass)
    server.requests = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def small_cifar10(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """CIFAR-10 of four images a file, an empty cache, no ROSETTA_DATA, and no way to the internet."""
    if request.node.name == "test_real_cifar10":
        return
    monkeypatch.delenv("ROSETTA_DATA", raising=False)
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(data, "CIFAR10_FILE_SIZE", RECORDS * 3073)
    monkeypatch.setattr(data, "CIFAR10_FILES", {name: hashlib.sha256(c).hexdigest() for name, c in FILES.items()})
    monkeypatch.setattr(data, "CIFAR10_URL", "http://127.0.0.1:9/nobody-listens")


def serve(server: Server, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    server.content = content
    monkeypatch.setattr(data, "CIFAR10_URL", server.url)
    monkeypatch.setattr(data, "CIFAR10_SIZE", len(content))
    monkeypatch.setattr(data, "CIFAR10_SHA256", hashlib.sha256(content).hexdigest())


def lay_out(folder: Path) -> Path:
    (folder / data.CIFAR10_FOLDER).mkdir(parents=True)
    for name, content in FILES.items():
        (folder / data.CIFAR10_FOLDER / name).write_bytes(content)
    return folder


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


def test_download_of_something_else_is_refused_and_deleted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, monkeypatch, archive())
    server.content = server.content[:-1] + b"x"
    with pytest.raises(data.DataError, match="is not the official file"):
        data.cifar10("auto")
    assert not list(data.CACHE.glob("*.tar.gz*"))


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
        {"extra": {"cifar-10-batches-bin/large": bytes(100_000)}},
    ],
)
def test_hostile_archive_writes_nothing_but_the_six_files(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hostile: dict[str, object]
) -> None:
    serve(server, monkeypatch, archive(**hostile))  # type: ignore[arg-type]
    expect_small_cifar10(data.cifar10("real"))
    written = {path.name for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()}
    assert written == {*FILES, "cifar-10-binary.tar.gz"}
    assert not Path("/tmp/escaped-from-rosetta").exists()


def test_link_in_the_place_of_a_file_is_not_followed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(
        server,
        monkeypatch,
        archive(leave_out="test_batch.bin", link=("cifar-10-batches-bin/test_batch.bin", "/etc/passwd")),
    )
    with pytest.raises(data.DataError, match=r"lacks test_batch\.bin"):
        data.cifar10("real")
    assert not (data.CACHE / data.CIFAR10_FOLDER).exists()


def test_full_disk_names_the_file(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve(server, monkeypatch, archive())
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(data.DataError, match=r"cache.*can't be written"):
        data.cifar10("auto")


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


def test_synthetic_labels_can_be_learnt() -> None:
    images = data.synthetic_images(2000, 500)
    x = images.train_images.reshape(2000, -1).astype(np.float64) / 255
    weights = np.linalg.solve(x.T @ x + 10 * np.eye(3072), x.T @ np.eye(10)[images.train_labels])
    predicted = (images.test_images.reshape(500, -1) / 255 @ weights).argmax(1)
    assert (predicted == images.test_labels).mean() > 0.8


@pytest.mark.skipif("ROSETTA_DATA" not in os.environ, reason="ROSETTA_DATA doesn't name a folder with the real data")
def test_real_cifar10() -> None:
    images = data.cifar10("real")
    assert images.train_images.shape == (50_000, 3, 32, 32)
    assert images.train_labels[:4].tolist() == [6, 9, 9, 4]
    assert images.test_labels[:4].tolist() == [3, 8, 8, 0]
    assert np.bincount(images.train_labels).tolist() == [5000] * 10
