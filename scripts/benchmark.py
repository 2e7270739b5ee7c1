"""Measurements: every figure of speed in the README is a command of this file, with its baseline in the same run."""

import jax
import typer
from benchmarks.engine import engine
from benchmarks.kernels import kernels
from benchmarks.measuring import count_compilation
from benchmarks.pair import pair
from benchmarks.step import step
from benchmarks.tune_block import tune_block

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(pair)
app.command()(engine)
app.command()(tune_block)
app.command()(step)
app.command()(kernels)


@app.callback()
def main() -> None:
    """Measure on the device in use."""
    jax.monitoring.register_event_duration_secs_listener(count_compilation)


if __name__ == "__main__":
    try:
        app()
    except ValueError as error:  # what is wrong with the folders or options, in one line
        raise SystemExit(f"error: {error}") from error
