"""Folders of drafters that draft token by token: EAGLE-3 in both layouts, and the head inside a target's folder."""

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as tiny

from convert.hf_chain import eagle3_config, mtp_config
from convert.hf_config import CheckpointError, target_config
from convert.load import load, load_drafter, load_mtp, open_checkpoint
from convert.stream import to_hf, to_orbax
from dflash_jax.config import Eagle3Config, MTPConfig, drafter_type, from_json, pair, to_json
from dflash_jax.params import flatten

SPECFORGE = {**tiny.BASE, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
SPECFORGE |= {"draft_vocab_size": 40, "tie_word_embeddings": False}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 96,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "norm_before_residual": True,
    "norm_output": True,
    "target_hidden_size": None,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
    "transformer_layer_config": {**tiny.BASE, "model_type": "qwen3", "num_hidden_layers": 2},
}
TARGET = {**tiny.TARGET, "num_hidden_layers": 8}
MTP = {
    **tiny.BASE,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
}
del MTP["rope_theta"], MTP["rope_scaling"]


def eagle3_tensors(hf: dict, layer: dict, name: str, reduced: int, **more: tuple[int, ...]) -> tiny.Tensors:
    """All tensors of an EAGLE-3 folder; ``name`` of its first layer."""
    dim = layer["hidden_size"]
    first = tiny.layer_shapes(name, layer)
    first |= {
        n: (s[0], 2 * dim) for n, s in first.items() if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    shapes = {**first, f"{name}.hidden_norm.weight": (dim,), "fc.weight": (dim, 3 * dim), "norm.weight": (dim,)}
    for i in range(1, layer["num_hidden_layers"]):
        shapes |= tiny.layer_shapes(f"layers.{i}", layer)
    tensors = tiny.fill({**shapes, "lm_head.weight": (reduced, dim), **more})
    if reduced < layer["vocab_size"]:
        tensors["d2t"] = np.arange(reduced, dtype=np.int64)
        tensors["t2d"] = np.isin(np.arange(layer["vocab_size"]), 2 * np.arange(reduced))
    return tensors


def specforge(folder: Path) -> Path:
    return tiny.write(folder, SPECFORGE, eagle3_tensors(SPECFORGE, SPECFORGE, "midlayer", 40))


def mtp_target(folder: Path) -> tuple[Path, tiny.Tensors]:
    """A dense target whose folder also holds a head (of no released family: the head does not mind)."""
    dim, head, heads, kv = 32, 16, 4, 2
    shapes = tiny.layer_shapes("mtp.layers.0", {**tiny.BASE, "model_type": "qwen3"})
    shapes["mtp.layers.0.self_attn.q_proj.weight"] = (2 * heads * head, dim)
    shapes |= {"mtp.fc.weight": (dim, 2 * dim)}
    shapes |= {f"mtp.{n}.weight": (dim,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert shapes["mtp.layers.0.self_attn.k_proj.weight"] == (kv * head, dim)
    tensors = tiny.fill(shapes, seed=3)
    return tiny.write(folder, MTP, tensors), tensors


def test_specforge_layout(tmp_path: Path) -> None:
    cfg, params = load_drafter(specforge(tmp_path / "draft"), "float32")
    assert isinstance(cfg, Eagle3Config)
    assert (cfg.own_embedding, cfg.own_head, cfg.draft_vocab_size, cfg.block_size) == (False, True, 40, 8)
    flags = (cfg.norm_before_residual, cfg.norm_before_fc, cfg.fc_norm, cfg.norm_output, cfg.qk_norm)
    assert not any(flags)
    assert params["layers"][0]["q"].shape == (64, 4, 16)
    assert cfg.target_layer_ids == ()  # the published rule, of the target's depth
    loaded = load(tiny.write(tmp_path / "t", TARGET, tiny.target_tensors(TARGET)), drafter=tmp_path / "draft")
    assert loaded.target.target_layer_ids == (1, 3, 4)


def test_speculators_layout(tmp_path: Path) -> None:
    layer = SPECULATORS["transformer_layer_config"]
    tensors = eagle3_tensors(SPECULATORS, layer, "layers.0", 96, **{"embed_tokens.weight": (96, 32)})
    cfg, params = load_drafter(tiny.write(tmp_path, SPECULATORS, tensors), "float32")
    assert isinstance(cfg, Eagle3Config)
    assert (cfg.own_embedding, cfg.own_head, cfg.block_size, cfg.num_hidden_layers) == (True, True, 5, 2)
    assert (cfg.norm_before_residual, cfg.norm_before_fc, cfg.norm_output, cfg.qk_norm) == (True, False, True, True)
    assert cfg.target_layer_ids == (0, 1, 3)
    assert params["layers"][1]["q"].shape == (32, 4, 16)
    np.testing.assert_array_equal(params["embed"], tensors["embed_tokens.weight"])


def test_norms_of_taps_have_their_places(tmp_path: Path) -> None:
    for fields, more, wanted in (
        ({"norm_before_fc": True}, {"input_norm.weight": (96,)}, {"taps_norm": (96,)}),
        (
            {"fc_norm": True},
            {f"fc_norm.{i}.weight": (32,) for i in range(3)},
            {f"tap{i}_norm": (32,) for i in range(3)},
        ),
    ):
        hf = {**SPECFORGE, **fields, "norm_output": True}
        folder = tiny.write(tmp_path / next(iter(fields)), hf, eagle3_tensors(hf, hf, "layers.0", 40, **more))
        cfg, params = load_drafter(folder, "float32")
        assert {n: p.shape for n, p in flatten(params).items() if n in wanted} == wanted
        assert isinstance(cfg, Eagle3Config)
        assert not cfg.norm_output  # in this layout it says nothing


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, ()),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]}}, (1, 11, 21)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 12, 22]}}, (1, 11, 21)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 12, 22]}, (1, 11, 21)),
        ({"eagle_aux_hidden_state_layer_ids": [4, 7], "eagle_config": {}}, (3, 6)),
    ],
)
def test_tapped_layers(fields: dict, ids: tuple[int, ...]) -> None:
    assert eagle3_config({**SPECFORGE, **fields}).target_layer_ids == ids


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 9]}}, "may count outputs or inputs"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = false"),
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_theta": None, "intermediate_size": None}, "lacks intermediate_size, rope_theta"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"draft_vocab_size": 97}, "draft_vocab_size 97"),
    ],
)
def test_what_is_not_built_is_refused(fields: dict, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        eagle3_config({**SPECFORGE, **fields})


def test_a_flag_on_which_readers_disagree_is_asked_for() -> None:
    hf = {name: value for name, value in SPECULATORS.items() if name != "norm_before_residual"}
    with pytest.raises(CheckpointError, match="lacks norm_before_residual"):
        eagle3_config(hf)


def test_pairs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = tiny.write(tmp_path / "t", tiny.TARGET, tiny.target_tensors())
    drafter = tmp_path / "d"
    hf = {**SPECFORGE, "target_hidden_size": 48, "vocab_size": 90, "eagle_aux_hidden_state_layer_ids": [1, 2, 9]}
    tiny.write(drafter, hf, eagle3_tensors(hf, hf, "midlayer", 40) | tiny.fill({"fc.weight": (32, 144)}))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(target, drafter)
    for said in ("width 48, the target's are 32", "vocab_size is 90", r"[8] lie outside the target's 4 layers"):
        assert said in str(error.value)


def test_tensors_that_lack_are_named(tmp_path: Path) -> None:
    tensors = eagle3_tensors(SPECFORGE, SPECFORGE, "midlayer", 40)
    del tensors["midlayer.hidden_norm.weight"], tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensors: .*hidden_norm.*lm_head"):
        load_drafter(tiny.write(tmp_path, SPECFORGE, tensors))


def test_the_head_of_a_target(tmp_path: Path) -> None:
    folder, tensors = mtp_target(tmp_path)
    cfg, params = load_mtp(folder, "float32")
    assert isinstance(cfg, MTPConfig)
    assert (cfg.rope.partial_rotary_factor, cfg.rope.rope_theta, cfg.num_experts, cfg.block_size) == (0.25, 1e7, 0, 4)
    assert cfg.mtp_hidden == "post_norm"
    q = tensors["mtp.layers.0.self_attn.q_proj.weight"].reshape(4, 2, 16, 32)
    np.testing.assert_array_equal(params["layers"][0]["q"], q.transpose(3, 0, 1, 2).reshape(32, 4, 32))
    with pytest.raises(CheckpointError, match="brings no multi-token-prediction head"):
        load_mtp(tiny.write(tmp_path / "without", TARGET, tiny.target_tensors(TARGET)))
    with pytest.raises(CheckpointError, match="mtp_use_dedicated_embeddings = true"):
        mtp_config({**MTP, "mtp_use_dedicated_embeddings": True})
    with pytest.raises(CheckpointError, match="2 layers is not supported"):
        mtp_config({**MTP, "mtp_num_hidden_layers": 2})


def test_configs_and_folders_there_and_back(tmp_path: Path) -> None:
    """Through JSON, and a whole conversion of a pair, bit for bit."""
    cfgs = (eagle3_config(SPECFORGE), eagle3_config(SPECULATORS), mtp_config(MTP))
    for cfg in cfgs:
        assert from_json(drafter_type(to_json(cfg)), to_json(cfg)) == cfg
    with pytest.raises(ValueError, match="method 'medusa' is not known"):
        drafter_type({"method": "medusa"})
    target = tiny.write(tmp_path / "t", TARGET, tiny.target_tensors(TARGET))
    drafter = specforge(tmp_path / "d")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        to_orbax(target, tmp_path / "ours", drafter)
    loaded = load(tmp_path / "ours", "float32")
    assert isinstance(loaded.drafter, Eagle3Config)
    assert loaded.target.target_layer_ids == (1, 3, 4)
    to_hf(tmp_path / "ours", tmp_path / "back")
    theirs = tmp_path / "back" / "drafter"
    again, params = load_drafter(theirs, "float32")
    assert again == loaded.drafter
    wanted = flatten(load_drafter(drafter, "float32")[1])
    for name, value in flatten(params).items():
        np.testing.assert_array_equal(value, wanted[name])


def test_the_default_taps_need_a_target_of_some_depth() -> None:
    cfg = dataclasses.replace(eagle3_config(SPECFORGE), vocab_size=96)
    with pytest.raises(ValueError, match=r"duplicates|lie outside"):
        pair(target_config({**tiny.TARGET, "num_hidden_layers": 3}), cfg)
