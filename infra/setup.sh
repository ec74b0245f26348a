#!/usr/bin/env bash
# Makes .venv with the pinned CPU environment and this project in editable mode. A no-op when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch="torch==2.13.0"
stamp=.venv/.rollbook-setup
want=$("$python" --version; cat infra/requirements-cpu.txt infra/setup.sh pyproject.toml)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && .venv/bin/python -c "" 2>/dev/null; then
    exit 0
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "rollbook needs Python 3.11 or newer; name one with PYTHON=/path/to/python3 make setup" >&2
    exit 1
}
echo "setting up .venv (about 3 GB; a few minutes the first time)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)

# A CPU build of torch: from this machine's disk where pip knows of one, else from PyTorch's CPU wheel index.
if ! .venv/bin/python -c "import torch, sys; sys.exit('$torch' != 'torch==' + torch.__version__.split('+')[0])" 2>/dev/null; then
    "${pip[@]}" install --no-deps --no-index "$torch" 2>/dev/null ||
        "${pip[@]}" install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
"${pip[@]}" install --no-deps --requirement infra/requirements-cpu.txt
"${pip[@]}" install --no-deps --no-build-isolation --editable .
printf '%s' "$want" > "$stamp"
