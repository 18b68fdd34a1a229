#!/usr/bin/env bash
# The GPU suite on a bare machine with a CUDA GPU: `bash bench/gpu_suite.sh [pytest arguments]`.
#
# What the call carried is put in place first (gpu_join.sh). WORKERS sets the processes, 24 unless
# told otherwise; $OUT gets the log, a line a test as it ends, and failures.log with what each
# failure said, so that a run that is cut tells both. The exit status is pytest's. NEWEST=1 runs it on
# the torch that torch_pack.sh packed.
set -uo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
if [ -n "${NEWEST:-}" ]; then
  # shellcheck source=bench/torch_setup.sh
  source bench/torch_setup.sh || exit
fi
workers="${WORKERS:-24}"
export PYTHONPATH="$PWD/bench:$PYTHONPATH"
python3 -m pytest -m gpu -v -p told_failures --numprocesses "$workers" --maxprocesses "$workers" "$@" 2>&1 |
  tee -i "${OUT:-/tmp}/gpu_suite.log"
