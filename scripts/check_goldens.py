"""Runs golden cases (tiny checkpoints with the PyTorch references' outputs) through the real code, one line a case.

    python scripts/check_goldens.py tests/golden --real smollm2=.cache/smollm2-135m-instruct

A case is a folder with case.json, expected.safetensors and checkpoints; layout, conventions and tolerances are those of
the README beside the cases. Token ids and acceptance lengths must be exact, arrays within their bound. A case, or a
part of one, whose family is not built is listed as skipped by name; what is built is asked of ``convert``. Exits 1 on
any miss. Needs the dev extra (scipy).
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import typer
from goldens.case import Case, Verdict
from goldens.checks import check_drafter, check_pair, check_real, check_target
from safetensors.numpy import load_file

from pallas_kernels import resolve

CHECKS: Mapping[str, Callable[[Case, str, Verdict], None]] = {
    "target": check_target,
    "drafter": check_drafter,
    "pair": check_pair,
}


def judged(name: str, check: Callable[[Verdict], None]) -> Verdict:
    """The verdict of a check; an error inside is a miss of this case, and the others go on."""
    verdict = Verdict(name)
    try:
        check(verdict)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        verdict.misses.append(f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}")
    return verdict


def check_case(folder: Path, root: Path, kernels: str) -> Verdict:
    """Runs the case in ``folder``, which lies under ``root``."""
    name = folder.relative_to(root).as_posix()
    about = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    if about["kind"] not in CHECKS:
        return Verdict(name, skipped=[f"kind {about['kind']} is not built"])
    case = Case(name, folder, about, load_file(folder / "expected.safetensors"))
    return judged(name, partial(CHECKS[about["kind"]], case, kernels))


def checks_of(root: Path, real: Mapping[str, str], kernels: str) -> Mapping[str, Callable[[], Verdict]]:
    """Everything under ``root`` by name, in the order in which it runs."""
    folders = [path.parent for path in sorted(root.rglob("case.json"))]
    checks = {folder.relative_to(root).as_posix(): partial(check_case, folder, root, kernels) for folder in folders}
    for runs in sorted((root / "real").glob("*.json")):
        folder = Path(real[runs.stem]) if runs.stem in real else None
        checks[f"real/{runs.stem}"] = partial(judged, f"real/{runs.stem}", partial(check_real, runs, folder, kernels))
    return checks


def main(
    folder: Annotated[Path, typer.Argument(help="folder of cases", exists=True, file_okay=False)],
    real: Annotated[list[str] | None, typer.Option(help="NAME=HF_FOLDER of a real target, e.g. smollm2=DIR")] = None,
    only: Annotated[str, typer.Option(help="run the cases whose name holds this")] = "",
    kernels: Annotated[str, typer.Option(help="auto, or an implementation of the kernels")] = "auto",
) -> None:
    """Run every golden case under FOLDER."""
    chosen = resolve(kernels, jax.default_backend())
    if wrong := [item for item in real or () if "=" not in item]:
        raise typer.BadParameter(f"{wrong[0]!r} is not NAME=HF_FOLDER", param_hint="--real")
    folders = dict(item.split("=", 1) for item in real or ())
    unknown = sorted(set(folders) - {p.stem for p in (folder / "real").glob("*.json")})
    if unknown:
        raise typer.BadParameter(f"{folder / 'real'} has no runs of {', '.join(unknown)}", param_hint="--real")

    verdicts = []
    for name, check in checks_of(folder, folders, chosen).items():
        if only in name:
            start = time.perf_counter()
            verdicts.append(check())
            print(f"{verdicts[-1].line()} [{time.perf_counter() - start:.1f} s]", flush=True)

    ran = [v for v in verdicts if v.ids or v.errors or v.misses]
    missed = [v.name for v in verdicts if v.misses]
    parts = [v.name for v in ran if v.skipped]
    print(
        f"{len(ran) - len(missed)} of {len(ran)} cases ok ({chosen} kernels, {jax.default_backend()}), "
        f"{len(parts)} of them in part, {len(verdicts) - len(ran)} skipped"
    )
    if missed or not verdicts:
        print(f"missed: {', '.join(missed)}" if missed else f"no case in {folder}{f' named *{only}*' if only else ''}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
