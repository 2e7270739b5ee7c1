"""Faults that users of speculative engines met (the kinds that need no engine), and what keeps each out."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driving import Driven, drive
from scripted import ScriptedDrafter, ScriptedTarget, script_of
from tiny_models import DRAFTER, TARGET, Pair, target_params, tiny_pair

from dflash_jax import Model, ModelParams, generate, row_sampling
from dflash_jax.params import init, pack
from dflash_jax.reference import full_pass
from dflash_jax.sampling import RowSampling

PAGE, STOP, MASK = 64, 3, 9
PROMPT = [1, 1, 1]


def scripted_pair(outputs: Sequence[Sequence[int]], right: Sequence[bool], block: int, longest: int) -> Pair:
    """A target that writes ``outputs`` behind PROMPT, and a drafter that is right where ``right`` is."""
    texts = [PROMPT + list(output) for output in outputs]
    drafts = [PROMPT + [t if good else 63 - t for t, good in zip(o, right, strict=True)] for o in outputs]
    pages = [jnp.asarray(script_of(each, longest, PAGE)) for each in (texts, drafts)]
    params = ModelParams({"embed": jnp.zeros((64, 1)), "script": pages[0]}, {"script": pages[1]})
    return Pair(params, Model(ScriptedTarget(), ScriptedDrafter(block), "reference"), None)


def expected(output: Sequence[int], right: Sequence[bool], block: int, cap: int) -> tuple[list[int], list[int]]:
    """Tokens and acceptance lengths by the loop of the paper, token by token."""
    tokens, rounds = [output[0]], []
    while len(tokens) < cap and STOP not in tokens:
        accepted = 0
        while accepted < block - 1 and right[len(tokens) + accepted]:
            accepted += 1
        tokens += output[len(tokens) : len(tokens) + accepted + 1]
        rounds.append(accepted + 1)
    tokens = tokens[:cap]
    return tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens, rounds


@pytest.mark.parametrize(("block", "period"), [(16, 100), (16, 4), (5, 3), (1, 100)])
def test_stops_and_budgets_inside_an_accepted_block(mesh: object, block: int, period: int) -> None:
    """Row 1: every stop offset 0 .. 33 (and none) with every cap 1 .. 33; the mask's id among the output is kept."""
    length = 60
    outputs = [[10 + i % 20 for i in range(length)] for _ in range(35)]
    for offset, output in enumerate(outputs):
        output[5] = MASK
        if offset < 34:
            output[offset] = STOP
    right = [i % period != period - 1 for i in range(length)]
    pair = scripted_pair(outputs, right, block, PAGE)
    for cap in range(1, 34):
        rows = generate(
            pair.params, pair.model, [PROMPT] * 35, cap, mesh=mesh, block_size=block, stop=[STOP, 62], page=PAGE
        )
        for row, output in zip(rows, outputs, strict=True):
            tokens, rounds = expected(output, right, block, cap)
            assert row.tokens == tokens
            assert row.acceptance_lengths == rounds  # per round and uncut, the prefill's token in none
            assert len(row.logprobs) == len(tokens)
            assert 1 + sum(rounds[:-1]) < len(tokens) or not rounds  # the last round was needed
            assert 1 + sum(rounds) >= len(tokens)


def test_the_first_stop_ends_the_text(mesh: object) -> None:
    """Row 1, as first met: [10, 11, STOP, 20, 21, 22] with a cap of 5."""
    pair = scripted_pair([[10, 11, STOP, 20, 21, 22, 23, 24]], [True] * 8, 4, PAGE)
    (row,) = generate(pair.params, pair.model, [PROMPT], 5, mesh=mesh, stop=[STOP], page=PAGE)
    assert row.tokens == [10, 11, STOP]


FIVE = row_sampling(5, temperature=[0.0, 0.3, 0.7, 1.0, 1.5], top_k=[0, 0, 9, 0, 0], min_p=[0, 0, 0, 0.05, 0], seed=1)
PROMPTS = [[5, 6, 7], [80] * 20, [1], list(range(30)), [33, 44]]


def only(sampling: RowSampling, row: int) -> RowSampling:
    """One row of a batch's sampling."""
    return jax.tree.map(lambda a: np.asarray(a)[row : row + 1], sampling)


def same(a: Driven, b: Driven) -> None:
    assert a.tokens == b.tokens
    assert a.counts == b.counts
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_each_row_of_a_mixed_batch_equals_its_own_run(tiny: Pair) -> None:
    """Row 6: five temperatures, a greedy row beside hot ones, padding rows of -1 and NaN, slots out of order."""
    together = drive(tiny, PROMPTS, FIVE, 4, block=4, batch=8, slots=[5, 0, 3, 7, 2])
    assert len({tuple(row.tokens) for row in together}) == 5
    for i, row in enumerate(together):
        same(row, drive(tiny, [PROMPTS[i]], only(FIVE, i), 4, block=4, batch=8, slots=[6])[0])
        same(row, drive(tiny, [PROMPTS[i]], only(FIVE, i), 4, block=4, batch=1)[0])
        assert all(row.finite)


def test_a_seed_gives_its_tokens_in_any_row(tiny: Pair) -> None:
    """Row 6: seed 7 in slots 0, 3 and 7; another sample of the seed differs."""
    sampling = row_sampling(4, temperature=1.0, seed=[7, 7, 7, 8])
    rows = drive(tiny, [PROMPTS[0]] * 4, sampling, 4, block=4, batch=8, slots=[0, 3, 7, 5])
    same(rows[0], rows[1])
    same(rows[0], rows[2])
    assert rows[0].tokens != rows[3].tokens


def test_a_rows_width_bounds_its_rounds_and_changes_no_token(tiny: Pair) -> None:
    """Drafting off, or held back, for one row of a batch: it goes on like the others, in shorter rounds."""
    free = drive(tiny, PROMPTS, FIVE, 6, block=4, batch=8)
    held = drive(tiny, PROMPTS, FIVE, 6, block=4, batch=8, widths=[1, 2, 4, 1, 3])
    for width, a, b in zip([1, 2, 4, 1, 3], held, free, strict=True):
        assert max(a.counts) <= width
        shared = min(len(a.tokens), len(b.tokens))
        assert a.tokens[:shared] == b.tokens[:shared]


def test_taps_are_the_outputs_of_their_layers(mesh: object) -> None:
    """Row 7: layer i adds i + 1, so taps [2, 0] are the embedding + 6 and + 1: hidden_states[3] and [1] elsewhere."""
    cfg = replace(TARGET, mlp_bias=True, target_layer_ids=(2, 0))
    params = init(cfg, jax.random.key(3), jnp.float32, mesh)
    for i, layer in enumerate(params["layers"]):
        layer |= {"o": layer["o"] * 0, "down": layer["down"] * 0, "down_bias": layer["down_bias"] + i + 1}
    tokens = jnp.array([[4, 8, 15]])
    hidden, _ = full_pass(pack(params, cfg, mesh), cfg, tokens)
    embedded = np.asarray(params["embed"])[np.asarray(tokens)]
    np.testing.assert_allclose(hidden.features, np.concatenate([embedded + 6, embedded + 1], axis=-1), atol=1e-5)


@pytest.mark.parametrize("kind", [0.0, 1.0])
def test_ids_of_padding_are_never_emitted(tiny: Pair, kind: float) -> None:
    """Row 9: the head's rows beyond vocab_size win by far, and no token of theirs comes, greedy, hot or filtered."""
    hidden, logits = full_pass(tiny.params.target, tiny.model.target, jnp.array([[1, 2, 3]]))
    head = np.asarray(tiny.params.target["head"])
    raw = np.asarray(hidden.final) @ head.T
    assert (raw.argmax(axis=-1) >= TARGET.vocab_size).any()
    assert np.isneginf(np.asarray(logits)[..., TARGET.vocab_size :]).all()
    sampling = row_sampling(5, temperature=kind, top_k=[0, 93, 5, 0, 0], top_p=[1, 1, 1, 0.9, 1], seed=2)
    for row in drive(tiny, PROMPTS, sampling, 6, block=4, batch=8):
        assert max(row.tokens) < TARGET.vocab_size


def test_drafting_ends_with_the_drafters_positions(mesh: object) -> None:
    """Row 11: drafter of 64 positions, target of 256, prompts of 100 and 50: plain tokens, no drafts from 64 on."""
    short = tiny_pair(mesh, replace(DRAFTER, max_position_embeddings=64))
    prompts = [[i % 89 for i in range(n)] for n in (100, 50, 3)]
    plain = generate(*short.alone, prompts, 40, mesh=mesh, page=PAGE)
    rows = generate(short.params, short.model, prompts, 40, mesh=mesh, page=PAGE)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]


def test_no_draft_lies_beyond_the_drafters_positions(mesh: object) -> None:
    """Row 11: a drafter of 64 positions that is always right fills blocks of 8 up to there, and rounds of 1 follow."""
    texts = [[1 + i % 50 for i in range(160)], [2 + i % 50 for i in range(160)]]
    script = {"script": jnp.asarray(script_of(texts, 192, PAGE))}
    model = Model(ScriptedTarget(), ScriptedDrafter(8, max_position_embeddings=64), "reference")
    params = ModelParams({"embed": jnp.zeros((64, 1)), **script}, script)
    rows = generate(params, model, [texts[0][:100], texts[1][:30]], 50, mesh=mesh, page=PAGE)
    assert rows[0].tokens == texts[0][100:150]
    assert rows[1].tokens == texts[1][30:80]
    assert rows[0].acceptance_lengths == [1] * 49
    assert rows[1].acceptance_lengths == [8] * 4 + [1] * 17  # blocks from 30, 38, 46 and 54 (up to 62) fit


def test_prompts_up_to_the_last_position(tiny: Pair) -> None:
    """Row 11: prompts of max - 1 .. max - 17 tokens fill the target's positions and get as many tokens as fit."""
    limit = TARGET.max_position_embeddings
    for room in (1, 2, 7, 8, 9, 17):
        prompt = [i * 7 % 89 for i in range(limit - room)]
        plain = generate(*tiny.alone, [prompt], room, mesh=tiny.mesh, page=PAGE)
        (row,) = generate(tiny.params, tiny.model, [prompt], room, mesh=tiny.mesh, page=PAGE)
        assert row.tokens == plain[0].tokens
        assert len(row.tokens) == room
    with pytest.raises(ValueError, match=r"253 tokens and asks for 4 more; the target has 256"):
        generate(tiny.params, tiny.model, [[1], [1] * 253], 4, mesh=tiny.mesh)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(tiny.params, tiny.model, [[1], []], 4, mesh=tiny.mesh)
    with pytest.raises(ValueError, match=r"prompt 0 has ids outside 0 \.\. 95"):
        generate(tiny.params, tiny.model, [[96]], 4, mesh=tiny.mesh)


def test_a_nan_row_is_flagged_and_its_neighbours_do_not_notice(tiny: Pair, mesh: object) -> None:
    """Row 15: one prompt's token has a NaN embedding."""
    plain = target_params(tiny.model.target, mesh)
    plain["embed"] = plain["embed"].at[88].set(jnp.nan)
    broken = Pair(ModelParams(pack(plain, tiny.model.target, mesh), tiny.params.drafter), tiny.model, mesh)
    prompts = [PROMPTS[0], [5, 88, 7], PROMPTS[2]]
    sampling = row_sampling(3, temperature=[0.0, 0.7, 1.0], top_p=[1, 0.9, 0.9], seed=4)
    rows = drive(broken, prompts, sampling, 4, block=4, batch=8)
    assert not any(rows[1].finite)
    assert all(0 <= token < TARGET.vocab_size for token in rows[1].tokens)
    others = jax.tree.map(lambda a: np.asarray(a)[[0, 2]], sampling)
    clean = drive(tiny, [prompts[0], prompts[2]], others, 4, block=4, batch=8)
    for ours, theirs in zip([rows[0], rows[2]], clean, strict=True):
        assert all(ours.finite)
        same(ours, theirs)


def test_logprobs_are_those_of_a_teacher_forced_pass(tiny: Pair) -> None:
    """Row 15 and 10: under the plain softmax, whatever the temperature; with the best alternatives where asked for."""
    model = replace(tiny.model, top_logprobs=3)
    rows = drive(replace(tiny, model=model), PROMPTS, FIVE, 4, block=4, batch=8)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        text = np.zeros((1, 64), np.int32)
        text[0, : len(prompt) + len(row.tokens)] = prompt + row.tokens
        _, logits = full_pass(tiny.params.target, tiny.model.target, text)
        logprobs = np.asarray(jax.nn.log_softmax(logits[0]))[len(prompt) - 1 :][: len(row.tokens)]
        wanted = np.take_along_axis(logprobs, np.array(row.tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(row.logprobs, wanted, atol=1e-4)
        best = np.sort(logprobs, axis=1)[:, ::-1][:, :3]
        np.testing.assert_allclose(row.top_logprobs, best, atol=1e-4)
        np.testing.assert_array_equal(
            np.take_along_axis(logprobs, np.array(row.top_tokens), axis=1).round(4), best.round(4)
        )
