"""Drafters by config type; each is a module (or object) that meets ``interface.Drafter``."""

from typing import Any

from dflash_jax.config import DrafterConfig, Eagle3Config, MTPConfig
from dflash_jax.drafters import dflash, eagle3, mtp
from dflash_jax.drafters.interface import Drafter, TargetIO

IMPLEMENTATIONS: dict[type, Any] = {
    DrafterConfig: dflash,
    Eagle3Config: eagle3.DRAFTER,
    MTPConfig: mtp.DRAFTER,
}


def of(cfg: Any) -> Drafter:
    """The drafter module that runs ``cfg``."""
    implementation: Drafter = IMPLEMENTATIONS[type(cfg)]
    return implementation


__all__ = ["IMPLEMENTATIONS", "Drafter", "TargetIO", "dflash", "eagle3", "mtp", "of"]
