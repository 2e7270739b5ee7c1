"""The theorem over mixtures of experts, where a token's neighbours decide how its experts are multiplied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_theorem import NEW, PAGE, SAMPLING, Plain, plain_of, same_as_plain, scripted
from tiny_models import GPT_OSS, MIXTURE, tiny_target

from dflash_jax import generate
from dflash_jax.reference import continuation
from pallas_kernels.expert_mlp.reference import GATHERED_PAIRS

BLOCK = 8


@pytest.fixture(scope="module", params=[MIXTURE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def plain(request: pytest.FixtureRequest, mesh: Mesh) -> Plain:
    lengths = np.random.default_rng(0)
    return plain_of(tiny_target(request.param, mesh), [lengths.integers(0, 89, n).tolist() for n in (3, 17, 1, 30)])


@pytest.mark.parametrize("rightness", ["never", "two_in_three", "always"])
def test_any_drafter_gives_a_mixtures_own_tokens(plain: Plain, rightness: str) -> None:
    """Plain steps gather their experts, verify steps group them: the tokens are the same."""
    params, model = scripted(plain, rightness, BLOCK)
    pairs = len(plain.prompts) * model.target.num_experts_per_tok
    assert pairs <= GATHERED_PAIRS < pairs * BLOCK
    rows = generate(params, model, plain.prompts, NEW, mesh=plain.pair.mesh, sampling=SAMPLING, page=PAGE)
    same_as_plain(rows, plain)
    rounds = {length for row in rows for length in row.acceptance_lengths}
    assert rounds == {"never": {1}, "two_in_three": {1, 2, 3}, "always": {BLOCK}}[rightness]


def test_the_oracle_writes_a_mixtures_tokens(plain: Plain) -> None:
    """Plain cached decoding, windows and sinks included, equals the target without a cache."""
    for i in (3, 8, 12):
        row = jax.tree.map(lambda a, i=i: jnp.asarray(a[i : i + 1]), SAMPLING)
        tokens = continuation(plain.pair.params.target, plain.pair.model.target, plain.prompts[i], 8, row, frozenset())
        assert tokens == plain.rows[i].tokens[:8]
