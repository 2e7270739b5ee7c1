"""Tensors that a file does not hold as such: stacks of per-expert matrices, and quantised weights.

Each looks like a ``Tensor`` and knows the real ones that it is made of; its values are made when they are asked for,
a layer's experts at a time. Quantised weights are dequantised exactly: MXFP4 values are bfloat16 numbers, FP8 values
times their block's scale are float32.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from convert.tensors import DTYPES, Tensor

FP8_BLOCK = 128
MXFP4_GROUP = 32  # values that share a scale
# Tensors that a file may hold in pieces, one below the other, and the pieces in order; E is the last expert.
PIECES = (
    ("mlp.experts.gate_up_proj", "mlp.experts.{0..E}.{gate,up}_proj.weight"),
    ("mlp.experts.down_proj", "mlp.experts.{0..E}.down_proj.weight"),
    ("mlp.shared_expert.gate_up_proj.weight", "mlp.shared_expert.{gate,up}_proj.weight"),
)
MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stack:
    """Equal matrices one below the other, in order: 2 E of [F, D] are [E, 2 F, D]. Its name is their pattern."""

    name: str
    pieces: tuple["Stored", ...]
    shape: Shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of every piece."""
        return self.pieces[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors of the files, in order."""
        return tuple(part for piece in self.pieces for part in piece.parts)

    @property
    def quantised(self) -> str | None:
        """The format of the pieces in the file, None where they are plain."""
        return self.pieces[0].quantised

    def view(self) -> NDArray:
        """The values, in memory of their own."""
        out = np.empty((len(self.pieces), *self.pieces[0].shape), self.dtype)
        for i, piece in enumerate(self.pieces):
            out[i] = piece.view()
        return out.reshape(self.shape)


@dataclass(frozen=True)
class Fp8:
    """A matrix [O, I] of float8 values with one scale for every block of 128 x 128 (``X.weight_scale_inv``)."""

    weight: Tensor
    scales: Tensor
    quantised = "FP8"
    dtype = DTYPES["F32"]

    @property
    def name(self) -> str:
        """The name of the values."""
        return self.weight.name

    @property
    def shape(self) -> Shape:
        """[O, I]."""
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.weight.nbytes + self.scales.nbytes

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Values and scales."""
        return self.weight, self.scales

    def faults(self) -> Iterator[str]:
        """What is wrong with the pair."""
        if len(self.shape) != 2:
            yield f"wrong shape: {self.name} is {self.shape}; FP8 weights are matrices"
            return
        if self.scales.dtype not in (DTYPES["F32"], DTYPES["BF16"]):
            yield f"wrong dtype: {self.scales.name} is {self.scales.dtype}"
        expected = tuple(-(-size // FP8_BLOCK) for size in self.shape)
        if self.scales.shape != expected:
            yield (
                f"wrong shape: {self.scales.name} is {self.scales.shape}; {self.name} {self.shape} in blocks of "
                f"{FP8_BLOCK} x {FP8_BLOCK} has scales {expected}"
            )

    def view(self) -> NDArray:
        """float32 [O, I]."""
        out = self.weight.view().astype(np.float32)
        scales = self.scales.view().astype(np.float32)
        for i, row in enumerate(scales):
            columns = np.repeat(row, FP8_BLOCK)[: out.shape[1]]
            out[i * FP8_BLOCK : (i + 1) * FP8_BLOCK] *= columns
        return out


@dataclass(frozen=True)
class Mxfp4:
    """Experts [E, I, O] from 4-bit values: blocks uint8 [E, O, I / 32, 16], scales uint8 [E, O, I / 32].

    A byte holds value 2j in its low and 2j + 1 in its high nibble; a value counts times 2 ^ (scale - 127).
    """

    blocks: Tensor
    scales: Tensor
    quantised = "MXFP4"
    dtype = DTYPES["BF16"]

    @property
    def name(self) -> str:
        """The name of the weights in an unquantised file."""
        return self.blocks.name.removesuffix(MXFP4_BLOCKS)

    @property
    def shape(self) -> Shape:
        """[E, I, O]."""
        experts, outs, groups, _ = self.blocks.shape
        return experts, groups * MXFP4_GROUP, outs

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.blocks.nbytes + self.scales.nbytes

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Blocks and scales."""
        return self.blocks, self.scales

    def faults(self) -> Iterator[str]:
        """What is wrong with the pair."""
        for tensor in self.parts:
            if tensor.dtype != DTYPES["U8"]:
                yield f"wrong dtype: {tensor.name} is {tensor.dtype}, MXFP4 is uint8"
        shape = self.blocks.shape
        if len(shape) != 4 or shape[-1] != MXFP4_GROUP // 2:
            yield f"wrong shape: {self.blocks.name} is {shape}; MXFP4 blocks are [E, O, I / 32, 16]"
        elif self.scales.shape != shape[:-1]:
            yield f"wrong shape: {self.scales.name} is {self.scales.shape}; {self.blocks.name} has scales {shape[:-1]}"

    def view(self) -> NDArray:
        """bfloat16 [E, I, O], a transposed view of [E, O, I]."""
        blocks, scales, table = self.blocks.view(), self.scales.view(), mxfp4_table()
        experts, outs, groups, half = blocks.shape
        out = np.empty((experts, outs, groups, half, 2), ml_dtypes.bfloat16)
        for expert in range(experts):
            at = scales[expert][..., None]
            out[expert, ..., 0] = table[at, blocks[expert] & 15]
            out[expert, ..., 1] = table[at, blocks[expert] >> 4]
        return out.reshape(experts, outs, groups * MXFP4_GROUP).transpose(0, 2, 1)


@cache
def mxfp4_table() -> NDArray:
    """bfloat16 [256 scales, 16 nibbles]: exact, save where 2 ^ (scale - 127) leaves float32."""
    with np.errstate(over="ignore", under="ignore"):
        values = np.ldexp(MXFP4_VALUES, np.arange(256, dtype=np.int32)[:, None] - 127)
        return values.astype(ml_dtypes.bfloat16)


Stored = Tensor | Stack | Fp8 | Mxfp4


def dequantised(there: Mapping[str, Tensor], faults: list[str]) -> tuple[dict[str, Stored], set[str]]:
    """The tensors of a file with every pair of quantised values and scales as the one weight that it means.

    Values or scales alone stay as they are: unknown.

    Returns:
        {name: tensor}, and the names of weights that cannot be read, for what was added to ``faults``.
    """
    found: dict[str, Stored] = dict(there)
    broken = set()
    for name in there:
        whole = name.removesuffix(FP8_SCALES).removesuffix(MXFP4_BLOCKS)
        if name.endswith(FP8_SCALES) and whole in there:
            pair: Fp8 | Mxfp4 = Fp8(there[whole], there[name])
            keys = (whole, name)
        elif name.endswith(MXFP4_BLOCKS) and whole + MXFP4_SCALES in there:
            pair = Mxfp4(there[name], there[whole + MXFP4_SCALES])
            keys = (name, whole + MXFP4_SCALES)
        else:
            continue
        wrong = list(pair.faults())
        faults += wrong
        for key in keys:
            del found[key]
        if wrong:
            broken.add(whole)
        else:
            found[whole] = pair
    return found, broken


def spelled_out(name: str) -> list[str]:
    """The names that a pattern with ranges ``{0..7}`` and lists ``{gate,up}`` stands for, the last running first."""
    brace = re.search(r"\{([^}]*)\}", name)
    if brace is None:
        return [name]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", brace[1])
    words = [str(i) for i in range(int(span[1]), int(span[2]) + 1)] if span else brace[1].split(",")
    return [rest for word in words for rest in spelled_out(name[: brace.start()] + word + name[brace.end() :])]


def pieces_of(name: str, shape: Shape) -> str | None:
    """The pattern of the names of the pieces that the tensor ``name`` of ``shape`` may be in; None where it is not."""
    for whole, pieces in PIECES:
        if name.endswith(whole):
            return name.removesuffix(whole) + pieces.replace("E}", f"{shape[0] - 1}}}")
    return None


def take(
    name: str, shape: Shape, there: dict[str, Stored], broken: set[str], faults: list[str], missing: list[str]
) -> Stored | None:
    """Takes the tensor ``name`` out of ``there``, whole or put together from its pieces.

    Args:
        name, shape: what the model wants.
        there: the tensors of a file by name.
        broken: names that were there and could not be read.
        faults, missing: get what is wrong, and the names of tensors that are not there.

    Returns:
        The tensor; None where it cannot be had.
    """
    if name in there:
        tensor = there.pop(name)
        if tensor.shape == shape:
            return tensor
        faults.append(f"wrong shape: {tensor.name} is {tensor.shape}, the config says {shape}")
        return None
    pattern = pieces_of(name, shape)
    names = spelled_out(pattern) if pattern else []
    if pattern is None or not any(n in there or n in broken for n in names):
        missing += [] if name in broken else [name]
        return None
    missing += [n for n in names if n not in there and n not in broken]
    pieces = [there.pop(n) for n in names if n in there]
    expected = (math.prod(shape[:-1]) // len(names), shape[-1])
    wrong = [p for p in pieces if p.shape != expected]
    faults += [f"wrong shape: {p.name} is {p.shape}, the config says {expected}" for p in wrong]
    kinds = sorted({str(p.dtype) for p in pieces})
    if len(kinds) > 1:
        faults.append(f"wrong dtype: {pattern} are of several: {', '.join(kinds)}")
    whole = len(pieces) == len(names) and not wrong and len(kinds) == 1
    return Stack(pattern, tuple(pieces), shape) if whole else None
