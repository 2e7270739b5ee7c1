"""Config files of others: what is read, what is refused, and that nothing is guessed in silence."""

import json
from pathlib import Path

import pytest
import tiny_checkpoints as tiny

from convert.hf_config import CheckpointError, eos_token_ids, target_config
from convert.hf_drafter import default_layer_ids, drafter_config
from dflash_jax.config import pair

CONFIGS = json.loads((Path(__file__).parent / "data" / "dflash_configs.json").read_text())["configs"]
REST = ("rope_theta", "rms_norm_eps")
# Every published or quoted config of dflash_configs.json: () parses, one name is the family that it is refused as, more
# are the fields that are all named in the refusal.
OUTCOMES = {
    "z-lab/Qwen3-4B-DFlash-b16": (),
    "z-lab/Qwen3-8B-DFlash-b16": (*REST, "max_position_embeddings"),
    "z-lab/Qwen3.5-4B-DFlash or modal-labs/Qwen3.5-4B-DFlash (said to be byte-identical)": (),
    "z-lab/Qwen3.6-27B-DFlash": ("max_position_embeddings", "lacks"),
    "z-lab/Qwen3.6-35B-A3B-DFlash": ("intermediate_size", "max_position_embeddings", "rms_norm_eps"),
    "z-lab/Qwen3.5-27B-DFlash": REST,
    "z-lab/gpt-oss-20b-DFlash": (*REST, "vocab_size", "num_attention_heads", "num_key_value_heads"),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": (
        *REST,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "mask_token_id",
    ),
    "JetSpec/jetspec-Qwen3.6-35B-A3B": ("JetSpec",),
    "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash (dflash/config.json @ b754e6c8)": ("MiMo",),
    "z-lab/Qwen3.8-27B-DFlash2 @ 50307d4c (DFlash2, another architecture)": ("DFlash2",),
    "z-lab/Muse-Glimmer-30B-DFlash2 @ b54ffdd1 (DFlash2)": ("DFlash2",),
    "qwen2.5-0.5b-dflash": (),
    "qwen3-4b-dflash": (),
    "qwen3-8b-dflash": (),
    "qwen3.5-4b-dflash": (),
    "qwen3.5-35b-a3b-dflash": (),
    "qwen3.6-27b-dflash": (),
    "lfm2.5-1.2b-instruct-dflash": (),
    "longcat-flash-dflash": (),
}


def test_the_table_is_complete():
    assert {entry["checkpoint"] for entry in CONFIGS} <= set(OUTCOMES)


@pytest.mark.parametrize("entry", CONFIGS, ids=lambda entry: entry["checkpoint"].split(" ")[0])
def test_every_known_drafter_config_ends_as_it_should(entry):
    hf, expected = entry["config"], OUTCOMES[entry["checkpoint"]]
    if not expected:
        cfg = drafter_config(hf)
        options = hf["dflash_config"]
        assert cfg.target_layer_ids == tuple(options["target_layer_ids"])
        assert cfg.mask_token_id == options["mask_token_id"]
        assert cfg.block_size == options.get("block_size", hf.get("block_size"))
        assert cfg.layer_types == tuple(hf["layer_types"])
        assert cfg.in_block_causal == tuple(kind == "sliding_attention" for kind in hf["layer_types"])
        assert cfg.num_target_layers == hf["num_target_layers"]
        return
    with pytest.raises(CheckpointError) as error:
        drafter_config(hf)
    said = str(error.value)
    assert all(name in said for name in expected), said
    if len(expected) > 1:
        named = {word.strip("(),").split(".")[-1] for word in said.split()}
        for field in OUTCOMES["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"]:
            given = field in hf or field in hf.get("dflash_config", {})
            assert (field in named) == (not given), (field, said)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 24.0, "truncate": False}


@pytest.mark.parametrize(
    ("kind", "values"),
    [("default", {}), ("linear", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN)],
)
@pytest.mark.parametrize("read", [target_config, drafter_config], ids=["target", "drafter"])
def test_both_spellings_of_the_rotary_embedding_are_one(kind, values, read):
    base = dict(tiny.TARGET if read is target_config else tiny.DRAFTER)
    del base["rope_theta"], base["rope_scaling"]
    new = read({**base, "rope_parameters": {"rope_type": kind, "rope_theta": 500000, **values}})
    spelled = [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": kind, **values} if values else None},
        {"rope_theta": 500000, "rope_scaling": {"type": kind, **values}},
        {
            "rope_theta": 500000,
            "rope_scaling": {"type": kind, "rope_type": kind, "partial_rotary_factor": 1.0, **values},
        },
        {"rope_theta": 500000, "rope_parameters": {"rope_type": kind, "beta_slow": None, **values}},
    ]
    for old in spelled:
        assert read({**base, **old}) == new
    assert new.rope.rope_type == kind
    assert new.rope.factor == values.get("factor")


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({}, "lacks rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "lacks rope_theta"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "two types: linear, yarn"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings of"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7}}, "mscale"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, r"10000.0, 1000000.0"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}}, "mrope_section"),
    ],
)
def test_a_rotary_embedding_that_is_not_built_is_refused(rope, said):
    for read, base in ((target_config, tiny.TARGET), (drafter_config, tiny.DRAFTER)):
        bare = {name: value for name, value in base.items() if not name.startswith("rope")}
        with pytest.raises(CheckpointError, match=said):
            read({**bare, **rope})


def test_the_families_differ_where_transformers_says_so():
    qwen3 = target_config({**tiny.TARGET, "attention_bias": True})
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, True, False)
    qwen2 = target_config({**tiny.TARGET, "model_type": "qwen2"})
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (False, True, False, False)
    llama = target_config({**tiny.TARGET, "model_type": "llama", "attention_bias": True, "mlp_bias": True})
    assert (llama.qk_norm, llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (False, True, True, True)
    bare = {k: v for k, v in tiny.TARGET.items() if k not in ("head_dim", "num_key_value_heads", "tie_word_embeddings")}
    old = target_config({**bare, "model_type": "llama"})
    assert (old.head_dim, old.num_key_value_heads, old.tie_word_embeddings) == (8, 4, False)
    with pytest.raises(CheckpointError, match="lacks num_key_value_heads, head_dim"):
        target_config(bare)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, (None, None, 9, 9)),
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 2}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        ({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}, (9, None, 9, None)),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_layers_of_targets_follow_transformers(family, fields, windows):
    assert target_config({**tiny.TARGET, "model_type": family, **fields}).windows() == windows


def test_every_missing_field_is_named_at_once():
    with pytest.raises(CheckpointError) as error:
        target_config({"model_type": "qwen3", "hidden_size": 32, "intermediate_size": None})
    for name in set(tiny.BASE) - {"hidden_size", "hidden_act", "rope_scaling"}:
        assert name in str(error.value)
    assert "hidden_size" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "abacus"}, "model_type 'abacus' is not supported yet; built: llama, qwen2, qwen3"),
        ({"model_type": None}, "names no model_type"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_experts": 8, "clip_qkv": 3.0}, "clip_qkv = 3.0, num_experts = 8"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, "use_sliding_window is false"),
        ({"architectures": ["DFlashDraftModel"]}, "this is a drafter"),
        ({"speculators_model_type": "eagle3"}, "this is a drafter"),
    ],
)
def test_targets_that_are_not_built_are_refused(fields, said):
    with pytest.raises(CheckpointError, match=said):
        target_config({**tiny.TARGET, **fields})


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, {}, "DFlash2 drafter"),
        ({}, {"conv_kernel_size": 2}, "DFlash2 drafter"),
        ({}, {"selector_rank": 256}, "DFlash2 drafter"),
        ({}, {"projector_type": "domino"}, "Domino drafter"),
        ({}, {"shift_label": True}, "Domino drafter"),
        ({}, {"projector_type": "dspark"}, "DSpark drafter"),
        ({}, {"markov_rank": 256}, "DSpark drafter"),
        ({}, {"projector_type": "other"}, "projector_type 'other'"),
        ({}, {"causal_head": True}, "JetSpec"),
        ({}, {"attention_sink_bias": True}, "MiMo-style drafter"),
        ({"attention_value_scale": 0.6}, {}, "MiMo-style drafter"),
        ({"v_head_dim": 8}, {}, "v_head_dim = 8"),
        ({}, {"use_qk_norm": False}, "dflash_config.use_qk_norm = false"),
        ({}, {"final_logit_softcapping": 20.0}, "final_logit_softcapping = 20.0"),
        ({}, {"temperature_scale": 2, "another": None}, "not supported: another, temperature_scale"),
        ({}, {"use_swa": True}, "use_swa is True"),
        ({"draft_vocab_size": 40}, {}, "draft_vocab_size = 40"),
        ({"quantization_config": {}}, {}, "quantization_config"),
        ({"architectures": ["DFlashOtherModel"]}, {}, "DFlashOtherModel is not supported"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {}, "EAGLE drafter of another kind"),
        ({}, {"target_layer_ids": [1, 1]}, "duplicates"),
        ({}, {"target_layer_ids": [-1, 1]}, r"\[-1\] lie outside"),
        ({}, {"target_layer_ids": [1, 4]}, r"\[4\] lie outside the target's 4 layers"),
        ({}, {"target_layer_ids": []}, "at least one of target_layer_ids"),
        ({"block_size": 0}, {}, "block_size must be at least 1"),
    ],
)
def test_drafters_that_are_not_plain_dflash_are_refused_by_name(fields, options, said):
    hf = {**tiny.DRAFTER, **fields, "dflash_config": {**tiny.DRAFTER["dflash_config"], **options}}
    with pytest.raises(CheckpointError, match=said):
        drafter_config(hf)


def test_training_options_and_neutral_values_do_no_harm():
    options = {"num_anchors": 512, "loss_decay_gamma": 7.0, "causal_head": False, "markov_rank": 0, "use_swa": False}
    options |= {"attention_value_scale": 1.0, "use_qk_norm": True, "shift_label": None}
    hf = {**tiny.DRAFTER, "dflash_config": {**tiny.DRAFTER["dflash_config"], **options}}
    assert drafter_config(hf) == drafter_config(tiny.DRAFTER)


def test_the_block_size_is_read_nested_first_then_at_the_top():
    def size(top, nested):
        hf = {**tiny.DRAFTER, "block_size": top}
        return drafter_config({**hf, "dflash_config": {**hf["dflash_config"], "block_size": nested}}).block_size

    assert (size(8, 12), size(8, None), size(None, 12), size(None, None)) == (12, 8, 12, 16)


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        (None, None, (True, False)),
        (None, True, (True, True)),
        (None, False, (False, False)),
        (False, True, (False, False)),
        (True, False, (True, True)),
    ],
)
def test_causality_in_the_block(top, nested, expected):
    hf = {**tiny.DRAFTER, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "is_causal": top}
    cfg = drafter_config({**hf, "dflash_config": {**hf["dflash_config"], "causal": nested}})
    assert cfg.in_block_causal == expected
    assert cfg.windows() == (9, None)


def test_speculators_sliding_layers_are_causal_unless_told_otherwise():
    layer = {**tiny.SPECULATOR["transformer_layer_config"], "sliding_window": 9}
    layer["layer_types"] = ["sliding_attention", "full_attention"]
    for free in (False, True):
        hf = {**tiny.SPECULATOR, "transformer_layer_config": layer, "sliding_window_non_causal": free}
        cfg = drafter_config(hf)
        assert cfg.in_block_causal == (not free, False)
        assert cfg.windows() == (9, None)


def test_speculators_count_layers_from_one():
    cfg = drafter_config(tiny.SPECULATOR)
    assert cfg.target_layer_ids == (0, 2)
    assert cfg.num_target_layers is None
    assert (cfg.draft_vocab_size, cfg.vocab_size, cfg.own_head) == (40, 96, True)
    assert cfg.target_hidden_size == 32
    with pytest.raises(CheckpointError, match="DSpark"):
        drafter_config({**tiny.SPECULATOR, "sample_from_anchor": True})
    with pytest.raises(CheckpointError, match="EAGLE drafter of another kind"):
        drafter_config({**tiny.SPECULATOR, "speculators_model_type": "eagle"})
    with pytest.raises(CheckpointError) as error:
        drafter_config(
            {"speculators_model_type": "dflash", "transformer_layer_config": {**tiny.BASE, "head_dim": None}}
        )
    for name in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "transformer_layer_config.head_dim"):
        assert name in str(error.value)


def test_absent_layer_ids_follow_the_published_rule_and_are_said_aloud():
    assert default_layer_ids(5, 36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(8, 40) == (1, 6, 11, 16, 22, 27, 32, 37)
    assert default_layer_ids(1, 36) == (18,)
    hf = {**tiny.DRAFTER, "num_hidden_layers": 3, "num_target_layers": 8, "dflash_config": {"mask_token_id": 95}}
    with pytest.warns(UserWarning, match=r"published default \[1, 3, 5\] for 3 drafter layers on 8 target layers"):
        assert drafter_config(hf).target_layer_ids == (1, 3, 5)
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        drafter_config({**hf, "num_target_layers": None})


def test_a_mask_token_is_looked_up_in_the_targets_tokenizer(tmp_path):
    options = {"target_layer_ids": [0, 2]}
    hf = {**tiny.DRAFTER, "dflash_config": options}
    with pytest.raises(CheckpointError, match="mask_token_id"):
        drafter_config(hf, tmp_path)
    table = {"added_tokens": [{"id": 90, "content": "<|MASK|>"}], "model": {"vocab": {"<m>": 3}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    assert drafter_config(hf, tmp_path).mask_token_id == 90
    named = {**hf, "dflash_config": {**options, "mask_token": "<m>"}}
    assert drafter_config(named, tmp_path).mask_token_id == 3
    with pytest.raises(CheckpointError, match="no token '<x>'"):
        drafter_config({**hf, "dflash_config": {**options, "mask_token": "<x>"}}, tmp_path)


def test_a_drafter_for_another_target_is_refused_with_both_numbers():
    target = target_config({**tiny.TARGET, "num_hidden_layers": 32})
    ids = [1, 9, 17, 25, 33]
    fields = {
        "num_target_layers": 36,
        "vocab_size": 100,
        "dflash_config": {"mask_token_id": 99, "target_layer_ids": ids},
    }
    with pytest.raises(ValueError, match="does not fit") as error:
        pair(target, drafter_config({**tiny.DRAFTER, **fields}))
    for said in ("36 layers", "has 32", "100", "96", "mask_token_id 99", r"[33]"):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [(7, [7, 9], (7, 9)), (None, [2], (2,)), ([3, 4], None, (3, 4)), (None, None, ()), (5, 4, (5, 4))],
)
def test_end_ids_come_from_both_files(config, generation, ids):
    assert eos_token_ids({"eos_token_id": config}, {"eos_token_id": generation}) == ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_sliding_window": True}, "sliding_window is not given"),
        ({"rope_scaling": [1]}, "rope_scaling must be a JSON object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor of rope_type 'linear' cannot be '4'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor of rope_type 'linear' cannot be 0"),
    ],
)
def test_values_that_would_change_attention_in_silence_are_refused(fields, message):
    hf = {name: value for name, value in tiny.TARGET.items() if name != "sliding_window"}
    with pytest.raises(CheckpointError, match=message):
        target_config({**hf, **fields})
