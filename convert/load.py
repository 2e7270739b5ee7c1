"""Opens any checkpoint: a Hugging Face folder, a hub id, or a folder that ``python -m convert`` wrote.

Everything is checked before a weight is placed: the config's family, every tensor's name and shape, and that the
drafter fits the target. Then tensors go one at a time from the mapped file to the devices that hold a part of them.
"""

import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from numpy.typing import NDArray

from convert import rules
from convert.folder import GENERATION, HF_CONFIGS, OURS, TOKENIZER_FILES, Record, is_converted, read_records
from convert.hf_chain import mtp_config
from convert.hf_config import CheckpointError, eos_token_ids, read_json, target_config
from convert.hf_drafter import drafter_config, family_of
from convert.tensors import DTYPES, contiguous, open_shelf
from dflash_jax import checkpoint
from dflash_jax.config import (
    DRAFTERS,
    AnyDrafterConfig,
    Eagle3Config,
    MTPConfig,
    TargetConfig,
    pair,
)
from dflash_jax.params import Params, abstract, unflatten
from dflash_jax.sharding import Mesh, make_mesh

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
DTYPE_NAMES = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}
MANY = 4  # tensors left out for one reason that are named one by one
Config = TargetConfig | AnyDrafterConfig
MTP = "mtp"  # the drafter that lies in the target's own folder


@dataclass(frozen=True)
class Loaded:
    """A target, perhaps with its drafter, ready on a mesh.

    ``target`` taps what ``drafter`` reads. Parameters have the plain layout of ``dflash_jax.params`` in one ``dtype``.
    ``tokenizer`` is the folder with the tokenizer's files (None: there are none), ``generation_config`` the JSON object
    of that name, ``eos_token_ids`` the union of both config files' ids, ``notes`` what was left out and why.
    """

    target: TargetConfig
    drafter: AnyDrafterConfig | None
    target_params: Params
    drafter_params: Params | None
    tokenizer: Path | None
    generation_config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    dtype: np.dtype
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Opened:
    """One model of a folder, checked but not read: found in Hugging Face files, or recorded in a converted folder."""

    folder: Path
    hf: Mapping[str, Any]
    cfg: Config
    dtype: np.dtype
    found: rules.Matched | Record

    def notes(self) -> tuple[str, ...]:
        """A line for every tensor that is left out for a reason worth saying, or for all that share one."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.found.skipped.items():
            if why:
                by_reason.setdefault(why, []).append(name)
        return tuple(
            f"{self.folder.name}: skipped {listed}: {why}"
            for why, names in by_reason.items()
            for listed in (names if len(names) <= MANY else [f"{len(names)} tensors, {names[0]} ... {names[-1]}"])
        )


def resolve(path: str | Path) -> Path:
    """The folder of a local path or of a hub id ``organisation/name`` (downloaded).

    Raises:
        CheckpointError: a file, a path that does not exist, or a hub id that cannot be fetched.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder")
    if not HUB_ID.fullmatch(str(path)):
        raise CheckpointError(f"{folder} does not exist")
    try:
        return Path(huggingface_hub.snapshot_download(str(path), allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        said = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path} is no local folder, and fetching it from the hub failed: {said[0] if said else error!r}"
        ) from error


def stored_dtype(matched: rules.Matched) -> np.dtype:
    """The dtype of most bytes of a model, its quantised weights aside."""
    total: dict[np.dtype, int] = {}
    for source in matched.sources.values():
        if source.path != "d2t" and source.tensor.quantised is None:
            total[source.tensor.dtype] = total.get(source.tensor.dtype, 0) + source.tensor.nbytes
    return max(total, key=lambda dtype: total[dtype])


def open_converted(folder: Path, part: str) -> Opened:
    """The target or drafter of a converted folder. Raises CheckpointError where the folder has no such part."""
    records = read_records(folder)
    if part not in records:
        raise CheckpointError(f"{folder} holds no {part}")
    record = records[part]
    try:
        checkpoint.check(folder / part, record.config)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return Opened(folder, read_json(folder / HF_CONFIGS[part]), record.config, DTYPE_NAMES[record.dtype], record)


def open_target(folder: Path) -> Opened:
    """A target's folder, checked. Raises CheckpointError with everything that is wrong with it."""
    if is_converted(folder):
        return open_converted(folder, "target")
    hf = read_json(folder / OURS)
    cfg = target_config(hf)
    shelf = open_shelf(folder)
    embed = next((t for t in shelf if rules.plain_name(t.name, cfg) == "model.embed_tokens.weight"), None)
    if embed is not None and embed.shape:
        cfg = dataclasses.replace(cfg, vocab_rows=max(cfg.vocab_size, embed.shape[0]))
    head = shelf.tensors.get("lm_head.weight")
    if cfg.tie_word_embeddings and embed and head and not rules.same_bytes(embed.view(), head.view()):
        # As transformers 5 does: two different tables cannot be one.
        warnings.warn(
            f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding: not tied",
            stacklevel=2,
        )
        cfg = dataclasses.replace(cfg, tie_word_embeddings=False)
    matched = rules.match(shelf, cfg)
    rules.check_values(matched, cfg)
    return Opened(folder, hf, cfg, stored_dtype(matched), matched)


def open_drafter(folder: Path, tokenizer: Path | None = None) -> Opened:
    """A drafter's folder, checked. ``tokenizer``: the target's folder, for a mask token given by its text."""
    if is_converted(folder):
        return open_converted(folder, "drafter")
    hf = read_json(folder / OURS)
    cfg, shelf = drafter_config(hf, tokenizer), open_shelf(folder)
    if isinstance(cfg, Eagle3Config):
        names = {rules.plain_name(name, cfg) for name in shelf.tensors}
        reduced = cfg.draft_vocab_size < cfg.vocab_size
        cfg = dataclasses.replace(
            cfg, own_embedding="embed_tokens.weight" in names, own_head=reduced or "lm_head.weight" in names
        )
    matched = rules.match(shelf, cfg, speculators=family_of(hf) == "speculators")
    rules.check_values(matched, cfg)
    return Opened(folder, hf, cfg, stored_dtype(matched), matched)


def open_mtp(folder: Path) -> Opened:
    """The multi-token-prediction head that a target's folder brings along, checked.

    Raises:
        CheckpointError: it has none, or everything that is wrong with it.
    """
    if is_converted(folder):
        opened = open_converted(folder, "drafter")
        if not isinstance(opened.cfg, MTPConfig):
            raise CheckpointError(f"{folder} was converted with another drafter, not with the target's own head")
        return opened
    hf, shelf = read_json(folder / OURS), open_shelf(folder)
    shelf.tensors = {name: tensor for name, tensor in shelf.tensors.items() if name.startswith("mtp.")}
    if not shelf.tensors and not shelf.faults:
        raise CheckpointError(f"{folder} has no mtp.* tensors: this target brings no multi-token-prediction head")
    cfg = mtp_config(hf)
    matched = rules.match(shelf, cfg)
    return Opened(folder, hf, cfg, stored_dtype(matched), matched)


def open_drafter_of(folder: Path, drafter: str | Path, tokenizer: Path | None) -> Opened:
    """The drafter for the target in ``folder``: its own head for "mtp", else another folder or hub id."""
    return open_mtp(folder) if str(drafter) == MTP else open_drafter(resolve(drafter), tokenizer)


def place(opened: Opened, dtype: np.dtype, mesh: Mesh) -> Params:
    """Reads a model's parameters onto the mesh in ``dtype``, one tensor at a time."""
    if isinstance(opened.found, Record):
        part = "drafter" if isinstance(opened.cfg, DRAFTERS) else "target"
        return checkpoint.restore(opened.folder / part, opened.cfg, dtype, mesh)
    specs = abstract(opened.cfg, dtype, mesh)
    flat = {}
    for path, source in opened.found.sources.items():
        view, spec = source.view(), specs[path]
        flat[path] = checkpoint.place(partial(piece, view, spec.dtype), spec)
    return unflatten(flat, opened.cfg)


def piece(view: NDArray, dtype: np.dtype, index: tuple[slice, ...]) -> NDArray:
    """The part of a mapped tensor that one device holds, as memory of its own."""
    return contiguous(view[index], dtype)


def chosen_dtype(dtype: str | np.dtype | None, stored: np.dtype) -> np.dtype:
    """None and "auto" keep the stored dtype. Raises CheckpointError for anything but float32, bfloat16 and float16."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return stored
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in DTYPE_NAMES:
        raise CheckpointError(f"dtype {name!r} is not one of auto, {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


def tokenizer_folder(folder: Path) -> Path | None:
    """``folder`` if it holds a tokenizer."""
    return folder if any((folder / name).exists() for name in TOKENIZER_FILES) else None


def load(
    path: str | Path,
    dtype: str | np.dtype | None = None,
    mesh: Mesh | None = None,
    drafter: str | Path | None = None,
) -> Loaded:
    """Opens a target and, if there is one, its drafter.

    Args:
        path: a Hugging Face folder, a hub id, or a converted folder. A converted folder's own drafter comes with it.
        dtype: of both models; None or "auto" keeps the target's stored dtype.
        mesh: where the parameters go; None is a mesh of one device.
        drafter: a drafter of its own (z-lab, speculators or EAGLE-3 folder, hub id, converted folder), or "mtp": the
            multi-token-prediction head that the target's files bring along.

    Raises:
        CheckpointError: everything that is wrong with a folder or about which the two disagree, before weights move.

    Warns:
        UserWarning: what had to be guessed: absent target_layer_ids, a tied head that differs from the embedding.
    """
    return open_checkpoint(path, drafter).place(dtype, make_mesh() if mesh is None else mesh)


def open_checkpoint(path: str | Path, drafter: str | Path | None = None) -> "Checkpoint":
    """The checks of ``load`` without its reading: everything that can be wrong shows here, in seconds."""
    folder = resolve(path)
    opened = open_target(folder)
    tokenizer = tokenizer_folder(folder)
    paired: Opened | None = None
    if drafter is not None:
        paired = open_drafter_of(folder, drafter, tokenizer)
    elif isinstance(opened.found, Record) and "drafter" in read_records(folder):
        paired = open_converted(folder, "drafter")
    return Checkpoint(opened, paired, pair_up(opened, paired), tokenizer, generation_config(folder))


def generation_config(folder: Path) -> Mapping[str, Any]:
    """The JSON object of generation_config.json; empty without the file. Raises CheckpointError for a broken one."""
    return read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}


@dataclass(frozen=True)
class Checkpoint:
    """A target, perhaps with its drafter, checked but not read."""

    opened: Opened
    paired: Opened | None
    target: TargetConfig
    tokenizer: Path | None
    generation_config: Mapping[str, Any]

    @property
    def drafter(self) -> AnyDrafterConfig | None:
        """The drafter's config."""
        return None if self.paired is None or isinstance(self.paired.cfg, TargetConfig) else self.paired.cfg

    def place(self, dtype: str | np.dtype | None, mesh: Mesh) -> Loaded:
        """Reads the parameters onto the mesh; None or "auto" keeps the target's stored dtype."""
        chosen = chosen_dtype(dtype, self.opened.dtype)
        return Loaded(
            target=self.target,
            drafter=self.drafter,
            target_params=place(self.opened, chosen, mesh),
            drafter_params=place(self.paired, chosen, mesh) if self.paired else None,
            tokenizer=self.tokenizer,
            generation_config=self.generation_config,
            eos_token_ids=eos_token_ids(self.opened.hf, self.generation_config),
            dtype=chosen,
            notes=self.opened.notes() + (self.paired.notes() if self.paired else ()),
        )


def pair_up(target: Opened, drafter: Opened | None) -> TargetConfig:
    """The target's config with the drafter's taps. Raises CheckpointError with all that the two disagree about."""
    assert isinstance(target.cfg, TargetConfig)
    if drafter is None:
        return target.cfg
    assert not isinstance(drafter.cfg, TargetConfig)
    try:
        return pair(target.cfg, drafter.cfg)
    except ValueError as error:
        raise CheckpointError(f"{drafter.folder} with {target.folder}: {error}") from error


def load_drafter(
    path: str | Path,
    dtype: str | np.dtype | None = None,
    mesh: Mesh | None = None,
    tokenizer: Path | None = None,
) -> tuple[AnyDrafterConfig, Params]:
    """A drafter without its target: nothing is said about whether they fit. Arguments and errors as ``load``; the head
    of a target's own is ``load_mtp``'s."""
    return placed(open_drafter(resolve(path), tokenizer), dtype, mesh)


def load_mtp(
    path: str | Path, dtype: str | np.dtype | None = None, mesh: Mesh | None = None
) -> tuple[AnyDrafterConfig, Params]:
    """The multi-token-prediction head of a target's folder, without the target. Arguments and errors as ``load``."""
    return placed(open_mtp(resolve(path)), dtype, mesh)


def placed(opened: Opened, dtype: str | np.dtype | None, mesh: Mesh | None) -> tuple[AnyDrafterConfig, Params]:
    """A drafter's config and its parameters on the mesh."""
    assert not isinstance(opened.cfg, TargetConfig)
    params = place(opened, chosen_dtype(dtype, opened.dtype), make_mesh() if mesh is None else mesh)
    return opened.cfg, params


def read_tensor(path: str | Path, name: str) -> NDArray:
    """One tensor of a Hugging Face folder by its name, as stored.

    Raises:
        CheckpointError: the folder has no such tensor.
    """
    shelf = open_shelf(resolve(path))
    if name not in shelf.tensors:
        raise CheckpointError("; ".join([*shelf.faults, f"{path} has no tensor {name}"]))
    return np.array(shelf.tensors[name].view())
