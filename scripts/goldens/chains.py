"""How golden cases of drafters that draft token by token are run: EAGLE-3 and multi-token-prediction heads.

What the expected rows 1 .. S are made of, and what the drafter's own ``extend`` and ``draft`` make of the same
features, are compared both: rows one by one from the functions, pages and drafts from the methods.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from numpy.typing import NDArray

from convert.hf_config import read_json
from convert.load import load_drafter, load_mtp
from dflash_jax import cache, drafters, make_mesh
from dflash_jax.cache import PagedKV, View
from dflash_jax.config import AnyDrafterConfig, Eagle3Config, default_taps
from dflash_jax.drafters import TargetIO, eagle3, mtp
from dflash_jax.drafters.chain import Chain
from dflash_jax.params import pack
from goldens import passes
from goldens.case import Case, Verdict

ROWS_BOUND, CHAIN_BOUND = 2e-4, 5e-4  # baselines/README.md: given the stored features; drafts behind the first
METHODS = ("eagle3", "mtp")


@struct.dataclass
class Seen:
    """A pass over rows [n]: fused [n, D], layer_input [n, 2D], layer_hidden [L, n, D], hidden [n, D], logits [n, Vd],
    k and v [L, n, G, h]; projected [n, D] of a multi-token-prediction head."""

    fused: Any
    layer_input: Any
    layer_hidden: Any
    hidden: Any
    logits: Any
    k: Any
    v: Any
    projected: Any = None


def method_of(cfg: Any) -> Chain:
    """The drafter that runs ``cfg``."""
    chain = drafters.of(cfg)
    assert isinstance(chain, Chain)
    return chain


def draft_logits(params: Any, lent: TargetIO, cfg: Any, final: Array) -> Array:
    """Logits [.., Vd] over the draft vocabulary."""
    if isinstance(cfg, Eagle3Config):
        return eagle3.head_logits(params, lent, cfg, final)
    return method_of(cfg).scores(params, lent, cfg, final)


@partial(jax.jit, static_argnames=("cfg", "fused"))
def observed(
    params: Any, tables: dict[str, Array], cfg: Any, view: View, tokens: Array, hidden: Array, fused: bool
) -> tuple[Seen, View]:
    """Rows of tokens [1, n] behind ``view``: hidden [1, n, ..] is features, or the drafter's own where ``fused``."""
    lent, chain = passes.borrow(tables), method_of(cfg)
    g = hidden if fused else chain.fuse(params, cfg, hidden, view.kernels)
    at, valid = view.positions(tokens.shape[1]), jnp.array([tokens.shape[1]])
    out = chain.rows(params, lent, cfg, tokens, g, at, valid, view, True)
    if isinstance(cfg, Eagle3Config):
        joined, projected = eagle3.entry(params, lent, cfg, tokens, g)[0], None
    else:
        joined = mtp.joined(params, lent, cfg, tokens, g)
        projected = (joined @ params["fc"])[0]
    k, v = (jnp.stack([kv[0, :, i] for kv in out.kv]) for i in (0, 1))
    logits = draft_logits(params, lent, cfg, out.final)[0]
    stream = jnp.stack([x[0] for x in out.stream])
    return Seen(g[0], joined[0], stream, out.hidden[0], logits, k, v, projected), view.hold(out.kv)


@partial(jax.jit, static_argnames="cfg")
def extended(
    params: Any, tables: dict[str, Array], cfg: Any, view: View, tokens: Array, features: Array, carry: Array
) -> tuple[PagedKV, Array]:
    """The pool with tokens [1, n] and features [1, n, F] committed behind ``view.lengths``, and the carry [1, D]."""
    valid = jnp.array([tokens.shape[1]])
    rows, carries = method_of(cfg).extend(params, passes.borrow(tables), cfg, features, tokens, valid, view, carry)
    slots = cache.slots_of(view.kv, view.table, view.positions(tokens.shape[1]), jnp.ones(tokens.shape, bool))
    return cache.commit(view.kv, rows, slots, view.kernels), carries[:, -1]


@partial(jax.jit, static_argnames="cfg")
def drafted(
    params: Any, tables: dict[str, Array], cfg: Any, view: View, anchor: Array, carry: Array
) -> tuple[Array, Array]:
    """The drafts [k] behind anchor [1], greedy, and the logits [k, V] that they were taken from."""
    seen: list[Array] = []

    def draw(logits: Array, positions: Array) -> Array:
        seen.append(logits[0])
        return jnp.argmax(logits, axis=-1)

    block = method_of(cfg).draft(params, passes.borrow(tables), cfg, anchor, view.lengths, view, carry, draw)
    return block[0, 1:], jnp.concatenate(seen)


class Drafter:
    """A drafter fed with given features, for one row of up to ``context`` tokens; its pages start as NaN."""

    def __init__(self, params: Any, tables: dict[str, Array], cfg: Any, kernels: str, context: int) -> None:
        self.params, self.tables, self.cfg, self.kernels = params, tables, cfg, kernels
        pages = -(-context // passes.PAGE) + 1
        self.table = np.random.default_rng(1).permutation(pages).astype(np.int32)[None]
        self.reset()

    def reset(self) -> None:
        """Back to an empty pool."""
        layers, kv_heads, head_dim = method_of(self.cfg).cache_shape(self.cfg)
        pool = jnp.full((self.table.size * passes.PAGE, kv_heads, head_dim), jnp.nan, jnp.float32)
        self.kv = PagedKV(k=(pool,) * layers, v=(pool,) * layers, page=passes.PAGE)
        self.length, self.carry = 0, jnp.full((1, self.cfg.hidden_size), jnp.nan, jnp.float32)

    def view(self, length: int | None = None) -> View:
        """The pool as a step sees it, up to ``length``."""
        lengths = jnp.array([self.length if length is None else length], jnp.int32)
        return View(self.kv, jnp.asarray(self.table), lengths, self.kernels, since=1)

    def extend(self, tokens: NDArray, features: NDArray) -> None:
        """Commit tokens [n] with features [n, F]."""
        self.kv, self.carry = extended(
            self.params, self.tables, self.cfg, self.view(), tokens[None], features[None], self.carry
        )
        self.length += len(tokens)

    def rows(self, length: int, tokens: NDArray, features: NDArray) -> Seen:
        """The rows of tokens [n] at positions ``length`` on, with the features [n, F] before them."""
        seen, _ = observed(
            self.params, self.tables, self.cfg, self.view(length), tokens[None], features[None], fused=False
        )
        return jax.tree.map(np.asarray, seen)

    def chain(self, anchor: int, drafts: NDArray) -> list[Seen]:
        """The anchor's row and those of all drafts but the last, each with the hidden state of the one before."""
        view, hidden, shown = self.view(), self.carry[:, None], []
        for token in [anchor, *drafts[:-1].tolist()]:
            seen, view = observed(self.params, self.tables, self.cfg, view, jnp.array([[token]]), hidden, fused=True)
            hidden = jnp.asarray(seen.hidden)[None]
            shown.append(jax.tree.map(np.asarray, seen))
        return shown

    def draft(self, anchor: int, drafts: int) -> tuple[NDArray, NDArray]:
        """Drafts [k] and their logits [k, Vd]."""
        cfg = method_of(self.cfg).with_block(self.cfg, drafts + 1)
        ids, logits = drafted(self.params, self.tables, cfg, self.view(), jnp.array([anchor]), self.carry)
        known = np.isfinite(np.asarray(logits)).all(axis=0)
        return np.asarray(ids), np.asarray(logits)[:, known]

    def cached(self) -> tuple[list[NDArray], list[NDArray]]:
        """K and V [n - 1, G, h] of every layer for slots 1 .. n - 1, from the pages."""
        at = np.arange(1, self.length)
        slots = self.table[0, at // passes.PAGE] * passes.PAGE + at % passes.PAGE
        return [np.asarray(k)[slots] for k in self.kv.k], [np.asarray(v)[slots] for v in self.kv.v]


def check_rows(case: Case, folder: Path, target: Path, kernels: str, verdict: Verdict) -> None:
    """From given features: config, the rows of a context, a chain of drafts, and a round with its re-extend."""
    mesh, native = make_mesh(), case.about["method"] == "mtp"
    cfg, plain = load_mtp(folder, "float32", mesh) if native else load_drafter(folder, "float32", mesh)
    compare_config(cfg, case, target, verdict)
    arrays = case.arrays
    context = max(len(arrays["ctx.features"]), len(arrays.get("round.features", ())) + 8) + 8
    drafter = Drafter(pack(plain, cfg, mesh), passes.borrowed_tables(target), cfg, kernels, context)

    tokens, features = arrays["ctx.input_ids"], arrays["ctx.features"]
    following = np.concatenate([tokens[1:], arrays["ctx.next_id"]])
    seen = drafter.rows(1, following, features)  # slot 0 is NaN
    for name in ("fused", "layer_input", "projected", "layer_hidden", "hidden", "logits"):
        if f"ctx.{name}" in arrays:
            verdict.close(f"ctx {name}", getattr(seen, name), arrays[f"ctx.{name}"], ROWS_BOUND)
    for layer in range(cfg.num_hidden_layers):
        verdict.close("ctx k", seen.k[layer], arrays[f"ctx.k.{layer}"], ROWS_BOUND)
        verdict.close("ctx v", seen.v[layer], arrays[f"ctx.v.{layer}"], ROWS_BOUND)

    half = len(tokens) // 2
    drafter.extend(tokens[:half], features[:half])
    drafter.extend(tokens[half:], features[half:])
    compare_pages(drafter, case, "ctx", verdict)
    anchor = int(arrays["ctx.next_id"][0])
    compare_drafts(drafter, case, anchor, "draft.ids", "draft.logits", verdict)
    chain = drafter.chain(anchor, arrays["draft.ids"])
    verdict.close("draft hidden", np.concatenate([s.hidden for s in chain]), arrays["draft.hidden"], CHAIN_BOUND)
    for layer in range(cfg.num_hidden_layers):
        for name, rows in (("k", [s.k[layer] for s in chain[1:]]), ("v", [s.v[layer] for s in chain[1:]])):
            verdict.close(f"draft {name}", np.concatenate(rows), arrays[f"draft.{name}.{layer}"], CHAIN_BOUND)
    if "round.features" in arrays:
        check_round(drafter, case, verdict)


def check_round(drafter: Drafter, case: Case, verdict: Verdict) -> None:
    """A round that accepts some drafts: its drafts, the rows made again from true features, the next drafts."""
    arrays = case.arrays
    accepted, anchor = int(arrays["round.accepted"][0]), int(arrays["round.anchor"][0])
    drafter.reset()
    drafter.extend(arrays["round.input_ids"], arrays["round.features"])
    compare_drafts(drafter, case, anchor, "round.draft_ids", "round.draft_logits", verdict)

    block = np.concatenate([[anchor], arrays["round.draft_ids"]]).astype(np.int32)[: accepted + 1]
    features = arrays["round.block_features"][: accepted + 1]
    start = drafter.length
    drafter.extend(block, features)
    seen = drafter.rows(start + 1, arrays["round.extend_ids"], features)
    verdict.close("extend hidden", seen.hidden, arrays["round.extend_hidden"], ROWS_BOUND)
    verdict.close("extend logits", seen.logits, arrays["round.extend_logits"], ROWS_BOUND)
    compare_pages(drafter, case, "round", verdict)
    bonus = int(arrays["round.extend_ids"][-1])
    compare_drafts(drafter, case, bonus, "round.next_draft_ids", "round.next_draft_logits", verdict)


def compare_drafts(drafter: Drafter, case: Case, anchor: int, ids: str, logits: str, verdict: Verdict) -> None:
    """Drafts behind what is committed, with the arrays of these names."""
    ours, scores = drafter.draft(anchor, len(case.arrays[ids]))
    verdict.same("drafts", ours, case.arrays[ids], ids)
    verdict.close("first logits", scores[0], case.arrays[logits][0], ROWS_BOUND)
    verdict.close("chain logits", scores[1:], case.arrays[logits][1:], CHAIN_BOUND)


def compare_pages(drafter: Drafter, case: Case, prefix: str, verdict: Verdict) -> None:
    """K and V in the pages with those expected, which also hold the anchor's row: that one is not committed."""
    for name, layers in zip("kv", drafter.cached(), strict=True):
        for layer, rows in enumerate(layers):
            verdict.close(f"{prefix} pages {name}", rows, case.arrays[f"{prefix}.{name}.{layer}"][:-1], ROWS_BOUND)


def compare_config(cfg: AnyDrafterConfig, case: Case, target: Path, verdict: Verdict) -> None:
    """What was read of config.json with what the case says."""
    names = {"vocab_size": "vocab_size", "num_hidden_layers": "num_layers"}
    if isinstance(cfg, Eagle3Config):
        flags = (
            "draft_vocab_size",
            "own_embedding",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
        )
        names |= {flag: flag for flag in flags}
        ids = cfg.target_layer_ids or default_taps(read_json(target / "config.json")["num_hidden_layers"])
        verdict.same("config", ids, case.about["target_layer_ids"], "config target_layer_ids")
    for ours, theirs in names.items():
        verdict.same("config", getattr(cfg, ours), case.about[theirs], f"config {ours}")
