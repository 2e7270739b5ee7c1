"""A drafter's config.json -> ``DrafterConfig``: z-lab folders in both spellings, and speculators folders; those of
EAGLE-3 go to ``hf_chain``.

DFlash has many relatives that share its architecture name. They are told apart by their options,
and every one that computes something else is refused by the name of its family, as is any option of ``dflash_config``
that nobody here knows.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.hf_chain import eagle3_config, is_eagle3
from convert.hf_config import CheckpointError, Fields, layer_layout, read_json, refuse_options, rope_config
from dflash_jax.config import DrafterConfig, Eagle3Config

DEFAULT_BLOCK = 16
DEFAULT_MASK = "<|MASK|>"

# Options of dflash_config that make the folder a member of another family, unless null, false, zero or empty.
RELATIVES: Mapping[str, tuple[str, ...]] = {
    "DFlash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "JetSpec (causal head)": ("causal_head",),
    "Domino": ("shift_label", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"),
    "DSpark": (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "confidence_head_alpha",
        "sample_from_anchor",
    ),
    "MiMo-style": ("attention_sink_bias", "attention_value_scale", "partial_rotary_factor"),
}
PROJECTORS = {"domino": "Domino", "dspark": "DSpark"}
READ = {
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "mask_token",
    "causal",
    "projector_type",
    "use_swa",
    "swa_window_size",
}
# Options that change the numbers, with the values at which they change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_qk_norm": (True,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (0,),
}
# Options of training alone, and facts about the target.
WITHOUT_EFFECT = {"num_anchors", "loss_decay_gamma", "backbone_rotary_base"}
LAYER_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "attention_value_scale": (1,),
    "attention_sink_bias": (False,),
    "mlp_bias": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "quantization_config": (),
}


def family_of(hf: Mapping[str, Any]) -> str:
    """Which kind of drafter a config.json describes: "z-lab", "speculators" or "eagle3".

    Raises:
        CheckpointError: no drafter at all, or one of another family, by name.
    """
    names = [str(name) for name in hf.get("architectures") or ()]
    kind = hf.get("speculators_model_type")
    if is_eagle3(hf):
        return "eagle3"
    if any("Eagle" in name for name in names) or (isinstance(kind, str) and "eagle" in kind):
        raise CheckpointError(f"this is an EAGLE drafter of another kind ({kind or ', '.join(names)}); built: EAGLE-3")
    if kind is not None or any("Speculator" in name for name in names):
        if hf.get("sample_from_anchor") or kind == "dspark":
            raise CheckpointError("this is a DSpark drafter (sample_from_anchor); built: DFlash")
        if kind != "dflash":
            raise CheckpointError(f"speculators_model_type {kind!r} is not supported; built: dflash, eagle3")
        return "speculators"
    options = hf.get("dflash_config")
    if options is None and not any("DFlash" in name for name in names):
        raise CheckpointError(f"this is no DFlash drafter: architectures {names}, no dflash_config")
    return "z-lab"


def refuse_relatives(hf: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises CheckpointError naming the family of a z-lab style config that is not plain DFlash."""
    names = [str(name) for name in hf.get("architectures") or ()]
    if any("DFlash2" in name for name in names):
        raise CheckpointError(f"this is a DFlash2 drafter ({', '.join(names)}); built: DFlash")
    projector = options.get("projector_type")
    if projector in PROJECTORS:
        family = PROJECTORS[projector]
        raise CheckpointError(f"this is a {family} drafter (projector_type {projector!r}); built: DFlash")
    given = {**hf, **options}
    for family, marks in RELATIVES.items():
        found = [name for name in marks if given.get(name) and (isinstance(given[name], bool) or given[name] != 1)]
        if found:
            said = ", ".join(f"{name} = {json.dumps(given[name])}" for name in found)
            raise CheckpointError(f"this is a {family} drafter ({said}); built: DFlash")
    if projector is not None:
        raise CheckpointError(f"dflash_config.projector_type {projector!r} is not supported")
    others = [name for name in names if "DFlash" in name and name != "DFlashDraftModel"]
    if others:
        raise CheckpointError(f"architecture {', '.join(others)} is not supported; built: DFlashDraftModel")


def default_layer_ids(count: int, target_layers: int) -> tuple[int, ...]:
    """The published rule for absent ``target_layer_ids``: evenly from layer 1 to the third last."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def mask_token_id(options: Mapping[str, Any], fields: Fields, tokenizer: Path | None) -> int:
    """The id fed in masked slots: given, or looked up as a token of the target's tokenizer.json.

    Raises:
        CheckpointError: the token is not in the tokenizer.
    """
    if options.get("mask_token_id") is not None:
        return fields.integer("mask_token_id", least=0)
    token = fields.text("mask_token", DEFAULT_MASK)
    if tokenizer is None or not (tokenizer / "tokenizer.json").exists():
        fields.missing.append(f"dflash_config.mask_token_id (and no tokenizer.json to look {token!r} up in)")
        return 0
    table = read_json(tokenizer / "tokenizer.json")
    added = {entry["content"]: entry["id"] for entry in table.get("added_tokens") or ()}
    vocabulary = (table.get("model") or {}).get("vocab") or {}
    known = vocabulary if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary)}
    found = added.get(token, known.get(token))
    if found is None:
        raise CheckpointError(
            f"dflash_config has no mask_token_id, and the target's tokenizer has no token {token!r} to stand for it"
        )
    return int(found)


def causal_layers(hf: Mapping[str, Any], options: Mapping[str, Any], layer_types: tuple[str, ...]) -> tuple[bool, ...]:
    """Causality inside the block: top-level is_causal, else dflash_config.causal, else what the layer's type says."""
    for source, name in ((hf, "is_causal"), (options, "causal")):
        if source.get(name) is not None:
            return (Fields(source).flag(name, False),) * len(layer_types)
    return tuple(kind == "sliding_attention" for kind in layer_types)


def check_window(options: Mapping[str, Any], fields: Fields, window: int | None) -> None:
    """Raises CheckpointError where use_swa or swa_window_size contradict layer_types and sliding_window."""
    if fields.flag("use_swa", window is not None) != (window is not None):
        raise CheckpointError(f"dflash_config.use_swa is {options['use_swa']}, but the layers' window is {window}")
    if window is not None and fields.integer("swa_window_size", window) != window:
        raise CheckpointError(f"swa_window_size {options['swa_window_size']} differs from sliding_window {window}")


def z_lab_config(hf: Mapping[str, Any], tokenizer: Path | None) -> DrafterConfig:
    """The ``DrafterConfig`` of a z-lab folder (architecture DFlashDraftModel)."""
    options = hf.get("dflash_config") or {}
    if not isinstance(options, dict):
        raise CheckpointError(f"dflash_config must be a JSON object, got {options!r}")
    refuse_relatives(hf, options)
    relatives = {name for marks in RELATIVES.values() for name in marks}
    unknown = sorted(set(options) - READ - relatives - set(NEUTRAL) - WITHOUT_EFFECT)
    if unknown:
        raise CheckpointError(f"dflash_config has options that are not supported: {', '.join(unknown)}")
    refuse_options(options, NEUTRAL, "dflash_config.")
    refuse_options(hf, {"draft_vocab_size": (hf.get("vocab_size"),)})

    nested = Fields(options, "dflash_config.")
    fields = Fields(hf)
    block = nested.integer("block_size", fields.integer("block_size", DEFAULT_BLOCK))
    ids = nested.integers("target_layer_ids")
    mask = mask_token_id(options, nested, tokenizer)
    layers = fields.integer("num_hidden_layers")
    target_layers = fields.integer("num_target_layers", 0) or None
    if ids is None and target_layers is None:
        nested.missing += ["target_layer_ids (or num_target_layers, from which the default ids follow)"]
    geometry = geometry_of(hf, fields)
    fields.missing += nested.missing
    if fields.missing:
        raise CheckpointError(f"config.json lacks {', '.join(fields.missing)}")
    if ids is None and target_layers is not None:
        ids = default_layer_ids(layers, target_layers)
        warnings.warn(
            f"dflash_config has no target_layer_ids: using the published default {list(ids)} for {layers} drafter "
            f"layers on {target_layers} target layers, which is wrong for many drafters",
            stacklevel=2,
        )
    layer_types, window = layer_layout(hf, layers)
    check_window(options, nested, window)
    return build(
        **geometry,
        draft_vocab_size=geometry["vocab_size"],
        target_hidden_size=fields.integer("target_hidden_size", geometry["hidden_size"]),
        layer_types=layer_types,
        sliding_window=window,
        in_block_causal=causal_layers(hf, options, layer_types),
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=ids,
        num_target_layers=target_layers,
    )


def speculators_config(hf: Mapping[str, Any]) -> DrafterConfig:
    """The ``DrafterConfig`` of a speculators folder: layer ids are stored + 1, the vocabulary may be reduced."""
    layer = hf.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError("config.json lacks transformer_layer_config")
    refuse_options(hf, LAYER_NEUTRAL)
    outer = Fields(hf)
    fields = Fields(layer, "transformer_layer_config.")
    geometry = geometry_of(layer, fields)
    layers = geometry["num_hidden_layers"]
    block, mask = outer.integer("block_size"), outer.integer("mask_token_id", least=0)
    if "draft_vocab_size" not in hf:
        outer.missing.append("draft_vocab_size")
    reduced = outer.integer("draft_vocab_size", geometry["vocab_size"])
    stored = outer.integers("aux_hidden_state_layer_ids")
    if stored is None:
        outer.missing.append("aux_hidden_state_layer_ids")
    missing = outer.missing + fields.missing
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    layer_types, window = layer_layout(layer, layers)
    free = outer.flag("sliding_window_non_causal", False)
    return build(
        **geometry,
        draft_vocab_size=reduced,
        target_hidden_size=outer.integer("target_hidden_size", geometry["hidden_size"]),
        layer_types=layer_types,
        sliding_window=window,
        in_block_causal=tuple(kind == "sliding_attention" and not free for kind in layer_types),
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=tuple(i - 1 for i in stored or ()),
        num_target_layers=None,
    )


def geometry_of(layer: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """The fields that both formats spell alike; what is missing is remembered in ``fields``."""
    refuse_options(layer, LAYER_NEUTRAL, fields.prefix)
    whole = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
    values: dict[str, Any] = {name: fields.integer(name) for name in whole}
    refuse_options({"v_head_dim": layer.get("v_head_dim")}, {"v_head_dim": (values["head_dim"],)}, fields.prefix)
    values["rms_norm_eps"] = fields.number("rms_norm_eps")
    values["attention_bias"] = fields.flag("attention_bias", False)
    values["rope"] = rope_config(layer, fields)
    return values


def build(**values: Any) -> DrafterConfig:
    """``DrafterConfig`` with its complaints as CheckpointError."""
    try:
        return DrafterConfig(**values)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def drafter_config(hf: Mapping[str, Any], tokenizer: Path | None = None) -> DrafterConfig | Eagle3Config:
    """The config of a drafter's config.json.

    Args:
        hf: the JSON object.
        tokenizer: the target's folder with tokenizer.json, to look up a mask token that the config names by its text.

    Raises:
        CheckpointError: another family (by name), an unknown option, or the list of all missing fields.

    Warns:
        UserWarning: target_layer_ids are absent and the published default rule gave them.
    """
    family = family_of(hf)
    if family == "eagle3":
        return eagle3_config(hf)
    return speculators_config(hf) if family == "speculators" else z_lab_config(hf, tokenizer)
