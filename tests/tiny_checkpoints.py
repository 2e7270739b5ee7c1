"""Tiny Hugging Face checkpoints for tests, their tensor names and shapes written out by hand."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from convert.tensors import open_shelf

ROPE = {"rope_theta": 10000.0, "rope_scaling": None}
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    **ROPE,
}
TARGET = {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4}
TARGET |= {"tie_word_embeddings": False, "eos_token_id": 7}
DRAFTER = {**BASE, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2}
DRAFTER |= {"num_target_layers": 4, "block_size": 8, "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]}}
SPECULATOR: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "block_size": 8,
    "mask_token_id": 95,
    "draft_vocab_size": 40,
    "aux_hidden_state_layer_ids": [1, 3],
    "target_hidden_size": None,
    "transformer_layer_config": {**BASE, "model_type": "qwen3", "num_hidden_layers": 2},
}
MOE = {**TARGET, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2}
MOE |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
GPT_OSS = {**TARGET, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 2}
GPT_OSS |= {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "swiglu_limit": 7.0}
Tensors = dict[str, np.ndarray]


def layer_shapes(prefix: str, hf: dict[str, Any], bias: str = "") -> dict[str, tuple[int, ...]]:
    """One decoder layer; ``bias`` names the projections that have one, by their first letters."""
    dim, width, head = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    heads, kv = hf["num_attention_heads"] * head, hf["num_key_value_heads"] * head
    shapes = {
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
        "self_attn.q_proj.weight": (heads, dim),
        "self_attn.k_proj.weight": (kv, dim),
        "self_attn.v_proj.weight": (kv, dim),
        "self_attn.o_proj.weight": (dim, heads),
        "mlp.gate_proj.weight": (width, dim),
        "mlp.up_proj.weight": (width, dim),
        "mlp.down_proj.weight": (dim, width),
    }
    if hf["model_type"] in ("qwen3", "qwen3_moe"):
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    sizes = {"q": heads, "k": kv, "v": kv, "o": dim}
    shapes |= {f"self_attn.{letter}_proj.bias": (sizes[letter],) for letter in bias if letter in sizes}
    if "m" in bias:
        shapes |= {"mlp.gate_proj.bias": (width,), "mlp.up_proj.bias": (width,), "mlp.down_proj.bias": (dim,)}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def fill(shapes: dict[str, tuple[int, ...]], dtype: str = "float32", seed: int = 0) -> Tensors:
    """Random values; bfloat16 exists in numpy through ml_dtypes alone."""
    random = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return {name: random.normal(size=shape).astype(kind) for name, shape in shapes.items()}


def target_tensors(hf: dict[str, Any] = TARGET, dtype: str = "float32", bias: str = "", rows: int = 0) -> Tensors:
    """All tensors of a target; ``rows`` of the embedding and head if not vocab_size."""
    rows = rows or hf["vocab_size"]
    shapes = {"model.embed_tokens.weight": (rows, hf["hidden_size"]), "model.norm.weight": (hf["hidden_size"],)}
    if not hf.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (rows, hf["hidden_size"])
    for i in range(hf["num_hidden_layers"]):
        shapes |= layer_shapes(f"model.layers.{i}", hf, bias)
    return fill(shapes, dtype)


def moe_tensors(hf: dict[str, Any] = MOE, dtype: str = "float32", stacked: bool = False) -> Tensors:
    """All tensors of a Qwen3-MoE target: an expert's matrices apart, or the same values stacked."""
    dim, width, count = hf["hidden_size"], hf["moe_intermediate_size"], hf["num_experts"]
    shapes = {f"experts.{e}.{name}_proj.weight": (width, dim) for e in range(count) for name in ("gate", "up")}
    shapes |= {f"experts.{e}.down_proj.weight": (dim, width) for e in range(count)}
    tensors = {name: value for name, value in target_tensors(hf, dtype).items() if ".mlp." not in name}
    for i in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{i}.mlp."
        made = fill(shapes | {"gate.weight": (count, dim)}, dtype, seed=3 + i)
        if stacked:
            both = [
                np.concatenate([made.pop(f"experts.{e}.{n}_proj.weight") for n in ("gate", "up")]) for e in range(count)
            ]
            downs = [made.pop(f"experts.{e}.down_proj.weight") for e in range(count)]
            made |= {"experts.gate_up_proj": np.stack(both), "experts.down_proj": np.stack(downs)}
        tensors |= {prefix + name: value for name, value in made.items()}
    return tensors


def gpt_oss_tensors(hf: dict[str, Any] = GPT_OSS, dtype: str = "float32") -> Tensors:
    """All tensors of a gpt-oss target with plain experts."""
    dim, width, count = hf["hidden_size"], hf["intermediate_size"], hf["num_local_experts"]
    shapes = {"self_attn.sinks": (hf["num_attention_heads"],), "mlp.router.weight": (count, dim)}
    shapes |= {"mlp.router.bias": (count,), "mlp.experts.gate_up_proj": (count, dim, 2 * width)}
    shapes |= {"mlp.experts.gate_up_proj_bias": (count, 2 * width), "mlp.experts.down_proj": (count, width, dim)}
    shapes |= {"mlp.experts.down_proj_bias": (count, dim)}
    tensors = {name: value for name, value in target_tensors(hf, dtype, "qkvo").items() if ".mlp." not in name}
    for i in range(hf["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{n}": value for n, value in fill(shapes, dtype, seed=3 + i).items()}
    return tensors


def drafter_tensors(hf: dict[str, Any] = DRAFTER, dtype: str = "float32", taps: int = 2) -> Tensors:
    """All tensors of a z-lab drafter."""
    dim = hf["hidden_size"]
    shapes = {"fc.weight": (dim, taps * dim), "hidden_norm.weight": (dim,), "norm.weight": (dim,)}
    for i in range(hf["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{i}", hf)
    return fill(shapes, dtype, seed=1)


def speculator_tensors(hf: dict[str, Any] = SPECULATOR, dtype: str = "float32") -> Tensors:
    """All tensors of a speculators drafter with a reduced vocabulary: every second id."""
    layer, reduced = hf["transformer_layer_config"], hf["draft_vocab_size"]
    tensors = drafter_tensors(layer, dtype)
    size = {"embed_tokens.weight": (layer["vocab_size"], layer["hidden_size"])}
    tensors |= fill(size | {"lm_head.weight": (reduced, layer["hidden_size"])}, dtype, seed=2)
    chosen = np.arange(reduced) * 2
    tensors["d2t"] = (chosen - np.arange(reduced)).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(layer["vocab_size"]), chosen)
    return tensors


def write(folder: Path, hf: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """config.json and the tensors, in one file or with an index over several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {tensor: names[i % shards] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor, file in where.items() if file == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A target in three shards with its other files, and a drafter that fits it."""
    target = write(folder / "target", TARGET, target_tensors(), shards=3)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.6}))
    (target / "tokenizer.json").write_text("{}")
    return target, write(folder / "drafter", DRAFTER, drafter_tensors())


def same_files(first: Path, second: Path) -> bool:
    """Whether two Hugging Face folders hold the same tensors: names, shapes, dtypes and bytes."""
    mine, other = open_shelf(first), open_shelf(second)
    assert not mine.faults + other.faults
    assert mine.tensors.keys() == other.tensors.keys()
    for name, tensor in mine.tensors.items():
        assert (tensor.shape, tensor.dtype) == (other.tensors[name].shape, other.tensors[name].dtype), name
        assert tensor.view().tobytes() == other.tensors[name].view().tobytes(), name
    return True
