"""Eight simulated CPU devices, no GPU tests without a GPU, and the model pairs that all tests share."""

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import pytest
from jax.sharding import Mesh
from tiny_models import Pair, tiny_pair

from convert.load import load
from dflash_jax import Model, ModelParams, make_mesh
from dflash_jax.params import pack

GOLDEN = Path(__file__).parent / "golden"

# Most of a test's time is XLA's: the programs are tiny, and compiling them without optimisation takes 40 % less.
jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and jax.default_backend() != "gpu":
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        for wanted in item.iter_markers("devices"):
            if jax.device_count() < wanted.args[0]:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {wanted.args[0]} devices, there are {jax.device_count()}")
                )


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """One device."""
    return make_mesh()


@pytest.fixture(scope="session")
def tiny(mesh: Mesh) -> Pair:
    """A random pair in float32."""
    return tiny_pair(mesh)


@pytest.fixture(scope="session")
def trained(mesh: Mesh) -> Pair:
    """The trained pair of tests/golden, whose drafter is often right."""
    folder = GOLDEN / "pairs" / "trained_pair"
    loaded = load(folder / "target", "float32", mesh, drafter=folder / "draft")
    assert loaded.drafter is not None
    assert loaded.drafter_params is not None
    params = ModelParams(
        pack(loaded.target_params, loaded.target, mesh), pack(loaded.drafter_params, loaded.drafter, mesh)
    )
    return Pair(params, Model(loaded.target, loaded.drafter, "reference"), mesh)
