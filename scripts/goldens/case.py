"""One golden case as it lies on disk, what came of it, and the bounds that its arrays must keep."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from convert.hf_config import FAMILIES, read_json

# Bounds on the largest absolute error (golden/README.md, "Tolerances").
TARGET_BOUND, HYBRID_BOUND, HIDDEN_BOUND, DRAFT_LOGITS_BOUND = 1e-3, 3e-3, 1e-4, 5e-4
HYBRIDS = ("qwen3_5", "qwen3_next")


@dataclass(frozen=True)
class Case:
    """One folder: what case.json says and the expected arrays."""

    name: str
    folder: Path
    about: Mapping[str, Any]
    arrays: Mapping[str, NDArray]

    def path(self, relative: str) -> Path:
        """A folder that case.json names relative to the case or to a folder above it."""
        for base in (self.folder, *self.folder.parents):
            if (base / relative).is_dir():
                return base / relative
        raise FileNotFoundError(f"{relative} lies neither in {self.folder} nor above it")

    def several(self, pattern: str) -> list[NDArray]:
        """The arrays whose names match a pattern with one number, in the order of the numbers."""
        found = {int(m.group(1)): a for n, a in self.arrays.items() if (m := re.fullmatch(pattern, n))}
        return [found[i] for i in sorted(found)]


@dataclass
class Verdict:
    """What came of a case: comparisons of ids by label, largest error and bound by array, misses in words, skips."""

    name: str
    ids: dict[str, list[bool]] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def same(self, label: str, ours: Any, theirs: Any, where: str = "") -> None:
        """Ids, lengths or settings that must be equal."""
        a, b = np.asarray(ours), np.asarray(theirs)
        equal = a.shape == b.shape and bool((a == b).all())
        self.ids.setdefault(label, []).append(equal)
        if not equal:
            self.misses.append(f"{where or label}: {a.tolist()}, expected {b.tolist()}")

    def close(self, label: str, ours: ArrayLike, theirs: ArrayLike | None, bound: float) -> None:
        """Values that must agree to ``bound``, infinities exactly; None where the case does not say."""
        if theirs is None:
            return
        a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        worst = np.inf
        if a.shape == b.shape:
            differ = a != b  # equal infinities have no difference to take
            worst = float(np.nan_to_num(np.abs(a[differ] - b[differ]), nan=np.inf, posinf=np.inf).max(initial=0.0))
        if not worst <= bound:
            detail = f"{worst:.1e}" if a.shape == b.shape else f"shape {a.shape} for {b.shape}"
            self.misses.append(f"{label}: {detail}, bound {bound:.0e}")
        before = self.errors.get(label, (0.0, bound))
        self.errors[label] = (max(worst, before[0]), max(bound, before[1]))

    def line(self) -> str:
        """The case in one line, with its misses below."""
        if not self.ids and not self.errors and not self.misses:
            return f"skipped  {self.name}: {'; '.join(self.skipped)}"
        parts = [f"{label} {'exact' if all(r) else 'WRONG'} {sum(r)}/{len(r)}" for label, r in self.ids.items()]
        parts += [f"{label} {worst:.1e} (<= {bound:.1e})" for label, (worst, bound) in self.errors.items()]
        parts += self.notes + [f"skipped: {what}" for what in self.skipped]
        lines = [f"{'MISS' if self.misses else 'ok':7}  {self.name}: {', '.join(parts)}"]
        return "\n".join(lines + [f"         {miss}" for miss in self.misses])


def spread(values: NDArray) -> float:
    """The size of a residual stream, by which the bound on taps is scaled: its root mean square, at least 1."""
    return max(1.0, float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))))


def family_of(folder: Path) -> str:
    """The family of the target in ``folder``."""
    return str(read_json(folder / "config.json").get("model_type"))


def bound_of(folder: Path) -> float:
    """The bound on the values of the target in ``folder``."""
    return HYBRID_BOUND if family_of(folder).startswith(HYBRIDS) else TARGET_BOUND


def not_built(folder: Path) -> str | None:
    """Why the target in ``folder`` cannot be run: its family's name, if it is not built."""
    return None if family_of(folder) in FAMILIES else f"target family {family_of(folder)} is not built"
