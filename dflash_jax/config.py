"""What a model is: frozen, hashable, validated values that jit takes as static arguments.

Fields keep their Hugging Face names. Nothing here reads files (``convert.hf_config`` does) and nothing has a default
that could hide a missing field of a checkpoint.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]
C = TypeVar("C", bound="TargetConfig | DrafterConfig | Eagle3Config | MTPConfig")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding (half-split pairs). ``None`` marks a parameter that ``rope_type`` lacks.

    ``partial_rotary_factor``: the share of a head's dimensions that turns, the first ones.
    """

    rope_theta: float
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {self.rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
        if self.rope_theta <= 0:
            raise ValueError(f"rope_theta must be positive, got {self.rope_theta}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor must be in 0 .. 1, got {self.partial_rotary_factor}")
        needed = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }[self.rope_type]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"rope_type {self.rope_type!r} needs {', '.join(missing)}")


@dataclass(frozen=True)
class TargetConfig:
    """A dense decoder: Llama, Qwen2 / 2.5, Qwen3.

    ``vocab_rows`` counts the rows of the embedding file, which may exceed ``vocab_size`` (padding): ids from
    ``vocab_size`` on are never emitted. ``target_layer_ids`` are the layers whose output residual stream is tapped for
    a drafter (0-based, in the drafter's order); a target on its own taps none.
    """

    model_type: str
    vocab_size: int
    vocab_rows: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    target_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_attention(self)
        if self.vocab_rows < self.vocab_size:
            raise ValueError(f"the embedding has {self.vocab_rows} rows for vocab_size {self.vocab_size}")
        check_layer_ids(self.target_layer_ids, self.num_hidden_layers)

    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer, None for full attention."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)


@dataclass(frozen=True, kw_only=True)
class MoeConfig(TargetConfig):
    """A target whose layers mix experts: Qwen3-MoE.

    ``moe_intermediate_size`` is the width of an expert, ``shared_expert_intermediate_size`` that of the expert of every
    token (0: there is none). ``norm_topk_prob``: the weights of a token's experts are scaled to sum to one.
    ``intermediate_size`` has no use where no layer is dense.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is not in 1 .. {self.num_experts} experts"
            )


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoeConfig):
    """gpt-oss: a mixture with biases everywhere, attention sinks, and SwiGLU clamped at ``swiglu_limit``."""

    swiglu_limit: float


@dataclass(frozen=True, kw_only=True)
class HybridConfig(TargetConfig):
    """Qwen3.5: gated delta nets (``linear_attention``) beside attention with an output gate; zero-centred norms."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @property
    def grouped_projections(self) -> bool:
        """Whether files hold the projections of a delta net as two tensors grouped by key head (Qwen3-Next)."""
        return self.model_type == "qwen3_next"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.linear_num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.linear_num_key_heads}"
            )
        if self.linear_conv_kernel_dim < 2:
            raise ValueError(f"linear_conv_kernel_dim must be at least 2, got {self.linear_conv_kernel_dim}")


@dataclass(frozen=True, kw_only=True)
class HybridMoeConfig(HybridConfig, MoeConfig):
    """Qwen3-Next and Qwen3.5-MoE: the same with experts."""


# The classes of targets by model_type; a family that is not named here is dense.
TARGET_CONFIGS: Mapping[str, type[TargetConfig]] = {
    "gpt_oss": GptOssConfig,
    "qwen3_5": HybridConfig,
    "qwen3_5_moe": HybridMoeConfig,
    "qwen3_moe": MoeConfig,
    "qwen3_next": HybridMoeConfig,
}


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter (arXiv 2602.06036): no embedding and no head of its own unless ``draft_vocab_size`` is reduced.

    ``target_layer_ids`` are the tapped target layers (0-based outputs), ``in_block_causal`` the rule of every drafter
    layer inside the block. ``draft_vocab_size`` < ``vocab_size`` means an own head whose rows map to target ids by
    ``d2t``. ``block_size`` counts the anchor: 16 means 15 drafts.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    attention_bias: bool
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    in_block_causal: tuple[bool, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    method: ClassVar[str] = "dflash"
    title: ClassVar[str] = "DFlash"

    def __post_init__(self) -> None:
        check_attention(self)
        if len(self.in_block_causal) != self.num_hidden_layers:
            raise ValueError(
                f"in_block_causal has {len(self.in_block_causal)} entries for {self.num_hidden_layers} layers"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is not in 1 .. vocab_size {self.vocab_size}")
        if not self.target_layer_ids:
            raise ValueError("a DFlash drafter needs at least one of target_layer_ids")
        check_layer_ids(self.target_layer_ids, self.num_target_layers)

    @property
    def own_head(self) -> bool:
        """Whether drafts are scored by the drafter's own head over a reduced vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer, None for full attention."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 drafter (arXiv 2503.01840) of one layer or more, which drafts token by token.

    ``target_layer_ids`` are the tapped target layers (0-based outputs); () is the published rule, which depends on the
    target's depth (``default_taps``). ``own_embedding`` and ``own_head`` say whether the files bring them, else the
    target's serve; ``draft_vocab_size`` < ``vocab_size`` needs an own head, whose rows map to target ids by ``d2t``.
    The norms: ``norm_before_residual`` (the first layer's residual is the normed hidden), ``norm_before_fc`` (one norm
    over all taps), ``fc_norm`` (one norm a tap), ``norm_output`` (the hidden fed back is the normed one).
    ``block_size`` counts the anchor: 8 means 7 drafts.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    own_head: bool
    block_size: int
    target_layer_ids: tuple[int, ...]
    method: Literal["eagle3"] = "eagle3"
    title: ClassVar[str] = "EAGLE-3"

    def __post_init__(self) -> None:
        check_attention(self)
        check_layer_ids(self.target_layer_ids, None)
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is not in 1 .. vocab_size {self.vocab_size}")
        if self.draft_vocab_size < self.vocab_size and not self.own_head:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} of {self.vocab_size} ids needs a head of its own"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")

    @property
    def taps(self) -> int:
        """How many layers of the target it reads."""
        return len(self.target_layer_ids) or 3

    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer, None for full attention."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)


@dataclass(frozen=True)
class MTPConfig:
    """The multi-token-prediction head that Qwen3-Next and Qwen3.5 bring along: one layer of the target's kind with
    gated attention, drafting token by token with the target's embedding and head.

    ``num_experts`` 0 is a dense feed-forward of ``intermediate_size``, else a mixture as the target's, with a shared
    expert. ``mtp_hidden`` says which of the target's hidden states it was trained on: after the final norm (as
    released) or before. ``block_size`` counts the anchor.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_target_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    mtp_hidden: Literal["post_norm", "pre_norm"]
    block_size: int
    num_hidden_layers: int = 1
    method: Literal["mtp"] = "mtp"
    title: ClassVar[str] = "MTP"

    def __post_init__(self) -> None:
        check_heads(self)
        if self.num_hidden_layers != 1:
            raise ValueError(f"a multi-token-prediction head of {self.num_hidden_layers} layers is not supported")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.mtp_hidden not in ("post_norm", "pre_norm"):
            raise ValueError(f"mtp_hidden must be post_norm or pre_norm, got {self.mtp_hidden!r}")
        if not self.num_experts and self.intermediate_size < 1:
            raise ValueError(f"a dense head needs an intermediate_size, got {self.intermediate_size}")
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} is not in 1 .. {self.num_experts}")

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The target layers that it taps: none after the final norm, the last one before it."""
        return (self.num_target_layers - 1,) if self.mtp_hidden == "pre_norm" else ()


# Every kind of drafter.
AnyDrafterConfig = DrafterConfig | Eagle3Config | MTPConfig
DRAFTERS: tuple[type, ...] = (DrafterConfig, Eagle3Config, MTPConfig)


def check_attention(cfg: TargetConfig | DrafterConfig | Eagle3Config) -> None:
    """Raises ValueError where the attention geometry of a config contradicts itself."""
    check_heads(cfg)
    if len(cfg.layer_types) != cfg.num_hidden_layers:
        raise ValueError(f"layer_types has {len(cfg.layer_types)} entries for {cfg.num_hidden_layers} layers")
    known = {"full_attention", "linear_attention" if isinstance(cfg, HybridConfig) else "sliding_attention"}
    unknown = sorted(set(cfg.layer_types) - known)
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(unknown)}; only {' and '.join(sorted(known))} are known")
    if "sliding_attention" in cfg.layer_types and not (cfg.sliding_window and cfg.sliding_window > 0):
        raise ValueError(f"sliding_attention layers need a positive sliding_window, got {cfg.sliding_window}")


def check_heads(cfg: TargetConfig | AnyDrafterConfig) -> None:
    """Raises ValueError for heads that do not share keys evenly, or that do not split in rotary pairs."""
    if cfg.num_attention_heads % cfg.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {cfg.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {cfg.num_key_value_heads}"
        )
    if cfg.head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary pairs, got {cfg.head_dim}")


def check_layer_ids(ids: tuple[int, ...], layers: int | None) -> None:
    """Raises ValueError for duplicate, negative or too large ``target_layer_ids`` (``layers`` None: not known)."""
    if len(set(ids)) != len(ids):
        raise ValueError(f"target_layer_ids {list(ids)} has duplicates")
    wrong = [i for i in ids if i < 0 or (layers is not None and i >= layers)]
    if wrong:
        raise ValueError(f"target_layer_ids {wrong} lie outside the target's {layers} layers (0-based)")


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers that an EAGLE-3 drafter taps of a target of so many, where its files do not say."""
    return (1, layers // 2 - 1, layers - 4)


def pair(target: TargetConfig, drafter: AnyDrafterConfig) -> TargetConfig:
    """The target config that taps what ``drafter`` reads.

    Raises:
        ValueError: everything about which the two disagree, with both numbers.
    """
    faults = disagreements(target, drafter) if isinstance(drafter, DrafterConfig) else chain_faults(target, drafter)
    ids = drafter.target_layer_ids
    if isinstance(drafter, Eagle3Config) and not ids:
        ids = default_taps(target.num_hidden_layers)
    if drafter.vocab_size not in (target.vocab_size, target.vocab_rows):
        faults.append(f"the drafter's vocab_size is {drafter.vocab_size}, the target's {target.vocab_size}")
    outside = [i for i in ids if not 0 <= i < target.num_hidden_layers]
    if outside:
        faults.append(f"target_layer_ids {outside} lie outside the target's {target.num_hidden_layers} layers")
    if faults:
        raise ValueError("this drafter does not fit this target: " + "; ".join(faults))
    return dataclasses.replace(target, target_layer_ids=ids)


def chain_faults(target: TargetConfig, drafter: Eagle3Config | MTPConfig) -> list[str]:
    """What a drafter that drafts token by token says otherwise than the target."""
    faults = []
    reads = drafter.target_hidden_size if isinstance(drafter, Eagle3Config) else drafter.hidden_size
    if reads != target.hidden_size:
        faults.append(f"the drafter reads features of width {reads}, the target's are {target.hidden_size}")
    if isinstance(drafter, MTPConfig):
        if drafter.num_target_layers != target.num_hidden_layers:
            faults.append(
                f"the drafter was made for a target of {drafter.num_target_layers} layers, this target has "
                f"{target.num_hidden_layers}"
            )
    elif drafter.hidden_size != target.hidden_size and not (drafter.own_embedding and drafter.own_head):
        faults.append(
            f"the drafter's hidden_size {drafter.hidden_size} differs from the target's {target.hidden_size}, whose "
            "embedding or head it shares"
        )
    return faults


def disagreements(target: TargetConfig, drafter: DrafterConfig) -> list[str]:
    """What a DFlash drafter says otherwise than the target."""
    faults = []
    if drafter.num_target_layers is not None and drafter.num_target_layers != target.num_hidden_layers:
        faults.append(
            f"the drafter was made for a target of {drafter.num_target_layers} layers "
            f"(num_target_layers), this target has {target.num_hidden_layers}"
        )
    if drafter.target_hidden_size != target.hidden_size:
        faults.append(
            f"the drafter reads features of width {drafter.target_hidden_size}, the target's are {target.hidden_size}"
        )
    if drafter.hidden_size != target.hidden_size:
        faults.append(
            f"the drafter's hidden_size {drafter.hidden_size} differs from the target's {target.hidden_size}, whose "
            "embedding it shares"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_rows:
        faults.append(
            f"mask_token_id {drafter.mask_token_id} is not a row of the target's embedding ({target.vocab_rows} rows)"
        )
    return faults


def drafter_type(data: dict[str, Any]) -> type[AnyDrafterConfig]:
    """Which drafter a config written by ``to_json`` describes. Raises ValueError for one that is not known."""
    kinds: dict[str, type[AnyDrafterConfig]] = {"dflash": DrafterConfig, "eagle3": Eagle3Config, "mtp": MTPConfig}
    method = data.get("method", "dflash")
    if method not in kinds:
        raise ValueError(f"a drafter of method {method!r} is not known; built: {', '.join(kinds)}")
    return kinds[method]


def to_json(cfg: TargetConfig | AnyDrafterConfig) -> dict[str, Any]:
    """A config as plain JSON values."""
    return dataclasses.asdict(cfg)


def from_json(kind: type[C], data: dict[str, Any]) -> C:
    """The inverse of ``to_json``; a target's class follows from its model_type.

    Raises ValueError naming unknown and missing fields together.
    """
    family = TARGET_CONFIGS.get(data.get("model_type", ""), TargetConfig)
    kind = cast(type[C], family) if issubclass(kind, TargetConfig) else kind
    names = {field.name for field in dataclasses.fields(kind)}
    required = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    unknown, missing = sorted(set(data) - names), sorted(required - set(data))
    if unknown or missing:
        raise ValueError(f"{kind.__name__}: unknown fields {unknown}, missing fields {missing}")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    values["rope"] = RopeConfig(**data["rope"])
    return kind(**values)
