"""A config.json -> ``Eagle3Config`` or ``MTPConfig``: drafters that draft token by token.

EAGLE-3 folders come in two layouts. SpecForge (and the original) write the decoder's fields at the top and name the
tapped layers, if at all, in ``eagle_config``; speculators nests the decoder in ``transformer_layer_config``. Defaults
of the training tools disagree, so a flag is only defaulted where its absence says one thing. A multi-token-prediction
head has no config of its own: it follows from the target's.
"""

from collections.abc import Mapping
from typing import Any

from convert.hf_config import CheckpointError, Fields, layer_layout, refuse_options, rope_config, text_of
from dflash_jax.config import Eagle3Config, MTPConfig

EAGLE3_BLOCK = 8  # anchor and 7 drafts: EAGLE-3 is trained with 7 steps of its own drafts
MTP_BLOCK = 4  # anchor and 3 drafts
EAGLE3_MODELS = ("llama", "qwen3")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_drafting": (False,),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "tie_word_embeddings": (False,),
}


def is_eagle3(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 drafter, by its architecture or its kind of speculator."""
    names = [str(name) for name in hf.get("architectures") or ()]
    return hf.get("speculators_model_type") == "eagle3" or any("Eagle3" in name for name in names)


def eagle3_config(hf: Mapping[str, Any]) -> Eagle3Config:
    """The ``Eagle3Config`` of an EAGLE-3 folder's config.json, with a head and no embedding of its own: which of them
    the folder really brings is for its files to say.

    Raises:
        CheckpointError: an option that is not built, tap ids that can be read in two ways, or all missing fields.
    """
    nested = hf.get("transformer_layer_config")
    if hf.get("speculators_model_type") is not None and not isinstance(nested, dict):
        raise CheckpointError("config.json lacks transformer_layer_config")
    layer = nested if isinstance(nested, dict) else hf
    outer, fields = Fields(hf), Fields(layer, "transformer_layer_config." if layer is nested else "")
    refuse_options(layer, NEUTRAL, fields.prefix)
    family = layer.get("model_type")
    if family not in EAGLE3_MODELS:
        raise CheckpointError(f"an EAGLE-3 layer of model_type {family!r} is not supported; built: llama, qwen3")

    dim, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    vocab, layers = fields.integer("vocab_size"), fields.integer("num_hidden_layers")
    if family == "llama" and layer.get("head_dim") is None and dim % max(heads, 1):
        raise CheckpointError(f"hidden_size {dim} is not a multiple of num_attention_heads {heads}")
    geometry: dict[str, Any] = {
        "vocab_size": vocab,
        "draft_vocab_size": outer.integer("draft_vocab_size", vocab),
        "hidden_size": dim,
        "target_hidden_size": outer.integer("target_hidden_size", dim),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", dim // max(heads, 1) if family == "llama" else None),
        "intermediate_size": fields.integer("intermediate_size"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "attention_bias": fields.flag("attention_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
        "rope": rope_config(layer, fields),
    }
    if layer is nested and "norm_before_residual" not in hf:  # readers and writers of this layout disagree
        outer.missing.append("norm_before_residual")
    missing = outer.missing + fields.missing
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    layer_types, window = layer_layout(layer, layers)
    try:
        return Eagle3Config(
            **geometry,
            qk_norm=family == "qwen3",
            layer_types=layer_types,
            sliding_window=window,
            norm_before_residual=outer.flag("norm_before_residual", False),
            norm_before_fc=outer.flag("norm_before_fc", False),
            fc_norm=outer.flag("fc_norm", False),
            # SpecForge's flag of this name only says that the head reads the normed hidden, as it always does.
            norm_output=layer is nested and outer.flag("norm_output", False),
            own_embedding=False,
            own_head=True,
            block_size=trained_drafts(hf) + 1,
            target_layer_ids=tap_ids(hf),
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def tap_ids(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """The tapped layers, 0-based outputs; () where the config leaves them to the published rule.

    At the top level, speculators counts a layer's input, one more. Inside ``eagle_config`` both ways of counting are in
    use; the published rule begins with layer 1, so a list that begins with 1 or 2 tells which.
    """
    options = hf.get("eagle_config") or {}
    if not isinstance(options, dict):
        raise CheckpointError(f"eagle_config must be a JSON object, got {options!r}")
    refuse_options(options, {"use_aux_hidden_state": (True,)}, "eagle_config.")
    name = "eagle_aux_hidden_state_layer_ids"
    inputs = Fields(hf).integers(name)
    if inputs is not None:
        return tuple(i - 1 for i in inputs)
    given = Fields(options, "eagle_config.").integers(name)
    if not given:
        return ()
    if given[0] not in (1, 2):
        raise CheckpointError(
            f"eagle_config.{name} {list(given)} may count outputs or inputs of layers: say which by {name} at the top "
            "of config.json, which counts inputs (the layer above the output)"
        )
    return tuple(i - (given[0] - 1) for i in given)


def trained_drafts(hf: Mapping[str, Any]) -> int:
    """Drafts a round as the config proposes them, else as EAGLE-3 is trained."""
    methods = (hf.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return Fields(methods[0], "proposal_methods[0].").integer("speculative_tokens", EAGLE3_BLOCK - 1)


def mtp_config(hf: Mapping[str, Any]) -> MTPConfig:
    """The ``MTPConfig`` of a target's config.json (Qwen3-Next, Qwen3.5, inside their multimodal wrapper or not).

    Raises:
        CheckpointError: an option that is not built, or all missing fields.
    """
    text = text_of(hf)
    fields = Fields(text)
    neutral = {"hidden_act": ("silu",), "attn_output_gate": (True,), "attention_bias": (False,)}
    refuse_options(text, {**neutral, "mtp_use_dedicated_embeddings": (False,)})
    experts = fields.integer("num_experts", 0, least=0)
    values: dict[str, Any] = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size", 0 if experts else None),
        "num_target_layers": fields.integer("num_hidden_layers"),
        "num_attention_heads": fields.integer("num_attention_heads"),
        "num_key_value_heads": fields.integer("num_key_value_heads"),
        "head_dim": fields.integer("head_dim"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rope": rope_config(text, fields, partial=True),
        "num_experts": experts,
        "num_experts_per_tok": fields.integer("num_experts_per_tok", None if experts else 0),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "moe_intermediate_size": fields.integer("moe_intermediate_size", None if experts else 0),
        "shared_expert_intermediate_size": fields.integer("shared_expert_intermediate_size", None if experts else 0),
        "num_hidden_layers": fields.integer("mtp_num_hidden_layers", 1),
    }
    if fields.missing:
        raise CheckpointError(f"config.json lacks {', '.join(fields.missing)}")
    try:
        return MTPConfig(**values, mtp_hidden="post_norm", block_size=MTP_BLOCK)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
