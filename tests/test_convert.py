"""The converter: there and back bit for bit, every fault said before anything is written, kills survived."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny
from typer.testing import CliRunner

from convert import stream
from convert.__main__ import app
from convert.hf_config import CheckpointError
from convert.load import load, load_drafter, read_tensor
from convert.stream import to_hf, to_orbax
from convert.tensors import open_shelf
from dflash_jax.params import flatten
from dflash_jax.sharding import make_mesh

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pair(tmp_path):
    return tiny.write_pair(tmp_path)


def broken(folder, kind):
    """One fault, or all of them, in a folder of three shards."""
    if kind == "config only":
        for file in folder.glob("*.safetensors*"):
            file.unlink()
    if kind in ("shard", "all"):
        (folder / "model-00002-of-00003.safetensors").unlink()
    if kind in ("tensors", "all"):
        tensors = tiny.target_tensors()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["model.layers.0.self_attn.extra.weight"] = tensors.pop("model.norm.weight")
        for name in [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]:
            tensors[name] = tensors[name].T.copy()
        if kind == "tensors":
            (folder / "model.safetensors.index.json").unlink()
            tiny.write(folder, tiny.TARGET, tensors)
        else:
            index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
            first = {n: t for n, t in tensors.items() if index.get(n, "model-00001").startswith("model-00001")}
            tiny.save_file(first, folder / "model-00001-of-00003.safetensors")
    if kind == "short":
        file = folder / "model-00003-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
    if kind == "garbage":
        (folder / "model-00001-of-00003.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("config only", ["no weights", "missing tensors: model.embed_tokens.weight"]),
        ("shard", ["model-00002-of-00003.safetensors (1 of 3 shards)", "missing tensors: "]),
        (
            "tensors",
            [
                "missing tensors: model.norm.weight",
                "unknown tensors: model.layers.0.self_attn.extra.weight",
                "model.layers.1.mlp.up_proj.weight is (32, 48), the config says (48, 32)",
            ],
        ),
        ("all", ["(1 of 3 shards)", "missing tensors: ", "unknown tensors: ", "wrong shape: "]),
        ("short", ["model-00003-of-00003.safetensors ends early"]),
        ("garbage", ["model-00001-of-00003.safetensors is no safetensors file"]),
    ],
)
def test_broken_folders_are_refused_with_everything_in_one_error(pair, tmp_path, kind, said):
    broken(pair[0], kind)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["to-orbax", "--target", str(pair[0]), "--out", str(out)])
    assert result.exit_code == 1
    assert all(part in result.stderr for part in said), result.stderr
    assert "Traceback" not in result.stderr
    assert "inv_freq" not in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "target"]
    with pytest.raises(CheckpointError):
        load(pair[0])
    assert CliRunner().invoke(app, ["check", str(pair[0])]).exit_code == 1


def test_a_drafter_for_another_target_leaves_no_folder(pair, tmp_path):
    hf = {**tiny.DRAFTER, "num_target_layers": 36, "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 33]}}
    drafter = tiny.write(tmp_path / "other", hf, tiny.drafter_tensors())
    for command in (["to-orbax", "--target", str(pair[0]), "--out", str(tmp_path / "out")], ["check", str(pair[0])]):
        result = CliRunner().invoke(app, [*command, "--drafter", str(drafter)])
        assert result.exit_code == 1
        assert "36 layers" in result.stderr
        assert "[33]" in result.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.converting").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_is_bit_for_bit(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(stream, "SHARD_BYTES", 20_000)
    target = tiny.write(tmp_path / "target", tiny.TARGET, tiny.target_tensors(dtype=dtype), shards=2)
    (target / "tokenizer.json").write_text('{"a": 1}')
    drafter = tiny.write(tmp_path / "drafter", tiny.DRAFTER, tiny.drafter_tensors(dtype=dtype))
    report = to_orbax(target, tmp_path / "ours", drafter)
    assert report.notes == ()
    assert report.nbytes == sum(t.nbytes for folder in (target, drafter) for t in open_shelf(folder))
    assert to_hf(tmp_path / "ours", tmp_path / "back").notes == ()
    assert tiny.same_files(target, tmp_path / "back")
    assert tiny.same_files(drafter, tmp_path / "back" / "drafter")
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (target / name).read_bytes()
    assert (tmp_path / "back" / "drafter" / "config.json").read_bytes() == (drafter / "config.json").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "drafter", "ours", "target"]


@pytest.mark.devices(2)
def test_a_converted_folder_loads_as_its_source_does(pair, tmp_path):
    to_orbax(pair[0], tmp_path / "ours", pair[1])
    for mesh in (make_mesh(), make_mesh(2)):
        ours, theirs = load(tmp_path / "ours", mesh=mesh), load(pair[0], mesh=mesh, drafter=pair[1])
        assert (ours.target, ours.drafter, ours.dtype) == (theirs.target, theirs.drafter, theirs.dtype)
        assert (ours.eos_token_ids, ours.generation_config) == (theirs.eos_token_ids, theirs.generation_config)
        assert ours.tokenizer == tmp_path / "ours"
        for mine, other in ((ours.target_params, theirs.target_params), (ours.drafter_params, theirs.drafter_params)):
            for name, value in flatten(mine).items():
                assert np.asarray(value).tobytes() == np.asarray(flatten(other)[name]).tobytes(), name
    cfg, params = load_drafter(tmp_path / "ours", dtype="bfloat16")
    assert cfg == ours.drafter
    assert params["fc"].dtype == jnp.bfloat16
    with pytest.raises(CheckpointError, match="is a converted folder already"):
        to_orbax(tmp_path / "ours", tmp_path / "again")
    with pytest.raises(CheckpointError, match="exists already"):
        to_orbax(pair[0], tmp_path / "ours")
    with pytest.raises(CheckpointError, match="is not a converted folder"):
        to_hf(pair[0], tmp_path / "again")


def test_a_cast_is_recorded_and_reported_on_the_way_back(pair, tmp_path):
    to_orbax(pair[0], tmp_path / "ours", pair[1], dtype="bfloat16")
    assert load(tmp_path / "ours").dtype == jnp.bfloat16
    notes = to_hf(tmp_path / "ours", tmp_path / "back").notes
    assert sum("floats were converted to bfloat16" in note for note in notes) == 2
    head = read_tensor(tmp_path / "back", "lm_head.weight")
    assert head.tobytes() == tiny.target_tensors()["lm_head.weight"].astype(ml_dtypes.bfloat16).tobytes()


def test_speculators_folders(pair, tmp_path):
    drafter = tiny.write(tmp_path / "spec", tiny.SPECULATOR, tiny.speculator_tensors())
    loaded = load(pair[0], drafter=drafter)
    assert loaded.target.target_layer_ids == (0, 2)
    tensors = tiny.speculator_tensors()
    np.testing.assert_array_equal(loaded.drafter_params["head"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(loaded.drafter_params["d2t"] + np.arange(40), np.arange(40) * 2)
    assert loaded.drafter_params["d2t"].dtype == jnp.int32
    assert [note.split()[2] for note in loaded.notes] == ["embed_tokens.weight:", "t2d:"]
    to_orbax(pair[0], tmp_path / "ours", drafter)
    notes = to_hf(tmp_path / "ours", tmp_path / "back").notes
    assert len([note for note in notes if "was skipped and is missing" in note]) == 2
    back = open_shelf(tmp_path / "back" / "drafter").tensors
    assert back.keys() == tensors.keys() - {"embed_tokens.weight", "t2d"}
    assert all(back[name].view().tobytes() == tensors[name].tobytes() for name in back)
    assert back["d2t"].dtype == np.int64


def test_other_spellings_of_drafter_tensors(pair, tmp_path):
    plain = tiny.drafter_tensors()
    renamed = {
        {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(
            name, "model." + name.replace("layers.0.", "midlayer.")
        ): value
        for name, value in plain.items()
    }
    drafter = tiny.write(tmp_path / "renamed", tiny.DRAFTER, renamed)
    for name, value in flatten(load(pair[0], drafter=drafter).drafter_params).items():
        other = flatten(load(pair[0], drafter=pair[1]).drafter_params)[name]
        np.testing.assert_array_equal(value, other)
    to_orbax(pair[0], tmp_path / "ours", drafter)
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert tiny.same_files(drafter, tmp_path / "back" / "drafter")
    twice = {**plain, "model.norm.weight": plain["norm.weight"]}
    with pytest.raises(CheckpointError, match=r"norm\.weight and (model\.)?norm\.weight are the same tensor"):
        load_drafter(tiny.write(tmp_path / "twice", tiny.DRAFTER, twice))


KILLED = """
import os, signal, sys
from pathlib import Path
from convert import stream
stream.GROUP_BYTES = 4000

def progress(part, done, total):
    if done > 0.3 * total:
        os.kill(os.getpid(), signal.SIGKILL)

stream.to_orbax(sys.argv[1], Path(sys.argv[2]), sys.argv[3], progress=progress)
"""


def test_a_conversion_killed_at_30_percent_is_refused_by_the_loader_and_goes_on(pair, tmp_path, monkeypatch):
    out, left = tmp_path / "ours", tmp_path / "ours.converting"
    arguments = [str(pair[0]), str(out), str(pair[1])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    for folder in (left, left.rename(tmp_path / "renamed")):
        if folder.exists():
            with pytest.raises(CheckpointError, match="is an unfinished conversion"):
                load(folder)
    (tmp_path / "renamed").rename(left)
    (left / "target.partial_save.orbax-checkpoint-tmp").mkdir()

    with pytest.raises(CheckpointError, match="left from a conversion of something else"):
        to_orbax(pair[0], out, pair[1], dtype="bfloat16")
    begun = {}
    monkeypatch.setattr(stream, "GROUP_BYTES", 4000)
    to_orbax(pair[0], out, pair[1], progress=lambda part, done, total: begun.setdefault(part, done / total))
    assert begun["target"] >= 0.3
    assert not left.exists()
    to_hf(out, tmp_path / "back")
    assert tiny.same_files(pair[0], tmp_path / "back")
    assert tiny.same_files(pair[1], tmp_path / "back" / "drafter")


def test_a_conversion_killed_while_it_was_merging_starts_that_model_again(pair, tmp_path, monkeypatch):
    def stop(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stream.checkpoint, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            to_orbax(pair[0], tmp_path / "ours")
    piece = next((tmp_path / "ours.converting" / "target.partial_save").rglob("manifest.ocdbt"))
    piece.unlink()
    to_orbax(pair[0], tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert tiny.same_files(pair[0], tmp_path / "back")


def test_a_folder_in_the_way_is_left_alone(pair, tmp_path):
    (tmp_path / "ours.converting").mkdir()
    (tmp_path / "ours.converting" / "thesis.txt").write_text("do not delete")
    with pytest.raises(CheckpointError, match="in the way"):
        to_orbax(pair[0], tmp_path / "ours")
    assert (tmp_path / "ours.converting" / "thesis.txt").exists()


def test_the_command_line(pair, tmp_path):
    run = CliRunner()
    out, back = str(tmp_path / "ours"), str(tmp_path / "back")
    both = ["--target", str(pair[0]), "--drafter", str(pair[1])]
    done = run.invoke(app, ["to-orbax", *both, "--out", out])
    assert done.exit_code == 0, done.output
    assert "GB/s" in done.stderr
    again = run.invoke(app, ["to-orbax", *both, "--out", out])
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    for arguments in ([out], [str(pair[0]), "--drafter", str(pair[1])]):
        checked = run.invoke(app, ["check", *arguments])
        assert checked.exit_code == 0, checked.output
        for said in ("model.layers.3.self_attn.o_proj.weight", "layers.3.o", "47 tensors", "25 tensors", "taps [0, 2]"):
            assert said in checked.stdout, said
    alone = run.invoke(app, ["check", str(pair[1])])
    assert alone.exit_code == 0
    assert "pairing not checked" in alone.stdout
    assert run.invoke(app, ["to-hf", out, "--out", back]).exit_code == 0
    assert tiny.same_files(pair[0], tmp_path / "back")
    assert run.invoke(app, ["to-orbax", "--out", out]).exit_code == 2
    bad = run.invoke(app, ["to-orbax", *both, "--out", str(tmp_path / "x"), "--dtype", "int8"])
    assert bad.exit_code == 2
    assert "int8" in bad.stderr


def test_a_damaged_converted_folder_is_refused(pair, tmp_path):
    to_orbax(pair[0], tmp_path / "ours")
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    ours["target"]["config"]["num_hidden_layers"] = 3
    ours["target"]["config"]["layer_types"] = ["full_attention"] * 3
    (tmp_path / "ours" / "config.json").write_text(json.dumps(ours))
    with pytest.raises(CheckpointError, match=r"unknown arrays: layers\.3"):
        load(tmp_path / "ours")
    ours["target"]["surprise"] = 1
    (tmp_path / "ours" / "config.json").write_text(json.dumps(ours))
    with pytest.raises(CheckpointError, match="surprise"):
        load(tmp_path / "ours")
    (tmp_path / "ours" / "config.json").write_text(json.dumps({**ours, "format": "dflash-jax 9"}))
    with pytest.raises(CheckpointError, match="'dflash-jax 9', not 'dflash-jax 1'"):
        load(tmp_path / "ours")


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_damaged_arrays_are_an_error_of_one_line_and_not_zeros(pair, tmp_path, damage):
    """In a process of its own: Orbax leaves its other reads behind, and they complain whenever they end."""
    to_orbax(pair[0], tmp_path / "ours", pair[1])
    arrays = [file for file in (tmp_path / "ours" / "target").rglob("*") if file.is_file()]
    largest = max(arrays, key=lambda file: file.stat().st_size)
    if damage == "lost":
        largest.unlink()
    else:
        largest.write_bytes(largest.read_bytes()[:100])
    command = [sys.executable, "-m", "convert", "to-hf", str(tmp_path / "ours"), "--out", str(tmp_path / "hf")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "error: the checkpoint at" in run.stderr
    assert "cannot be read" in run.stderr
    assert not (tmp_path / "hf").exists()
