#!/usr/bin/env bash
# Makes the project's .venv and installs the project with its demo and dev extras into it.
# Does nothing when that is already done for this pyproject.toml in this place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
stamp=.venv/installed
wanted="$(pwd -P; cat pyproject.toml)"

find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or later is needed; python3 here is: $(python3 --version 2>&1 || true)" >&2
    return 1
}

if [[ ! -f "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base="$(find_python)"
        "$base" -m venv --clear .venv
    fi
    echo "Installing the project and its dependencies into .venv ..." >&2
    "$python" -m pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
    printf '%s\n' "$wanted" >"$stamp"
fi
