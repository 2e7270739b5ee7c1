"""The golden cases of this folder, through scripts/check_goldens.py, which runs the large sets the same way."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import check_goldens
import jax
import numpy as np
import pytest
from goldens.case import Verdict
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.parent.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("case.json"))


@pytest.mark.parametrize("name", CASES)
def test_golden_case(name: str) -> None:
    if name.startswith("pairs/"):  # samples enough for computing to outweigh compiling
        jax.config.update("jax_disable_most_optimizations", False)
    verdict = check_goldens.check_case(GOLDEN / name, GOLDEN, "reference")
    assert not verdict.misses, verdict.line()
    assert not verdict.skipped
    assert verdict.ids
    assert verdict.errors


def test_every_kind_is_there_and_small() -> None:
    assert {name.split("/")[0] for name in CASES} == {"targets", "drafters", "pairs"}
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 8e6


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leaves the optimiser as the other tests want it."""
    before = jax.config.read("jax_disable_most_optimizations")
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of one case, to be spoilt."""
    shutil.copytree(GOLDEN / "targets" / "tiny_qwen2", tmp_path / "targets" / "tiny_qwen2")
    return tmp_path


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    app = check_goldens.typer.Typer()
    app.command()(check_goldens.main)
    result = CliRunner().invoke(app, [str(folder), *options])
    return result.exit_code, result.output


def test_a_spoilt_value_and_a_wrong_id_are_missed(folder: Path) -> None:
    """The negative control: errors beyond the bound and single wrong ids are found, named, and end in exit code 1."""
    file = folder / "targets" / "tiny_qwen2" / "expected.safetensors"
    arrays = load_file(file)
    arrays["p1.taps"][3, 5] += 0.05
    arrays["chain.block_logits"][2, 7, 0] = np.nan
    arrays["p0.greedy_ids"][-1] += 1
    save_file(arrays, file)
    code, output = run(folder)
    assert code == 1
    assert "MISS     targets/tiny_qwen2" in output
    assert "greedy_ids WRONG 1/2" in output
    assert "taps: 5.0e-02, bound" in output
    assert "block_logits: inf, bound 1e-03" in output
    assert "logits: " not in output.replace("block_logits: ", "")  # what is right is not among the misses
    assert "missed: targets/tiny_qwen2" in output


def test_what_is_not_built_is_skipped_by_name(folder: Path) -> None:
    case = folder / "targets" / "tiny_qwen2"
    config = json.loads((case / "checkpoint" / "config.json").read_text())
    (case / "checkpoint" / "config.json").write_text(json.dumps({**config, "model_type": "abacus"}))
    eagle = folder / "drafters" / "eagle"
    eagle.mkdir(parents=True)
    shutil.copy(case / "expected.safetensors", eagle)
    (eagle / "case.json").write_text(json.dumps({"kind": "drafter", "method": "eagle9", "checkpoint": "checkpoint"}))
    (folder / "real").mkdir()
    (folder / "real" / "smollm2.json").write_text("{}")
    code, output = run(folder)
    assert code == 0
    assert "skipped  targets/tiny_qwen2: target family abacus is not built" in output
    assert "skipped  drafters/eagle: drafter method eagle9 is not built" in output
    assert "skipped  real/smollm2: no folder given" in output
    assert f"0 of 0 cases ok (reference kernels, {jax.default_backend()}), 0 of them in part, 3 skipped" in output
    assert run(folder, "--only", "nothing of the kind")[0] == 1


def test_an_error_is_a_miss_of_its_case_alone(folder: Path) -> None:
    (folder / "targets" / "tiny_qwen2" / "checkpoint" / "model.safetensors").unlink()
    code, output = run(folder)
    assert code == 1
    assert "CheckpointError" in output
    assert "no weights" in output


def test_a_real_pair_without_runs_is_refused(folder: Path) -> None:
    code, output = run(folder, "--real", "qwen=somewhere")
    assert code == 2
    assert "has no runs of qwen" in " ".join(output.replace("│", " ").split())


def test_verdicts_judge_shapes_infinities_and_nan() -> None:
    verdict = Verdict("case")
    verdict.close("fine", [1.0, -np.inf], [1.0, -np.inf], 0.0)
    assert not verdict.misses
    for ours, theirs in (([np.nan], [0.0]), ([np.inf], [-np.inf]), ([1.0], [np.inf]), ([1.0, 2.0], [1.0])):
        before = len(verdict.misses)
        verdict.close("wrong", ours, theirs, 1e9)
        assert len(verdict.misses) == before + 1
    verdict.same("ids", [1, 2], [1, 2, 3])
    assert "ids: [1, 2], expected [1, 2, 3]" in verdict.misses
