"""Files of mixtures: experts in pieces or stacked, MXFP4 and FP8 made from known weights, and every fault by name."""

import json
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoints as tiny

from convert import rules, stream
from convert.derived import spelled_out
from convert.hf_config import CheckpointError, target_config
from convert.load import load, open_checkpoint
from convert.stream import to_hf, to_orbax
from convert.tensors import open_shelf
from dflash_jax.config import GptOssConfig, MoeConfig
from dflash_jax.params import flatten, leaves_of, pack, unpack
from dflash_jax.reference import full_pass
from dflash_jax.sharding import make_mesh

BF16 = ml_dtypes.bfloat16
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
WIDE = {**tiny.MOE, "hidden_size": 160, "moe_intermediate_size": 144, "num_experts": 3, "num_hidden_layers": 1}


CODER_30B = {**tiny.MOE, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128}
CODER_30B |= {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
CODER_30B |= {"moe_intermediate_size": 768}
GPT_OSS_20B = {**tiny.GPT_OSS, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64}
GPT_OSS_20B |= {"num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4, "layer_types": None}
GPT_OSS_20B |= {"num_hidden_layers": 24, "num_local_experts": 32}
GPT_OSS_120B = {**GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128}


def e2m1(code):
    """The number that four bits stand for: sign, two of exponent, one of mantissa."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def packed_mxfp4(codes, scales):
    """Codes [E, O, I] as blocks [E, O, I / 32, 16], and what they mean: float64 [E, I, O]."""
    low, high = codes[..., 0::2], codes[..., 1::2]
    blocks = (low | high << 4).astype(np.uint8).reshape(*codes.shape[:2], -1, 16)
    values = np.vectorize(e2m1)(codes).reshape(*scales.shape, 32) * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
    return blocks, values.reshape(codes.shape).swapaxes(1, 2)


def mxfp4_tensors(seed=0):
    """Tensors of a gpt-oss file with experts in MXFP4, and {name: what the experts are}."""
    random, tensors, meant = np.random.default_rng(seed), tiny.gpt_oss_tensors(dtype="bfloat16"), {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, width, outs = tensors.pop(name).shape
        codes = random.integers(0, 16, (experts, outs, width))
        codes.reshape(-1)[:16] = np.arange(16)
        scales = random.integers(110, 131, (experts, outs, width // 32)).astype(np.uint8)
        scales.reshape(-1)[1:4] = 1, 20, 250
        tensors[f"{name}_blocks"], meant[name] = packed_mxfp4(codes, scales)
        tensors[f"{name}_scales"] = scales
    return tensors, meant


def fp8_tensors(seed=0):
    """Tensors of a Qwen3-MoE file with FP8 matrices, and {name: what they are, float32}."""
    random, tensors, meant = np.random.default_rng(seed), tiny.moe_tensors(WIDE, dtype="bfloat16"), {}
    for name in [n for n in tensors if "_proj.weight" in n]:
        outs, ins = tensors[name].shape
        tensors[name] = (random.normal(size=(outs, ins)) * 50).astype(ml_dtypes.float8_e4m3fn)
        scales = random.uniform(0.001, 0.01, (-(-outs // 128), -(-ins // 128))).astype(np.float32)
        tensors[f"{name}_scale_inv"] = scales
        each = np.kron(scales, np.ones((128, 128), np.float32))[:outs, :ins]
        meant[name] = tensors[name].astype(np.float32) * each
    return tensors, meant


def test_parameters_are_as_many_as_published():
    """Every number of targets.md section 11, from the declaration alone; tensors by the families' formulas."""
    coder, small, large = (target_config(hf) for hf in (CODER_30B, GPT_OSS_20B, GPT_OSS_120B))
    for cfg, total, routed in (
        (coder, 30_532_122_624, 28_991_029_248),
        (small, 20_914_757_184, 19_116_933_120),
        (large, 116_829_156_672, 114_701_598_720),
    ):
        sizes = {name: math.prod(leaf.shape) for name, leaf in flatten(leaves_of(cfg)).items()}
        assert sum(sizes.values()) == total
        assert sum(size for name, size in sizes.items() if ".expert_" in name) == routed
    assert len(rules.rules_of(coder)) == 48 * 11 + 3
    assert len(rules.rules_of(large)) == 36 * 17 + 3


@pytest.mark.parametrize(
    ("hf", "tensors", "count"),
    [
        (tiny.MOE, tiny.moe_tensors(), 2 * (9 + 3 * 4) + 3),
        (tiny.MOE, tiny.moe_tensors(stacked=True), 2 * (9 + 2) + 3),
        (tiny.GPT_OSS, tiny.gpt_oss_tensors(), 2 * 17 + 3),
        ({**tiny.GPT_OSS, **MXFP4}, mxfp4_tensors()[0], 2 * 19 + 3),
        ({**WIDE, **FP8}, fp8_tensors()[0], 9 + 3 * 3 + 3 + 4 + 9),
    ],
    ids=["per expert", "stacked", "gpt-oss", "mxfp4", "fp8"],
)
def test_every_tensor_of_a_family_is_taken_and_none_is_left(tmp_path, hf, tensors, count):
    assert len(tensors) == count
    found = open_checkpoint(tiny.write(tmp_path / "hf", hf, tensors)).opened.found
    taken = [part.name for source in found.sources.values() for part in source.tensor.parts]
    assert sorted(taken) == sorted(tensors)


def test_experts_go_to_their_places(tmp_path):
    """Per expert and stacked files of the same weights are one model: gate and up, expert by expert."""
    tensors = tiny.moe_tensors()
    one = load(tiny.write(tmp_path / "pieces", tiny.MOE, tensors, shards=3))
    two = load(tiny.write(tmp_path / "stacked", tiny.MOE, tiny.moe_tensors(stacked=True)))
    assert isinstance(one.target, MoeConfig)
    for name, value in flatten(one.target_params).items():
        np.testing.assert_array_equal(value, flatten(two.target_params)[name], err_msg=name)
    layer = one.target_params["layers"][1]
    np.testing.assert_array_equal(layer["router"], tensors["model.layers.1.mlp.gate.weight"].T)
    for e in range(4):
        for j, part in enumerate(("gate", "up")):
            theirs = tensors[f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"]
            np.testing.assert_array_equal(layer["expert_gate_up"][e, :, j], theirs.T)
        theirs = tensors[f"model.layers.1.mlp.experts.{e}.down_proj.weight"]
        np.testing.assert_array_equal(layer["expert_down"][e], theirs.T)


def test_gate_and_up_of_gpt_oss_take_turns(tmp_path):
    tensors = tiny.gpt_oss_tensors()
    loaded = load(tiny.write(tmp_path / "hf", tiny.GPT_OSS, tensors))
    assert isinstance(loaded.target, GptOssConfig)
    layer, prefix = loaded.target_params["layers"][0], "model.layers.0.mlp.experts."
    for j in (0, 1):
        np.testing.assert_array_equal(layer["expert_gate_up"][:, :, j], tensors[f"{prefix}gate_up_proj"][..., j::2])
        np.testing.assert_array_equal(
            layer["expert_gate_up_bias"][:, j], tensors[f"{prefix}gate_up_proj_bias"][:, j::2]
        )
    np.testing.assert_array_equal(layer["expert_down"], tensors[f"{prefix}down_proj"])
    np.testing.assert_array_equal(layer["sinks"], tensors["model.layers.0.self_attn.sinks"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_dequantised_bit_for_bit(tmp_path, dtype):
    tensors, meant = mxfp4_tensors()
    loaded = load(tiny.write(tmp_path / "hf", {**tiny.GPT_OSS, **MXFP4}, tensors), dtype)
    assert any("MXFP4 weights are dequantised" in note for note in loaded.notes)
    for i, layer in enumerate(loaded.target_params["layers"]):
        wide = meant[f"model.layers.{i}.mlp.experts.gate_up_proj"]
        experts, dim, width = wide.shape
        wide = wide.reshape(experts, dim, width // 2, 2).swapaxes(2, 3)
        for ours, theirs in (
            (layer["expert_gate_up"], wide),
            (layer["expert_down"], meant[f"model.layers.{i}.mlp.experts.down_proj"]),
        ):
            assert np.asarray(ours).astype(np.float64).tobytes() == theirs.tobytes()  # signs of zeros included
    assert load(tmp_path / "hf").dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_dequantised_bit_for_bit(tmp_path, dtype):
    """Value times its block's scale in float32, then the model's dtype; the last blocks are narrower."""
    tensors, meant = fp8_tensors()
    loaded = load(tiny.write(tmp_path / "hf", {**WIDE, **FP8}, tensors), dtype)
    layer, prefix = loaded.target_params["layers"][0], "model.layers.0."
    for e in range(3):
        experts = f"{prefix}mlp.experts.{e}."
        for ours, name in (
            (layer["expert_gate_up"][e, :, 0], f"{experts}gate_proj.weight"),
            (layer["expert_gate_up"][e, :, 1], f"{experts}up_proj.weight"),
            (layer["expert_down"][e], f"{experts}down_proj.weight"),
        ):
            assert np.asarray(ours).tobytes() == meant[name].T.astype(ours.dtype).tobytes(), name
    q = np.asarray(layer["q"]).reshape(160, -1)
    assert q.tobytes() == meant[f"{prefix}self_attn.q_proj.weight"].T.astype(q.dtype).tobytes()
    assert load(tmp_path / "hf").dtype == jnp.bfloat16  # of what is not quantised


def gone(name):
    return lambda t: t.pop(name)


def cut(name, *index):
    return lambda t: t.update({name: np.ascontiguousarray(t[name][index])})


def retyped(name, dtype):
    return lambda t: t.update({name: t[name].astype(dtype)})


EXPERTS = "model.layers.0.mlp.experts."
GATE_UP, DOWN, UP = f"{EXPERTS}gate_up_proj", f"{EXPERTS}down_proj", f"{EXPERTS}1.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
DAMAGES = [
    (
        "mxfp4",
        cut(f"{GATE_UP}_scales", ..., slice(1)),
        r"wrong shape: .*gate_up_proj_scales is \(2, 128, 1\); .* has scales \(2, 128, 2\)",
    ),
    ("mxfp4", cut(f"{DOWN}_scales", slice(1)), r"down_proj_scales is \(1, 64, 2\)"),
    ("mxfp4", cut(f"{DOWN}_blocks", ..., slice(8)), r"down_proj_blocks is \(2, 64, 2, 8\); MXFP4 blocks are"),
    ("mxfp4", retyped(f"{DOWN}_scales", np.int8), "down_proj_scales is int8, MXFP4 is uint8"),
    ("mxfp4", gone(f"{DOWN}_scales"), rf"(?s)missing tensors: {DOWN}\n.*unknown tensors: {DOWN}_blocks"),
    ("mxfp4", gone(f"{DOWN}_blocks"), rf"(?s)missing tensors: {DOWN}\n.*unknown tensors: {DOWN}_scales"),
    (
        "fp8",
        cut(f"{UP}_scale_inv", slice(1)),
        rf"{UP}_scale_inv is \(1, 2\); .* blocks of 128 x 128 has scales \(2, 2\)",
    ),
    ("fp8", gone(f"{UP}_scale_inv"), r"\{gate,up\}_proj.weight are of several: float32, float8_e4m3fn"),
    ("fp8", gone(f"{Q}_scale_inv"), f"wrong dtype: {Q} is float8_e4m3fn"),
    ("fp8", gone(UP), rf"(?s)missing tensors: {UP}\n.*unknown tensors: {UP}_scale_inv"),
    ("pieces", gone(f"{EXPERTS}3.down_proj.weight"), f"missing tensors: {EXPERTS}3.down_proj.weight$"),
    ("pieces", cut(UP, slice(1, None)), rf"{UP} is \(19, 32\), the config says \(20, 32\)"),
    ("pieces", lambda t: t.update({f"{EXPERTS}4.up_proj.weight": t[UP]}), f"unknown tensors: {EXPERTS}4.up_proj"),
    ("stacked", cut(DOWN, slice(3)), rf"{DOWN} is \(3, 32, 20\), the config says \(4, 32, 20\)"),
    ("stacked", gone(DOWN), f"missing tensors: {DOWN}$"),
]


@pytest.mark.parametrize(("kind", "damage", "said"), DAMAGES)
def test_what_is_wrong_with_experts_is_said_by_name(tmp_path, kind, damage, said):
    hf, tensors = {
        "mxfp4": ({**tiny.GPT_OSS, **MXFP4}, mxfp4_tensors()[0]),
        "fp8": ({**WIDE, **FP8}, fp8_tensors()[0]),
        "pieces": (tiny.MOE, tiny.moe_tensors()),
        "stacked": (tiny.MOE, tiny.moe_tensors(stacked=True)),
    }[kind]
    damage(tensors)
    with pytest.raises(CheckpointError, match=said) as error:
        open_checkpoint(tiny.write(tmp_path / "hf", hf, tensors))
    assert str(error.value).count("\n") <= 2  # and nothing that follows from it is said as well


def without(hf, *names):
    return {name: value for name, value in hf.items() if name not in names}


SMALL_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}


@pytest.mark.parametrize(
    ("hf", "said"),
    [
        ({**tiny.GPT_OSS, "quantization_config": {"quant_method": "bitsandbytes"}}, 'quant_method = "bitsandbytes"'),
        ({**tiny.MOE, **MXFP4}, 'quant_method = "mxfp4" of qwen3_moe'),
        ({**tiny.MOE, **SMALL_BLOCKS}, r"weight_block_size = \[64, 64\]"),
        ({**tiny.MOE, "quantization_config": {"quant_method": "fp8"}}, "names no weight_block_size"),
        ({**tiny.MOE, "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({**tiny.MOE, "mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ({**tiny.MOE, "use_sliding_window": True, "sliding_window": 4}, "use_sliding_window = true"),
        ({**tiny.MOE, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is not in 1 .. 4 experts"),
        (without(tiny.MOE, "norm_topk_prob", "num_experts"), "lacks norm_topk_prob, num_experts"),
        (without(tiny.GPT_OSS, "num_local_experts"), "lacks num_local_experts"),
    ],
)
def test_configs_of_mixtures_that_mean_something_else_are_refused(hf, said):
    with pytest.raises(CheckpointError, match=said):
        target_config(hf)


def test_gpt_oss_slides_on_even_layers_unless_it_says_otherwise():
    silent = without(tiny.GPT_OSS, "layer_types", "swiglu_limit")
    assert target_config(silent) == target_config(tiny.GPT_OSS)
    assert target_config(silent).windows() == (6, None)


@pytest.mark.parametrize("kind", ["pieces", "stacked", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixtures_there_and_back_are_bit_for_bit(tmp_path, monkeypatch, kind, dtype):
    """The layout of the file is kept: experts in pieces come back in pieces."""
    monkeypatch.setattr(stream, "SHARD_BYTES", 20_000)
    hf = tiny.GPT_OSS if kind == "gpt_oss" else tiny.MOE
    tensors = (
        tiny.gpt_oss_tensors(dtype=dtype)
        if kind == "gpt_oss"
        else tiny.moe_tensors(dtype=dtype, stacked=kind == "stacked")
    )
    source = tiny.write(tmp_path / "hf", hf, tensors, shards=2)
    assert to_orbax(source, tmp_path / "ours").notes == ()
    mine, other = load(tmp_path / "ours"), load(source)
    assert mine.target == other.target
    for name, value in flatten(mine.target_params).items():
        assert np.asarray(value).tobytes() == np.asarray(flatten(other.target_params)[name]).tobytes(), name
    assert to_hf(tmp_path / "ours", tmp_path / "back").notes == ()
    assert tiny.same_files(source, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_quantised_files_come_back_plain_and_say_so(tmp_path, kind):
    hf, (tensors, _) = (
        ({**tiny.GPT_OSS, **MXFP4}, mxfp4_tensors()) if kind == "mxfp4" else ({**WIDE, **FP8}, fp8_tensors())
    )
    source = tiny.write(tmp_path / "hf", hf, tensors)
    for report in (to_orbax(source, tmp_path / "ours"), to_hf(tmp_path / "ours", tmp_path / "back")):
        assert any(f"{kind.upper()} weights are dequantised" in note for note in report.notes)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert {t.dtype for t in open_shelf(tmp_path / "back")} == {np.dtype(BF16)}
    first, last = load(source), load(tmp_path / "back")
    assert first.target == last.target
    for name, value in flatten(first.target_params).items():
        assert np.asarray(value).tobytes() == np.asarray(flatten(last.target_params)[name]).tobytes(), name


def test_patterns_are_spelled_out_in_the_order_of_the_bytes():
    assert spelled_out("a.{0..1}.{gate,up}_p") == ["a.0.gate_p", "a.0.up_p", "a.1.gate_p", "a.1.up_p"]
    assert spelled_out("plain.name") == ["plain.name"]


@pytest.mark.devices(2)
@pytest.mark.parametrize("kind", ["pieces", "gpt_oss"])
@pytest.mark.parametrize("tokens", [3, 30])
def test_a_mixture_split_over_devices_is_the_same_model(tmp_path, kind, tokens):
    hf, tensors = (tiny.GPT_OSS, tiny.gpt_oss_tensors()) if kind == "gpt_oss" else (tiny.MOE, tiny.moe_tensors())
    folder = tiny.write(tmp_path / "hf", hf, tensors)
    ids = np.random.default_rng(0).integers(0, 96, (1, tokens)).astype(np.int32)
    logits = []
    for mesh in (make_mesh(), make_mesh(2)):
        loaded = load(folder, mesh=mesh)
        packed = pack(loaded.target_params, loaded.target, mesh)
        logits.append(np.asarray(full_pass(packed, loaded.target, ids)[1]))
        for name, value in flatten(unpack(packed)).items():
            np.testing.assert_array_equal(value, flatten(loaded.target_params)[name])
    assert "model" in packed["layers"][0]["expert_down"].sharding.spec
    np.testing.assert_allclose(*logits, atol=2e-4 * np.abs(logits[0]).max())
