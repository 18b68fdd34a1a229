#!/usr/bin/env bash
# The GPU suite on a bare machine with a CUDA GPU: `bash bench/gpu_suite.sh [pytest arguments]`.
#
# Wheels in .whl/ (what that machine lacks: `pip download --no-deps -d .whl gguf==0.19.0
# platformdirs==4.14.5`) go to /tmp/site first. WORKERS sets the processes, 24 unless told otherwise;
# $OUT gets the log, a line a test as it ends, so that a run that is cut tells what failed. The exit
# status is pytest's.
set -uo pipefail
cd "$(dirname "$0")/.."
if compgen -G ".whl/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target /tmp/site .whl/*.whl || exit
fi
export PYTHONPATH="$PWD:/tmp/site${PYTHONPATH:+:$PYTHONPATH}"
workers="${WORKERS:-24}"
python3 -m pytest -m gpu -v --numprocesses "$workers" --maxprocesses "$workers" "$@" 2>&1 |
  tee "${OUT:-/tmp}/gpu_suite.log"
