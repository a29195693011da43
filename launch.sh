#!/usr/bin/env bash
# Finds a Python for zerolab/run/launch.py, which reads the options, sets up the environment and starts the command.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x "$here/.venv/bin/python" ]; then
    python=$here/.venv/bin/python
fi
if ! command -v "$python" >/dev/null; then
    echo "error: ${PYTHON:+PYTHON=}$python is not a command. Set PYTHON to Python 3.11 or newer" >&2
    exit 2
fi
if ! "$python" -S -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: ${PYTHON:+PYTHON=}$python is $("$python" --version 2>&1). Set PYTHON to Python 3.11 or newer" >&2
    exit 2
fi
# Paths on the command line begin in the current folder, so it stays the current one. The project is found by
# PYTHONPATH, and with PYTHONSAFEPATH nothing in the current folder is imported in its place.
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
exec "$python" -m zerolab.run.launch "$@"
