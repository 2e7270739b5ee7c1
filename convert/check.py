"""What ``python -m convert check`` prints: every tensor of a folder, and whether target and drafter fit."""

import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from convert import rules
from convert.folder import OURS, Record, is_converted, read_records
from convert.hf_config import CheckpointError, drafter_marks, read_json
from convert.load import (
    Opened,
    open_converted,
    open_drafter,
    open_drafter_of,
    open_target,
    pair_up,
    resolve,
    tokenizer_folder,
)
from convert.tensors import open_shelf
from dflash_jax import checkpoint
from dflash_jax.config import DrafterConfig, TargetConfig

Row = tuple[str, str, str, str, int]


def hf_rows(opened: Opened) -> Iterator[Row]:
    """(file, tensor, becomes, shape and dtype, bytes) of a Hugging Face folder, skipped tensors included."""
    assert isinstance(opened.found, rules.Matched)
    paths = {part.name: source.path for source in opened.found.sources.values() for part in source.tensor.parts}
    for tensor in open_shelf(opened.folder):
        if tensor.name not in paths and tensor.name not in opened.found.skipped:
            continue  # another model's: a target's folder may bring its own drafter
        fate = paths.get(tensor.name) or f"skipped: {opened.found.skipped[tensor.name] or 'a buffer'}"
        yield tensor.name, fate, str(tensor.shape), tensor.dtype.name, tensor.nbytes


def converted_rows(opened: Opened, part: str) -> Iterator[Row]:
    """The same of one model in a converted folder."""
    assert isinstance(opened.found, Record)
    for path, (shape, dtype) in sorted(checkpoint.stored(opened.folder / part).items()):
        yield opened.found.names[path], path, str(shape), dtype.name, math.prod(shape) * dtype.itemsize


def table(title: str, rows: list[Row]) -> Table:
    """The tensors of one model with their sum."""
    made = Table(title=title)
    for column in ("tensor", "parameter", "shape", "dtype"):
        made.add_column(column, overflow="fold")
    made.add_column("bytes", justify="right", no_wrap=True)
    for name, path, shape, dtype, nbytes in rows:
        made.add_row(name, path, shape, dtype, f"{nbytes:,}")
    made.add_section()
    made.add_row(f"{len(rows)} tensors", "", "", "", f"{sum(row[-1] for row in rows):,}")
    return made


def check(path: str | Path, drafter: str | Path | None, console: Console) -> None:
    """Prints what a folder holds.

    Args:
        path: a Hugging Face folder (target or drafter), a hub id, or a converted folder.
        drafter: a drafter to pair with the target; a converted folder's own one otherwise.
        console: where to print.

    Raises:
        CheckpointError: everything that is wrong.
    """
    folder = resolve(path)
    models: dict[str, Opened] = {}
    if is_converted(folder):
        models = {part: open_converted(folder, part) for part in read_records(folder)}
    elif drafter_marks(read_json(folder / OURS)):
        models["drafter"] = open_drafter(folder)
    else:
        models["target"] = open_target(folder)
    if drafter is not None:
        if "target" not in models:
            raise CheckpointError(f"{folder} is a drafter itself")
        models["drafter"] = open_drafter_of(folder, drafter, tokenizer_folder(folder))

    for part, opened in models.items():
        rows = list(hf_rows(opened) if isinstance(opened.found, rules.Matched) else converted_rows(opened, part))
        console.print(table(f"{part}: {opened.folder}", rows))
    if "target" not in models:
        console.print("a drafter without a target: pairing not checked")
        return
    if "drafter" not in models:
        console.print("a target without a drafter")
        return
    paired = pair_up(models["target"], models["drafter"])
    cfg = models["drafter"].cfg
    assert not isinstance(cfg, TargetConfig)
    console.print(
        f"target and drafter fit: taps {list(paired.target_layer_ids)} of {paired.num_hidden_layers} layers, "
        f"block {cfg.block_size}" + (f", mask id {cfg.mask_token_id}" if isinstance(cfg, DrafterConfig) else "")
    )
