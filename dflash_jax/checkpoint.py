"""Parameters to and from disk, straight onto a mesh: the one user of Orbax.

Arrays lie under the dotted names of ``params.flatten``, in the plain layout, each as one uncompressed chunk (weights
hardly compress, and a mapped file can then be written without a copy of its own). They are restored on any number of
devices whatever they were saved on. A checkpoint is written whole by ``save``, or piece by piece by ``append`` and
``finish`` where it would not fit in memory; until then its folder does not exist.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax import Array
from jax.sharding import Mesh

from dflash_jax.config import AnyDrafterConfig, TargetConfig
from dflash_jax.params import Params, abstract, flatten, leaves_of, unflatten

UNFINISHED = ".partial_save"  # Orbax's suffix of a checkpoint that is still being appended to
READ_BYTES = 1 << 30  # read at once, unless one array is larger


def stay_on_host() -> None:
    """Keeps JAX off accelerators in this process, which only moves files. Call it before anything else uses JAX."""
    jax.config.update("jax_platforms", "cpu")


def context() -> ocp.Context:
    """How we write: no compression, no defensive copies (nobody changes the arrays meanwhile)."""
    made = ocp.Context()
    made.array.saving.use_compression = False
    made.memory.deepcopy_host_arrays = False
    return made


def save(params: Params, path: Path) -> None:
    """Writes all parameters (nested or flat) to ``path``; the folder appears when it is whole.

    Raises:
        ValueError: ``path`` exists.
    """
    path = path.absolute()
    if path.exists():
        raise ValueError(f"{path} exists already")
    with context():
        ocp.save(path, flatten(params))


def append(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Adds some arrays, by dotted name, to the unfinished checkpoint beside ``path``; all of them or none."""
    with context():
        ocp.partial.save(path.absolute(), dict(arrays))


def appended(path: Path) -> set[str]:
    """The names that ``append`` has written so far: after a crash, what need not be written again."""
    names: set[str] = set()
    for file in path.with_name(path.name + UNFINISHED).glob("*.pending*/*/_METADATA"):
        tree = json.loads(file.read_text(encoding="utf-8"))["tree_metadata"]
        names |= {".".join(str(key["key"]) for key in entry["key_metadata"]) for entry in tree.values()}
    return names


def finish(path: Path) -> None:
    """Makes the appended arrays the checkpoint at ``path``."""
    with context():
        ocp.partial.finalize(path.absolute())


def stored(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every array of a finished checkpoint, without reading them.

    Raises:
        ValueError: there is no finished checkpoint at ``path``.
    """
    path = path.absolute()
    if path.name.endswith(UNFINISHED) or path.with_name(path.name + UNFINISHED).exists():
        raise ValueError(f"the checkpoint at {path} was never finished")
    try:
        tree = ocp.metadata(path).metadata
    except (ValueError, OSError) as error:
        raise ValueError(f"there is no finished checkpoint at {path}: {error}") from error
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in flatten(tree).items()}


def check(path: Path, cfg: TargetConfig | AnyDrafterConfig) -> None:
    """Raises ValueError listing all differences between the checkpoint at ``path`` and the declaration of ``cfg``."""
    there = {name: shape for name, (shape, _) in stored(path).items()}
    declared = {name: leaf.shape for name, leaf in flatten(leaves_of(cfg)).items()}
    missing, unknown = sorted(set(declared) - set(there)), sorted(set(there) - set(declared))
    faults = [f"missing arrays: {', '.join(missing)}"] if missing else []
    faults += [f"unknown arrays: {', '.join(unknown)}"] if unknown else []
    faults += [
        f"{name} is {there[name]}, the config says {shape}"
        for name, shape in declared.items()
        if name in there and there[name] != shape
    ]
    if faults:
        raise ValueError(f"the checkpoint at {path} does not fit its config: {'; '.join(faults)}")


def restore(path: Path, cfg: TargetConfig | AnyDrafterConfig, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """Parameters from ``path`` onto the mesh in ``dtype``, each device reading its own part.

    Raises:
        ValueError: no finished checkpoint, or one that does not fit ``cfg``: all differences at once.
    """
    check(path, cfg)
    wanted = abstract(cfg, dtype, mesh)
    reading = context()
    largest = max(math.prod(spec.shape) * max(spec.dtype.itemsize, 4) for spec in wanted.values())
    reading.memory.read_concurrent_bytes = max(READ_BYTES, largest)
    with reading, damage_named(path):
        return unflatten(ocp.load(path.absolute(), wanted), cfg)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turns what Orbax says of unreadable bytes into one ValueError that names the checkpoint."""
    try:
        yield
    except Exception as error:  # tensorstore raises several kinds, by the place of the damage
        said = str(error).strip().splitlines()
        raise ValueError(f"the checkpoint at {path} cannot be read: {said[0] if said else error!r}") from error


def read(path: Path, wanted: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, np.ndarray]:
    """Some arrays of a finished checkpoint on the host, as stored. ``wanted`` is a part of what ``stored`` says."""
    reading = context()
    reading.pytree.loading.partial_load = True
    with reading, damage_named(path):
        loaded = ocp.load(path.absolute(), {name: np.empty(shape, dtype) for name, (shape, dtype) in wanted.items()})
    return {name: np.asarray(loaded[name]) for name in wanted}


def place(part: Callable[[Any], np.ndarray], spec: jax.ShapeDtypeStruct) -> Array:
    """An array on the devices of ``spec``; ``part`` makes the piece of one device (own memory, of the spec's dtype)."""
    return jax.make_array_from_callback(spec.shape, spec.sharding, part)
