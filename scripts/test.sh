#!/usr/bin/env bash
# Format, lint, types, tests. Arguments go to pytest: bash scripts/test.sh tests/test_step.py -k lossless
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/venv.sh

python=.venv/bin/python
"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
# Most of a test's time is XLA compiling on one thread, so two processes help even on two cores;
# a file stays in one process, where its tests share compiled functions.
"$python" -m pytest -q -n 2 --dist loadfile "$@"
