#!/usr/bin/env bash
# From a fresh clone to a real model answering, plain and with DFlash. Arguments go to scripts/demo.py (try --help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/venv.sh
exec .venv/bin/python scripts/demo.py "$@"
