"""Drafters by config type; each is a module (or object) that meets ``interface.Drafter``."""

from typing import Any

from dflash_jax.config import DrafterConfig
from dflash_jax.drafters import dflash
from dflash_jax.drafters.interface import Drafter, TargetIO

IMPLEMENTATIONS: dict[type, Any] = {DrafterConfig: dflash}


def of(cfg: Any) -> Drafter:
    """The drafter module that runs ``cfg``."""
    implementation: Drafter = IMPLEMENTATIONS[type(cfg)]
    return implementation


__all__ = ["IMPLEMENTATIONS", "Drafter", "TargetIO", "dflash", "of"]
