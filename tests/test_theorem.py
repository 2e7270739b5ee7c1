"""The theorem: whatever the drafter, the tokens are the target's own with the same seed, at every temperature."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import ScriptedDrafter, ScriptedTarget, script_of
from tiny_models import Pair

from dflash_jax import Generation, Model, ModelParams, generate, row_sampling
from dflash_jax.cache import resolve
from dflash_jax.reference import continuation
from dflash_jax.sampling import RowSampling
from dflash_jax.verify import equality

NEW, PAGE = 20, 64
# Every temperature with every filter, a row each; prompts of mixed lengths take turns.
FILTERS = ({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02})
ROWS = [{"temperature": t, **filters} for t in (0.0, 0.7, 1.0) for filters in FILTERS]
SAMPLING = row_sampling(
    len(ROWS),
    temperature=[row["temperature"] for row in ROWS],
    top_k=[int(row.get("top_k", 0)) for row in ROWS],
    top_p=[row.get("top_p", 1.0) for row in ROWS],
    min_p=[row.get("min_p", 0.0) for row in ROWS],
    seed=7,
)


@dataclass(frozen=True)
class Plain:
    """What a target alone writes behind each prompt."""

    pair: Pair
    prompts: list[list[int]]
    rows: list[Generation]


def plain_of(pair: Pair, prompts: Sequence[Sequence[int]]) -> Plain:
    chosen = [list(prompts[i % len(prompts)]) for i in range(len(ROWS))]
    # Longer than any test asks for, so that a scripted drafter is right beyond the end too.
    rows = generate(*pair.alone, chosen, NEW + 12, mesh=pair.mesh, sampling=SAMPLING, page=PAGE)
    return Plain(pair, chosen, rows)


@pytest.fixture(scope="module")
def plain(tiny: Pair) -> Plain:
    lengths = np.random.default_rng(0)
    return plain_of(tiny, [lengths.integers(0, 89, n).tolist() for n in (3, 17, 1, 30)])


@pytest.fixture(scope="module")
def plain_trained(trained: Pair) -> Plain:
    texts = (  # behind the last one the target is in doubt
        "Q: add 18 and 19\nA:",
        "Q: count from 2 to 7\nA:",
        "Q: tell me about max and the black boat\nA:",
        "Q: tell me about sam and the red bike\nA: sam has a red bike. the red bike of sam is ",
    )
    return plain_of(trained, [[1, *map(ord, text)] for text in texts])


def scripted(plain: Plain, rightness: str, block: int) -> tuple[ModelParams, Model]:
    """The pair's target with a drafter that is right never, two times in three (by position), or always."""
    wrong = {"never": lambda i: True, "two_in_three": lambda i: i % 3 == 0, "always": lambda i: False}[rightness]
    texts = []
    for prompt, row in zip(plain.prompts, plain.rows, strict=True):
        text = prompt + row.tokens
        texts.append([(token + 1) % 90 if wrong(i) else token for i, token in enumerate(text)])
    longest = max(map(len, plain.prompts)) + NEW + block
    params = ModelParams(plain.pair.params.target, {"script": jnp.asarray(script_of(texts, longest, PAGE))})
    return params, Model(plain.pair.model.target, ScriptedDrafter(block), "reference")


def same_as_plain(rows: Sequence[Generation], plain: Plain) -> None:
    for ours, theirs in zip(rows, plain.rows, strict=True):
        assert ours.tokens == theirs.tokens[:NEW]
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs[:NEW], atol=1e-4)


@pytest.mark.parametrize("block", [2, 5, 8])
@pytest.mark.parametrize("rightness", ["never", "two_in_three", "always"])
def test_any_drafter_gives_the_targets_own_tokens(plain: Plain, rightness: str, block: int) -> None:
    params, model = scripted(plain, rightness, block)
    rows = generate(params, model, plain.prompts, NEW, mesh=plain.pair.mesh, sampling=SAMPLING, page=PAGE)
    same_as_plain(rows, plain)
    rounds = {length for row in rows for length in row.acceptance_lengths}
    expected = {"never": {1}, "two_in_three": set(range(1, min(block, 3) + 1)), "always": {block}}[rightness]
    assert rounds == expected  # the drafter was as right as it was meant to be


@pytest.mark.parametrize("block", [3, 8])
def test_a_real_drafter_gives_the_targets_own_tokens(plain_trained: Plain, block: int) -> None:
    pair = plain_trained.pair
    rows = generate(
        pair.params,
        pair.model,
        plain_trained.prompts,
        NEW,
        mesh=pair.mesh,
        block_size=block,
        sampling=SAMPLING,
        page=PAGE,
    )
    same_as_plain(rows, plain_trained)
    for temperature in (0.0, 0.7, 1.0):  # it is right now and then at every temperature: the theorem is not tested idly
        lengths = [
            n
            for row, g in zip(ROWS, rows, strict=True)
            if row["temperature"] == temperature
            for n in g.acceptance_lengths
        ]
        assert 1.2 < np.mean(lengths) < block
        assert {1, block} <= set(lengths)


def test_chunks_and_pages_change_nothing(plain_trained: Plain) -> None:
    """Neither a token nor a draft: what both caches hold does not depend on how it came there."""
    pair, options = plain_trained.pair, {"sampling": SAMPLING, "block_size": 8}
    whole = generate(pair.params, pair.model, plain_trained.prompts, 10, mesh=pair.mesh, page=PAGE, **options)
    pieces = generate(pair.params, pair.model, plain_trained.prompts, 10, mesh=pair.mesh, page=5, chunk=7, **options)
    for a, b in zip(whole, pieces, strict=True):
        assert (a.tokens, a.acceptance_lengths) == (b.tokens, b.acceptance_lengths)


def test_kernels_change_no_token(plain_trained: Plain) -> None:
    """Neither a token nor a draft: compiled kernels on a GPU, the same kernels interpreted elsewhere."""
    pair, few = plain_trained.pair, slice(3, 7)
    kernels = resolve("interpreted" if jax.default_backend() == "cpu" else "triton", jax.default_backend())
    options = {"sampling": jax.tree.map(lambda a: a[few], SAMPLING), "block_size": 8, "page": 16, "chunk": 48}
    prompts = plain_trained.prompts[few]
    plainly = generate(pair.params, pair.model, prompts, 10, mesh=pair.mesh, **options)
    ours = generate(pair.params, replace(pair.model, kernels=kernels), prompts, 10, mesh=pair.mesh, **options)
    for a, b in zip(ours, plainly, strict=True):
        assert (a.tokens, a.acceptance_lengths) == (b.tokens, b.acceptance_lengths)


def test_a_drafter_that_knows_the_targets_logits_is_always_right(plain: Plain) -> None:
    """Drafts are drawn with the verifier's noise, temperature and filters, so equal logits give equal tokens."""
    block, script = 5, {"script": jnp.asarray(script_of([range(5, 60)] * len(ROWS), 60, PAGE))}
    model = Model(ScriptedTarget(sharpness=0.01), ScriptedDrafter(block, twin=True), "reference")
    params = ModelParams({"embed": jnp.zeros((64, 1)), **script}, script)
    rows = generate(params, model, [[5]] * len(ROWS), NEW, mesh=plain.pair.mesh, sampling=SAMPLING, page=PAGE)
    assert len({tuple(row.tokens) for row in rows}) == 11  # the five greedy rows agree, no two hot ones do
    assert {n for row in rows for n in row.acceptance_lengths} == {block}


def test_the_oracle_writes_the_same(plain: Plain) -> None:
    """Plain cached decoding equals the target without a cache, row by row."""
    for i in (0, 8, 12, 7, 11):
        row = jax.tree.map(lambda a, i=i: jnp.asarray(a[i : i + 1]), SAMPLING)
        tokens = continuation(plain.pair.params.target, plain.pair.model.target, plain.prompts[i], 8, row, frozenset())
        assert tokens == plain.rows[i].tokens[:8]


def always_accept(block: jax.Array, draws: jax.Array, width: jax.Array) -> jax.Array:
    """A wrong rule: goes on behind a draft that the target did not draw."""
    return jnp.maximum(width - 1, 0)


def accept_one_more(block: jax.Array, draws: jax.Array, width: jax.Array) -> jax.Array:
    """A wrong rule, off by one."""
    return jnp.minimum(equality(block, draws, width) + 1, jnp.maximum(width - 1, 0))


@pytest.mark.parametrize("rule", [always_accept, accept_one_more])
def test_a_wrong_rule_is_seen(plain: Plain, rule: object) -> None:
    """The negative control: the comparison above can fail, greedy and sampled."""
    params, model = scripted(plain, "two_in_three", 5)
    rows = generate(params, model, plain.prompts, NEW, mesh=plain.pair.mesh, sampling=SAMPLING, page=PAGE, accept=rule)
    different = [ours.tokens != theirs.tokens[:NEW] for ours, theirs in zip(rows, plain.rows, strict=True)]
    for temperature in (0.0, 0.7, 1.0):
        assert any(d for d, row in zip(different, ROWS, strict=True) if row["temperature"] == temperature)


def test_another_seed_is_seen(plain: Plain) -> None:
    """Another control: with another key the hot rows differ and the greedy ones do not."""
    other = RowSampling(
        SAMPLING.temperature, SAMPLING.top_k, SAMPLING.top_p, SAMPLING.min_p, SAMPLING.key ^ np.uint32(1)
    )
    rows = generate(*plain.pair.alone, plain.prompts, NEW, mesh=plain.pair.mesh, sampling=other, page=PAGE)
    for row, ours, theirs in zip(ROWS, rows, plain.rows, strict=True):
        assert (ours.tokens == theirs.tokens[:NEW]) == (row["temperature"] == 0)
