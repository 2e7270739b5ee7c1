"""Orbax checkpoints: saved on some devices, restored on others, and never taken for whole before they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints as tiny

from convert.hf_config import target_config
from dflash_jax import checkpoint
from dflash_jax.params import abstract, flatten, leaves_of
from dflash_jax.sharding import make_mesh

pytestmark = pytest.mark.devices(8)

CFG = dataclasses.replace(
    target_config({**tiny.TARGET, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}),
    tie_word_embeddings=True,
)


def random_params(dtype, mesh):
    random = np.random.default_rng(0)
    return {
        name: jax.device_put(random.normal(size=spec.shape).astype(spec.dtype), spec.sharding)
        for name, spec in abstract(CFG, dtype, mesh).items()
    }


def bits(params):
    return {name: np.asarray(value).tobytes() for name, value in flatten(params).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    params = random_params(jnp.bfloat16, make_mesh(8))
    path = tmp_path_factory.mktemp("saved") / "params"
    checkpoint.save(params, path)
    return params, path


@pytest.mark.parametrize(("model", "data"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2)])
def test_saved_on_eight_devices_restored_on_any(saved, model, data):
    params, path = saved
    mesh = make_mesh(model, data)
    restored = checkpoint.restore(path, CFG, jnp.bfloat16, mesh)
    assert bits(restored) == bits(params)
    for name, spec in abstract(CFG, jnp.bfloat16, mesh).items():
        assert flatten(restored)[name].sharding.is_equivalent_to(spec.sharding, len(spec.shape)), name


def test_restored_in_another_dtype(saved):
    params, path = saved
    restored = checkpoint.restore(path, CFG, jnp.float32, make_mesh(2))
    for name, value in flatten(restored).items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(value), np.asarray(flatten(params)[name]).astype(np.float32))


def test_what_is_stored_is_known_without_reading(saved):
    params, path = saved
    shapes = {name: leaf.shape for name, leaf in flatten(leaves_of(CFG)).items()}
    assert checkpoint.stored(path) == {name: (shape, jnp.dtype(jnp.bfloat16)) for name, shape in shapes.items()}
    some = {name: checkpoint.stored(path)[name] for name in ("embed", "layers.1.q")}
    for name, value in checkpoint.read(path, some).items():
        assert value.tobytes() == bits(params)[name]


def test_an_existing_folder_is_not_overwritten(saved):
    params, path = saved
    with pytest.raises(ValueError, match="exists already"):
        checkpoint.save(params, path)


def test_a_config_that_does_not_fit_is_refused_with_all_differences(saved):
    _, path = saved
    other = dataclasses.replace(CFG, num_hidden_layers=1, layer_types=("full_attention",), qkv_bias=True, head_dim=8)
    with pytest.raises(ValueError, match="does not fit") as error:
        checkpoint.restore(path, other, jnp.float32, make_mesh())
    for said in (
        "missing arrays: layers.0.k_bias",
        "unknown arrays: layers.1.down",
        "layers.0.q is (32, 8, 16)",
        "(32, 8, 8)",
    ):
        assert said in str(error.value)


def test_pieces_become_a_checkpoint_only_when_finished(tmp_path):
    path = tmp_path / "pieces"
    flat = {name: np.asarray(value) for name, value in random_params(jnp.float32, make_mesh()).items()}
    names = sorted(flat)
    for group in (names[:3], names[3:10]):
        checkpoint.append({name: flat[name] for name in group}, path)
    assert checkpoint.appended(path) == set(names[:10])
    with pytest.raises(ValueError, match="never finished"):
        checkpoint.restore(path, CFG, jnp.float32, make_mesh())
    checkpoint.append({name: flat[name] for name in names[10:]}, path)
    assert checkpoint.appended(path) == set(names)
    checkpoint.finish(path)
    assert bits(checkpoint.restore(path, CFG, jnp.float32, make_mesh(4))) == {k: v.tobytes() for k, v in flat.items()}


def test_nothing_there(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        with pytest.raises(ValueError, match="no finished checkpoint"):
            checkpoint.restore(tmp_path / name, CFG, jnp.float32, make_mesh())
