"""Pickled arrays read without unpickling them: nothing that a file names is looked up, let alone called.

A pickle is a program. Here it runs with a stand-in for every name that it may ask for, and any other name is refused.
What comes out is a tree of stand-ins, which the functions below take apart. So a hostile file can waste memory, but
do nothing else.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from array import array
from contextlib import contextmanager
from typing import IO, Any, Callable, Dict, Iterator, NamedTuple, Set, Tuple

import numpy as np

LARGEST = 1 << 28  # bytes that a member of an archive may unpack to

_NUMPY = {
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",  # how Python 3 writes bytes in pickle's protocol 2
}
_STORAGES = {
    "torch.DoubleStorage": "<f8",
    "torch.FloatStorage": "<f4",
    "torch.HalfStorage": "<f2",
    "torch.LongStorage": "<i8",
    "torch.IntStorage": "<i4",
    "torch.ShortStorage": "<i2",
    "torch.CharStorage": "i1",
    "torch.ByteStorage": "u1",
    "torch.BoolStorage": "?",
}
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_TORCH = {"collections.OrderedDict", _REBUILD_TENSOR, _REBUILD_PARAMETER, *_STORAGES}
_TORCH_LEGACY_START = (0x1950A86A20F9469CFC6C, 1001)  # magic number, version


class UnpickleError(ValueError):
    """A file that is broken, or asks for more than data; the message says what is wrong, and the caller which file."""


class Lists(NamedTuple):
    """Lists of integers: the integers end to end, int32 (total,), and each list's length, int64 (count,)."""

    integers: np.ndarray
    lengths: np.ndarray


def integer_lists(npz: bytes, member: str) -> Lists:
    """Return an array of an `.npz` file whose elements are lists of integers. Raises `UnpickleError`."""
    with _reading("array of lists"):
        count, _, file = _open_npy(npz, member)
        _, _, _, _, lists = _Unpickler(file, _NUMPY).load().state
        lengths = np.array([len(one) for one in lists], np.int64)
        if len(lists) != count or lengths.sum() > file.tell():  # one list referred to many times fills any memory
            raise UnpickleError("{} isn't the array of lists that it says it is".format(member))
        integers = array("i")
        for one in lists:
            integers.fromlist(one)
        return Lists(np.array(integers, np.int32), lengths)


def integers(npz: bytes, member: str) -> np.ndarray:
    """Return a one-dimensional array of integers of an `.npz` file, int32. Raises `UnpickleError`."""
    with _reading("array of integers"):
        count, dtype, file = _open_npy(npz, member)
        found = np.frombuffer(file.read(), dtype)
        if len(found) != count or dtype.kind not in "iu":
            raise UnpickleError("{} isn't an array of {} integers".format(member, count))
        return found.astype(np.int32)


def state_dict(pth: bytes) -> Dict[str, np.ndarray]:
    """Return the arrays of a PyTorch state dict, in the zip format or the one before PyTorch 1.6, by name.

    Each is a copy of its own, in C order. Raises `UnpickleError`.
    """
    with _reading("state dict"):
        return (_zipped if pth.startswith(b"PK\3\4") else _legacy)(pth)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn whatever a broken file makes pickle, zipfile and NumPy raise into `UnpickleError`."""
    try:
        yield
    except UnpickleError:
        raise
    except Exception as error:
        reason = " ".join(ascii(error).split())
        raise UnpickleError("it holds no readable {}: {}".format(what, reason)) from None


class _Inert:
    """Stands in for whatever a pickle names, and for what calling that returns: keeps what it is told, does nothing."""

    def __init__(self, name: str, arguments: Any = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None
        self.items: Dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> _Inert:
        return _Inert(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value


class _Unpickler(pickle.Unpickler):
    """Makes the tree of stand-ins; `names` are the only ones that the pickle may use."""

    def __init__(self, file: IO[bytes], names: Set[str]) -> None:
        super().__init__(file)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        full = "{}.{}".format(module, name)
        if full not in self._names:
            raise UnpickleError("it asks for {}, which no array needs, so it is refused".format(ascii(full)))
        return _Inert(full)

    def persistent_load(self, pid: Any) -> Any:
        return _Inert("persistent", pid)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > LARGEST:
        raise UnpickleError("{} would unpack to {:,} bytes".format(ascii(name), info.file_size))
    return archive.read(info)


def _open_npy(npz: bytes, member: str) -> Tuple[int, np.dtype[Any], IO[bytes]]:
    """Return length and type of a one-dimensional array, and the file, at the place where its content starts."""
    with zipfile.ZipFile(io.BytesIO(npz)) as archive:
        file = io.BufferedReader(io.BytesIO(_member(archive, member + ".npy")))  # pickle reads it in large pieces
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    (count,), _, dtype = readers[np.lib.format.read_magic(file)](file)
    return count, dtype, file


class _Tensor(NamedTuple):
    """A tensor as a pickle describes it: a view of a storage, in elements."""

    dtype: np.dtype[Any]
    storage: str
    storage_size: int
    offset: int
    size: Tuple[int, ...]
    stride: Tuple[int, ...]


def _zipped(pth: bytes) -> Dict[str, np.ndarray]:
    """Read the zip format: a pickle, and a member for each storage."""
    with zipfile.ZipFile(io.BytesIO(pth)) as archive:
        (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        folder = pickled[: -len("data.pkl")]
        if folder + "byteorder" in archive.namelist() and _member(archive, folder + "byteorder") != b"little":
            raise UnpickleError("it was written on a big-endian machine")
        tensors = _tensors(_Unpickler(io.BytesIO(_member(archive, pickled)), _TORCH).load())
        return _arrays(tensors, lambda tensor: _member(archive, folder + "data/" + tensor.storage))


def _legacy(pth: bytes) -> Dict[str, np.ndarray]:
    """Read the older format: five pickles one after the other, then each storage's size and content."""
    file = io.BytesIO(pth)
    start = tuple(_Unpickler(file, set()).load() for _ in range(2))
    if start != _TORCH_LEGACY_START:
        raise UnpickleError("it isn't a file that torch.save wrote")
    if not _Unpickler(file, set()).load()["little_endian"]:
        raise UnpickleError("it was written on a big-endian machine")
    tensors = _tensors(_Unpickler(file, _TORCH).load())
    dtypes = {tensor.storage: tensor.dtype for tensor in tensors.values()}
    storages = {}
    for key in _Unpickler(file, set()).load():
        size = int.from_bytes(file.read(8), "little")
        storages[key] = file.read(size * dtypes[key].itemsize)
    return _arrays(tensors, lambda tensor: storages[tensor.storage])


def _tensors(root: Any) -> Dict[str, _Tensor]:
    """Return the tensors that a state dict's tree of stand-ins describes."""
    if not isinstance(root, _Inert) or root.name != "collections.OrderedDict":
        raise UnpickleError("it holds something else than a state dict")
    return {str(name): _tensor(value) for name, value in root.items.items()}


def _tensor(value: Any) -> _Tensor:
    if value.name == _REBUILD_PARAMETER:
        value = value.arguments[0]
    if value.name != _REBUILD_TENSOR:
        raise UnpickleError("it holds a {} where a tensor should be".format(value.name))
    storage, offset, size, stride = value.arguments[:4]
    _, kind, key, _, storage_size, *view = storage.arguments
    if view not in ([], [None]):
        raise UnpickleError("it holds a view of a storage, which nothing has written since PyTorch 0.4")
    return _Tensor(np.dtype(_STORAGES[kind.name]), key, storage_size, offset, size, stride)


def _arrays(tensors: Dict[str, _Tensor], content_of: Callable[[_Tensor], bytes]) -> Dict[str, np.ndarray]:
    """Return each tensor's elements, once it is sure that they all lie in its storage."""
    arrays = {}
    for name, tensor in tensors.items():
        content, width = content_of(tensor), tensor.dtype.itemsize
        if len(content) != tensor.storage_size * width or math.prod(tensor.size) > tensor.storage_size:
            raise UnpickleError("the size of {} and of what is stored for it differ".format(ascii(name)))
        strides = [step * width for step in tensor.stride]
        # NumPy, given a buffer, checks that no element lies outside
        arrays[name] = np.ndarray(tensor.size, tensor.dtype, content, tensor.offset * width, strides).copy()
    return arrays
