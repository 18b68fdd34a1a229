#!/usr/bin/env bash
# What certified's promotion by need still owes a GPU, on a bare machine with one Hopper GPU and 16
# cores, in calls of 9 minutes:
#
#   export ATTNPLUG_COMMIT=...                # git rev-parse --short=12 HEAD, where there is git
#   bash bench/certified_gpu.sh tests         # certified's GPU tests; again with `tests rest` if cut
#   bash bench/certified_gpu.sh rows          # default options: steps, without slots, phases, `bound`
#   bash bench/certified_gpu.sh fuzz          # a million head-steps
#   bash bench/certified_gpu.sh fidelity      # quantiles of the bounds over text, SmolLM2
#   bash bench/certified_gpu.sh all           # all of these, as far as the time goes
#
# $OUT gets parts.txt, a line for each part as it ends; tests.log, rows.json and rows.log; fuzz.json
# and fuzz-PART.json; fidelity.json. Each is written as it goes: a call that is cut leaves what it
# has. SECONDS_AT_MOST (530) is when a call ends by itself, HEAD_STEPS (1000000) what the fuzz
# counts, WORKERS (16) its processes and the tests', FUZZ_SECONDS when the fuzz begins nothing new.
# DEVICE (cuda): `cpu` tries the script where there is no GPU, and skips `rows`. `fidelity` wants the
# weights in the user's cache (attnplug/models/pretrained.py) and says so. Wheels and
# weights come as gpu_join.sh says. Exits with 1 unless all parts ended well.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${ATTNPLUG_COMMIT:?names the commit that is measured}"
out=${OUT:-/tmp} limit=${SECONDS_AT_MOST:-530} device=${DEVICE:-cuda} workers=${WORKERS:-16}
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3} failed=0
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
left() { echo $((limit - SECONDS)); }
tell() { # part, status, since when
  local word="failed ($2)"
  case $2 in 0) word="ended" ;; 124 | 137) word="cut" ;; esac
  [ "$2" -eq 0 ] || failed=1
  echo "$word: $1, $((SECONDS - $3)) s" | tee -a "$out/parts.txt"
}
within() { timeout --kill-after=5 "$(left)" "$@"; }

op=(tests/ops/certified)
rest=(
  tests/policies/test_certified.py tests/hostile/test_past_the_end.py
  tests/contract/test_policies.py tests/contract/test_cuda_graphs.py
)
tests() { # op, or rest of the tests, or both
  local begun=$SECONDS chosen=("${op[@]}" "${rest[@]}") mark=gpu
  [ "${1:-}" = op ] && chosen=("${op[@]}")
  [ "${1:-}" = rest ] && chosen=("${rest[@]}")
  [ "$device" = cuda ] || mark="not gpu"
  # shellcheck disable=SC2086 # TESTS_TOLD are words
  within "$python" -m pytest -p no:cacheprovider -m "$mark" -k certified -v --tb=short --durations=20 \
    --numprocesses "$workers" --maxprocesses "$workers" ${TESTS_TOLD:-} "${chosen[@]}" \
    >>"$out/tests.log" 2>&1
  tell "tests ${1:-all}" $? "$begun"
}

chosen=(
  "test_certified.py::test_defaults[host-131072-1]" "test_certified.py::test_defaults[host-65536-1]"
  "test_certified.py::test_defaults_without_slots" "test_certified.py::test_defaults[device-131072-1]"
  "test_certified.py::test_certified[host-131072-1]" "test_certified.py::test_certified[host-65536-1]"
  "test_certified.py::test_phases" "test_certified.py::test_the_papers_options" "test_quantize_kv.py"
  "test_certified.py::test_defaults[host-524288-1]" "test_certified.py::test_defaults[host-131072-4]"
)
rows() {
  local begun=$SECONDS kept
  kept=$(mktemp)
  export ATTNPLUG_BENCH_ROWS=$kept
  local paths=("${chosen[@]/#/bench/}")
  if [ "$device" != cuda ]; then
    within "$python" -m pytest -p no:cacheprovider -p no:xdist -o addopts= --collect-only -q \
      "${paths[@]}" >>"$out/rows.log" 2>&1
    tell "rows, only collected" $? "$begun"
    return
  fi
  ATTNPLUG_BENCH_DRY=1 timeout --kill-after=5 $((limit / 3)) "$python" -m pytest -q --tb=short \
    -p no:cacheprovider --numprocesses 8 --dist worksteal "${paths[@]}" >>"$out/rows.log" 2>&1
  tell "rows, compiled" 0 "$begun" # what fails here fails again below, and is told there
  begun=$SECONDS
  within "$python" -m pytest -p no:cacheprovider -q -s --tb=short "${paths[@]}" >>"$out/rows.log" 2>&1
  local status=$?
  "$python" bench/join_rows.py "$kept" >"$out/rows.json"
  tell "rows, $(wc -l <"$kept") of them" $status "$begun"
}

fuzz() { # one shape a process: the kernels of a shape take longer to compile than to run
  local begun=$SECONDS seconds part pids=() status=0 parts=${FUZZ_PARTS:-18}
  seconds=${FUZZ_SECONDS:-$(($(left) - 60))}
  for ((part = 0; part < parts; part++)); do
    while [ "$(jobs -rp | wc -l)" -ge "$workers" ]; do wait -n || true; done
    within "$python" bench/certified_fuzz.py --device "$device" --part "$part/$parts" \
      --head-steps "${HEAD_STEPS:-1000000}" --seconds "$((seconds - SECONDS + begun))" \
      --out "$out/fuzz-$part.json" >"$out/fuzz-$part.log" 2>&1 &
    pids+=($!)
  done
  for part in "${pids[@]}"; do wait "$part" || status=$?; done
  "$python" bench/certified_fuzz.py --join "$out"/fuzz-[0-9]*.json --out "$out/fuzz.json" \
    >"$out/fuzz.log" || status=$?
  tell "fuzz, $(grep -m1 -A0 '"head_steps"' "$out/fuzz.json" | tr -d ' ,')" $status "$begun"
}

fidelity() {
  local begun=$SECONDS
  # shellcheck disable=SC2086 # two numbers
  within "$python" bench/certified_fidelity.py --device "$device" --out "$out/fidelity.json" \
    ${FIDELITY:-4096 64} >"$out/fidelity.log" 2>&1
  tell fidelity $? "$begun"
}

mkdir -p "$out"
case ${1:-} in
  tests) tests "${2:-}" ;;
  rows | fuzz | fidelity) "$1" ;;
  all) rows && fuzz && fidelity && tests op && tests rest ;;
  *)
    echo "name a part: tests, rows, fuzz, fidelity, all" >&2
    exit 2
    ;;
esac
exit $failed
