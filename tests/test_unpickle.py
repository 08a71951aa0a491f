"""Pickled arrays: read right whoever wrote them, and nothing run, whatever they ask for."""

from __future__ import annotations

import io
import pickle
import pickletools
import subprocess
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common import unpickle
from harness import environments, frameworks

LISTS = [[1, 300, 70_000], [], [2**31 - 1, -5], [1]]


class Code(bytes):
    """Opcodes of a pickle that leave one object on its stack."""


def code(value: object) -> bytes:
    """Opcodes that make `value`, of which parts may be opcodes already."""
    if isinstance(value, Code):
        return value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(code, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(code, value)) + b"e"
    return pickle.dumps(value, 2)[2:-1]


def name(module: str, name: str) -> Code:
    return Code(f"c{module}\n{name}\n".encode())


def call(function: Code, *arguments: object) -> Code:
    return Code(function + code(arguments) + b"R")


def program(value: object, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + code(value) + b"."


def array_of(items: object, count: int, build: bytes = b"") -> Code:
    """An object array as NumPy pickles it."""
    reconstruct = call(name("numpy.core.multiarray", "_reconstruct"), name("numpy", "ndarray"), (0,), "b")
    dtype = Code(call(name("numpy", "dtype"), "O8", False, True) + code((3, "|", None, None, None, -1, -1, 63)) + b"b")
    return Code(reconstruct + build + code((1, (count,), dtype, False, items)) + b"b")


def npy(content: bytes, shape: object, descr: str = "|O") -> bytes:
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[arg-type]
    return file.getvalue() + content


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return file.getvalue()


def npz(pickled: bytes, count: int) -> bytes:
    return zipped({"x.npy": npy(pickled, (count,))})


def object_array(lists: list[list[int]]) -> np.ndarray:
    array = np.empty(len(lists), object)
    array[:] = lists
    return array


def expect_lists(found: unpickle.Lists) -> None:
    assert found.integers.dtype == np.int32
    assert found.integers.tolist() == [number for one in LISTS for number in one]
    assert found.lengths.dtype == np.int64
    assert found.lengths.tolist() == [len(one) for one in LISTS]


@pytest.mark.parametrize("protocol", range(6))
def test_lists_of_any_protocol(protocol: int) -> None:
    pickled = pickle.dumps(object_array(LISTS), protocol)
    expect_lists(unpickle.integer_lists(npz(pickled, len(LISTS)), "x"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_saves(save: Callable[..., None]) -> None:
    file = io.BytesIO()
    save(file, x=object_array(LISTS), y=np.array([1, 0, 1]), z=np.array([[1.0]]))
    expect_lists(unpickle.integer_lists(file.getvalue(), "x"))
    labels = unpickle.integers(file.getvalue(), "y")
    assert labels.dtype == np.int32
    assert labels.tolist() == [1, 0, 1]


def test_lists_that_python_2_wrote() -> None:
    pickled = (
        program(array_of(LISTS, len(LISTS))).replace(b"X\x01\0\0\0b", b"U\x01b").replace(b"X\x02\0\0\0O8", b"U\x02O8")
    )
    assert b"SHORT_BINSTRING" in _names(pickled)
    expect_lists(unpickle.integer_lists(npz(pickled, len(LISTS)), "x"))


def _names(pickled: bytes) -> bytes:
    return " ".join(opcode.name for opcode, _, _ in pickletools.genops(pickled)).encode()


def hostile(command: str, allowed: Code) -> dict[str, tuple[bytes, str]]:
    """Pickles that would run `command`, or try other ways out, and what the refusal names."""
    system = name("os", "system")

    class Reduce:
        def __reduce__(self) -> object:
            import os

            return os.system, (command,)

    stack_global = Code(code("os") + code("system") + b"\x93")
    return {
        "reduce, protocol 0": (pickle.dumps(Reduce(), 0), "posix.system"),
        "reduce, protocol 2": (pickle.dumps(Reduce(), 2), "posix.system"),
        "reduce, protocol 5": (pickle.dumps(Reduce(), 5), "posix.system"),
        "after a good name": (program([call(allowed), call(system, command)]), "os.system"),
        "stack global": (program(call(stack_global, command), 4), "os.system"),
        "inst": (b"(" + code(command) + b"ios\nsystem\n.", "os.system"),
        "obj": (b"(" + system + code(command) + b"o.", "os.system"),
        "newobj": (program(Code(name("subprocess", "Popen") + code((command,)) + b"\x81")), "subprocess.Popen"),
        "eval": (program(call(name("builtins", "eval"), f"__import__('os').system({command!r})")), "builtins.eval"),
        "eval of Python 2": (program(call(name("__builtin__", "eval"), "1")), "__builtin__.eval"),
        "getattr": (program(call(name("builtins", "getattr"), allowed, "x")), "builtins.getattr"),
        "dotted": (program(name("numpy.core.multiarray", "_reconstruct.__globals__"), 4), "_reconstruct.__globals__"),
        "dotted stack global": (program(Code(code("numpy") + code("os.system") + b"\x93"), 4), "numpy.os.system"),
        "numpy's load": (program(call(name("numpy", "load"), "x.npy")), "numpy.load"),
        "numpy's scalar": (program(name("numpy.core.multiarray", "scalar")), "numpy.core.multiarray.scalar"),
        "numpy's runstring": (program(name("numpy.testing._private.utils", "runstring")), "runstring"),
        "torch's load": (program(call(name("torch.storage", "_load_from_bytes"), b"")), "_load_from_bytes"),
        "copyreg": (program(name("copyreg", "_reconstructor")), "copyreg._reconstructor"),
        "line break": (program(Code(code("os\n") + code("sys\ntem") + b"\x93"), 4), r"os\n.sys\ntem"),
        "memoised": (program(Code(system + b"q\x05" + b"0h\x05" + code((command,)) + b"R")), "os.system"),
        "memo overwritten": (program(Code(allowed + b"q\x000" + system + b"q\x000h\x00")), "os.system"),
    }  # fmt: skip


@pytest.mark.parametrize("way", hostile("", Code()))
@pytest.mark.parametrize("reader", ["lists", "zipped state dict", "old state dict"])
def test_name_that_no_array_needs_is_refused_and_nothing_run(tmp_path: Path, way: str, reader: str) -> None:
    ran = tmp_path / "ran"
    allowed = name("numpy", "ndarray") if reader == "lists" else name("collections", "OrderedDict")
    pickled, named = hostile(f"touch {ran}", allowed)[way]
    with pytest.raises(unpickle.UnpickleError) as caught:
        if reader == "lists":
            unpickle.integer_lists(npz(pickled, 1), "x")
        else:
            unpickle.state_dict((zip_format if reader == "zipped state dict" else old_format)(pickled))
    assert "refused" in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not ran.exists()


@pytest.mark.parametrize(
    "value",
    [
        Code(name("numpy", "ndarray") + b"}" + code("__setstate__") + code(1) + b"sb"),
        Code(name("numpy", "ndarray") + code((None, {"__call__": 1, "__class__": 2})) + b"b"),
        Code(name("numpy", "ndarray") + code(()) + b"\x81"),  # makes an object of a class, which this isn't
        call(Code(code({}) + code((None, {"get": 1})) + b"b")),
        array_of(LISTS, len(LISTS), build=code({"__call__": 1, "state": (1, 2, 3, 4, LISTS)}) + b"b"),
    ],
)
def test_stand_ins_can_t_be_turned_against_the_reader(value: object) -> None:
    before = dict(vars(unpickle._Inert))
    try:
        expect_lists(unpickle.integer_lists(npz(program(value), len(LISTS)), "x"))
    except unpickle.UnpickleError as error:
        assert "array of lists" in str(error)
    assert dict(vars(unpickle._Inert)) == before


@pytest.mark.parametrize(
    ("items", "count"),
    [
        ([[1], [2]], 3),
        ([[1], 2], 2),
        ([[1], [2.5]], 2),
        ([[1], ["2"]], 2),
        ([[1], [None]], 2),
        ([[1], [[2]]], 2),
        ([[1], [2**31]], 2),
        ([[1], b"12"], 2),
        (([1], [2]), 3),
        (None, 1),
        (Code(b"]q\x07h\x07a"), 1),  # a list that holds itself
        ([Code(code(list(range(100))) + b"q\x07"), *[Code(b"h\x07")] * 1000], 1001),
    ],
)
def test_array_that_isn_t_one_of_lists_of_integers_is_refused(items: object, count: int) -> None:
    with pytest.raises(unpickle.UnpickleError, match="array of lists"):
        unpickle.integer_lists(npz(program(array_of(items, count)), count), "x")


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"N.",
        program(1),
        program(Code(code(("storage", 1)) + b"Q")),
        b"\x80\x09N.",
        b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"abc.",
        b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"abc.",
        b"\x80\x02\x8b" + (1 << 30).to_bytes(4, "little") + b"abc.",
        b"\x80\x02h\x63.",
        b"\x80\x02\x82\x01.",
        b"0" * 10,
        b"(" * 100_000,
        bytes(range(256)),
    ],
)
def test_broken_pickle_is_refused(pickled: bytes) -> None:
    with pytest.raises(unpickle.UnpickleError, match=r"^it "):
        unpickle.integer_lists(npz(pickled, 1), "x")
    with pytest.raises(unpickle.UnpickleError, match=r"^it "):
        unpickle.state_dict(zip_format(pickled))
    with pytest.raises(unpickle.UnpickleError, match=r"^it "):
        unpickle.state_dict(old_format(pickled))


def test_truncated_anywhere_is_refused() -> None:
    pickled = program(array_of(LISTS, len(LISTS)))
    for end in range(len(pickled)):
        with pytest.raises(unpickle.UnpickleError):
            unpickle.integer_lists(npz(pickled[:end], len(LISTS)), "x")
    for whole in (zip_format(GOOD), old_format(GOOD)):
        expect_state(unpickle.state_dict(whole))
        for end in range(len(whole)):
            with pytest.raises(unpickle.UnpickleError):
                unpickle.state_dict(whole[:end])


@pytest.mark.parametrize(
    "content",
    [
        npy(bytes(16), (3,), "<i8"),
        npy(bytes(16), (10**12,), "<i8"),
        npy(bytes(16), (-1,), "<i8"),
        npy(bytes(16), (1, 2), "<i8"),
        npy(bytes(16), (2,), "<f8"),
        npy(bytes(16), (2,), "|O"),
        npy(bytes(16), (2,), "|V8"),
        npy(bytes(16), (2,), "<i8")[:-1],
        npy(bytes(16), "__import__('os')", "<i8"),
        npy(bytes(16), (2,), "<i8").replace(b"\x93NUMPY\x01", b"\x93NUMPY\x09"),
        b"not an array",
        b"",
    ],
)
def test_array_that_isn_t_one_of_integers_is_refused(content: bytes) -> None:
    with pytest.raises(unpickle.UnpickleError, match=r"^(it|y) "):
        unpickle.integers(zipped({"y.npy": content}), "y")


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"not a zip", zipped({"other.npy": b""})])
def test_archive_that_is_none_or_lacks_the_array_is_refused(content: bytes) -> None:
    with pytest.raises(unpickle.UnpickleError, match="it holds no readable array of integers"):
        unpickle.integers(content, "y")


def test_member_that_would_unpack_to_too_much_is_not_unpacked() -> None:
    bomb = zipped({"y.npy": bytes(unpickle.LARGEST + 1)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1_000_000
    with pytest.raises(unpickle.UnpickleError, match=r"'y\.npy' would unpack to 268,435,457 bytes"):
        unpickle.integers(bomb, "y")


def tensor(
    size: object = (2, 3), stride: object = (3, 1), offset: object = 0, kind: str = "FloatStorage", key: object = "0",
    count: object = 6, view: object = None,
) -> Code:  # fmt: skip
    """A tensor as PyTorch pickles it."""
    storage = Code(code(("storage", name("torch", kind), key, "cpu", count, view)) + b"Q")
    return call(name("torch._utils", "_rebuild_tensor_v2"), storage, offset, size, stride, False, None)


def state(**values: object) -> bytes:
    """The pickle of a state dict, with `_metadata` as PyTorch adds it."""
    items = b"".join(code(key) + code(value) for key, value in values.items())
    return program(
        Code(call(name("collections", "OrderedDict")) + b"(" + items + b"u" + code({"_metadata": {}}) + b"b")
    )


STORED = np.arange(6, dtype="<f4").tobytes()
GOOD = state(
    plain=tensor(),
    transposed=tensor((3, 2), (1, 3)),
    part=tensor((2,), (2,), 1),
    scalar=tensor((), (), 5),
    empty=tensor((0, 7), (7, 1)),
    parameter=call(name("torch._utils", "_rebuild_parameter"), tensor(), True, None),
)


def zip_format(pickled: bytes, stored: bytes = STORED, **others: bytes) -> bytes:
    return zipped({"archive/data.pkl": pickled, "archive/data/0": stored, **others})


def old_format(pickled: bytes, stored: bytes = STORED, count: int = 6, little_endian: bool = True) -> bytes:
    start = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": little_endian}]
    head = b"".join(pickle.dumps(value, 2) for value in start)
    return head + pickled + pickle.dumps(["0"], 2) + count.to_bytes(8, "little") + stored


def expect_state(found: dict[str, np.ndarray]) -> None:
    whole = [[0, 1, 2], [3, 4, 5]]
    assert {key: value.tolist() for key, value in found.items()} == {
        "plain": whole, "transposed": [[0, 3], [1, 4], [2, 5]], "part": [1, 3], "scalar": 5, "empty": [],
        "parameter": whole,
    }  # fmt: skip
    for value in found.values():
        assert value.dtype == np.float32
        assert value.flags.c_contiguous
        assert value.flags.owndata
        assert value.flags.writeable


@pytest.mark.parametrize("written", [zip_format, old_format])
@pytest.mark.parametrize(
    "wrong",
    [
        tensor(offset=1),
        tensor(offset=-1),
        tensor(offset=10**30),
        tensor(stride=(4, 1)),
        tensor(stride=(3, -1)),
        tensor(stride=(10**30, 1)),
        tensor(stride=(2**62, 1)),
        tensor(stride=(1,)),
        tensor(size=(2, 4)),
        tensor(size=(1 << 40,), stride=(0,)),
        tensor(size=(2**32, 2**32), stride=(0, 0)),
        tensor(size=(-2, -3)),
        tensor(size=(1,) * 100, stride=(1,) * 100),
        tensor(size="ab"),
        tensor(size=None),
        tensor(size=(2.0, 3)),
        tensor(count=7),
        tensor(count=1 << 50),
        tensor(count="6"),
        tensor(count=-6),
        tensor(kind="DoubleStorage"),
        tensor(key="1"),
        tensor(key="../0"),
        tensor(key=0),
        tensor(view=("1", 0, 6)),
        tensor(kind="_utils._rebuild_tensor_v2"),
        call(name("torch._utils", "_rebuild_parameter"), 1),
        call(name("torch._utils", "_rebuild_tensor_v2"), 1, 0, (2,), (1,)),
        call(name("torch._utils", "_rebuild_tensor_v2")),
        call(name("collections", "OrderedDict")),
        1,
        None,
        "weights",
        [tensor()],
    ],
)
def test_tensor_that_isn_t_in_its_storage_is_refused(written: Callable[[bytes], bytes], wrong: object) -> None:
    with pytest.raises(unpickle.UnpickleError, match=r"^(it|the size of 'w') "):
        unpickle.state_dict(written(state(w=wrong)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no readable state dict"),
        (b"<html>", "no readable state dict"),
        (pickle.dumps({"w": 1}, 2), "no readable state dict"),
        (pickle.dumps(1, 2) * 5, "isn't a file that torch.save wrote"),
        (zipped({"archive/other": b""}), "no readable state dict"),
        (zip_format(program(Code(b"}" + code("w") + tensor() + b"s"))), "something else than a state dict"),
        (old_format(program(tensor())), "something else than a state dict"),
        (zip_format(state(w=tensor()), **{"archive/byteorder": b"big"}), "big-endian"),
        (old_format(state(w=tensor()), little_endian=False), "big-endian"),
        (zip_format(state(w=tensor()), STORED[:-1]), "the size of 'w' and of what is stored for it differ"),
        (old_format(state(w=tensor()), count=1 << 63), "no readable state dict"),
        (zip_format(state(w=tensor(kind="BFloat16Storage"))), "torch.BFloat16Storage', which no array needs"),
    ],
)
def test_file_that_isn_t_a_state_dict_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(unpickle.UnpickleError, match=reason):
        unpickle.state_dict(content)


WRITE_WITH_TORCH = """
import sys
import numpy as np
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
base = torch.randn(5, 6)
state = net.state_dict()  # with the _metadata of a module
state.update({
    "parameter": net[2].weight, "transposed": base.t(), "column": base[:, 2], "part": base[1:3, ::2], "scalar": base[2, 3],
    "empty": base[:0], "double": base.double(), "half": base.half(), "int": torch.arange(4, dtype=torch.int32),
    "short": torch.arange(4, dtype=torch.int16), "char": torch.arange(-2, 2, dtype=torch.int8),
    "byte": torch.arange(4, dtype=torch.uint8), "bool": base > 0, "channels_last": net[0].weight.detach().to(memory_format=torch.channels_last),
})
torch.save(state, sys.argv[1])
torch.save(state, sys.argv[2], _use_new_zipfile_serialization=False)
np.savez(sys.argv[3], **{name: value.detach().numpy() for name, value in state.items()})
"""  # noqa: E501


@pytest.mark.notebooks
def test_state_dicts_that_torch_writes(tmp_path: Path) -> None:
    python = environments.inspect(frameworks.load("torch"), "cpu").python
    assert python, "build it with: rosetta environments build torch"
    paths = [tmp_path / "new.pth", tmp_path / "old.pth", tmp_path / "expected.npz"]
    subprocess.run([python, "-c", textwrap.dedent(WRITE_WITH_TORCH), *map(str, paths)], check=True)
    with np.load(paths[2]) as expected:
        for path in paths[:2]:
            found = unpickle.state_dict(path.read_bytes())
            assert list(found) == list(expected)
            for key, value in found.items():
                assert value.dtype == expected[key].dtype, key
                assert np.array_equal(value, expected[key]), key
