"""Which implementation of the ops runs, chosen out loud.

``reference`` is plain JAX and runs on every platform. Compiled kernels join ``IMPLEMENTED`` with the platform that
runs them; this module will be the only importer of the Triton backend of Pallas.
"""

# implementation -> platforms (jax.default_backend()) that run it; None: all of them.
IMPLEMENTED: dict[str, tuple[str, ...] | None] = {"reference": None}


def resolve(kernels: str, platform: str) -> str:
    """The implementation behind ``kernels`` ("auto" or a name) on ``platform``: "cpu", "gpu", ...

    Raises:
        ValueError: a name that is not implemented, or not on this platform. Nothing is ever swapped in silence.
    """
    if kernels == "auto":
        return "reference"
    if kernels not in IMPLEMENTED:
        raise ValueError(f"kernels={kernels!r} is not implemented; choose auto or one of {', '.join(IMPLEMENTED)}")
    platforms = IMPLEMENTED[kernels]
    if platforms is not None and platform not in platforms:
        raise ValueError(f"kernels={kernels!r} runs on {', '.join(platforms)}, not on {platform!r}")
    return kernels
