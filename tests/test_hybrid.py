"""Targets with recurrent layers: the theorem, long texts, the engine's rows and prefixes, parameters."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import Garage, generated_all, request_of, same
from jax.sharding import Mesh
from scripted import ScriptedDrafter, script_of
from tiny_hybrid import CONFIGS, hybrid_pair
from tiny_models import Pair

from dflash_jax import Generation, Model, ModelParams, generate, make_mesh, row_sampling
from dflash_jax.params import flatten, init, pack, unpack
from dflash_jax.reference import continuation, full_pass
from dflash_jax.step import decode_step, new_state
from serving import SamplingParams, build

NEW, PAGE = 24, 64
SAMPLING = row_sampling(4, temperature=[0.0, 1.0, 1.0, 0.7], top_k=[0, 0, 9, 0], seed=3)
WRONG = {"never": lambda i: True, "two_in_three": lambda i: i % 3 == 0, "always": lambda i: False}


@pytest.fixture(scope="module")
def garage() -> Garage:
    return Garage()


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def hybrid(request: pytest.FixtureRequest, mesh: Mesh) -> Pair:
    return hybrid_pair(mesh, request.param)


@pytest.fixture(scope="module")
def moe(mesh: Mesh) -> Pair:
    return hybrid_pair(mesh)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    chance = np.random.default_rng(0)
    return [chance.integers(0, 89, n).tolist() for n in lengths]


def scripted(pair: Pair, prompts: list[list[int]], rows: list[Generation], rightness: str, block: int) -> list[object]:
    """The pair's target with a drafter that is right never, two times in three, or always."""
    texts = []
    for prompt, row in zip(prompts, rows, strict=True):
        text = prompt + row.tokens
        texts.append([(token + 1) % 90 if WRONG[rightness](i) else token for i, token in enumerate(text)])
    longest = max(map(len, texts)) + block
    params = ModelParams(pair.params.target, {"script": jnp.asarray(script_of(texts, longest, PAGE))})
    return [params, Model(pair.model.target, ScriptedDrafter(block), "reference")]


@pytest.mark.parametrize("rightness", ["never", "two_in_three", "always"])
def test_any_drafter_gives_the_targets_own_tokens(hybrid: Pair, rightness: str) -> None:
    """Prompts end inside and behind the first chunk; two of four rows draw with heat."""
    prompts, block = prompts_of((3, 70, 1, 41)), 8
    longer = generate(*hybrid.alone, prompts, NEW + block, mesh=hybrid.mesh, sampling=SAMPLING, page=PAGE)
    rows = generate(
        *scripted(hybrid, prompts, longer, rightness, block),
        prompts,
        NEW,
        mesh=hybrid.mesh,
        sampling=SAMPLING,
        page=PAGE,
        chunk=96,
    )
    for ours, theirs in zip(rows, longer, strict=True):
        assert ours.tokens == theirs.tokens[:NEW]
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs[:NEW], atol=2e-4)
    rounds = {length for row in rows for length in row.acceptance_lengths}
    assert rounds == {"never": {1}, "two_in_three": {1, 2, 3}, "always": {block}}[rightness]
    for i in (0, 1):
        row = jax.tree.map(lambda a, i=i: jnp.asarray(a[i : i + 1]), SAMPLING)
        tokens = continuation(hybrid.params.target, hybrid.model.target, prompts[i], 8, row, frozenset())
        assert tokens == longer[i].tokens[:8]


def test_a_real_drafter_gives_the_targets_own_tokens(moe: Pair) -> None:
    prompts = prompts_of((5, 40, 12, 1))
    plain = generate(*moe.alone, prompts, 12, mesh=moe.mesh, sampling=SAMPLING, page=PAGE)
    rows = generate(moe.params, moe.model, prompts, 12, mesh=moe.mesh, sampling=SAMPLING, page=PAGE, block_size=5)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_600_tokens_do_not_drift(moe: Pair, temperature: float) -> None:
    """Hundreds of folds: tokens are those of plain decoding, and the last logits those of one pass over the text."""
    prompts, block, count = prompts_of((9,)), 8, 600
    sampling = row_sampling(1, temperature=temperature, seed=5)
    plain = generate(*moe.alone, prompts, count + block, mesh=moe.mesh, sampling=sampling, page=PAGE)
    rows = generate(
        *scripted(moe, prompts, plain, "two_in_three", block),
        prompts,
        count,
        mesh=moe.mesh,
        sampling=sampling,
        page=PAGE,
    )
    assert rows[0].tokens == plain[0].tokens[:count]
    text = jnp.asarray([prompts[0] + rows[0].tokens[:-1]])
    _, logits = full_pass(moe.params.target, moe.model.target, text)
    chosen = jax.nn.log_softmax(logits[0, len(prompts[0]) - 1 :])[jnp.arange(count), jnp.asarray(rows[0].tokens)]
    np.testing.assert_allclose(rows[0].logprobs, chosen, atol=5e-4)


def test_chunks_and_pages_change_nothing(moe: Pair) -> None:
    prompts = prompts_of((150, 7))
    sampling = row_sampling(2, temperature=[0.0, 1.0], seed=1)
    whole = generate(*moe.alone, prompts, 10, mesh=moe.mesh, sampling=sampling, page=PAGE, chunk=150)
    pieces = generate(*moe.alone, prompts, 10, mesh=moe.mesh, sampling=sampling, page=5, chunk=7)
    assert [row.tokens for row in whole] == [row.tokens for row in pieces]


def test_kernels_change_no_token(moe: Pair) -> None:
    """Float32 norm weights, grouped projections and gated queries through the kernels, interpreted."""
    if jax.default_backend() != "cpu":
        pytest.skip("kernels are interpreted on CPUs only")
    params, model = moe.alone
    plainly = generate(params, model, [[1, 2, 3, 4, 5]], 4, mesh=moe.mesh, chunk=8)
    ours = generate(params, replace(model, kernels="interpreted"), [[1, 2, 3, 4, 5]], 4, mesh=moe.mesh, chunk=8)
    assert ours[0].tokens == plainly[0].tokens


# --- the engine


def requests_of(count: int, longest: int = 90, shared: int = 0) -> list:
    chance, made = np.random.default_rng(2), []
    stem = chance.integers(3, 89, longest).tolist()
    for i in range(count):
        length = int(chance.integers(1, longest))
        prompt = chance.integers(3, 89, length).tolist()
        if i % 2 and shared:
            prompt = stem[:shared] + prompt[: longest - shared]
        params = SamplingParams(
            temperature=[0.0, 1.0][i % 2], seed=i, max_tokens=int(chance.integers(2, 40)), top_k=[0, 7][i % 3 == 0]
        )
        made.append(request_of(prompt, params, index=i, room=160 - len(prompt)))
    return made


@pytest.mark.parametrize("overlap", [True, False])
def test_the_engine_gives_generates_ids(garage: Garage, moe: Pair, overlap: bool) -> None:
    """More requests than rows, so that slots are used again; some are put out in the middle and come back."""
    engine = garage.engine(moe, 160, block_size=4, page_size=8, overlap=overlap, kept=300, max_num_seqs=3)

    def put_out(at: int) -> None:
        if at % 9 == 8 and engine.scheduler.rows and not engine.scheduler.rows[-1].gone:
            engine.scheduler.preempt(engine.scheduler.rows[-1])

    requests = garage.run(engine, requests_of(10, shared=40), put_out)
    for request, row in zip(requests, generated_all(moe, requests, 4), strict=True):
        same(request, row)
    assert engine.stats.preemptions > 2
    assert engine.stats.hit_tokens > 0


@pytest.mark.parametrize("snapshots", [12, 1])
def test_a_shared_prefix_is_restored(moe: Pair, monkeypatch: pytest.MonkeyPatch, snapshots: int) -> None:
    """Prompts that begin alike, all at once; then the next turn of each. With one snapshot they take it from each
    other; tokens are the same."""
    monkeypatch.setattr(build, "SNAPSHOTS_A_ROW", 4 if snapshots > 1 else 0.34)
    garage = Garage()
    engine = garage.engine(moe, 160, block_size=4, page_size=8, max_num_seqs=3)
    assert engine.runner.snapshots == snapshots
    stem, chance = prompts_of((50,))[0], np.random.default_rng(4)
    firsts = [
        request_of([*stem, *chance.integers(3, 89, 9 + 5 * i).tolist()], SamplingParams(seed=i, max_tokens=9), index=i)
        for i in range(4)
    ]
    for request in firsts:
        request.limit = 9
    garage.run(engine, firsts)
    for request, row in zip(firsts, generated_all(moe, firsts, 4), strict=True):
        same(request, row)
    hits = [request.cached_tokens for request in firsts]
    assert hits == [0, 48, 48, 48] if snapshots > 1 else max(hits) == 48
    seconds = [
        request_of([*first.prompt, *first.output, 5, 6], SamplingParams(seed=i, max_tokens=9), index=i)
        for i, first in enumerate(firsts)
    ]
    for request in seconds:
        request.limit = 9
    garage.run(engine, seconds)
    for request, row in zip(seconds, generated_all(moe, seconds, 4), strict=True):
        same(request, row)
    if snapshots > 1:
        assert all(r.cached_tokens >= (len(f.prompt) - 1) // 8 * 8 for r, f in zip(seconds, firsts, strict=True))
    kept = engine.scheduler.tree.snapshots
    assert not kept.pins
    assert len(kept.free) + len(kept.kept) == snapshots


# --- what is refused, and parameters


def test_a_block_that_cannot_be_folded_is_refused(moe: Pair) -> None:
    model = replace(moe.model, drafter=ScriptedDrafter(65))
    state = new_state(model, 1, 4, 64, jnp.dtype(jnp.float32), moe.mesh)
    with pytest.raises(ValueError, match="65 tokens: a target with recurrent layers verifies at most 64"):
        decode_step(moe.params, model, 65, state, None)


@pytest.mark.parametrize("family", CONFIGS)
def test_packing_can_be_undone(family: str, mesh: Mesh) -> None:
    """Bit for bit in bfloat16, whose zero-centred norms do not survive 1 + w; states' parameters stay float32."""
    cfg = CONFIGS[family]
    plain = init(cfg, jax.random.key(0), jnp.bfloat16, mesh)
    for layer in plain["layers"]:
        layer["input_norm"] = jax.random.normal(jax.random.key(1), layer["input_norm"].shape, jnp.bfloat16) * 1e-6
    back = flatten(unpack(pack(plain, cfg, mesh), cfg))
    assert back.keys() == flatten(plain).keys()
    for name, leaf in flatten(plain).items():
        assert back[name].dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(back[name]), np.asarray(leaf))
        assert (leaf.dtype == jnp.float32) == (name.split(".")[-1] in ("a_log", "delta_norm"))


@pytest.mark.devices(2)
@pytest.mark.parametrize("devices", [2])
def test_two_devices_give_one_devices_tokens(moe: Pair, devices: int) -> None:
    cfg, mesh = moe.model.target, make_mesh(model=devices)
    params = pack(unpack(moe.params.target, cfg), cfg, mesh)
    assert params["layers"][0]["delta_in"].sharding.spec[1] == "model"
    prompts = prompts_of((5, 30))
    one = generate(*moe.alone, prompts, 8, mesh=moe.mesh, page=PAGE)
    two = generate(ModelParams(params), moe.alone[1], prompts, 8, mesh=mesh, page=PAGE)
    assert [row.tokens for row in one] == [row.tokens for row in two]
