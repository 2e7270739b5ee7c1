"""One table a family: Hugging Face name <-> parameter path <-> transform, read both ways.

A transform only moves values, so that saving is exact; nearly all are views of the file. Torch linear weights are
[out, in]; ours are [in, out] with heads apart.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convert.derived import Stack, Stored, dequantised, take
from convert.hf_config import CheckpointError
from convert.tensors import DTYPES, Shelf, Tensor
from dflash_jax.config import (
    AnyDrafterConfig,
    DrafterConfig,
    Eagle3Config,
    HybridConfig,
    MTPConfig,
    TargetConfig,
)
from dflash_jax.params import Leaf, flatten, leaves_of

Shape = tuple[int, ...]
FLOATS = (DTYPES["F32"], DTYPES["BF16"], DTYPES["F16"])
IDS = (DTYPES["I64"], DTYPES["I32"])


@dataclass(frozen=True)
class Transform:
    """``load`` makes our array of a Hugging Face one (given our shape), ``save`` is its inverse; ``shape`` is HF's."""

    shape: Callable[[Shape], Shape]
    load: Callable[[NDArray, Shape], NDArray]
    save: Callable[[NDArray], NDArray]


SAME = Transform(lambda s: s, lambda w, s: w, lambda w: w)
MATRIX = Transform(lambda s: (s[1], s[0]), lambda w, s: w.T, lambda w: w.T)
# [N * H, D] <-> [D, N, H]
HEADS = Transform(
    lambda s: (s[1] * s[2], s[0]),
    lambda w, s: w.reshape(s[1], s[2], s[0]).transpose(2, 0, 1),
    lambda w: w.transpose(1, 2, 0).reshape(-1, w.shape[0]),
)
# [D, N * H] <-> [N, H, D]
HEADS_OUT = Transform(
    lambda s: (s[2], s[0] * s[1]),
    lambda w, s: w.reshape(s[2], s[0], s[1]).transpose(1, 2, 0),
    lambda w: w.transpose(2, 0, 1).reshape(w.shape[2], -1),
)
# [N * H] <-> [N, H]
HEAD_BIAS = Transform(lambda s: (s[0] * s[1],), lambda w, s: w.reshape(s), lambda w: w.reshape(-1))


def by_key_head(groups: int, sizes: tuple[int, ...]) -> Transform:
    """Rows of several parts one below the other, each split by key head, <-> [rest, G, sizes side by side]: part i has
    ``groups`` x sizes[i] rows. In files Q, K and V follow each other; here what belongs to a key head does."""

    def load(w: NDArray, shape: Shape) -> NDArray:
        ends = np.cumsum([groups * size for size in sizes])[:-1]
        parts = [part.reshape(groups, -1, w.shape[-1]) for part in np.split(w.reshape(-1, w.shape[-1]), ends)]
        return np.concatenate(parts, axis=1)

    def save(w: NDArray) -> NDArray:
        parts = np.split(w, np.cumsum(sizes)[:-1], axis=1)
        return np.concatenate([part.reshape(-1, w.shape[-1]) for part in parts])

    return Transform(
        lambda s: (s[1] * s[2], s[0]), lambda w, s: load(w, s).transpose(2, 0, 1), lambda w: save(w.transpose(1, 2, 0))
    )


def convolution(projection: Transform) -> Transform:
    """The same rows of a depthwise convolution [C, 1, kernel] <-> [G, c, kernel]."""
    return Transform(
        lambda s: (s[0] * s[1], 1, s[2]),
        lambda w, s: projection.load(w[:, 0], s).transpose(1, 2, 0),
        lambda w: projection.save(w.transpose(2, 0, 1))[:, None],
    )


# [E, 2 F, D] <-> [E, D, 2, F], and [2 F, D] <-> [D, 2, F]
GATE_UP = Transform(
    lambda s: (*s[:-3], s[-2] * s[-1], s[-3]),
    lambda w, s: np.moveaxis(w.reshape(*s[:-3], s[-2], s[-1], s[-3]), -1, -3),
    lambda w: np.moveaxis(w, -3, -1).reshape(*w.shape[:-3], -1, w.shape[-3]),
)
# [E, D, F] <-> [E, F, D]
MATRICES = Transform(lambda s: (s[0], s[2], s[1]), lambda w, s: w.swapaxes(1, 2), lambda w: w.swapaxes(1, 2))
# gpt-oss: [.., F, 2] folded <-> [.., 2, F], gate and up in turn
IN_TURN = Transform(
    lambda s: (*s[:-2], s[-1] * 2),
    lambda w, s: w.reshape(*s[:-2], s[-1], 2).swapaxes(-1, -2),
    lambda w: w.swapaxes(-1, -2).reshape(*w.shape[:-2], -1),
)
# [1, D] <-> [D]
ROW = Transform(lambda s: (1, *s), lambda w, s: w.reshape(s), lambda w: w.reshape(1, -1))


@dataclass(frozen=True)
class Rule:
    """One line of a table; ``{}`` stands for the layer number in both names."""

    hf: str
    path: str
    transform: Transform


@dataclass(frozen=True)
class Skip:
    """Tensors of a file that are left out: a pattern of names, and why (None: not worth saying)."""

    pattern: str
    reason: str | None


def layer_rules(prefix: str) -> tuple[Rule, ...]:
    """The decoder layer of Llama, Qwen2, Qwen3 and of DFlash drafters; a rule without a leaf in the model is idle."""
    table = (
        ("input_layernorm.weight", "input_norm", SAME),
        ("post_attention_layernorm.weight", "post_norm", SAME),
        ("self_attn.q_proj.weight", "q", HEADS),
        ("self_attn.k_proj.weight", "k", HEADS),
        ("self_attn.v_proj.weight", "v", HEADS),
        ("self_attn.o_proj.weight", "o", HEADS_OUT),
        ("self_attn.q_proj.bias", "q_bias", HEAD_BIAS),
        ("self_attn.k_proj.bias", "k_bias", HEAD_BIAS),
        ("self_attn.v_proj.bias", "v_bias", HEAD_BIAS),
        ("self_attn.o_proj.bias", "o_bias", SAME),
        ("self_attn.q_norm.weight", "q_norm", SAME),
        ("self_attn.k_norm.weight", "k_norm", SAME),
        ("mlp.gate_proj.weight", "gate", MATRIX),
        ("mlp.up_proj.weight", "up", MATRIX),
        ("mlp.down_proj.weight", "down", MATRIX),
        ("mlp.gate_proj.bias", "gate_bias", SAME),
        ("mlp.up_proj.bias", "up_bias", SAME),
        ("mlp.down_proj.bias", "down_bias", SAME),
        ("mlp.gate.weight", "router", MATRIX),
        ("mlp.experts.gate_up_proj", "expert_gate_up", GATE_UP),
        ("mlp.experts.down_proj", "expert_down", MATRICES),
        ("mlp.shared_expert.gate_up_proj.weight", "shared_gate_up", GATE_UP),
        ("mlp.shared_expert.down_proj.weight", "shared_down", MATRIX),
        ("mlp.shared_expert_gate.weight", "shared_gate", ROW),
    )
    return tuple(Rule(f"{prefix}layers.{{}}.{hf}", f"layers.{{}}.{path}", how) for hf, path, how in table)


def delta_rules(cfg: HybridConfig, prefix: str) -> tuple[Rule, ...]:
    """The gated delta nets of a hybrid."""
    wide = cfg.linear_num_value_heads // cfg.linear_num_key_heads * cfg.linear_value_head_dim
    rows = by_key_head(cfg.linear_num_key_heads, (cfg.linear_key_head_dim, cfg.linear_key_head_dim, wide))
    table = (
        ("in_proj_qkv.weight", "delta_qkv", rows),
        ("in_proj_z.weight", "delta_z", HEADS),
        ("in_proj_b.weight", "delta_b", HEADS),
        ("in_proj_a.weight", "delta_a", HEADS),
        ("in_proj_qkvz.weight", "delta_qkvz", HEADS),
        ("in_proj_ba.weight", "delta_ba", HEADS),
        ("conv1d.weight", "delta_conv", convolution(rows)),
        ("A_log", "a_log", SAME),
        ("dt_bias", "dt_bias", SAME),
        ("norm.weight", "delta_norm", SAME),
        ("out_proj.weight", "delta_out", HEADS_OUT),
    )
    return tuple(Rule(f"{prefix}layers.{{}}.linear_attn.{hf}", f"layers.{{}}.{path}", how) for hf, path, how in table)


DENSE = (
    Rule("model.embed_tokens.weight", "embed", SAME),
    Rule("model.norm.weight", "final_norm", SAME),
    Rule("lm_head.weight", "head", SAME),
    *layer_rules("model."),
)
GPT_OSS = (
    *(rule for rule in DENSE if not rule.path.endswith(("router", "expert_gate_up", "expert_down"))),
    Rule("model.layers.{}.self_attn.sinks", "layers.{}.sinks", SAME),
    Rule("model.layers.{}.mlp.router.weight", "layers.{}.router", MATRIX),
    Rule("model.layers.{}.mlp.router.bias", "layers.{}.router_bias", SAME),
    Rule("model.layers.{}.mlp.experts.gate_up_proj", "layers.{}.expert_gate_up", IN_TURN),
    Rule("model.layers.{}.mlp.experts.gate_up_proj_bias", "layers.{}.expert_gate_up_bias", IN_TURN),
    Rule("model.layers.{}.mlp.experts.down_proj", "layers.{}.expert_down", SAME),
    Rule("model.layers.{}.mlp.experts.down_proj_bias", "layers.{}.expert_down_bias", SAME),
)
DFLASH = (
    Rule("fc.weight", "fc", MATRIX),
    Rule("hidden_norm.weight", "hidden_norm", SAME),
    Rule("norm.weight", "final_norm", SAME),
    Rule("lm_head.weight", "head", SAME),
    Rule("d2t", "d2t", SAME),
    *layer_rules(""),
)
EAGLE3 = (
    Rule("fc.weight", "fc", MATRIX),
    Rule("input_norm.weight", "taps_norm", SAME),
    *(Rule(f"fc_norm.{i}.weight", f"tap{i}_norm", SAME) for i in range(16)),
    Rule("layers.{}.hidden_norm.weight", "layers.{}.hidden_norm", SAME),
    Rule("norm.weight", "final_norm", SAME),
    Rule("embed_tokens.weight", "embed", SAME),
    Rule("lm_head.weight", "head", SAME),
    Rule("d2t", "d2t", SAME),
    *layer_rules(""),
)
MTP = (
    Rule("mtp.fc.weight", "fc", MATRIX),
    Rule("mtp.pre_fc_norm_embedding.weight", "embedding_norm", SAME),
    Rule("mtp.pre_fc_norm_hidden.weight", "hidden_norm", SAME),
    Rule("mtp.norm.weight", "final_norm", SAME),
    *layer_rules("mtp."),
)
TABLES: Mapping[str, tuple[Rule, ...]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_5": DENSE,
    "qwen3_5_moe": DENSE,
    "qwen3_next": DENSE,
    "qwen3_moe": DENSE,
    "gpt_oss": GPT_OSS,
    "dflash": DFLASH,
    "eagle3": EAGLE3,
    "mtp": MTP,
}

BUFFERS = Skip(r"(.*\.)?rotary_emb\.inv_freq", None)
TIED_HEAD = Skip(r"lm_head\.weight", "the head is tied to the embedding (tie_word_embeddings), as the config says")
HYBRID_SKIPS = (
    Skip(r"model\.visual\..*", "the vision tower; this model is text only"),
    Skip(r"mtp\..*", "the native MTP head, a drafter of its own"),
)
# Stands among what was skipped where a file's weights are quantised: the field of config.json that says so.
QUANTISATION = "quantization_config"
DRAFTER_SKIPS = (
    BUFFERS,
    Skip(r"embed_tokens\.weight", "a frozen copy of the target's embedding"),
    Skip(r"t2d", "follows from d2t"),
    Skip(r"verifier_.*", "belongs to training"),
)
WHOLE = Skip(r"d2t", "the draft vocabulary is the whole one")
FULL_VOCABULARY_SKIPS = (Skip(r"lm_head\.weight", "a frozen copy of the target's head"), WHOLE)
EAGLE3_SKIPS = (BUFFERS, Skip(r"t2d", "follows from d2t"), Skip(r"verifier_.*", "belongs to training"))
WRAPPED = "model.language_model."  # where Qwen3.5's multimodal files have their text model
# Other spellings of drafter names, tried in this order; each is met in the wild.
ALIASES = (
    (r"^model\.", ""),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^midlayer\.", "layers.0."),
)
FOREIGN = (
    (r".*(attention_sink_bias|sinks|mask_embedding).*", "MiMo-style"),
    (r".*(attention_conv|mlp_conv|predecessor_codebook|successor_codebook).*", "DFlash2"),
    (r".*(markov_|confidence_head).*", "DSpark"),
    (r".*(gru|prefix_gru)\..*", "Domino"),
    (r"(embed_tokens|lm_head)\.weight", "own-embedding (Nemotron)"),
)


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from: the tensor (of the file, or made of several), its rule, its shape here."""

    path: str
    tensor: Stored
    rule: Rule
    leaf: Leaf

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.nbytes

    def view(self) -> NDArray:
        """The parameter in our layout, a view of the mapped file where it lies there as one plain tensor."""
        return self.rule.transform.load(self.tensor.view(), self.leaf.shape)


@dataclass(frozen=True)
class Matched:
    """A file seen as a model: the source of every parameter, and what was left out with the reason for it."""

    sources: dict[str, Source]
    skipped: dict[str, str | None]


def rules_of(cfg: TargetConfig | AnyDrafterConfig) -> dict[str, tuple[Rule, str, Leaf]]:
    """{parameter path: (rule, Hugging Face name, leaf)} of a model, in the order of its declaration."""
    table = TABLES[cfg.model_type if isinstance(cfg, TargetConfig) else cfg.method]
    if isinstance(cfg, HybridConfig):
        table += delta_rules(cfg, "model.")
    by_path = {rule.path: rule for rule in table}
    found = {}
    for path, leaf in flatten(leaves_of(cfg)).items():
        layer = re.match(r"layers\.(\d+)\.", path)
        number = layer.group(1) if layer else ""
        rule = by_path[re.sub(r"^layers\.\d+\.", "layers.{}.", path)]
        found[path] = (rule, rule.hf.format(number), leaf)
    return found


def skips_of(cfg: TargetConfig | AnyDrafterConfig, speculators: bool) -> tuple[Skip, ...]:
    """What a file of this model may hold beside its parameters."""
    if isinstance(cfg, TargetConfig):
        extra = HYBRID_SKIPS if isinstance(cfg, HybridConfig) else ()
        return (BUFFERS, TIED_HEAD, *extra) if cfg.tie_word_embeddings else (BUFFERS, *extra)
    if isinstance(cfg, Eagle3Config):
        return EAGLE3_SKIPS if cfg.draft_vocab_size < cfg.vocab_size else (*EAGLE3_SKIPS, WHOLE)
    if isinstance(cfg, MTPConfig):
        return (BUFFERS,)
    if not speculators:
        return (BUFFERS,)
    return DRAFTER_SKIPS if cfg.own_head else DRAFTER_SKIPS + FULL_VOCABULARY_SKIPS


def plain_name(name: str, cfg: TargetConfig | AnyDrafterConfig) -> str:
    """A tensor's name without the prefixes that some exports and multimodal wrappers add."""
    if isinstance(cfg, HybridConfig):
        return name.replace(WRAPPED, "model.", 1) if name.startswith(WRAPPED) else name
    if isinstance(cfg, TargetConfig):
        return name
    for pattern, replacement in ALIASES:
        name = re.sub(pattern, replacement, name)
    return name


def wrapped(taken: Stored, cfg: TargetConfig | AnyDrafterConfig) -> Stored:
    """A stack under the name that its pieces have in the file, wrapper included."""
    if isinstance(taken, Stack) and plain_name(taken.parts[0].name, cfg) != taken.parts[0].name:
        return dataclasses.replace(taken, name=taken.name.replace("model.", WRAPPED, 1))
    return taken


def match(shelf: Shelf, cfg: TargetConfig | AnyDrafterConfig, speculators: bool = False) -> Matched:
    """Finds the tensor of every parameter.

    Args:
        shelf: the folder's tensors.
        cfg: what they should be.
        speculators: whether a drafter came from a speculators folder, which holds frozen copies and id maps.

    Raises:
        CheckpointError: all faults together: files, missing and unknown tensors, wrong shapes (with both shapes).
    """
    rules = rules_of(cfg)
    skips = skips_of(cfg, speculators)
    faults = list(shelf.faults)
    plain: dict[str, Tensor] = {}
    for tensor in shelf:
        name = plain_name(tensor.name, cfg)
        if name in plain:
            faults.append(f"{plain[name].name} and {tensor.name} are the same tensor")
        plain[name] = tensor
    there, broken = dequantised(plain, faults)

    sources: dict[str, Source] = {}
    missing: list[str] = []
    for path, (rule, name, leaf) in rules.items():
        taken = take(name, rule.transform.shape(leaf.shape), there, broken, faults, missing)
        if taken is None:
            continue
        if taken.dtype not in (IDS if path == "d2t" else FLOATS):
            faults.append(f"wrong dtype: {taken.name} is {taken.dtype}")
        sources[path] = Source(path, wrapped(taken, cfg), rule, leaf)
    skipped: dict[str, str | None] = {}
    unknown = []
    for name, left in there.items():
        skip = next((s for s in skips if re.fullmatch(s.pattern, name)), None)
        for tensor in left.parts:
            if skip is None:
                unknown.append(tensor.name)
            else:
                skipped[tensor.name] = skip.reason
    formats = sorted({str(s.tensor.quantised) for s in sources.values() if s.tensor.quantised})
    if formats:
        skipped[QUANTISATION] = f"{', '.join(formats)} weights are dequantised"
    if missing:
        faults.append(f"missing tensors: {', '.join(missing)}")
    if unknown:
        relatives = {family for name in unknown for pattern, family in FOREIGN if re.fullmatch(pattern, name)}
        hint = f" (as in {', '.join(sorted(relatives))} drafters)" if relatives else ""
        faults.append(f"unknown tensors: {', '.join(unknown)}{hint}")
    if faults:
        raise CheckpointError(f"{shelf.folder} does not hold what its config says:\n  " + "\n  ".join(faults))
    return Matched(sources, skipped)


def all_zero(values: NDArray) -> bool:
    """Whether every byte of an array is zero; stops at the first rows that are not."""
    raw = values.reshape(-1).view(np.uint8)
    return not any(raw[i : i + (1 << 20)].any() for i in range(0, raw.size, 1 << 20))


def same_bytes(a: NDArray, b: NDArray) -> bool:
    """Whether two arrays are equal byte for byte, compared in pieces."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    mine, other = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    return all(np.array_equal(mine[i : i + (1 << 20)], other[i : i + (1 << 20)]) for i in range(0, mine.size, 1 << 20))


def check_values(matched: Matched, cfg: TargetConfig | AnyDrafterConfig) -> None:
    """The faults that only values show.

    Raises:
        CheckpointError: an embedding or head that is all zeros, a d2t that leaves the target's vocabulary.
    """
    faults = []
    for path in ("embed", "head"):
        source = matched.sources.get(path)
        if source is not None and all_zero(source.tensor.view()):
            faults.append(f"{source.tensor.name} is all zeros")
    if isinstance(cfg, DrafterConfig | Eagle3Config) and "d2t" in matched.sources:
        ids = np.arange(cfg.draft_vocab_size, dtype=np.int64) + matched.sources["d2t"].view().astype(np.int64)
        wrong = np.flatnonzero((ids < 0) | (ids >= cfg.vocab_size))
        if wrong.size:
            first = int(wrong[0])
            faults.append(
                f"d2t sends {wrong.size} draft ids out of the vocabulary of {cfg.vocab_size} "
                f"(draft id {first} to {int(ids[first])})"
            )
    if faults:
        raise CheckpointError("; ".join(faults))
