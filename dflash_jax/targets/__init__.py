"""Target models by config type. A target module offers ``forward``, ``head``, ``embed`` and ``cache_shape``."""

from typing import Any

from dflash_jax.config import GptOssConfig, HybridConfig, HybridMoeConfig, MoeConfig, TargetConfig
from dflash_jax.targets import dense, gpt_oss, hybrid, moe
from dflash_jax.targets.hidden import Hidden

IMPLEMENTATIONS: dict[type, Any] = {
    TargetConfig: dense,
    MoeConfig: moe,
    GptOssConfig: gpt_oss,
    HybridConfig: hybrid,
    HybridMoeConfig: hybrid,
}


def of(cfg: Any) -> Any:
    """The target module that runs ``cfg``."""
    return IMPLEMENTATIONS[type(cfg)]


__all__ = ["IMPLEMENTATIONS", "Hidden", "dense", "gpt_oss", "hybrid", "moe", "of"]
