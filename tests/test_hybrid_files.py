"""Files of hybrids: wrappers, grouped projections, what is skipped and said, published counts, there and back."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import rules
from convert.hf_config import CheckpointError, target_config
from convert.load import load, open_checkpoint
from convert.stream import to_hf, to_orbax
from dflash_jax.config import from_json, to_json
from dflash_jax.params import flatten, leaves_of

GOLDEN = Path(__file__).parent / "golden" / "targets"
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# hidden, layers, heads, KV heads, value heads, MLP or expert width, experts (targets.md section 2.2)
PUBLISHED = {
    "4B": (2560, 32, 16, 4, 32, 9216, 0),
    "9B": (4096, 32, 16, 4, 32, 12288, 0),
    "27B": (5120, 64, 24, 4, 48, 17408, 0),
    "35B-A3B": (2048, 40, 16, 2, 32, 512, 256),
    "122B-A10B": (3072, 48, 32, 2, 64, 1024, 256),
    "397B-A17B": (4096, 60, 32, 2, 64, 1024, 512),
}
COUNTS = {  # parameters, tensors
    "4B": (4_205_751_296, 426),
    "9B": (8_953_803_264, 427),
    "27B": (26_895_998_464, 851),
    "35B-A3B": (34_660_610_688, 693),
    "122B-A10B": (122_111_526_912, 831),
    "397B-A17B": (396_346_350_336, 1038),
}


def golden(family: str) -> Path:
    return GOLDEN / f"tiny_{family}" / "checkpoint"


def config_of(family: str) -> dict[str, Any]:
    return json.loads((golden(family) / "config.json").read_text())


def published(name: str) -> dict[str, Any]:
    """A config.json of the release's sizes."""
    hidden, layers, heads, kv_heads, values, width, experts = PUBLISHED[name]
    hf = config_of("qwen3_5_moe" if experts else "qwen3_5")
    text = {k: v for k, v in hf["text_config"].items() if k != "layer_types"}
    text |= {"vocab_size": 248320, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    text |= {"num_key_value_heads": kv_heads, "head_dim": 256, "linear_num_key_heads": 16, "intermediate_size": width}
    text |= {"linear_num_value_heads": values, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    text |= {"num_experts": experts, "num_experts_per_tok": 8, "full_attention_interval": 4} if experts else {}
    text |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": width, "full_attention_interval": 4}
    text["tie_word_embeddings"] = name == "4B"
    return {**hf, "tie_word_embeddings": name == "4B", "text_config": text}


def tensors_of(source: rules.Rule) -> int:
    """How many tensors a release holds for a parameter."""
    return 2 if source.path.endswith("shared_gate_up") else 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_tensors_are_as_many_as_published(name: str) -> None:
    cfg = target_config(published(name))
    assert sum(math.prod(leaf.shape) for leaf in flatten(leaves_of(cfg)).values()) == COUNTS[name][0]
    assert sum(tensors_of(rule) for rule, _, _ in rules.rules_of(cfg).values()) == COUNTS[name][1]
    assert cfg.layer_types.count("full_attention") * 4 == cfg.num_hidden_layers
    assert from_json(type(cfg), json.loads(json.dumps(to_json(cfg)))) == cfg


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    """All tensors but those of the vision tower and of the MTP head, which are named."""
    report = to_orbax(golden(family), tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "hf")
    before, after = (
        {n: a for f in p.glob("*.safetensors") for n, a in load_file(f).items()}
        for p in (golden(family), tmp_path / "hf")
    )
    gone = {n for n in before if n.startswith(("model.visual.", "mtp."))}
    assert before.keys() - after.keys() == gone
    assert after.keys() <= before.keys()
    assert all(before[n].dtype == a.dtype and np.array_equal(before[n], a) for n, a in after.items())
    assert all(any(name in note for note in report.notes) for name in gone)
    loaded, again = load(golden(family), "float32"), load(tmp_path / "orbax", "float32")
    assert loaded.target == again.target
    for name, leaf in flatten(loaded.target_params).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(flatten(again.target_params)[name]))


def test_a_log_stays_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(golden("qwen3_next"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.linear_attn.A_log"
    tensors[name] = np.linspace(0.1, 0.9, 4, dtype=np.float32)
    save_file(tensors, folder / "model.safetensors")
    to_orbax(folder, tmp_path / "orbax", dtype="bfloat16")
    for source in (folder, tmp_path / "orbax"):
        loaded = load(source, "bfloat16")
        assert loaded.target_params["layers"][0]["a_log"].tolist() == tensors[name].tolist()
        assert loaded.target_params["layers"][0]["delta_out"].dtype == "bfloat16"


def test_many_skipped_tensors_make_one_note(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(golden("qwen3_5"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.visual.blocks.{i}.norm1.bias": np.zeros(4, np.float32) for i in range(9)}
    save_file(tensors, folder / "model.safetensors")
    notes = [note for note in open_checkpoint(folder).opened.notes() if "vision" in note]
    assert len(notes) == 1
    assert "11 tensors" in notes[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = false"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"linear_key_head_dim": None, "full_attention_interval": None, "layer_types": None}, "linear_key_head_dim"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "partial_rotary_factor"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
    ],
)
def test_what_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    hf = config_of("qwen3_5")
    with pytest.raises(CheckpointError, match=said):
        target_config({**hf, "text_config": {**hf["text_config"], **change}})


def test_a_text_only_export_is_the_same_model() -> None:
    hf = config_of("qwen3_5")
    assert target_config(hf["text_config"]) == target_config(hf)


def test_a_missing_projection_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(golden("qwen3_next"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.linear_attn.in_proj_qkvz.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.1\.linear_attn\.in_proj_qkvz\.weight"):
        load(folder)
