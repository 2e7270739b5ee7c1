"""The batch command: its options, its files, Ctrl-C and kill -9."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from test_llm import PAIR, PROMPTS, write_tokenizer
from test_offline import opened, raw, written
from typer.testing import CliRunner

from serving import LLM, SamplingParams, batch
from serving.lines import lines_of
from serving.offline import Output, answers
from serving.runner import use_compilation_cache

SCRIPT = Path(__file__).parents[1] / "scripts" / "batch_generate.py"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(PAIR / "target", folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return opened(target, 2)


def lines_in(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, llm: LLM, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs the command on a model that is there already: its exit status and all that it said."""
    monkeypatch.setattr(batch, "LLM", lambda *_, **__: llm)
    monkeypatch.setattr(batch, "use_compilation_cache", lambda _: None)
    monkeypatch.chdir(tmp_path)
    prompts = raw([{"prompt": f"Q: add {i} and {i * i}\nA:"} for i in range(20)])
    written(tmp_path / "in.jsonl", [*prompts[:6], b"\n", b"oops\n", *prompts[7:]])

    def call(*arguments: str) -> tuple[int, str]:
        basic = ["--target", "t", "--input", "in.jsonl", "--output", "out.jsonl", "--no-warm-up", "--max-tokens", "9"]
        result = CliRunner().invoke(batch.app, [*basic, *arguments])
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception
        return result.exit_code, result.output

    return call


def test_a_run_ends_with_a_table_and_its_numbers(command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, said = command("--temperature", "1", "--stats", "stats.json")
    assert status == 0
    assert "line 8: it is not JSON" in said
    stats = json.loads((tmp_path / "stats.json").read_text())
    records = [json.loads(line) for line in lines_in(tmp_path / "out.jsonl")]
    assert [r["index"] for r in records] == list(range(20))
    assert [r["index"] for r in records if r["error"]] == [6]
    assert (stats["total"], stats["lines"], stats["errors"], stats["skipped"]) == (20, 20, 1, 0)
    for name in ("prompt_tokens", "output_tokens"):
        assert stats[name] == sum(r[name] for r in records)
        assert f"{stats[name]:,}" in said
    assert stats["tokens_per_second"] == stats["output_tokens"] / stats["seconds"]
    assert stats["acceptance_length"] > 1
    assert stats["interrupted"] is False
    status, said = command("--resume", "--stats", "stats.json")
    assert status == 0
    assert json.loads((tmp_path / "stats.json").read_text())["skipped"] == 20


def test_files_that_do_not_fit_are_refused_before_the_model_is_loaded(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "LLM", lambda *_, **__: pytest.fail("loaded"))
    before = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "soft.jsonl").symlink_to("in.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "in.jsonl")
    written(tmp_path / "full.jsonl", [b'{"index": 0}\n'])
    for arguments, message in (
        (["--output", "in.jsonl", "--overwrite"], "is the input"),
        (["--output", "soft.jsonl", "--overwrite"], "is the input"),
        (["--output", "hard.jsonl", "--resume"], "is the input"),
        (["--input", "none.jsonl"], "none.jsonl is no file"),
        (["--input", "."], "is no file"),
        (["--output", "none/out.jsonl"], "none, does not exist"),
        (["--output", "."], "is no file"),
        (["--output", "full.jsonl"], "--resume goes on with it, --overwrite throws it away"),
        (["--resume", "--overwrite"], "exclude one another"),
        (["--stats", "in.jsonl"], "is the input"),
        (["--stats", "out.jsonl"], "are the output"),
        (["--top-p", "2"], r"top_p must be in (0, 1], got 2.0"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--n", "0"], "n must be at least 1"),
    ):
        status, said = command(*arguments)
        assert (status, message in said, said.count("\n")) == (1, True, 1), said
    assert command("--dtype", "int8")[0] == 2
    assert (tmp_path / "in.jsonl").read_bytes() == before
    assert (tmp_path / "full.jsonl").read_bytes() == b'{"index": 0}\n'


def test_a_model_that_does_not_load_leaves_the_old_output(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such model")

    written(tmp_path / "out.jsonl", [b"old\n"])
    monkeypatch.setattr(batch, "LLM", refuse)
    assert command("--overwrite") == (1, "error: no such model\n")
    assert (tmp_path / "out.jsonl").read_bytes() == b"old\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_at_a_whole_line_and_a_resumed_run_equals_another(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert command("--temperature", "1", "--output", "whole.jsonl")[0] == 0
    whole = lines_in(tmp_path / "whole.jsonl")
    listening = signal.getsignal(number)

    real = Output.write

    def write(out: Output, record: bytes) -> None:
        real(out, record)
        if record == whole[2]:
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) == signal.SIG_DFL  # a second one ends the process

    monkeypatch.setattr(Output, "write", write)
    status, _ = command("--temperature", "1", "--stats", "stats.json")
    assert status == 128 + number
    assert signal.getsignal(number) == listening
    stopped = lines_in(tmp_path / "out.jsonl")
    assert 3 <= len(stopped) < 20
    assert stopped == whole[: len(stopped)]
    assert json.loads((tmp_path / "stats.json").read_text())["interrupted"] is True
    monkeypatch.setattr(Output, "write", real)
    assert command("--temperature", "1", "--resume")[0] == 0
    assert lines_in(tmp_path / "out.jsonl") == whole


@pytest.fixture
def cache_settings() -> Iterator[None]:
    """Where JAX keeps compiled steps, as it was before."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("cache_settings")
def test_compiled_steps_are_kept_where_one_is_told_else_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for given, told, wanted in (
        (None, None, tmp_path / "dflash-jax" / "xla"),
        (None, "jaxs", Path("jaxs")),
        (Path("mine"), "jaxs", Path("mine")),
    ):
        jax.config.update("jax_compilation_cache_dir", told)
        use_compilation_cache(given)
        assert jax.config.jax_compilation_cache_dir == str(wanted)


def killed_runs(target: Path, llm: LLM, folder: Path, kills: int, lines: int, seconds: float = 0) -> list[int]:
    """Kills a process again and again, finishes in this one, and compares with a run that nobody killed. seconds: kill
    at a time up to that, else after some more lines. The lines that each kill left."""
    asked = [{"prompt": PROMPTS[i % 3], "max_tokens": 2 + i % 13} for i in range(lines)]
    written(folder / "in.jsonl", given := [*raw(asked[:4]), b"oops\n", *raw(asked[5:])])
    defaults = SamplingParams(temperature=1, max_tokens=256)
    whole = [answer.record for answer in answers(llm, lines_of(given), defaults)]
    files = f"--target {target} --drafter {PAIR / 'draft'} --input in.jsonl --compilation-cache xla --no-warm-up"
    options = "--dtype float32 --block-size 4 --max-num-seqs 2 --max-model-len 128 --prefill-chunk 64 --temperature 1"
    command = [sys.executable, str(SCRIPT), *files.split(), *options.split(), "--seed", "5", "--resume"]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, "--output", "out.jsonl"], cwd=folder, env=environment)

    out, chance, left = written(folder / "out.jsonl", []), random.Random(1), []
    for kill in range(kills):
        run, before, begun = start(), len(lines_in(out)), time.monotonic()
        wanted, until = (
            before + chance.randint(1, 1 + (lines - before) // (kills - kill + 1)),
            chance.uniform(0, seconds),
        )
        while run.poll() is None and (time.monotonic() - begun < until if seconds else len(lines_in(out)) < wanted):
            time.sleep(0.001)
        run.kill()
        run.wait()
        done = lines_in(out)
        assert [line for line in done if line.endswith(b"\n")] == whole[: sum(line.endswith(b"\n") for line in done)]
        left.append(len(done))
    sampling = {"temperature": 1, "max_tokens": 256}
    batch.run(lambda: llm, folder / "in.jsonl", out, sampling, resume=True, overwrite=False, token_ids=False)
    assert lines_in(out) == whole
    return left


def test_killed_runs_lose_no_line_and_repeat_none(target: Path, llm: LLM, tmp_path: Path) -> None:
    first, second = killed_runs(target, llm, tmp_path, kills=2, lines=40)
    assert 1 <= first < second
