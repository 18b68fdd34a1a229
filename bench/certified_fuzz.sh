#!/usr/bin/env bash
# A million fuzzed certificates on a machine with a CUDA GPU:
#
#     bash bench/certified_fuzz.sh [certified_fuzz.py's arguments]
#
# PROCESSES (18: each compiles the kernels of one dtype, width and group) share the GPU for at most
# SECONDS_EACH (150). $OUT gets certified-fuzz.json, what all of them counted. The exit status is 1
# for a violated bound, one that the tolerance does not allow, a process that ended otherwise, or
# fewer than HEAD_STEPS (1,000,000).
set -uo pipefail
cd "$(dirname "$0")/.." || exit
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
out="${OUT:-/tmp}" work="$(mktemp -d)" processes="${PROCESSES:-18}" seconds="${SECONDS_EACH:-150}"
steps="${HEAD_STEPS:-1000000}"
export OMP_NUM_THREADS=1
pids=() parts=()
for ((index = 0; index < processes; index++)); do
  parts+=("$work/$index.json")
  timeout $((seconds + 60)) "${PYTHON:-python3}" bench/certified_fuzz.py \
    --device "${DEVICE:-cuda}" --head-steps "$steps" --seconds "$seconds" \
    --part "$index/$processes" --out "${parts[index]}" "$@" \
    >"$work/$index.log" 2>&1 &
  pids+=($!)
done
status=0
for index in "${!pids[@]}"; do
  if ! wait "${pids[index]}"; then
    echo "process $index:" && tail -n 3 "$work/$index.log"
    status=1
  fi
done
written=()
for part in "${parts[@]}"; do
  [ ! -s "$part" ] || written+=("$part")
done
[ "${#written[@]}" -gt 0 ] || exit 1
"${PYTHON:-python3}" bench/certified_fuzz.py --join "${written[@]}" \
  --out "$out/certified-fuzz.json" || status=1
"${PYTHON:-python3}" - "$out/certified-fuzz.json" "$steps" <<'PYTHON' || status=1
import json
import sys

found, wanted = json.load(open(sys.argv[1]))["head_steps"], int(sys.argv[2])
if found < wanted:
    sys.exit(f"{found:,} of {wanted:,} head-steps in this time")
PYTHON
exit "$status"
