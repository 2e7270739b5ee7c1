"""Hugging Face shards -> Orbax and back, one tensor at a time.

Going in, a tensor is a view of the mapped file, made contiguous (if it must be transposed) and appended to an
unfinished Orbax checkpoint; coming back, it is read alone and written to its place in a safetensors file. So memory
stays near the size of the largest tensor. Everything that can be wrong is said before anything is written; what a
killed run has saved is kept, and the same command goes on from there.
"""

import fcntl
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from convert import rules
from convert.derived import spelled_out
from convert.folder import (
    GENERATION,
    HF_CONFIGS,
    JOURNAL,
    OURS,
    TOKENIZER_FILES,
    UNFINISHED,
    Record,
    is_converted,
    read_records,
    write_records,
)
from convert.hf_config import CheckpointError, read_json
from convert.load import (
    DTYPE_NAMES,
    Opened,
    chosen_dtype,
    generation_config,
    open_converted,
    open_drafter_of,
    open_target,
    pair_up,
    resolve,
    tokenizer_folder,
)
from convert.tensors import DTYPES, INDEX, NAMES, SINGLE, contiguous
from dflash_jax import checkpoint
from dflash_jax.params import FLOAT32

GROUP_BYTES = 64 << 20  # small tensors are appended together up to this
SHARD_BYTES = 5_000_000_000
SLAB_BYTES = 64 << 20
LICENCES = ("LICENSE*", "NOTICE*")
Progress = Callable[[str, int, int], None]  # (part, bytes done, bytes in all)


@dataclass(frozen=True)
class Report:
    """What a conversion did: bytes written and, line by line, what is not as it was."""

    out: Path
    nbytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Written:
    """A parameter on its way out: path, rule, and its name, shape and dtype in the safetensors file.

    A name with braces stands for pieces of equal size, which lie one below the other in the array.
    """

    path: str
    rule: rules.Rule
    name: str
    shape: tuple[int, ...]
    dtype: str

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the file, in the order of the bytes."""
        names = spelled_out(self.name)
        if len(names) == 1:
            return [(self.name, self.shape)]
        return [(name, (math.prod(self.shape[:-1]) // len(names), self.shape[-1])) for name in names]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Item = TypeVar("Item", rules.Source, Written)


def quiet(part: str, done: int, total: int) -> None:
    """A progress callback that says nothing."""


def to_orbax(
    target: str | Path,
    out: Path,
    drafter: str | Path | None = None,
    dtype: str | None = None,
    progress: Progress = quiet,
) -> Report:
    """Converts a Hugging Face target, perhaps with its drafter, to the folder ``out``.

    Args:
        target: folder or hub id.
        out: must not exist; ``out.converting`` is the folder of the work in progress.
        drafter: folder or hub id of a z-lab, speculators or EAGLE-3 drafter; "mtp" for the target's own head.
        dtype: float32, bfloat16 or float16 for all floats; None keeps what the files have.
        progress: called after every write.

    Raises:
        CheckpointError: everything that is wrong with the input, before anything is written.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists already")
    folder = resolve(target)
    models = {"target": open_target(folder)}
    if drafter is not None:
        models["drafter"] = open_drafter_of(folder, drafter, tokenizer_folder(folder))
    for opened in models.values():
        if isinstance(opened.found, Record):
            raise CheckpointError(f"{opened.folder} is a converted folder already")
    pair_up(models["target"], models.get("drafter"))
    generation_config(folder)
    cast = None if dtype in (None, "auto") else DTYPE_NAMES[chosen_dtype(dtype, models["target"].dtype).name]

    work = out.with_name(out.name + UNFINISHED)
    with workplace(work, {"from": {part: identity(opened) for part, opened in models.items()}, "dtype": dtype}):
        nbytes = 0
        for part, opened in models.items():
            nbytes += write_arrays(work / part, part, opened, cast, progress)
            shutil.copyfile(opened.folder / OURS, work / HF_CONFIGS[part])
        copy_files(folder, work)
        records = {part: record_of(opened, cast) for part, opened in models.items()}
        write_records(work, records)
    work.rename(out)
    return Report(out, nbytes, tuple(note for opened in models.values() for note in opened.notes()))


def identity(opened: Opened) -> dict[str, Any]:
    """What tells one source from another: its config, and the name, size and time of its weight files."""
    files = sorted({part.file for source in matched(opened).sources.values() for part in source.tensor.parts})
    return {
        "folder": str(opened.folder.resolve()),
        "config": dict(opened.hf),
        "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }


def matched(opened: Opened) -> rules.Matched:
    """The sources of a Hugging Face folder."""
    assert isinstance(opened.found, rules.Matched)
    return opened.found


@contextmanager
def workplace(work: Path, journal: Mapping[str, Any]) -> Iterator[None]:
    """The folder of a conversion in progress, ours alone; the journal goes when the body has ended well.

    Raises:
        CheckpointError: another process works there, or what lies there comes from another conversion.
    """
    text = json.dumps(journal, sort_keys=True)
    fresh = work / (JOURNAL + ".new")
    fresh.unlink(missing_ok=True)
    if work.exists() and any(work.iterdir()):
        if not (work / JOURNAL).exists():
            raise CheckpointError(f"{work} is in the way, and no conversion left it")
        if (work / JOURNAL).read_text(encoding="utf-8") != text:
            raise CheckpointError(f"{work} is left from a conversion of something else: remove it first")
    else:
        work.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text, encoding="utf-8")
        fresh.rename(work / JOURNAL)
    with (work / JOURNAL).open("rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is converting to {work}") from None
        for stray in work.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(stray)
        yield
        (work / JOURNAL).unlink()


def groups(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Runs of small tensors up to GROUP_BYTES together; a larger one goes alone."""
    group: list[Item] = []
    size = 0
    for item in items:
        if group and size + item.nbytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += item.nbytes
    if group:
        yield group


def write_arrays(path: Path, part: str, opened: Opened, cast: Any, progress: Progress) -> int:
    """Appends all tensors of a model that are not there yet, then makes the checkpoint whole. Returns the bytes."""
    sources = list(matched(opened).sources.values())
    total = sum(source.nbytes for source in sources)
    finishing = path.with_name(path.name + ".finishing")
    if path.exists():
        finishing.unlink(missing_ok=True)
        progress(part, total, total)
        return total
    if finishing.exists():  # killed while Orbax merged its pieces: they may be half merged, so begin again
        shutil.rmtree(path.with_name(path.name + checkpoint.UNFINISHED), ignore_errors=True)
        finishing.unlink()
    there = checkpoint.appended(path)
    done = sum(source.nbytes for source in sources if source.path in there)
    progress(part, done, total)
    for group in groups([source for source in sources if source.path not in there]):
        checkpoint.append({source.path: array_of(source, opened.dtype, cast) for source in group}, path)
        done += sum(source.nbytes for source in group)
        progress(part, done, total)
    finishing.touch()
    checkpoint.finish(path)
    finishing.unlink()
    return total


def is_kept(path: str) -> bool:
    """Whether a parameter keeps its dtype where a model is converted to another."""
    return path.split(".")[-1] in FLOAT32


def array_of(source: rules.Source, stored: Any, cast: Any) -> NDArray:
    """A parameter in our layout: the mapped file itself where nothing changes, else a copy. ``stored``: the model's
    dtype, which weights get that were quantised."""
    view = source.view()
    kept = stored if source.tensor.quantised else view.dtype
    dtype = DTYPES["I32"] if source.path == "d2t" else kept if cast is None or is_kept(source.path) else cast
    return view if view.flags.c_contiguous and view.dtype == dtype else contiguous(view, dtype)


def record_of(opened: Opened, cast: Any) -> Record:
    """What the converted folder keeps of a model beside its arrays."""
    found = matched(opened)
    return Record(
        config=opened.cfg,
        dtype=(opened.dtype if cast is None else cast).name,
        names={path: source.tensor.name for path, source in found.sources.items()},
        dtypes={
            path: NAMES[opened.dtype if source.tensor.quantised else source.tensor.dtype]
            for path, source in found.sources.items()
        },
        cast=None if cast is None else cast.name,
        skipped=found.skipped,
    )


def copy_files(source: Path, destination: Path) -> None:
    """The generation config, the tokenizer and the licence."""
    names = [source / name for name in (GENERATION, *TOKENIZER_FILES)]
    names += [path for pattern in LICENCES for path in sorted(source.glob(pattern))]
    for path in names:
        if path.is_file():
            shutil.copyfile(path, destination / path.name)


def to_hf(source: Path, out: Path, progress: Progress = quiet) -> Report:
    """Writes a converted folder back: the target to ``out``, a drafter to ``out/drafter``.

    Tensors are bit for bit what they were, unless the conversion cast them; what it skipped is missing. Both are in
    the notes of the report.

    Raises:
        CheckpointError: ``source`` is no whole converted folder, or ``out`` exists.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists already")
    if not is_converted(source):
        raise CheckpointError(f"{source} is not a converted folder")
    records = read_records(source)
    notes: list[str] = []
    nbytes = 0
    for part, record in records.items():
        open_converted(source, part)
        if record.cast:
            notes.append(f"{part}: floats were converted to {record.cast}, and stay so")
        notes += [f"{part}: {name} was skipped and is missing ({why})" for name, why in record.skipped.items() if why]
    work = out.with_name(out.name + UNFINISHED)
    with workplace(work, {"back from": str(source.resolve())}):
        for part, record in records.items():
            folder = work if part == "target" else work / part
            folder.mkdir(exist_ok=True)
            nbytes += write_shards(source / part, folder, part, record, progress)
            copy_config(source / HF_CONFIGS[part], folder / OURS, record)
        copy_files(source, work)
    work.rename(out)
    return Report(out, nbytes, tuple(notes))


def copy_config(source: Path, destination: Path, record: Record) -> None:
    """A model's own config.json, byte for byte unless it says that weights are quantised which no longer are."""
    if rules.QUANTISATION not in record.skipped:
        shutil.copyfile(source, destination)
        return
    plain = {name: value for name, value in read_json(source).items() if name != rules.QUANTISATION}
    destination.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def plan_shards(record: Record) -> list[list[Written]]:
    """All tensors of a model in declaration order, cut into files of at most SHARD_BYTES."""
    shards: list[list[Written]] = [[]]
    size = 0
    for path, (rule, _, leaf) in rules.rules_of(record.config).items():
        was = record.dtypes[path]
        kind = was if record.cast is None or path == "d2t" or is_kept(path) else NAMES[DTYPE_NAMES[record.cast]]
        item = Written(path, rule, record.names[path], rule.transform.shape(leaf.shape), kind)
        if shards[-1] and size + item.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return shards


def write_shards(arrays: Path, folder: Path, part: str, record: Record, progress: Progress) -> int:
    """Writes the safetensors files of a model, and their index if there are several. Returns the bytes."""
    shards = plan_shards(record)
    there = checkpoint.stored(arrays)
    total = sum(item.nbytes for shard in shards for item in shard)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    done = 0
    progress(part, done, total)
    for file, shard in zip(names, shards, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for item in shard:
            for name, shape in item.tensors():
                end = offset + math.prod(shape) * DTYPES[item.dtype].itemsize
                header[name] = {"dtype": item.dtype, "shape": list(shape), "data_offsets": [offset, end]}
                offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for group in groups(shard):
                values = checkpoint.read(arrays, {item.path: there[item.path] for item in group})
                for item in group:
                    for slab in slabs(item.rule.transform.save(values.pop(item.path)), DTYPES[item.dtype]):
                        opened.write(slab)
                    done += item.nbytes
                progress(part, done, total)
    if len(shards) > 1:
        where = {
            name: file
            for file, shard in zip(names, shards, strict=True)
            for item in shard
            for name, _ in item.tensors()
        }
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def slabs(values: NDArray, dtype: Any) -> Iterator[bytes]:
    """The bytes of an array in C order, some rows at a time."""
    rows = max(1, SLAB_BYTES // max(1, values[:1].size * dtype.itemsize))
    for i in range(0, values.shape[0], rows):
        yield contiguous(values[i : i + rows], dtype).tobytes()
