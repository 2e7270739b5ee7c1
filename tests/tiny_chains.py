"""Tiny drafters that draft token by token, random or fitted to a few texts of a target until they know them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh
from tiny_models import Pair

from dflash_jax import Model, ModelParams, RopeConfig, TargetConfig, drafters, pair
from dflash_jax.cache import PagedKV, View
from dflash_jax.config import Eagle3Config, MTPConfig
from dflash_jax.params import init, pack
from dflash_jax.reference import full_pass
from dflash_jax.step import borrow


def eagle3_for(target: TargetConfig, layers: int = 1, block: int = 4, **options: Any) -> Eagle3Config:
    """A drafter with a head of its own over all ids."""
    fields: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope": RopeConfig(10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "layer_types": ("full_attention",) * layers,
        "sliding_window": None,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "own_embedding": False,
        "own_head": True,
        "block_size": block,
        "target_layer_ids": tuple(range(target.num_hidden_layers))[:3],
    }
    return Eagle3Config(**fields | options)


def mtp_for(target: TargetConfig, block: int = 4, **options: Any) -> MTPConfig:
    """A dense head."""
    fields: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 64,
        "num_target_layers": target.num_hidden_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope": RopeConfig(10000.0, partial_rotary_factor=0.5),
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "norm_topk_prob": True,
        "moe_intermediate_size": 0,
        "shared_expert_intermediate_size": 0,
        "mtp_hidden": "post_norm",
        "block_size": block,
    }
    return MTPConfig(**fields | options)


def with_drafter(target: Pair, cfg: Any, mesh: Mesh, plain: Any = None) -> Pair:
    """A target with another drafter, random where it brings no parameters."""
    plain = init(cfg, jax.random.key(5), jnp.float32, mesh) if plain is None else plain
    paired = pair(target.model.target, cfg)
    return Pair(ModelParams(target.params.target, pack(plain, cfg, mesh)), Model(paired, cfg, "reference"), mesh)


def fitted(target: Pair, cfg: Any, texts: Sequence[Sequence[int]], mesh: Mesh, steps: int = 300) -> Pair:
    """The pair after some steps of training on texts of one length: every row of a text starts a chain of
    ``cfg.block_size`` - 1 drafts that sees the true rows up to there and its own rows behind them (training-time test,
    arXiv 2503.01840)."""
    start = with_drafter(target, cfg, mesh)
    model, chain = start.model, drafters.of(cfg)
    tokens = jnp.asarray(np.array(texts, np.int32))
    count, length = tokens.shape
    features = chain.reads(cfg, full_pass(target.params.target, model.target, tokens)[0])
    layers, kv_heads, head_dim = chain.cache_shape(cfg)
    nothing = tuple(jnp.zeros((1, kv_heads, head_dim)) for _ in range(layers))
    one = jnp.ones((count,), jnp.int32)
    empty = View(PagedKV(nothing, nothing, 1), jnp.zeros((count, 1), jnp.int32), one * 0, "reference")
    rows, drafts = length - cfg.block_size, cfg.block_size - 1
    lower, own = jnp.tril(jnp.ones((rows, rows), bool)), jnp.eye(rows, dtype=bool)

    def loss(plain: Any) -> Array:
        packed = pack(plain, cfg, mesh)
        lent = borrow(ModelParams(target.params.target, packed), model)
        hidden, view, total = chain.fuse(packed, cfg, features, "reference")[:, :rows], empty, 0.0
        for i in range(drafts):
            rule = jnp.concatenate([lower, *[own] * i], axis=1)
            at = jnp.broadcast_to(jnp.arange(rows) + 1 + i, (count, rows))
            fed, wanted = tokens[:, 1 + i : 1 + i + rows], tokens[:, 2 + i : 2 + i + rows]
            out = chain.rows(packed, lent, cfg, fed, hidden, at, one * rows, view, rule)
            logits = chain.scores(packed, lent, cfg, out.final)[..., : model.target.vocab_size]
            total += optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()
            view, hidden = view.hold(out.kv), out.hidden
        return total / drafts

    optimiser = optax.adam(4e-3)

    @jax.jit
    def update(plain: Any, state: Any) -> tuple[Any, Any, Array]:
        value, slope = jax.value_and_grad(loss)(plain)
        change, state = optimiser.update(slope, state)
        return optax.apply_updates(plain, change), state, value

    plain = init(cfg, jax.random.key(5), jnp.float32, mesh)
    state = optimiser.init(plain)
    for _ in range(steps):
        plain, state, value = update(plain, state)
        if value < 0.01:
            break
    return with_drafter(target, cfg, mesh, plain)
