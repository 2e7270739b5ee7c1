"""Drafters that draft token by token, in generate() and in the engine: their drafts, not only the tokens.

Tokens alone would hide a wrong drafter. So heads are fitted to texts until they are (nearly) always right, and their
rounds must stay as long whatever brings the rows about: chunks, pages, cached prefixes, preemption.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from engines import Garage, checksum_pair, request_of
from jax.sharding import Mesh
from test_theorem import NEW, PAGE, SAMPLING, Plain, plain_of, same_as_plain
from tiny_chains import eagle3_for, fitted, mtp_for, with_drafter
from tiny_models import Pair

from dflash_jax import generate, step
from serving import SamplingParams
from serving.request import Request

BLOCK, FIRST = 4, 24  # tokens a round; tokens that are asked for
TEXTS = ("Q: tell me about max and the black boat\nA: max", "Q: count from 2 to 7 and tell me about sam\nA: 2")
PROMPTS = [[1, *map(ord, text)] for text in TEXTS]
FAMILIES = {"eagle3": eagle3_for, "mtp": mtp_for}


@dataclass(frozen=True)
class Fitted:
    """A pair whose drafter knows what the target says to PROMPTS."""

    pair: Pair
    outputs: list[list[int]]


@pytest.fixture(scope="module")
def outputs(trained: Pair) -> list[list[int]]:
    rows = generate(*trained.alone, PROMPTS, FIRST + 2 * BLOCK, mesh=trained.mesh)
    return [row.tokens for row in rows]


@pytest.fixture(scope="module", params=list(FAMILIES))
def known(request: pytest.FixtureRequest, trained: Pair, outputs: list[list[int]], mesh: Mesh) -> Fitted:
    texts = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    least = min(map(len, texts))
    assert least >= max(map(len, PROMPTS)) + FIRST + BLOCK
    cfg = FAMILIES[request.param](trained.model.target, block=BLOCK)
    return Fitted(fitted(trained, cfg, [text[:least] for text in texts], mesh), outputs)


@pytest.fixture(scope="module")
def garage() -> Garage:
    return Garage()


def asked() -> list[Request]:
    return [request_of(prompt, SamplingParams(temperature=0.0, max_tokens=FIRST)) for prompt in PROMPTS]


def check(requests: list[Request], known: Fitted) -> list[list[int]]:
    """The target's tokens in rounds that are almost always full; the rounds."""
    for request, output in zip(requests, known.outputs, strict=True):
        assert request.output == output[:FIRST]
        assert np.mean(request.acceptance_lengths) >= 0.9 * BLOCK
    return [request.acceptance_lengths for request in requests]


@pytest.mark.parametrize("page_size", [8, 16])
def test_a_drafter_that_knows_the_text_fills_its_rounds(known: Fitted, garage: Garage, page_size: int) -> None:
    """In the engine, first from nothing, then behind cached prefixes, then once more between other rows."""
    engine = garage.engine(known.pair, 128, block_size=BLOCK, page_size=page_size, prefill_chunk=32)
    first = check(garage.run(engine, asked()), known)
    hits = engine.stats.hit_tokens
    assert check(garage.run(engine, asked()), known) == first
    assert engine.stats.hit_tokens > hits + len(PROMPTS)  # a prefix hit brings the carry along


def test_a_drafter_that_knows_the_text_survives_preemption(known: Fitted, garage: Garage) -> None:
    engine = garage.engine(known.pair, 128, block_size=BLOCK, page_size=8, prefill_chunk=32, kept=128)
    requests = garage.run(engine, asked() + asked())
    assert engine.stats.preemptions > 0
    check(requests[:2], known)
    check(requests[2:], known)


def test_chunks_and_pages_change_no_draft(known: Fitted) -> None:
    pair = known.pair
    whole = generate(pair.params, pair.model, PROMPTS, FIRST, mesh=pair.mesh, page=64)
    pieces = generate(pair.params, pair.model, PROMPTS, FIRST, mesh=pair.mesh, page=5, chunk=7)
    for a, b, output in zip(whole, pieces, known.outputs, strict=True):
        assert a.tokens == b.tokens == output[:FIRST]
        assert a.acceptance_lengths == b.acceptance_lengths
        assert np.mean(a.acceptance_lengths) >= 0.9 * BLOCK


def test_a_lost_carry_is_seen(mesh: Mesh, garage: Garage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a row that starts on cached pages with its slot's old carry drafts something else."""
    right = step.carry_of

    def own_alone(state: object, inputs: object, lengths: object) -> object:
        return right(state.replace(target=state.target.replace(page=1 << 20)), inputs, lengths)  # never at a page's end

    prompt = [5 + i % 40 for i in range(40)]
    rounds = []
    for block, broken in ((7, False), (6, True)):  # two blocks: what is compiled for one is not taken for the other
        pair = checksum_pair(mesh, period=0, block=block)
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(step, "carry_of", own_alone)
            engine = garage.engine(pair, 64, block_size=block, page_size=8)
            params = SamplingParams(temperature=0.0, max_tokens=12)
            for request in ([*prompt[:30], 3], prompt):
                (answer,) = garage.run(engine, [request_of(request, params)])
            assert engine.stats.hit_tokens == 24
            rounds.append((answer.acceptance_lengths[0], block))
    assert rounds[0] == (7, 7)
    assert rounds[1][0] < 6


@pytest.fixture(scope="module")
def plain(tiny: Pair) -> Plain:
    return plain_of(tiny, [np.random.default_rng(n).integers(0, 89, n).tolist() for n in (3, 17, 1, 30)])


@pytest.mark.parametrize("family", ["eagle3", "deep", "mtp", "pre_norm"])
def test_random_heads_change_no_token(tiny: Pair, plain: Plain, mesh: Mesh, family: str) -> None:
    """The theorem, at every temperature and with every filter."""
    target = tiny.model.target
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "qk_norm": True}
    deep = {"layer_types": ("sliding_attention", "full_attention", "full_attention"), "sliding_window": 7}
    cfg = {
        "eagle3": lambda: eagle3_for(target, fc_norm=True),
        "deep": lambda: eagle3_for(target, layers=3, **deep, **flags),
        "mtp": lambda: mtp_for(target),
        "pre_norm": lambda: mtp_for(target, mtp_hidden="pre_norm"),
    }[family]()
    pair = with_drafter(tiny, cfg, mesh)
    rows = generate(pair.params, pair.model, plain.prompts, NEW, mesh=mesh, sampling=SAMPLING, page=PAGE)
    same_as_plain(rows, plain)
