"""The oracle: the target alone, without cache, drafter or batch. Every other path is compared with this one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax import sampling, targets
from dflash_jax.cache import PagedKV, View, no_states
from dflash_jax.config import TargetConfig
from dflash_jax.params import Params
from dflash_jax.sampling import RowSampling
from dflash_jax.targets import Hidden


@partial(jax.jit, static_argnames="cfg")
def full_pass(params: Params, cfg: TargetConfig, tokens: Array) -> tuple[Hidden, Array]:
    """One causal pass over tokens int32 [B, T] behind an empty cache: Hidden and float32 logits [B, T, V]."""
    target = targets.of(cfg)
    rows, length = tokens.shape
    layers, kv_heads, head_dim = target.cache_shape(cfg)
    nothing = jnp.zeros((1, kv_heads, head_dim), params["embed"].dtype)
    pages = PagedKV(k=(nothing,) * layers, v=(nothing,) * layers, page=1)
    empty = jnp.zeros((rows,), jnp.int32)
    states = no_states(target.state_shape(cfg), rows, nothing.dtype, None)
    view = View(pages, empty[:, None], empty, "reference", recurrent=states, slots=jnp.arange(rows))
    valid = jnp.full((rows,), length, jnp.int32)
    hidden = target.forward(params, cfg, tokens, view.positions(length), valid, view, True)
    return hidden.replace(records=()), target.head(params, cfg, hidden.final)


draw = jax.jit(sampling.draw)


def continuation(
    params: Params, cfg: TargetConfig, prompt: list[int], max_new_tokens: int, row: RowSampling, stop: frozenset[int]
) -> list[int]:
    """New tokens after ``prompt``, one full pass a token; ends with the first stop id, which is kept. ``row`` has one
    row.
    """
    tokens = np.zeros((1, len(prompt) + max_new_tokens), np.int32)
    tokens[0, : len(prompt)] = prompt
    for end in range(len(prompt), tokens.shape[1]):
        _, logits = full_pass(params, cfg, tokens)
        tokens[0, end] = draw(np.asarray(logits)[:, end - 1 : end], row, np.array([[end]], np.int32))[0, 0]
        if int(tokens[0, end]) in stop:
            return tokens[0, len(prompt) : end + 1].tolist()
    return tokens[0, len(prompt) :].tolist()
