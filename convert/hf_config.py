"""A Hugging Face config.json of a target -> ``TargetConfig``, and the rotary embedding of either kind of model.

Transformers 4 wrote ``rope_theta`` and ``rope_scaling`` ("type" or "rope_type"), transformers 5 writes one
``rope_parameters``; both end in the same ``RopeConfig``. Only fields without which a config still says one thing have
a default here; every other missing field is named in one error, and so is every option that would change the numbers
and that nobody here implements.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dflash_jax.config import (
    ROPE_TYPES,
    TARGET_CONFIGS,
    GptOssConfig,
    HybridConfig,
    HybridMoeConfig,
    LayerType,
    MoeConfig,
    RopeConfig,
    TargetConfig,
)

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", *HYBRIDS)
DRAFTER_FIELDS = ("dflash_config", "speculators_model_type")
DRAFTER_NAMES = ("DFlash", "Eagle", "Speculator", "DraftModel")

# Rotary parameters by type, beside rope_theta and the type itself.
ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
}
# Options that change what a layer computes, and the values at which they change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (1,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "output_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "rope_traditional": (False,),
}


MROPE = ("mrope_section", "mrope_interleaved")
HYBRID_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
HYBRID_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "decoder_sparse_step": (1,),
    "mamba_ssm_dtype": ("float32",),
    "mlp_only_layers": ([],),
    "use_sliding_window": (False,),
}
# What a family has of the options above (not in its list of refusals), and options that it alone refuses.
FAMILY_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "qwen3_moe": ("num_experts",),
    "gpt_oss": ("num_local_experts",),
    **dict.fromkeys(HYBRIDS, ("partial_rotary_factor", "num_experts")),
}
FAMILY_NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "qwen3_moe": {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "shared_expert_intermediate_size": (0,),
        "use_sliding_window": (False,),
    },
    "gpt_oss": {"attention_bias": (True,)},
    **dict.fromkeys(HYBRIDS, HYBRID_NEUTRAL),
}
FP8_BLOCK = [128, 128]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it stands; the message says all that is wrong with it."""


class Fields:
    """Reads a JSON object and remembers which required fields were missing, so that one error names them all."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix
        self.missing: list[str] = []

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number >= ``least``; missing (and remembered) where absent or null without ``default``."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            self.missing.append(self.prefix + name)
            return 0
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.prefix}{name} must be a whole number, got {value!r}")
        if value < least and self.values.get(name) is not None:
            raise CheckpointError(f"{self.prefix}{name} must be at least {least}, got {value}")
        return value

    def number(self, name: str) -> float:
        """A number; missing where absent or null."""
        value = self.values.get(name)
        if value is None:
            self.missing.append(self.prefix + name)
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.prefix}{name} must be a number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.prefix}{name} must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise CheckpointError(f"{self.prefix}{name} must be a string, got {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None where absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise CheckpointError(f"{self.prefix}{name} must be a list of whole numbers, got {value!r}")
        return tuple(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises CheckpointError where it is missing, unreadable or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def refuse_options(values: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raises CheckpointError naming every option of ``neutral`` that is set to a value with a meaning of its own."""
    wrong = [
        f"{prefix}{name} = {json.dumps(values[name])}"
        for name, harmless in neutral.items()
        if values.get(name) is not None and values[name] not in harmless
    ]
    if wrong:
        raise CheckpointError(f"options that are not supported: {', '.join(wrong)}")


def rope_config(values: Mapping[str, Any], fields: Fields, partial: bool = False) -> RopeConfig | None:
    """The rotary embedding of a config in either spelling; None (and the field remembered) where theta is nowhere.

    ``partial``: the family turns a part of each head only, and its config says which (``partial_rotary_factor``); what
    it says of M-RoPE's three axes makes no difference to text.

    Raises:
        CheckpointError: an unknown rope_type, a parameter that the type does not know, or two spellings that disagree.
    """
    given = {name: values[name] for name in ("rope_parameters", "rope_scaling") if values.get(name)}
    for name, value in given.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"{name} must be a JSON object, got {value!r}")
    nested = [dict(value) for value in given.values()]
    if len(nested) == 2 and nested[0] != {**nested[0], **nested[1]}:
        raise CheckpointError(f"rope_parameters {nested[0]} and rope_scaling {nested[1]} disagree")
    rope = {name: value for name, value in (nested[0] if nested else {}).items() if value is not None}

    kinds = {str(rope.pop(name)) for name in ("type", "rope_type") if name in rope} or {"default"}
    if len(kinds) > 1:
        raise CheckpointError(f"the rotary embedding has two types: {', '.join(sorted(kinds))}")
    kind = kinds.pop()
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"rope_type {kind!r} is not supported; built: {', '.join(ROPE_TYPES)}")

    thetas = {float(v) for v in (rope.pop("rope_theta", None), values.get("rope_theta")) if v is not None}
    if len(thetas) > 1:
        raise CheckpointError(f"rope_theta is given twice with different values: {sorted(thetas)}")
    shares = {
        v for v in (rope.pop("partial_rotary_factor", None), values.get("partial_rotary_factor")) if v is not None
    }
    if not partial:
        refuse_options({"partial_rotary_factor": next(iter(shares), None)}, NEUTRAL, "rope ")
        shares = {1.0}
    elif len(shares) > 1:
        raise CheckpointError(f"partial_rotary_factor is given twice with different values: {sorted(shares)}")
    for name in MROPE if partial else ():
        rope.pop(name, None)
    rope.pop("finetuned", None)
    unknown = sorted(set(rope) - set(ROPE_FIELDS[kind]))
    if unknown:
        raise CheckpointError(f"rope_type {kind!r} has parameters that are not supported: {', '.join(unknown)}")

    for name, value in rope.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not (isinstance(value, bool) if name == "truncate" else number):
            raise CheckpointError(f"{name} of rope_type {kind!r} cannot be {value!r}")

    lacking = [] if thetas else ["rope_theta (or rope_parameters.rope_theta)"]
    needed = ROPE_FIELDS[kind][: {"default": 0, "linear": 1, "llama3": 4, "yarn": 2}[kind]]
    lacking += [f"{name} of rope_type {kind!r}" for name in needed if name not in rope]
    lacking += [] if shares else ["partial_rotary_factor"]
    if lacking:
        fields.missing += lacking
        return None
    return RopeConfig(rope_theta=thetas.pop(), rope_type=kind, partial_rotary_factor=float(shares.pop()), **rope)


def layer_layout(values: Mapping[str, Any], layers: int) -> tuple[tuple[LayerType, ...], int | None]:
    """layer_types and the window, by the rule of transformers' Qwen2 and Qwen3.

    Layer i slides iff use_sliding_window holds, sliding_window is set and i >= max_window_layers, unless layer_types
    says so itself. A window that no layer uses is dropped.

    Raises:
        CheckpointError: layer_types that slide while use_sliding_window is false, or a rule that lacks a number.
    """
    types, window, switch = (values.get(name) for name in ("layer_types", "sliding_window", "use_sliding_window"))
    if types is not None:
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise CheckpointError(f"layer_types must be a list of names, got {types!r}")
        if switch is False and "sliding_attention" in types:
            raise CheckpointError("layer_types has sliding_attention layers, but use_sliding_window is false")
    elif switch and "sliding_window" not in values:  # null is full attention, absent is 4096 to transformers
        raise CheckpointError("use_sliding_window is true, and sliding_window is not given")
    elif switch and window is not None:
        start = values.get("max_window_layers")
        if start is None:
            raise CheckpointError("use_sliding_window is true, and neither layer_types nor max_window_layers is given")
        types = ["sliding_attention" if i >= start else "full_attention" for i in range(layers)]
    else:
        types = ["full_attention"] * layers
    return tuple(types), window if "sliding_attention" in types else None


def layout_fields(hf: Mapping[str, Any], family: str, layers: int) -> Mapping[str, Any]:
    """What ``layer_layout`` may read of a config: Llama never slides by itself, gpt-oss slides on even layers."""
    if family == "llama":
        return {"layer_types": hf.get("layer_types")}
    if family == "gpt_oss" and hf.get("layer_types") is None:
        return {**hf, "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]}
    return hf


def drafter_marks(hf: Mapping[str, Any]) -> list[str]:
    """By what a config.json says that it is a drafter's: fields and architectures. Empty for a target."""
    names = [str(name) for name in hf.get("architectures") or ()]
    marked = [name for name in names if any(mark in name for mark in DRAFTER_NAMES)]
    return marked + [name for name in DRAFTER_FIELDS if name in hf]


def text_of(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json, where a multimodal one keeps it apart, under the family's name."""
    inner = hf.get("text_config")
    if not isinstance(inner, dict):
        inner = {}
    family = hf.get("model_type")
    if isinstance(family, str) and family.removesuffix("_text") in HYBRIDS:
        family = family.removesuffix("_text")
        ties = [part["tie_word_embeddings"] for part in (hf, inner) if part.get("tie_word_embeddings") is not None]
        if len(set(ties)) > 1:
            raise CheckpointError("tie_word_embeddings of the config and of its text_config disagree")
        return {**hf, **inner, "model_type": family, **({"tie_word_embeddings": ties[0]} if ties else {})}
    return hf


def check_model_type(hf: Mapping[str, Any]) -> str:
    """The family of a target. Raises CheckpointError for drafters and for families that are not built, by name."""
    marks = drafter_marks(hf)
    if marks:
        raise CheckpointError(f"this is a drafter ({', '.join(marks)}), not a target model")
    family = hf.get("model_type")
    if family is None:
        raise CheckpointError(f"config.json names no model_type; built: {', '.join(FAMILIES)}")
    if family not in FAMILIES:
        raise CheckpointError(f"model_type {family!r} is not supported yet; built: {', '.join(FAMILIES)}")
    return str(family)


def check_quantisation(hf: Mapping[str, Any], family: str) -> None:
    """Raises CheckpointError for quantised weights of a kind that is not dequantised here."""
    given = hf.get("quantization_config")
    if given is None:
        return
    if not isinstance(given, dict):
        raise CheckpointError(f"quantization_config must be a JSON object, got {given!r}")
    method = given.get("quant_method")
    if method == "mxfp4" and family == "gpt_oss":
        return
    if method != "fp8":
        raise CheckpointError(
            f"options that are not supported: quantization_config.quant_method = {json.dumps(method)} of {family} "
            "(dequantised on load: fp8, and mxfp4 of gpt_oss)"
        )
    refuse_options(given, {"fmt": ("e4m3",), "weight_block_size": (FP8_BLOCK,)}, "quantization_config.")
    if given.get("weight_block_size") is None:
        raise CheckpointError(f"quantization_config of fp8 names no weight_block_size; built: {FP8_BLOCK}")


def moe_fields(hf: Mapping[str, Any], family: str, fields: Fields) -> dict[str, Any]:
    """The fields of ``MoeConfig`` and ``GptOssConfig`` beside those of every target; missing ones are remembered."""
    if family == "qwen3_moe":
        if hf.get("norm_topk_prob") is None:
            fields.missing.append("norm_topk_prob")
        return {
            "num_experts": fields.integer("num_experts"),
            "num_experts_per_tok": fields.integer("num_experts_per_tok"),
            "moe_intermediate_size": fields.integer("moe_intermediate_size"),
            "shared_expert_intermediate_size": 0,
            "norm_topk_prob": fields.flag("norm_topk_prob", False),
        }
    if family == "gpt_oss":
        if hf.get("swiglu_limit") is None:  # transformers has it as a constant
            fields.values = {**fields.values, "swiglu_limit": 7.0}
        return {
            "num_experts": fields.integer("num_local_experts"),
            "num_experts_per_tok": fields.integer("num_experts_per_tok"),
            "moe_intermediate_size": fields.integer("intermediate_size"),
            "shared_expert_intermediate_size": 0,
            "norm_topk_prob": True,
            "swiglu_limit": fields.number("swiglu_limit"),
        }
    return {}


def target_config(hf: Mapping[str, Any], vocab_rows: int | None = None) -> TargetConfig:
    """The ``TargetConfig`` of a Hugging Face config.json.

    Args:
        hf: the JSON object.
        vocab_rows: rows of the embedding in the file (None: as many as vocab_size).

    Raises:
        CheckpointError: another family, an option that is not built, or the list of all missing fields.
    """
    hf = text_of(hf)
    family = check_model_type(hf)
    neutral = {name: harmless for name, harmless in NEUTRAL.items() if name not in FAMILY_OPTIONS.get(family, ())}
    refuse_options(hf, {**neutral, **FAMILY_NEUTRAL.get(family, {})})
    check_quantisation(hf, family)
    if family in HYBRIDS:
        return hybrid_config(hf, vocab_rows)
    fields = Fields(hf)
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    heads, vocab = fields.integer("num_attention_heads"), fields.integer("vocab_size")
    # Llama configs from before grouped queries have no num_key_value_heads: one each, as transformers reads them.
    kv_heads = fields.integer("num_key_value_heads", heads if family == "llama" else None)
    # Llama and Qwen2 may leave head_dim to hidden_size / num_attention_heads; later families have a field of its own.
    shared = hidden // max(heads, 1) if family in ("llama", "qwen2") else None
    head_dim = fields.integer("head_dim", shared)
    width, eps = fields.integer("intermediate_size"), fields.number("rms_norm_eps")
    positions = fields.integer("max_position_embeddings")
    rope = rope_config(hf, fields)
    moe = moe_fields(hf, family, fields)
    if fields.missing or rope is None:
        raise CheckpointError(f"config.json lacks {', '.join(fields.missing)}")

    if shared is not None and hf.get("head_dim") is None and hidden % heads:
        raise CheckpointError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    layer_types, window = layer_layout(layout_fields(hf, family, layers), layers)
    attention_bias = fields.flag("attention_bias", family == "gpt_oss")
    kind = GptOssConfig if family == "gpt_oss" else MoeConfig if moe else TargetConfig
    try:
        return kind(
            model_type=family,
            vocab_size=vocab,
            vocab_rows=vocab if vocab_rows is None else vocab_rows,
            hidden_size=hidden,
            intermediate_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=eps,
            max_position_embeddings=positions,
            rope=rope,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=True if family == "qwen2" else attention_bias,
            o_bias=False if family == "qwen2" else attention_bias,
            mlp_bias=fields.flag("mlp_bias", False) if family == "llama" else False,
            qk_norm=family in ("qwen3", "qwen3_moe"),
            layer_types=layer_types,
            sliding_window=window,
            **moe,
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def hybrid_config(hf: Mapping[str, Any], vocab_rows: int | None) -> HybridConfig:
    """``target_config`` of Qwen3-Next and Qwen3.5, whose options have been looked at."""
    fields, family = Fields(hf), str(hf["model_type"])
    mixture = TARGET_CONFIGS[family] is HybridMoeConfig
    vocab, layers = fields.integer("vocab_size"), fields.integer("num_hidden_layers")
    types = hf.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval")
        types = ["linear_attention" if (i + 1) % max(interval, 1) else "full_attention" for i in range(layers)]
    given: dict[str, Any] = {
        "intermediate_size": fields.integer("intermediate_size", 0 if mixture else None),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope": rope_config(hf, fields, partial=True),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }
    given |= {name: fields.integer(name) for name in HYBRID_SIZES}
    if mixture:
        # Qwen3.5 has no norm_topk_prob: its weights always sum to one.
        given["norm_topk_prob"] = family != "qwen3_next" or fields.flag("norm_topk_prob", True)
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
            given[name] = fields.integer(name)
    if fields.missing:
        raise CheckpointError(f"config.json lacks {', '.join(fields.missing)}")
    try:
        return cast(type[HybridConfig], TARGET_CONFIGS[family])(
            model_type=family,
            vocab_size=vocab,
            vocab_rows=vocab if vocab_rows is None else vocab_rows,
            num_hidden_layers=layers,
            layer_types=tuple(types),
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=True,
            sliding_window=None,
            **given,
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(str(error)) from error


def eos_token_ids(hf: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids that end a text: config.json's, then generation_config.json's, each one number, a list or null."""
    found: list[int] = []
    for source in (text_of(hf), generation):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(i) for i in found))
