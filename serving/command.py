"""Options that the commands share: the model and the engine, declared once."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from serving.config import EngineConfig

Target = Annotated[str, typer.Option(help="folder or hub id of the target")]
Drafter = Annotated[str | None, typer.Option(help="folder or hub id of its DFlash drafter")]
TokenizerFolder = Annotated[Path | None, typer.Option(help="tokenizer folder, if the target's has none")]
CompilationCache = Annotated[Path | None, typer.Option(help="compiled steps; default: a folder per user")]

# Fields of EngineConfig; block_size and seed are each command's own matter.
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="auto: as the target's files")]
MaxModelLen = Annotated[int | None, typer.Option(help="prompt and output tokens")]
MaxNumSeqs = Annotated[int, typer.Option(help="rows decoded together")]
PageSize = Annotated[int, typer.Option(help="tokens a K/V page")]
NumPages = Annotated[int | None, typer.Option(help="K/V pages; default: what the memory holds")]
PrefillChunk = Annotated[int, typer.Option(help="prompt tokens a step")]
PrefixCache = Annotated[bool, typer.Option(help="share the K/V of prompts that begin alike")]
Overlap = Annotated[bool, typer.Option(help="plan a step while the one before runs")]
Kernels = Annotated[str, typer.Option(help="auto, or an implementation")]
TensorParallelSize = Annotated[int, typer.Option(help="devices that share the model")]


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's parameters that are fields of ``EngineConfig``: all of them, by the same names."""
    return {field.name: given[field.name] for field in fields(EngineConfig)}
