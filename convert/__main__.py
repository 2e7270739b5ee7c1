"""python -m convert {to-orbax, to-hf, check}: checkpoints between Hugging Face's format and ours."""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from convert.check import check as check_folder
from convert.stream import Progress, Report, to_hf, to_orbax
from dflash_jax.checkpoint import stay_on_host

PRINTED_WIDTH = 160
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=__doc__)
Folder = Annotated[Path, typer.Argument(help="a Hugging Face or converted folder")]
Dtype = Literal["float32", "bfloat16", "float16"]
Drafter = Annotated[str | None, typer.Option(help="folder or hub id of its drafter, or mtp: its own head")]


@contextmanager
def faults() -> Iterator[None]:
    """Turns what is wrong with the user's files into one message and exit status 1."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


@contextmanager
def shown() -> Iterator[Progress]:
    """A progress bar with GB/s on a terminal; one line a model elsewhere."""
    console = Console(stderr=True)
    begun: dict[str, tuple[float, int]] = {}
    tasks: dict[str, TaskID] = {}
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:

        def progress(part: str, done: int, total: int) -> None:
            if part not in begun:
                begun[part] = (time.monotonic(), done)
                tasks[part] = bar.add_task(part, total=total, completed=done)
            bar.update(tasks[part], completed=done)
            if done == total and not console.is_terminal:
                began, before = begun[part]
                seconds = max(time.monotonic() - began, 1e-9)
                speed = (done - before) / seconds / 1e9
                print(f"{part}: {total / 1e9:.3f} GB in {seconds:.1f} s ({speed:.2f} GB/s)", file=sys.stderr)

        yield progress


def say(report: Report) -> None:
    """The last words of a conversion."""
    for note in report.notes:
        print(f"note: {note}")
    print(f"{report.out}: {report.nbytes / 1e9:.3f} GB")


@app.command("to-orbax")
def to_orbax_command(
    target: Annotated[str, typer.Option(help="folder or hub id of the target")],
    out: Annotated[Path, typer.Option(help="the folder to write; must not exist")],
    drafter: Drafter = None,
    dtype: Annotated[Dtype | None, typer.Option(help="of all floats; default: as stored")] = None,
) -> None:
    """Convert a Hugging Face target, and its drafter, to one folder of ours."""
    stay_on_host()
    with faults():
        with shown() as progress:
            report = to_orbax(target, out, drafter, dtype, progress)
        say(report)


@app.command("to-hf")
def to_hf_command(
    folder: Annotated[Path, typer.Argument(help="a converted folder")],
    out: Annotated[Path, typer.Option(help="the folder to write; must not exist. A drafter goes to OUT/drafter")],
) -> None:
    """Write a converted folder back in Hugging Face's format."""
    stay_on_host()
    with faults():
        with shown() as progress:
            report = to_hf(folder, out, progress)
        say(report)


@app.command("check")
def check_command(folder: Folder, drafter: Drafter = None) -> None:
    """List tensors, shapes and bytes of a folder, and say whether target and drafter fit."""
    stay_on_host()
    with faults():
        console = Console()
        check_folder(folder, drafter, console if console.is_terminal else Console(width=PRINTED_WIDTH))


if __name__ == "__main__":
    app(prog_name="python -m convert")
