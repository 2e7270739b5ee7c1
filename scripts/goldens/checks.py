"""How each kind of golden case is run: targets, drafters, pairs, and the runs of real models."""

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from convert.hf_config import read_json
from convert.load import MTP, load, load_drafter
from dflash_jax import Generation, Model, ModelParams, drafters, generate, make_mesh
from dflash_jax.config import DrafterConfig
from dflash_jax.params import pack
from dflash_jax.reference import full_pass
from dflash_jax.verify import equality
from goldens import chains, passes
from goldens.case import DRAFT_LOGITS_BOUND, HIDDEN_BOUND, Case, Verdict, bound_of, not_built, spread
from goldens.laws import check_laws

ROOT = Path(__file__).resolve().parents[2]


def check_target(case: Case, kernels: str, verdict: Verdict) -> None:
    """A target on its own: cached prefill in chunks, greedy decoding, and verify blocks with rollback."""
    folder = case.path(case.about["checkpoint"])
    if reason := not_built(folder):
        verdict.skipped.append(reason)
        return
    mesh = make_mesh()
    loaded = load(folder, "float32", mesh)
    cfg = dataclasses.replace(loaded.target, target_layer_ids=tuple(case.about.get("target_layer_ids", ())))
    model = Model(cfg, None, kernels)
    params = ModelParams(pack(loaded.target_params, cfg, mesh))
    prompts, bound = case.several(r"p(\d+)\.input_ids"), bound_of(folder)
    chain = case.arrays.get("chain.block_ids", np.zeros((0, 8), np.int32))
    block = chain.shape[1]

    longest = max([len(prompt) for prompt in prompts] + [len(case.arrays["chain.prefix_ids"]) if len(chain) else 0])
    runner = passes.Runner(params, model, mesh, max(len(prompts), 1), tokens=longest + chain.size, chunk=block)
    for i, seen in enumerate(runner.prefill(prompts)):
        compare_pass(verdict, case, f"p{i}", seen, bound)
    if len(chain):
        check_chain(case, runner, verdict, bound)

    wanted = case.about.get("eos_token_ids")
    if wanted is not None:
        verdict.same("eos", sorted(loaded.eos_token_ids), sorted(set(wanted)))
    count = case.about.get("num_new_tokens", 40)
    for label, stop in (("greedy_ids", ()), ("greedy_ids_eos", wanted or ())):
        expected = case.several(rf"p(\d+)\.{label}")
        if expected:
            ours = generate(params, model, [p.tolist() for p in prompts], count, mesh=mesh, stop=stop, chunk=block)
            for i, row in enumerate(ours):
                verdict.same(label, row.tokens, expected[i], f"p{i}.{label}")


def compare_pass(verdict: Verdict, case: Case, prefix: str, seen: passes.Seen, bound: float) -> None:
    """Logits, final hidden and taps of one pass with those expected under ``prefix``."""
    for label, ours in (("logits", seen.logits), ("final_hidden", seen.final), ("taps", seen.features)):
        expected = case.arrays.get(f"{prefix}.{label}")
        if expected is not None:
            wide = bound * spread(expected) if label == "taps" else bound
            verdict.close(label, ours[..., : expected.shape[-1]], expected, wide)


def check_chain(case: Case, runner: passes.Runner, verdict: Verdict, bound: float) -> None:
    """Prefix, then verify blocks with drafts that are wrong on purpose: rows after ``keep`` must leave no trace."""
    arrays = case.arrays
    runner.reset()
    runner.prefill([arrays["chain.prefix_ids"]])
    blocks, keep = arrays["chain.block_ids"], arrays["chain.keep"]
    committed = arrays["chain.prefix_ids"].tolist()
    for i, block in enumerate(blocks):
        seen = runner.verify(block, int(keep[i]))
        draws = seen.logits.argmax(axis=-1)
        accepted = equality(jnp.asarray(block[None]), jnp.asarray(draws[None]), jnp.array([len(block)]))
        verdict.same("keep", int(accepted[0]) + 1, keep[i], f"chain block {i} keep")
        following = blocks[i + 1][0] if i + 1 < len(blocks) else arrays["chain.last_bonus"][0]
        verdict.same("bonus", draws[keep[i] - 1], following, f"chain block {i} bonus")
        expected = arrays["chain.block_logits"][i]
        verdict.close("block_logits", seen.logits[:, : expected.shape[-1]], expected, bound)
        if "chain.block_taps" in arrays:
            taps = arrays["chain.block_taps"][i]
            verdict.close("block_taps", seen.features, taps, bound * spread(taps))
        committed += block[: keep[i]].tolist()
    verdict.same("committed", committed, arrays["chain.committed_ids"])


def check_drafter(case: Case, kernels: str, verdict: Verdict) -> None:
    """A drafter: from given features always, and its loops where the target is built."""
    method = case.about.get("method", "dflash")
    if method not in ("dflash", *chains.METHODS):
        verdict.skipped.append(f"drafter method {method} is not built")
        return
    target = case.path(case.about["target"])
    if (target / "checkpoint").is_dir():
        target = target / "checkpoint"
    folder = case.path(case.about["checkpoint"]) if case.about["checkpoint"] else target
    check = check_draft if method == "dflash" else chains.check_rows
    check(case, folder, target, kernels, verdict)
    if "loops" not in case.about:  # rows alone, with no more of a target than its tables
        return
    if reason := not_built(target):
        verdict.skipped.append(f"loops ({reason})")
        return
    params, model = load_pair(target, MTP if method == "mtp" else folder, kernels)
    check_features(case, params, model, bound_of(target), verdict)
    loops = [{"block_size": run.get("num_drafts", 0) + 1, **run} for run in case.about.get("loops", ())]
    check_loops(case, loops, "loop", params, model, verdict, beyond=method == "dflash")


def load_pair(target: Path, drafter: str | Path, kernels: str) -> tuple[ModelParams, Model]:
    """A pair in float32, packed."""
    mesh = make_mesh()
    with warnings.catch_warnings():  # default layer ids warn; check_draft compares and notes them
        warnings.simplefilter("ignore", UserWarning)
        loaded = load(target, "float32", mesh, drafter=drafter)
    assert loaded.drafter is not None
    assert loaded.drafter_params is not None
    params = ModelParams(
        pack(loaded.target_params, loaded.target, mesh), pack(loaded.drafter_params, loaded.drafter, mesh)
    )
    return params, Model(loaded.target, loaded.drafter, kernels)


def check_draft(case: Case, folder: Path, target: Path, kernels: str, verdict: Verdict) -> None:
    """From given features: config, context, injected K/V, the block, and the block after every piece of context."""
    mesh = make_mesh()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        cfg, plain = load_drafter(folder, "float32", mesh, target)
    verdict.notes += ["default target_layer_ids"] if any("target_layer_ids" in str(w.message) for w in said) else []
    assert isinstance(cfg, DrafterConfig)
    compare_config(cfg, case, verdict)
    arrays = case.arrays
    tables = passes.borrowed_tables(target)
    drafter = passes.Drafter(pack(plain, cfg, mesh), tables, cfg, kernels, context=len(arrays["ctx.features"]))

    features = arrays["ctx.features"]
    verdict.close("context", drafter.context(features), arrays.get("ctx.context"), HIDDEN_BOUND)
    drafter.inject(features)
    keys, values = drafter.injected()
    for layer in range(cfg.num_hidden_layers):
        verdict.close("k", keys[layer], arrays.get(f"ctx.k.{layer}"), HIDDEN_BOUND)
        verdict.close("v", values[layer], arrays.get(f"ctx.v.{layer}"), HIDDEN_BOUND)
    compare_block(drafter, case, "block", verdict)

    drafter.reset()
    start = 0
    for j, size in enumerate(case.about.get("chunks", ())):
        drafter.inject(features[start : start + size])
        start += size
        verdict.same("config", start, case.about["chunk_anchors"][j], "chunk anchor")
        compare_block(drafter, case, f"chunk{j}", verdict)


def compare_config(cfg: DrafterConfig, case: Case, verdict: Verdict) -> None:
    """What was read of config.json with what the case says."""
    names = ["block_size", "mask_token_id", "target_layer_ids", "layer_types", "in_block_causal"]
    if "sliding_attention" in cfg.layer_types:  # a window that no layer uses is not kept
        names.append("sliding_window")
    for name in names:
        if name in case.about:
            ours = getattr(cfg, name)
            verdict.same("config", np.array(ours, object), np.array(case.about[name], object), f"config {name}")


def compare_block(drafter: passes.Drafter, case: Case, prefix: str, verdict: Verdict) -> None:
    """A block behind what is injected so far, with the arrays under ``prefix``."""
    where = {n.removeprefix(f"{prefix}."): a for n, a in case.arrays.items() if n.startswith(f"{prefix}.")}
    tokens = where["input_ids"] if "input_ids" in where else where["block_input_ids"]
    masks = [drafter.cfg.mask_token_id] * (len(tokens) - 1)
    verdict.same("block ids", [tokens[0], *masks], tokens, f"{prefix} input ids")
    block = drafter.block(tokens)
    for name, ours, bound in (
        ("noise_embedding", block.noise, HIDDEN_BOUND),
        ("layer_hidden", block.residuals, HIDDEN_BOUND),
        ("hidden", block.hidden, HIDDEN_BOUND),
        ("logits", block.logits, DRAFT_LOGITS_BOUND),
    ):
        label = f"draft {name}" if prefix == "block" else f"chunk {name}"
        verdict.close(label, ours, where.get(name), bound)
    if "position_ids" in where:
        verdict.same("block ids", block.positions, where["position_ids"], "block positions")
    if "draft_ids" in where:
        verdict.same("draft_ids", block.drafts, where["draft_ids"])


def check_features(case: Case, params: ModelParams, model: Model, bound: float, verdict: Verdict) -> None:
    """The target's own taps (and logits) on the context, in one pass without a cache."""
    hidden, logits = full_pass(params.target, model.target, case.arrays["ctx.input_ids"][None])
    expected = case.arrays["ctx.features"]
    features = hidden.features if model.drafter is None else drafters.of(model.drafter).reads(model.drafter, hidden)
    verdict.close("features", features[0], expected, bound * spread(expected))
    verdict.close("target_logits", logits[0, :, : model.target.vocab_size], case.arrays.get("ctx.target_logits"), bound)


class Recorder:
    """An acceptance rule (the usual one) that also keeps the blocks it saw."""

    def __init__(self) -> None:
        self.blocks: list[NDArray] = []

    def __call__(self, block: jax.Array, draws: jax.Array, width: jax.Array) -> jax.Array:
        """Accepted drafts [B]."""
        jax.debug.callback(lambda seen: self.blocks.append(np.array(seen)), block, ordered=True)
        return equality(block, draws, width)


def check_loops(
    case: Case,
    runs: Sequence[Mapping[str, Any]],
    prefix: str,
    params: ModelParams,
    model: Model,
    verdict: Verdict,
    beyond: bool = True,
) -> None:
    """Greedy runs at every block size: ids, acceptance lengths and, where the case has them, each round's block.

    beyond: whether the loop that made them ends when its limit is exceeded, as the DFlash authors' does, not when it is
    reached: a run whose last round hits the limit exactly has one more round there. Asking for one token more
    reproduces that; the token is cut.
    """
    prompts = [p.tolist() for p in case.several(r"prompt(\d+)\.input_ids")]
    recorder = Recorder() if any(f"{prefix}{r['run']}.round_block_ids" in case.arrays for r in runs) else None
    done: dict[tuple[int, int, tuple[int, ...]], tuple[list[Generation], list[NDArray]]] = {}
    for run in runs:
        stop, limit, number = tuple(run["stop_token_ids"] or ()), run["max_new_tokens"], run["run"]
        key = (run["block_size"], limit, stop)
        if key not in done:  # all prompts at once: one batch shape, so one compilation a block size
            done[key] = run_loop(params, model, prompts, limit + beyond, run["block_size"], stop, recorder)
        generations, blocks = done[key]
        ours, row = generations[run["prompt"]], run["prompt"]
        expected, where = case.arrays[f"{prefix}{number}.output_ids"], f"{prefix}{number} (block {run['block_size']})"
        label = f"b{run['block_size']}"
        tokens = ours.tokens[:limit]
        verdict.same(f"{label} ids", prompts[row] + tokens, expected, f"{where} ids")
        rounds = rounds_of(case.arrays[f"{prefix}{number}.acceptance_lengths"], tokens, stop)
        verdict.same(f"{label} acceptance", ours.acceptance_lengths, rounds, f"{where} acceptance")
        if f"{prefix}{number}.round_block_ids" in case.arrays and len(rounds):
            seen = np.stack(blocks)[: len(ours.acceptance_lengths), row]
            verdict.same(f"{label} rounds", seen, case.arrays[f"{prefix}{number}.round_block_ids"], f"{where} blocks")


def rounds_of(acceptance_lengths: ArrayLike, tokens: Sequence[int], stop: Sequence[int]) -> NDArray:
    """The authors' rounds that exist here too: they look for stop ids only after a round, even if the first is one."""
    return np.asarray(acceptance_lengths)[: 0 if tokens[0] in stop else None]


def run_loop(
    params: ModelParams,
    model: Model,
    prompts: list[list[int]],
    limit: int,
    block: int,
    stop: Sequence[int],
    recorder: Recorder | None,
) -> tuple[list[Generation], list[NDArray]]:
    """Every prompt's greedy run of ``limit`` tokens, and the blocks [B, T] of each round."""
    rule: Callable[..., jax.Array] = equality if recorder is None else recorder
    with warnings.catch_warnings():  # blocks above the trained size warn
        warnings.simplefilter("ignore", UserWarning)
        out = generate(
            params, model, prompts, limit, mesh=make_mesh(), block_size=block, stop=stop, page=64, accept=rule
        )
    if recorder is None:
        return out, []
    jax.effects_barrier()
    blocks, recorder.blocks = recorder.blocks, []
    return out, blocks


def check_pair(case: Case, kernels: str, verdict: Verdict) -> None:
    """A trained pair: everything of a drafter, its runs, and the laws of sampled tokens."""
    target, draft = case.path(case.about["target"]), case.path(case.about["draft"])
    check_draft(case, draft, target, kernels, verdict)
    if reason := not_built(target):
        verdict.skipped.append(f"runs and laws ({reason})")
        return
    params, model = load_pair(target, draft, kernels)
    check_features(case, params, model, bound_of(target), verdict)
    check_loops(case, case.about.get("runs", ()), "run", params, model, verdict)
    check_laws(case, params, model, bound_of(target), verdict)


def check_real(expected: Path, folder: Path | None, kernels: str, verdict: Verdict) -> None:
    """A real pair's greedy runs, NAME.json, with the target in ``folder`` and the drafter in models/NAME-dflash."""
    about = read_json(expected)
    if folder is None:
        verdict.skipped.append("no folder given")
        return
    drafter = ROOT / "models" / f"{expected.stem}-dflash"
    for part, path in (("target", folder), ("drafter", drafter)):
        with (path / "model.safetensors").open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        verdict.same("sha256", found, about[f"{part}_sha256"]["model.safetensors"], f"{path}/model.safetensors")
    params, model = load_pair(folder, drafter, kernels)
    for block in dict.fromkeys(run["block_size"] for run in about["runs"]):
        runs = [run for run in about["runs"] if run["block_size"] == block]
        limit, stop = about["max_new_tokens"], about["stop_token_ids"]
        out, _ = run_loop(params, model, [run["prompt_ids"] for run in runs], limit + 1, block, stop, None)
        for i, (run, ours) in enumerate(zip(runs, out, strict=True)):
            where = f"block {block} run {i}"
            verdict.same(f"b{block} ids", ours.tokens[:limit], run["output_ids"], f"{where} ids")
            rounds = rounds_of(run["acceptance_lengths"], ours.tokens, stop)
            verdict.same(f"b{block} acceptance", ours.acceptance_lengths, rounds, f"{where} acceptance")
