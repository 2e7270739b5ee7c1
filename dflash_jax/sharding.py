"""Where arrays live: logical axis names -> mesh axes, one rule table for every model.

A mesh has two axes: ``data`` splits rows, ``model`` splits heads, MLP width and vocabulary (tensor parallelism). Axes
are ``Auto`` on purpose: XLA inserts the collectives, and only the kernels' border uses ``shard_map``.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RULES: Mapping[str, str | None] = {
    "layers": None,
    "embed": None,
    "head": None,
    "taps": None,
    "kv": None,
    "heads_of_group": None,
    "heads": "model",
    "kv_heads": "model",
    "key_heads": "model",
    "value_heads": "model",
    "kernel": None,
    "mlp": "model",
    "vocab": "model",
    "slots": None,
    "experts": None,  # each device holds a slice of every expert: no imbalance, whatever the router chooses
    "rows": "data",
}


def make_mesh(model: int = 1, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A ``data`` x ``model`` mesh over the first devices, with Auto axes.

    Raises:
        ValueError: fewer devices than data * model.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < data * model:
        raise ValueError(f"a mesh of {data} x {model} needs {data * model} devices, {len(devices)} are there")
    grid = np.array(devices[: data * model]).reshape(data, model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def spec_of(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of an array of ``shape`` with logical ``axes``.

    An axis whose size the mesh axis does not divide is replicated (KV heads fewer than devices, odd vocabularies).

    Raises:
        ValueError: an unknown logical axis, or two axes of one array on the same mesh axis.
    """
    unknown = [axis for axis in axes if axis not in RULES]
    if unknown:
        raise ValueError(f"no sharding rule for the logical axes {unknown}")
    wanted = [RULES[axis] for axis in axes]
    placed = [
        name if name is not None and size % mesh.shape[name] == 0 else None
        for name, size in zip(wanted, shape, strict=True)
    ]
    used = [name for name in placed if name is not None]
    if len(set(used)) != len(used):
        raise ValueError(f"the logical axes {axes} put two dimensions on one mesh axis: {placed}")
    return PartitionSpec(*placed)


def sharding_of(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """``spec_of`` bound to its mesh."""
    return NamedSharding(mesh, spec_of(axes, shape, mesh))
