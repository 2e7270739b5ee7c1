"""Target models by config type. A target module offers ``forward``, ``head``, ``embed`` and ``cache_shape``."""

from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.targets import dense
from dflash_jax.targets.hidden import Hidden

IMPLEMENTATIONS: dict[type, Any] = {TargetConfig: dense}


def of(cfg: Any) -> Any:
    """The target module that runs ``cfg``."""
    return IMPLEMENTATIONS[type(cfg)]


__all__ = ["IMPLEMENTATIONS", "Hidden", "dense", "of"]
