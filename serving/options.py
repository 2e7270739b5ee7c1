"""What kind of value an option takes, checked before anything uses it."""

from math import isfinite
from numbers import Integral, Real
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether a value counts things: an int or a numpy integer, no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number, no bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def check_kinds(
    options: object,
    whole: tuple[str, ...],
    real: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
) -> None:
    """Raises ValueError for the first field of ``options`` that is not of its kind; ``optional`` ones take None too."""
    for names, kind, fits in (
        (whole, "a whole number", is_whole),
        (real, "a finite number", is_number),
        (flags, "True or False", lambda value: isinstance(value, bool)),
    ):
        for name in names:
            value = getattr(options, name)
            if not (fits(value) or (value is None and name in optional)):
                raise ValueError(f"{name} must be {kind}, got {value!r}")
