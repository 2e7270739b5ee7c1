"""What a target forward returns."""

from typing import Any

from flax import struct
from jax import Array

from dflash_jax.cache import Rows


class Hidden(struct.PyTreeNode):
    """final [B, T, D] after the final norm; features [B, T, K * D], the taps side by side; rows to commit; records.

    ``records`` is what recurrent layers need to fold an accepted prefix; a dense target has none.
    """

    final: Array
    features: Array
    rows: Rows
    records: Any = ()
