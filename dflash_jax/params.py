"""Parameters as declared: one ``Leaf`` tree a model; shapes, placement, initial values and checkpoints derive from it.

Checkpoints hold the plain layout of this declaration (separate q, k, v, gate, up). ``pack`` builds the layout that the
forward passes read: q, k and v fused by KV-head group, so that one matmul serves all three and a split over devices
keeps a group whole; gate and up as [D, 2, F].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from dflash_jax.config import (
    AnyDrafterConfig,
    DrafterConfig,
    Eagle3Config,
    GptOssConfig,
    HybridConfig,
    LayerType,
    MoeConfig,
    MTPConfig,
    TargetConfig,
)
from dflash_jax.sharding import sharding_of

Params = dict[str, Any]
AnyConfig = TargetConfig | AnyDrafterConfig


@dataclass(frozen=True)
class Leaf:
    """One array of a model: its shape and the logical name of every axis."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.shape)} dimensions {self.shape} with {len(self.axes)} axes {self.axes}")


def attention_leaves(cfg: AnyConfig, qkv_bias: bool, o_bias: bool, qk_norm: bool) -> Params:
    """q [D, N, H], k and v [D, G, H], o [N, H, D]; biases and head norms where the model has them."""
    dim, heads, kv_heads, head = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    leaves: Params = {
        "q": Leaf((dim, heads, head), ("embed", "heads", "head")),
        "k": Leaf((dim, kv_heads, head), ("embed", "kv_heads", "head")),
        "v": Leaf((dim, kv_heads, head), ("embed", "kv_heads", "head")),
        "o": Leaf((heads, head, dim), ("heads", "head", "embed")),
    }
    if qkv_bias:
        leaves["q_bias"] = Leaf((heads, head), ("heads", "head"))
        leaves["k_bias"] = Leaf((kv_heads, head), ("kv_heads", "head"))
        leaves["v_bias"] = Leaf((kv_heads, head), ("kv_heads", "head"))
    if o_bias:
        leaves["o_bias"] = Leaf((dim,), ("embed",))
    if qk_norm:
        leaves["q_norm"] = Leaf((head,), ("head",))
        leaves["k_norm"] = Leaf((head,), ("head",))
    return leaves


def mlp_leaves(cfg: AnyConfig, bias: bool) -> Params:
    """gate and up [D, F], down [F, D]."""
    dim, width = cfg.hidden_size, cfg.intermediate_size
    leaves: Params = {
        "gate": Leaf((dim, width), ("embed", "mlp")),
        "up": Leaf((dim, width), ("embed", "mlp")),
        "down": Leaf((width, dim), ("mlp", "embed")),
    }
    if bias:
        leaves["gate_bias"] = Leaf((width,), ("mlp",))
        leaves["up_bias"] = Leaf((width,), ("mlp",))
        leaves["down_bias"] = Leaf((dim,), ("embed",))
    return leaves


def expert_leaves(cfg: MoeConfig | MTPConfig, bias: bool) -> Params:
    """router [D, E], expert_gate_up [E, D, 2, F], expert_down [E, F, D] with their biases; the shared expert alike.

    Experts are declared as they run: a fused copy of them at load would double the largest arrays of a model.
    """
    dim, count, width, shared = (
        cfg.hidden_size,
        cfg.num_experts,
        cfg.moe_intermediate_size,
        cfg.shared_expert_intermediate_size,
    )
    leaves: Params = {
        "router": Leaf((dim, count), ("embed", "experts")),
        "expert_gate_up": Leaf((count, dim, 2, width), ("experts", "embed", "kv", "mlp")),
        "expert_down": Leaf((count, width, dim), ("experts", "mlp", "embed")),
    }
    if bias:
        leaves["router_bias"] = Leaf((count,), ("experts",))
        leaves["expert_gate_up_bias"] = Leaf((count, 2, width), ("experts", "kv", "mlp"))
        leaves["expert_down_bias"] = Leaf((count, dim), ("experts", "embed"))
    if shared:
        leaves["shared_gate_up"] = Leaf((dim, 2, shared), ("embed", "kv", "mlp"))
        leaves["shared_down"] = Leaf((shared, dim), ("mlp", "embed"))
        leaves["shared_gate"] = Leaf((dim,), ("embed",))
    return leaves


def delta_leaves(cfg: HybridConfig) -> Params:
    """A gated delta net of G key heads, each with s = N / G value heads; K and V their dimensions.

    Projections and convolution are grouped by key head, so that a split over devices keeps what belongs together:
    delta_qkv [D, G, 2 K + s V], delta_z [D, G, s V], delta_b and delta_a [D, G, s], or, as some files have them, two
    arrays with the last dimensions side by side; delta_conv [G, 2 K + s V, kernel]; delta_out [N, V, D].
    """
    dim, groups, heads = cfg.hidden_size, cfg.linear_num_key_heads, cfg.linear_num_value_heads
    share = heads // groups
    wide = share * cfg.linear_value_head_dim
    mixed = 2 * cfg.linear_key_head_dim + wide
    sizes = {"delta_qkv": mixed, "delta_z": wide, "delta_b": share, "delta_a": share}
    if cfg.grouped_projections:
        sizes = {"delta_qkvz": mixed + wide, "delta_ba": 2 * share}
    return {
        **{name: Leaf((dim, groups, size), ("embed", "key_heads", "head")) for name, size in sizes.items()},
        "delta_conv": Leaf((groups, mixed, cfg.linear_conv_kernel_dim), ("key_heads", "head", "kernel")),
        "a_log": Leaf((heads,), ("value_heads",)),
        "dt_bias": Leaf((heads,), ("value_heads",)),
        "delta_norm": Leaf((cfg.linear_value_head_dim,), ("head",)),
        "delta_out": Leaf((heads, cfg.linear_value_head_dim, dim), ("value_heads", "head", "embed")),
    }


def gated_attention_leaves(cfg: HybridConfig | MTPConfig) -> Params:
    """Attention whose q [D, N, 2 H] holds each head's query, then its gate."""
    leaves = attention_leaves(cfg, qkv_bias=False, o_bias=False, qk_norm=True)
    q = leaves["q"]
    return {**leaves, "q": Leaf((*q.shape[:2], 2 * cfg.head_dim), q.axes)}


def norm_leaves(cfg: AnyConfig) -> Params:
    """The two norms of a decoder layer [D]."""
    return {name: Leaf((cfg.hidden_size,), ("embed",)) for name in ("input_norm", "post_norm")}


def layer_leaves(cfg: TargetConfig, kind: LayerType) -> Params:
    """The declaration of one decoder layer of a target. gpt-oss has sinks [N]."""
    gpt_oss = isinstance(cfg, GptOssConfig)
    if isinstance(cfg, HybridConfig):
        mixer = delta_leaves(cfg) if kind == "linear_attention" else gated_attention_leaves(cfg)
    else:
        mixer = attention_leaves(cfg, cfg.qkv_bias, cfg.o_bias, cfg.qk_norm)
    if gpt_oss:
        mixer["sinks"] = Leaf((cfg.num_attention_heads,), ("heads",))
    feed_forward = expert_leaves(cfg, gpt_oss) if isinstance(cfg, MoeConfig) else mlp_leaves(cfg, cfg.mlp_bias)
    return {**norm_leaves(cfg), **mixer, **feed_forward}


def target_leaves(cfg: TargetConfig) -> Params:
    """The declaration of a target. embed and head are [V, D]; a tied target has no head."""
    dim = cfg.hidden_size
    table = Leaf((cfg.vocab_rows, dim), ("vocab", "embed"))
    leaves = {
        "embed": table,
        "final_norm": Leaf((dim,), ("embed",)),
        "layers": [layer_leaves(cfg, kind) for kind in cfg.layer_types],
    }
    return leaves if cfg.tie_word_embeddings else {**leaves, "head": table}


def drafter_leaves(cfg: DrafterConfig) -> Params:
    """The declaration of a DFlash drafter. fc is [K * Dt, D]; head [Vd, D] and d2t [Vd] only with a reduced vocabulary.

    d2t holds the *offset* of a draft id: target id = draft id + d2t[draft id] (int32).
    """
    dim = cfg.hidden_size
    layer = {
        **norm_leaves(cfg),
        **attention_leaves(cfg, cfg.attention_bias, cfg.attention_bias, qk_norm=True),
        **mlp_leaves(cfg, bias=False),
    }
    leaves = {
        "fc": Leaf((len(cfg.target_layer_ids) * cfg.target_hidden_size, dim), ("taps", "embed")),
        "hidden_norm": Leaf((dim,), ("embed",)),
        "final_norm": Leaf((dim,), ("embed",)),
        "layers": [dict(layer) for _ in range(cfg.num_hidden_layers)],
    }
    if cfg.own_head:
        leaves["head"] = Leaf((cfg.draft_vocab_size, dim), ("vocab", "embed"))
        leaves["d2t"] = Leaf((cfg.draft_vocab_size,), ("vocab",))
    return leaves


def eagle3_leaves(cfg: Eagle3Config) -> Params:
    """The declaration of an EAGLE-3 drafter. fc is [K * Dt, D], the first layer's q, k and v are [2D, ..]; embed [V, D]
    and head [Vd, D] where the files bring them, d2t [Vd] as in ``drafter_leaves``."""
    dim = cfg.hidden_size
    layer = {
        **norm_leaves(cfg),
        **attention_leaves(cfg, cfg.attention_bias, cfg.attention_bias, cfg.qk_norm),
        **mlp_leaves(cfg, cfg.mlp_bias),
    }
    wide = {name: Leaf((2 * dim, *layer[name].shape[1:]), layer[name].axes) for name in "qkv"}
    first = {**layer, **wide, "hidden_norm": Leaf((dim,), ("embed",))}
    leaves: Params = {
        "fc": Leaf((cfg.taps * cfg.target_hidden_size, dim), ("taps", "embed")),
        "final_norm": Leaf((dim,), ("embed",)),
        "layers": [first, *(dict(layer) for _ in range(cfg.num_hidden_layers - 1))],
    }
    if cfg.norm_before_fc:
        leaves["taps_norm"] = Leaf((cfg.taps * cfg.target_hidden_size,), ("taps",))
    if cfg.fc_norm:
        leaves |= {f"tap{i}_norm": Leaf((cfg.target_hidden_size,), ("embed",)) for i in range(cfg.taps)}
    if cfg.own_embedding:
        leaves["embed"] = Leaf((cfg.vocab_size, dim), ("vocab", "embed"))
    if cfg.own_head:
        leaves["head"] = Leaf((cfg.draft_vocab_size, dim), ("vocab", "embed"))
    if cfg.draft_vocab_size < cfg.vocab_size:
        leaves["d2t"] = Leaf((cfg.draft_vocab_size,), ("vocab",))
    return leaves


def mtp_leaves(cfg: MTPConfig) -> Params:
    """The declaration of a multi-token-prediction head. fc is [2D, D], embedding first; q [D, N, 2H] holds each head's
    query, then its gate. All norms are stored as their difference from one."""
    dim = cfg.hidden_size
    layer = {
        **norm_leaves(cfg),
        **gated_attention_leaves(cfg),
        **(expert_leaves(cfg, bias=False) if cfg.num_experts else mlp_leaves(cfg, bias=False)),
    }
    return {
        "fc": Leaf((2 * dim, dim), ("taps", "embed")),
        "embedding_norm": Leaf((dim,), ("embed",)),
        "hidden_norm": Leaf((dim,), ("embed",)),
        "final_norm": Leaf((dim,), ("embed",)),
        "layers": [layer],
    }


DECLARATIONS: dict[type, Callable[[Any], Params]] = {
    DrafterConfig: drafter_leaves,
    Eagle3Config: eagle3_leaves,
    MTPConfig: mtp_leaves,
}


def leaves_of(cfg: AnyConfig) -> Params:
    """The declaration of any kind of model."""
    return target_leaves(cfg) if isinstance(cfg, TargetConfig) else DECLARATIONS[type(cfg)](cfg)


def map_named(function: Callable[[str, Any], Any], tree: Any, prefix: str = "") -> Any:
    """``function(dotted path, leaf)`` over a nested tree of dicts and lists."""
    join = f"{prefix}." if prefix else ""
    if isinstance(tree, Mapping):
        return {name: map_named(function, sub, f"{join}{name}") for name, sub in tree.items()}
    if isinstance(tree, list):
        return [map_named(function, sub, f"{join}{i}") for i, sub in enumerate(tree)]
    return function(prefix, tree)


def flatten(tree: Any) -> dict[str, Any]:
    """A nested tree as {dotted path: leaf}, e.g. ``layers.3.q``: the names of converted checkpoints."""
    flat: dict[str, Any] = {}
    map_named(flat.__setitem__, tree)
    return flat


def unflatten(flat: Mapping[str, Any], cfg: AnyConfig) -> Params:
    """The inverse of ``flatten`` for the declaration of ``cfg``. Raises ValueError listing all missing or unknown
    names.
    """
    declared = flatten(leaves_of(cfg))
    missing, unknown = sorted(set(declared) - set(flat)), sorted(set(flat) - set(declared))
    if missing or unknown:
        raise ValueError(f"parameters missing: {missing}; unknown: {unknown}")

    tree: Params = map_named(lambda name, leaf: flat[name], leaves_of(cfg))
    return tree


def dtype_of(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of the parameter ``name`` in a model of ``dtype``: tables of ids stay integers, and what float32 states
    depend on stays float32."""
    kind = name.split(".")[-1]
    if kind == "d2t":
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float32) if kind in FLOAT32 else jnp.dtype(dtype)


def abstract(cfg: AnyConfig, dtype: jnp.dtype, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Flat {path: ShapeDtypeStruct with its sharding}: what a restore or an init fills."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, dtype_of(name, dtype), sharding=sharding_of(leaf.axes, leaf.shape, mesh))
        for name, leaf in flatten(leaves_of(cfg)).items()
    }


def init(cfg: AnyConfig, key: Array, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """Random parameters on the mesh: norms one (zero where they are zero-centred), biases zero, matrices normal with
    variance 1 / fan-in."""
    flat = abstract(cfg, dtype, mesh)
    if "d2t" in flat:
        raise ValueError("a reduced draft vocabulary has no random initial value: its d2t comes from data")

    keys = jax.random.split(key, len(flat))
    made = {}
    for key, (name, spec) in zip(keys, flat.items(), strict=True):
        kind = name.split(".")[-1]
        if isinstance(cfg, HybridConfig | MTPConfig) and kind in NORMS:
            made[name] = random_leaf("bias", spec, 1, key)
            continue
        made[name] = random_leaf(kind, spec, fan_in(kind, spec.shape, cfg.hidden_size), key)
    return unflatten(made, cfg)


def fan_in(kind: str, shape: tuple[int, ...], dim: int) -> int:
    """Numbers that one output of the parameter ``kind`` sums over."""
    if kind in ("expert_down", "delta_conv"):
        return shape[-2 if kind == "expert_down" else -1]
    if kind in ("q", "k", "v"):
        return shape[0]
    return dim if kind in FROM_STREAM else math.prod(shape[:-1])


@partial(jax.jit, static_argnames=("kind", "spec", "fan_in"))
def random_leaf(kind: str, spec: jax.ShapeDtypeStruct, fan_in: int, key: Array) -> Array:
    """One random parameter, made where it lives; layers share its compilation."""
    if kind.endswith("norm"):
        leaf = jnp.ones(spec.shape, spec.dtype)
    elif kind.endswith("bias"):
        leaf = jnp.zeros(spec.shape, spec.dtype)
    else:
        leaf = (jax.random.normal(key, spec.shape, jnp.float32) * fan_in**-0.5).astype(spec.dtype)
    return lax.with_sharding_constraint(leaf, spec.sharding)


def fuse_qkv(layer: Params, kv_heads: int, suffix: str = "") -> Array:
    """q [.., N, H], k and v [.., G, H] -> [.., G, N/G + 2, H]: a KV head beside the query heads it serves. A gated q
    [.., N, 2 H] counts as two heads, the query and its gate."""
    q, k, v = (layer[name + suffix] for name in "qkv")
    grouped = q.reshape(*q.shape[:-2], kv_heads, -1, k.shape[-1])
    return jnp.concatenate([grouped, k[..., None, :], v[..., None, :]], axis=-2)


def pack_layer(layer: Params, kv_heads: int) -> Params:
    """The runtime layout of one decoder layer."""
    packed = {k: v for k, v in layer.items() if k not in PLAIN}
    if "q" in layer:
        packed["qkv"] = fuse_qkv(layer, kv_heads)
    projections = [layer[name] for name in DELTA if name in layer]
    if projections:
        packed["delta_in"] = jnp.concatenate(projections, axis=-1)
    if "gate" in layer:
        packed["gate_up"] = jnp.stack([layer["gate"], layer["up"]], axis=1)
    if "q_bias" in layer:
        packed["qkv_bias"] = fuse_qkv(layer, kv_heads, "_bias")
    if "gate_bias" in layer:
        packed["gate_up_bias"] = jnp.stack([layer["gate_bias"], layer["up_bias"]])
    return packed


def unpack_layer(packed: Params, declared: Mapping[str, Leaf]) -> Params:
    """The inverse of ``pack_layer``, bit for bit."""
    layer = {k: v for k, v in packed.items() if k not in FUSED}
    for fused, suffix in (("qkv", ""), ("qkv_bias", "_bias")):
        if fused in packed:
            group = packed[fused]
            layer[f"q{suffix}"] = group[..., :-2, :].reshape(*group.shape[:-3], *declared[f"q{suffix}"].shape[-2:])
            layer[f"k{suffix}"], layer[f"v{suffix}"] = group[..., -2, :], group[..., -1, :]
    at = 0
    for name in [name for name in DELTA if name in declared]:
        layer[name] = packed["delta_in"][..., at : at + declared[name].shape[-1]]
        at += declared[name].shape[-1]
    if "gate_up" in packed:
        layer["gate"], layer["up"] = packed["gate_up"][:, 0], packed["gate_up"][:, 1]
    if "gate_up_bias" in packed:
        layer["gate_bias"], layer["up_bias"] = packed["gate_up_bias"]
    return layer


def norms_as_run(params: Params, cfg: AnyConfig) -> Params:
    """Norms that multiply in float32 as they run, w of gpt-oss and 1 + w of hybrids; w itself stays beside it, for
    export. Other families' norms multiply in the model's dtype."""
    if not isinstance(cfg, HybridConfig | MTPConfig | GptOssConfig):
        return params
    norms = {name: params[name] for name in NORMS if name in params}
    centre = 0.0 if isinstance(cfg, GptOssConfig) else 1.0
    wide = {name: centre + w.astype(jnp.float32) for name, w in norms.items()}
    return {**params, **wide, **{f"{name}{AS_STORED}": w for name, w in norms.items()}}


def as_stored(params: Params) -> Params:
    """The inverse of ``norms_as_run``."""
    stored = {name.removesuffix(AS_STORED): w for name, w in params.items() if name.endswith(AS_STORED)}
    return {**{name: w for name, w in params.items() if not name.endswith(AS_STORED)}, **stored}


# Projections of a delta net in the order in which they are fused; a family has the first two or the other four.
DELTA = ("delta_qkvz", "delta_ba", "delta_qkv", "delta_z", "delta_b", "delta_a")
# Parameters whose outputs sum over the residual stream, or that stand for it.
FROM_STREAM = ("embed", "head", "expert_gate_up", "shared_gate_up", "shared_gate", *DELTA)
PLAIN = ("q", "k", "v", "q_bias", "k_bias", "v_bias", "gate", "up", "gate_bias", "up_bias", *DELTA)
FUSED = ("qkv", "qkv_bias", "gate_up", "gate_up_bias", "delta_in")
FLOAT32 = ("a_log", "delta_norm")
# Of the decoder, and of a multi-token-prediction head; zero-centred in a hybrid and its head.
NORMS = ("input_norm", "post_norm", "final_norm", "q_norm", "k_norm", "embedding_norm", "hidden_norm")
AS_STORED = "_as_stored"
CONTEXT = ("context_kv", "context_kv_bias", "context_k_norm")
# Logical axes of the arrays that only the packed layout has.
PACKED_AXES = {
    "qkv": ("embed", "kv_heads", "heads_of_group", "head"),
    "qkv_bias": ("kv_heads", "heads_of_group", "head"),
    "gate_up": ("embed", "kv", "mlp"),
    "gate_up_bias": ("kv", "mlp"),
    "context_kv": ("embed", "layers", "kv", "kv_heads", "head"),
    "context_kv_bias": ("layers", "kv", "kv_heads", "head"),
    "context_k_norm": ("layers", "head"),
    "delta_in": ("embed", "key_heads", "head"),
    **{f"{name}{AS_STORED}": ("head" if name in ("q_norm", "k_norm") else "embed",) for name in NORMS},
}


def context_projection(layers: list[Params]) -> Params:
    """K/V projection of all drafter layers as one array [D, L, 2, G, H]: KV injection is one matmul."""
    stacked: Params = {
        "context_kv": jnp.stack([jnp.stack([p["k"], p["v"]], axis=1) for p in layers], axis=1),
        "context_k_norm": jnp.stack([p["k_norm"] for p in layers]),
    }
    if "k_bias" in layers[0]:
        stacked["context_kv_bias"] = jnp.stack([jnp.stack([p["k_bias"], p["v_bias"]]) for p in layers])
    return stacked


def pack(params: Params, cfg: AnyConfig, mesh: Mesh, consume: bool = False) -> Params:
    """Plain parameters -> the fused layout that the forward passes read, placed on ``mesh``.

    ``consume`` deletes the plain arrays of a layer once they are fused, so that memory holds the model and one layer
    more, not two models; ``params`` is of no use afterwards.
    """
    declared = {name: leaf.axes for name, leaf in flatten(leaves_of(cfg)).items()}

    def placed(name: str, leaf: Array) -> Array:
        axes = declared.get(name) or PACKED_AXES[name.split(".")[-1]]
        return jax.device_put(leaf, sharding_of(axes, leaf.shape, mesh))

    packed = {name: leaf for name, leaf in params.items() if name != "layers"}
    if isinstance(cfg, DrafterConfig):
        packed |= context_projection(params["layers"])
    packed = map_named(placed, norms_as_run(packed, cfg))
    packed["layers"] = []
    for i, layer in enumerate(params["layers"]):
        fused = pack_layer(layer, cfg.num_key_value_heads)
        packed["layers"].append(map_named(placed, norms_as_run(fused, cfg), f"layers.{i}"))
        for name in set(PLAIN) & set(layer) if consume else ():
            layer[name].delete()
    return packed


def unpack(packed: Params, cfg: AnyConfig) -> Params:
    """The inverse of ``pack``, bit for bit: for export."""
    plain = {k: v for k, v in as_stored(packed).items() if k not in CONTEXT}
    declared = leaves_of(cfg)["layers"]
    layers = [unpack_layer(as_stored(p), leaves) for p, leaves in zip(packed["layers"], declared, strict=True)]
    return {**plain, "layers": layers}
