"""Tilings as data: what ``scripts/tune_kernels.py`` measured on a kind of device, one JSON file each.

Where nothing was measured, on another GPU or for another shape, a rule beside the kernel decides.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pallas_kernels import backend

FOLDER = Path(__file__).parent / "tuned"


def file_of(kind: str) -> Path:
    """The file of a kind of device ("NVIDIA H200")."""
    return FOLDER / f"{kind.lower().replace(' ', '-')}.json"


@cache
def table(kind: str) -> Mapping[str, Mapping[str, Any]]:
    """What was measured on a kind of device: op -> key -> fields of a tiling; empty where nothing was."""
    file = file_of(kind)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def lookup(op: str, key: str) -> Any:
    """What was measured for an op and a shape on the device in use, None where nothing was."""
    return table(backend.device_kind()).get(op, {}).get(key)
