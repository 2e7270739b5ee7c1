"""The layout of a converted folder.

    config.json                 ours: format, and for "target" and "drafter" what the record below holds
    hf_config.json              the target's own config.json, byte for byte; hf_drafter_config.json the drafter's
    generation_config.json      and the tokenizer's files, as they were
    target/, drafter/           Orbax arrays under the dotted names of ``params.flatten``

A conversion, either way, works in ``<folder>.converting`` beside its destination, where ``conversion.json`` says from
what; the folder is renamed when it is whole.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from convert.hf_config import CheckpointError, read_json
from dflash_jax.config import AnyDrafterConfig, TargetConfig, drafter_type, from_json, to_json

FORMAT = "dflash-jax 1"
OURS = "config.json"
GENERATION = "generation_config.json"
JOURNAL = "conversion.json"
UNFINISHED = ".converting"
PARTS = ("target", "drafter")
HF_CONFIGS = {"target": "hf_config.json", "drafter": "hf_drafter_config.json"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class Record:
    """What a converted folder knows of one model.

    ``names`` maps a parameter to its Hugging Face name, ``dtypes`` to the safetensors dtype it had there; ``cast`` is
    the dtype that floats were converted to (None: kept), ``skipped`` the tensors that were left out and why.
    """

    config: TargetConfig | AnyDrafterConfig
    dtype: str
    names: Mapping[str, str]
    dtypes: Mapping[str, str]
    cast: str | None
    skipped: Mapping[str, str | None]


def is_converted(folder: Path) -> bool:
    """Whether ``folder`` was written by the converter.

    Raises:
        CheckpointError: it is what an unfinished conversion left, or holds no config.json.
    """
    if (folder / JOURNAL).exists() or any(folder.glob("*.partial_save")):
        raise CheckpointError(f"{folder} is an unfinished conversion: run the same command again to finish it")
    if not (folder / OURS).exists():
        raise CheckpointError(f"{folder} has no config.json")
    return "format" in read_json(folder / OURS)


def read_records(folder: Path) -> dict[str, Record]:
    """{"target" and perhaps "drafter": record} of a converted folder.

    Raises:
        CheckpointError: another format, or fields that are missing or unknown.
    """
    ours = read_json(folder / OURS)
    if ours.get("format") != FORMAT:
        raise CheckpointError(f"{folder / OURS} has the format {ours.get('format')!r}, not {FORMAT!r}")
    records = {}
    for part in PARTS:
        if part not in ours:
            continue
        known, given = {field.name for field in fields(Record)}, dict(ours[part])
        if set(given) != known:
            raise CheckpointError(f"{folder / OURS}: {part} has the fields {sorted(given)}, not {sorted(known)}")
        try:
            config = given.pop("config")
            cfg = from_json(TargetConfig, config) if part == "target" else from_json(drafter_type(config), config)
            records[part] = Record(config=cfg, **given)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / OURS}: {error}") from error
    if not records:
        raise CheckpointError(f"{folder / OURS} names neither a target nor a drafter")
    return records


def write_records(folder: Path, records: Mapping[str, Record]) -> None:
    """Writes our config.json.

    ``model_type`` stands at the top for transformers' tokenizers, which look there and suspect the worst (a faulty
    Mistral tokenizer) where they find none.
    """
    family = next((r.config.model_type for r in records.values() if isinstance(r.config, TargetConfig)), "dflash")
    ours = {part: {**asdict(record), "config": to_json(record.config)} for part, record in records.items()}
    (folder / OURS).write_text(
        json.dumps({"format": FORMAT, "model_type": family, **ours}, indent=1) + "\n", encoding="utf-8"
    )
