"""Target models by config type. A target module offers ``forward``, ``head``, ``embed`` and ``cache_shape``."""

from dflash_jax.config import TargetConfig
from dflash_jax.targets import dense
from dflash_jax.targets.hidden import Hidden

IMPLEMENTATIONS = {TargetConfig: dense}

__all__ = ["IMPLEMENTATIONS", "Hidden", "dense"]
