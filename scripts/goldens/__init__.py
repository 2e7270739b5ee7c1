"""Golden cases and how each kind of them is run: the parts of ``check_goldens``."""
