"""A folder of safetensors, read by its headers: names, shapes and dtypes without the values, values as mapped views.

A view costs no anonymous memory: its pages belong to the file and the kernel takes them back when it likes. So a
checkpoint of any size can be walked through one tensor at a time.
"""

import itertools
import json
import mmap
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from convert.hf_config import CheckpointError, read_json

TILE = 256
THREADED_BYTES = 8 << 20
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: its file, shape, dtype and the bytes [start, stop) of the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.stop - self.start

    @property
    def parts(self) -> "tuple[Tensor, ...]":
        """The tensors of the file that it is made of: itself."""
        return (self,)

    @property
    def quantised(self) -> str | None:
        """The format in which the file packs the values: none."""
        return None

    def view(self) -> NDArray:
        """The values as a read-only array over the mapped file."""
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        with self.file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(mapped, self.dtype, int(np.prod(self.shape, dtype=np.int64)), self.start)
        return flat.reshape(self.shape)


@dataclass
class Shelf:
    """All tensors of a folder, with everything that is wrong about its files."""

    folder: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors.values())


def contiguous(view: NDArray, dtype: np.dtype) -> NDArray:
    """A C-ordered copy in ``dtype``. A transposed view is copied tile by tile and by several threads: a plain copy
    would miss the cache on every element, at a fourth of the speed."""
    out = np.empty(view.shape, dtype)
    fast = int(np.argmin([abs(step) for step in view.strides])) if view.ndim else 0
    tiled = {fast, view.ndim - 1} if view.ndim > 1 else {0}

    def tiles(axis: int) -> list[slice]:
        step = TILE if axis in tiled else 1
        return [slice(i, i + step) for i in range(0, view.shape[axis], step)]

    def copy(index: tuple[slice, ...]) -> None:
        out[index] = view[index]

    if view.ndim < 2 or fast == view.ndim - 1 or view.nbytes < THREADED_BYTES:
        out[...] = view
        return out
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(copy, itertools.product(*(tiles(axis) for axis in range(view.ndim))), chunksize=16))
    return out


def read_header(file: Path) -> list[Tensor]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: a header that is no safetensors header, a dtype that is not known, or a file that ends early.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 0 < length <= min(MAX_HEADER, size - 8):
            raise CheckpointError(f"{file.name} is no safetensors file ({size} bytes, header length {length})")
        try:
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            entries = [(n, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for n, e in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file.name} has a damaged header: {error}") from error
    tensors = []
    for name, kind, shape, start, stop in entries:
        if kind not in DTYPES:
            raise CheckpointError(f"{file.name}: {name} has the dtype {kind}; known: {', '.join(DTYPES)}")
        expected = int(np.prod(shape, dtype=np.int64)) * DTYPES[kind].itemsize
        if stop - start != expected:
            raise CheckpointError(f"{file.name}: {name} {shape} {kind} takes {expected} bytes, not {stop - start}")
        base = 8 + length
        if base + stop > size:
            raise CheckpointError(f"{file.name} ends early: {name} lies at {base + stop}, the file has {size} bytes")
        tensors.append(Tensor(name, file, shape, DTYPES[kind], base + start, base + stop))
    end = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end:  # as the format demands: no hole, no byte in two tensors
            raise CheckpointError(
                f"{file.name} has a damaged header: {tensor.name} starts at {tensor.start}, not {end}"
            )
        end = tensor.stop
    if end != size:
        raise CheckpointError(f"{file.name} has {size} bytes, its tensors end at {end}")
    return tensors


def shard_files(folder: Path, faults: list[str]) -> tuple[list[Path], dict[str, str]]:
    """The files of a folder and, of a sharded one, {tensor: file name}; what is missing is added to ``faults``."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE], {}
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        names = sorted(set(index.values()))
        absent = [name for name in names if not (folder / name).exists()]
        if absent:
            faults.append(f"missing files: {', '.join(absent)} ({len(absent)} of {len(names)} shards)")
        return [folder / name for name in names if name not in absent], index
    others = sorted(p.name for p in folder.iterdir() if re.search(r"\.(safetensors|bin|pt|pth|gguf)$", p.name))
    seen = f"; found {', '.join(others[:5])}" if others else ""
    faults.append(f"no weights: neither {SINGLE} nor {INDEX} in {folder}{seen}")
    return [], {}


def open_shelf(folder: Path) -> Shelf:
    """Reads all headers of a folder. File faults are collected in the shelf, so that one error can list everything."""
    shelf = Shelf(folder)
    files, index = shard_files(folder, shelf.faults)
    for file in files:
        try:
            tensors = read_header(file)
        except CheckpointError as error:
            shelf.faults.append(str(error))
            continue
        twice = sorted(t.name for t in tensors if t.name in shelf.tensors)
        if twice:
            shelf.faults.append(f"{file.name} repeats tensors of another file: {', '.join(twice)}")
        shelf.tensors |= {t.name: t for t in tensors}
    there = {file.name for file in files}
    lost = sorted(name for name, file in index.items() if file in there and name not in shelf.tensors)
    if lost:
        shelf.faults.append(f"named by the index but in no file: {', '.join(lost)}")
    return shelf
