#!/usr/bin/env bash
# Create .venv and install s2rl with everything that the quickstart and the tests need.
# Finds a suitable Python and hands over to setup_env.py. S2RL_PYTHON names one explicitly.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suitable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [[ -n "${S2RL_PYTHON:-}" ]]; then
    candidates=("$S2RL_PYTHON")
else
    # 3.11 first: it is the version that the tests run with.
    candidates=(python3.11 python3.12 python3.13 python3 python)
fi
for candidate in "${candidates[@]}"; do
    if suitable "$candidate"; then
        exec "$candidate" scripts/setup_env.py
    fi
done
echo "error: no Python 3.11 or newer with the modules venv and ensurepip among: ${candidates[*]}." >&2
echo "Install one (on Debian and Ubuntu: apt-get install python3.11 python3.11-venv), or set S2RL_PYTHON to its path." >&2
exit 2
