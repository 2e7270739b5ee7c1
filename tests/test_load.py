"""Opening checkpoints: every value where it belongs, every fault of head, vocabulary and ids refused."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny

from convert.hf_config import CheckpointError
from convert.load import load, load_drafter, read_tensor
from convert.stream import to_hf, to_orbax
from convert.tensors import contiguous
from dflash_jax.params import flatten, pack, unpack
from dflash_jax.sharding import make_mesh

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pair(tmp_path):
    return tiny.write_pair(tmp_path)


def test_every_value_lies_where_it_belongs(pair):
    loaded = load(pair[0], drafter=pair[1])
    hf, params = tiny.target_tensors(), loaded.target_params
    np.testing.assert_array_equal(params["embed"], hf["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], hf["lm_head.weight"])
    x = np.random.default_rng(3).normal(size=(5, 32)).astype(np.float32)
    for i, layer in enumerate(params["layers"]):
        for ours, theirs in (("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("v", "self_attn.v_proj")):
            expected = (x @ hf[f"model.layers.{i}.{theirs}.weight"].T).reshape(5, -1, 16)
            np.testing.assert_allclose(np.einsum("td,dnh->tnh", x, layer[ours]), expected, rtol=1e-4, atol=1e-4)
        heads = np.random.default_rng(4).normal(size=(5, 4, 16)).astype(np.float32)
        expected = heads.reshape(5, 64) @ hf[f"model.layers.{i}.self_attn.o_proj.weight"].T
        np.testing.assert_allclose(np.einsum("tnh,nhd->td", heads, layer["o"]), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(layer["gate"], hf[f"model.layers.{i}.mlp.gate_proj.weight"].T)
        np.testing.assert_array_equal(layer["down"], hf[f"model.layers.{i}.mlp.down_proj.weight"].T)
        np.testing.assert_array_equal(layer["k_norm"], hf[f"model.layers.{i}.self_attn.k_norm.weight"])
    np.testing.assert_array_equal(loaded.drafter_params["fc"], tiny.drafter_tensors()["fc.weight"].T)
    assert loaded.target.target_layer_ids == loaded.drafter.target_layer_ids == (0, 2)
    assert loaded.eos_token_ids == (7, 9)
    assert loaded.generation_config["temperature"] == 0.6
    assert loaded.tokenizer == pair[0]
    assert loaded.notes == ()
    np.testing.assert_array_equal(read_tensor(pair[0], "lm_head.weight"), hf["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.bias"):
        read_tensor(pair[0], "lm_head.bias")


@pytest.mark.parametrize(
    ("family", "fields", "bias"),
    [("qwen2", {}, "qkv"), ("llama", {}, ""), ("llama", {"attention_bias": True, "mlp_bias": True}, "qkvom")],
)
def test_biases_of_the_families(tmp_path, family, fields, bias):
    hf = {**tiny.TARGET, "model_type": family, **fields}
    tensors = tiny.target_tensors(hf, bias=bias)
    layer = load(tiny.write(tmp_path / "hf", hf, tensors)).target_params["layers"][3]
    for letter in bias.replace("m", ""):
        given = tensors[f"model.layers.3.self_attn.{letter}_proj.bias"]
        np.testing.assert_array_equal(np.asarray(layer[f"{letter}_bias"]).reshape(-1), given)
    assert sum(name.endswith("_bias") for name in layer) == len(bias.replace("m", "xyz"))
    to_orbax(tmp_path / "hf", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert tiny.same_files(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_dtypes(tmp_path, stored):
    folder = tiny.write(tmp_path / "hf", tiny.TARGET, tiny.target_tensors(dtype=stored))
    kept = load(folder)
    assert kept.dtype == np.dtype(getattr(jnp, stored)) == kept.target_params["layers"][0]["q"].dtype
    upcast = load(folder, dtype="float32")
    assert upcast.target_params["embed"].dtype == jnp.float32
    embed = tiny.target_tensors(dtype=stored)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(upcast.target_params["embed"], embed.astype(np.float32))
    assert load(folder, dtype=jnp.bfloat16).target_params["head"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="'int8' is not one of auto, float32"):
        load(folder, dtype="int8")


@pytest.mark.devices(4)
@pytest.mark.parametrize("model", [1, 2, 4])
def test_loaded_on_a_mesh(pair, model):
    loaded = load(pair[0], mesh=make_mesh(model), drafter=pair[1])
    alone = load(pair[0], drafter=pair[1])
    for mine, other in ((loaded.target_params, alone.target_params), (loaded.drafter_params, alone.drafter_params)):
        for name, value in flatten(mine).items():
            assert np.asarray(value).tobytes() == np.asarray(flatten(other)[name]).tobytes(), name
    q = loaded.target_params["layers"][0]["q"]
    assert q.addressable_shards[0].data.shape == (32, 4 // model, 16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", ["no", "copy", "other"])
def test_the_tied_flag_decides_about_the_head(tmp_path, tied, present):
    hf = {**tiny.TARGET, "tie_word_embeddings": tied}
    tensors = tiny.target_tensors({**tiny.TARGET, "tie_word_embeddings": False})
    if present == "no":
        del tensors["lm_head.weight"]
    elif present == "copy":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    folder = tiny.write(tmp_path / "hf", hf, tensors)
    if not tied and present == "no":
        with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
            load(folder)
    elif tied and present == "other":
        with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the embedding: not tied"):
            loaded = load(folder)
        assert not loaded.target.tie_word_embeddings
        assert (np.asarray(loaded.target_params["head"]) == tensors["lm_head.weight"]).all()
    else:
        loaded = load(folder)
        assert loaded.target.tie_word_embeddings == tied
        assert ("head" in loaded.target_params) == (not tied)
        assert len(loaded.notes) == (tied and present == "copy")


def test_rows_beyond_the_vocabulary_are_kept(tmp_path):
    folder = tiny.write(tmp_path / "hf", tiny.TARGET, tiny.target_tensors(rows=128))
    drafter = tiny.write(
        tmp_path / "d", {**tiny.DRAFTER, "dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 2]}},
        tiny.drafter_tensors(),
    )  # fmt: skip
    loaded = load(folder, drafter=drafter)
    assert (loaded.target.vocab_size, loaded.target.vocab_rows) == (96, 128)
    assert loaded.target_params["embed"].shape == loaded.target_params["head"].shape == (128, 32)
    with pytest.raises(CheckpointError, match=r"\(90, 32\), the config says \(96, 32\)"):
        load(tiny.write(tmp_path / "few", tiny.TARGET, tiny.target_tensors(rows=90)))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tables_of_zeros_are_refused(tmp_path, name):
    tensors = tiny.target_tensors()
    tensors[name][...] = 0
    with pytest.raises(CheckpointError, match=f"{name} is all zeros"):
        load(tiny.write(tmp_path / "hf", tiny.TARGET, tensors))


def test_a_mask_id_without_a_row_is_refused(pair, tmp_path):
    options = {"target_layer_ids": [0, 2]}
    high = {**tiny.DRAFTER, "dflash_config": {**options, "mask_token_id": 96}}
    with pytest.raises(CheckpointError, match=r"mask_token_id 96 .*\(96 rows\)"):
        load(pair[0], drafter=tiny.write(tmp_path / "high", high, tiny.drafter_tensors()))
    with pytest.raises(CheckpointError, match=r"no token '<\|MASK\|>'"):
        load(
            pair[0],
            drafter=tiny.write(tmp_path / "n", {**tiny.DRAFTER, "dflash_config": options}, tiny.drafter_tensors()),
        )


def test_a_whole_draft_vocabulary_uses_the_targets_head(pair, tmp_path):
    hf = {**tiny.SPECULATOR, "draft_vocab_size": 96}
    tensors = tiny.speculator_tensors({**tiny.SPECULATOR, "draft_vocab_size": 48})
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].copy()
    loaded = load(pair[0], drafter=tiny.write(tmp_path / "spec", hf, tensors))
    assert "head" not in loaded.drafter_params
    assert "d2t" not in loaded.drafter_params
    assert len(loaded.notes) == 4


@pytest.mark.parametrize("offset", [-1, 57])
def test_a_d2t_that_leaves_the_vocabulary_is_refused(pair, tmp_path, offset):
    tensors = tiny.speculator_tensors()
    tensors["d2t"][39 if offset > 0 else 0] = offset
    with pytest.raises(CheckpointError, match="d2t sends 1 draft ids out of the vocabulary of 96"):
        load(pair[0], drafter=tiny.write(tmp_path / "spec", tiny.SPECULATOR, tensors))


@pytest.mark.parametrize(
    ("name", "family"), [("embed_tokens.weight", "own-embedding"), ("mask_embedding", "MiMo-style")]
)
def test_tensors_of_other_drafter_families_are_named(tmp_path, name, family):
    tensors = tiny.drafter_tensors() | {name: np.ones((96, 32), np.float32)}
    with pytest.raises(CheckpointError, match=f"unknown tensors: {name} .*{family}"):
        load_drafter(tiny.write(tmp_path / "d", tiny.DRAFTER, tensors))


def test_paths_that_are_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("")
    for path, said in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path, "no config.json"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load(path)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tiled_copies_are_copies(dtype):
    values = np.random.default_rng(0).normal(size=(1500, 8, 400)).astype(dtype)
    for view in (
        values,
        values.transpose(2, 0, 1),
        values.transpose(1, 2, 0),
        values[:, :, :300].T,
        values[0, 0],
        values[:0],
    ):
        copied = contiguous(view, np.dtype(np.float32))
        assert copied.flags.c_contiguous
        np.testing.assert_array_equal(copied, view.astype(np.float32))


@pytest.mark.parametrize("damage", ["overlap", "negative", "longer"])
def test_a_weights_file_whose_header_does_not_tile_it_is_refused(tmp_path, damage):
    folder = tiny.write(tmp_path / "hf", tiny.TARGET, tiny.target_tensors())
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    if damage == "longer":
        file.write_bytes(raw + b"\0" * 64)
    else:
        offsets = header["model.norm.weight"]["data_offsets"]
        moved = -4 if damage == "overlap" else -offsets[0] - 4
        header["model.norm.weight"]["data_offsets"] = [offsets[0] + moved, offsets[1] + moved]
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_packing_can_be_undone_and_can_consume_its_source(pair):
    mesh = make_mesh()
    loaded, kept = load(pair[0], mesh=mesh, drafter=pair[1]), load(pair[0], mesh=mesh, drafter=pair[1])
    for cfg, params, plain in (
        (loaded.target, loaded.target_params, kept.target_params),
        (loaded.drafter, loaded.drafter_params, kept.drafter_params),
    ):
        packed = pack(params, cfg, mesh, consume=True)
        assert params["layers"][0]["q"].is_deleted()
        assert not params["final_norm"].is_deleted()
        back = flatten(unpack(packed, cfg))
        assert back.keys() == flatten(plain).keys()
        assert all(np.array_equal(back[name], leaf) for name, leaf in flatten(plain).items())
