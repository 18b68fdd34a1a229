#!/usr/bin/env bash
# The GPU suite on a bare machine with a CUDA GPU: `bash bench/gpu_suite.sh [pytest arguments]`.
#
# What the call carried is put in place first (gpu_join.sh). WORKERS sets the processes, 24 unless
# told otherwise; $OUT gets the log, a line a test as it ends, so that a run that is cut tells what
# failed. The exit status is pytest's.
set -uo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
workers="${WORKERS:-24}"
python3 -m pytest -m gpu -v --numprocesses "$workers" --maxprocesses "$workers" "$@" 2>&1 |
  tee "${OUT:-/tmp}/gpu_suite.log"
