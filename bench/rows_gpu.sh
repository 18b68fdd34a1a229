#!/usr/bin/env bash
# Timing rows anew, on a bare machine with one CUDA GPU and 16 cores, in calls of 9 minutes:
#
#   export ATTNPLUG_COMMIT=...            # git rev-parse --short=12 HEAD, where there is git
#   bash bench/rows_gpu.sh decode prefill # every op, and the step of every default
#   bash bench/rows_gpu.sh models         # decode of whole models
#   bash bench/rows_gpu.sh rest           # first tokens, host memory, other shapes, a trace, generate
#
# Arguments are these four parts, or names of benches (test_e2e_ttft). $OUT gets rows.json, which is
# a file of bench/results as it is; rows.txt, which says of every bench whether it ended, was cut or
# was not begun; and rows.log. SECONDS_AT_MOST (530) is when benches are cut: a row is kept as soon as
# it is measured, and what a call has not begun the next one may name.
#
# The benches of ops compile in WORKERS (8) processes first, which time nothing; then one process at a
# time measures. Peers that are no packages come from .peers/ (bench/peers.py), .so or .so.xz; wheels
# and weights as gpu_join.sh says. Exits with 1 unless all benches ended well.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${ATTNPLUG_COMMIT:?names the commit that is measured}"
out=${OUT:-/tmp} limit=${SECONDS_AT_MOST:-530} rows=$(mktemp) log=${OUT:-/tmp}/rows.log
export ATTNPLUG_BENCH_ROWS=$rows PYTHONUNBUFFERED=1
export ATTNPLUG_BENCH_STREAM=${ATTNPLUG_BENCH_STREAM:-131072}
# Benches that share a process, and what else pytest is told; those that tell most come first.
decode=(
  "test_steps" "test_dense_decode+test_gather+test_gather_attention+test_block_bounds"
  "test_gvr+test_topk" "test_certified+test_quantize_kv"
  "test_gather_host+test_sketch_host -k one_layer"
)
prefill=(
  "test_momo+test_measure_blocks+test_momo_parts+test_query_sparse_attention"
  "test_stream_edges+test_stream::test_stream_mask" "test_e2e_ttft::test_long"
)
models=(
  "test_e2e_policies" "test_e2e_gather -k qwen-1" "test_e2e_decode" "test_e2e_certified"
)
rest=(
  "test_e2e_ttft::test_e2e_ttft" "test_sketch_host -k million" "test_gather_host -k million"
  "test_e2e_gather -k llama-1" "test_e2e_gather -k qwen-8" "test_e2e_gather -k qwen-4"
  "test_e2e_gather -k parts" "test_stream::test_trace_of_a_model" "test_generate -k tokens"
)

benches=()
for name; do
  case $name in
    decode) benches+=("${decode[@]}") ;;
    prefill) benches+=("${prefill[@]}") ;;
    models) benches+=("${models[@]}") ;;
    rest) benches+=("${rest[@]}") ;;
    *)
      found=0
      for bench in "${decode[@]}" "${prefill[@]}" "${models[@]}" "${rest[@]}"; do
        [[ $bench =~ (^|\+)"$name"($|[+: ]) ]] && benches+=("$bench") && found=1
      done
      [ $found = 1 ] || { echo "no part or bench is called $name" >&2; exit 2; }
      ;;
  esac
done
[ ${#benches[@]} -gt 0 ] || { echo "name parts: decode, prefill, models, rest" >&2; exit 2; }

# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
if compgen -G ".peers/*.xz" >/dev/null; then # before processes start that would each do it
  PYTHONPATH="$PWD/bench:$PYTHONPATH" python3 -c 'import peers; peers.unpack()' || exit
fi

summarise() { # however it ends
  python3 bench/join_rows.py "$rows" >"$out/rows.json"
  cat "$out/rows.txt"
}
trap summarise EXIT
trap 'exit 143' TERM
: >"$out/rows.txt"
: >"$log"
tell() { echo "$*" >>"$out/rows.txt"; }
run_pytest() { # seconds, then what pytest is told; leaves the seconds that it took in `took`
  local at_most=$1 begun=$SECONDS status
  shift
  timeout --kill-after=5 "$at_most" python3 -m pytest -p no:cacheprovider -q --tb=short "$@" \
    >>"$log" 2>&1
  status=$?
  took=$((SECONDS - begun))
  return $status
}

paths_of() { # of a name as above, for pytest
  local each
  for each in ${1//+/ }; do
    [[ $each == *::* ]] && echo "bench/${each/::/.py::}" || echo "bench/$each.py"
  done
}

files=()
for bench in "${benches[@]}"; do
  case $bench in *million* | *e2e* | *generate* | *::test_trace*) continue ;; esac
  for path in $(paths_of "${bench%% *}"); do # what names its tests makes its rows without GpuBench
    [[ $path == *::* || " ${files[*]-} " == *" $path "* ]] || files+=("$path")
  done
done
if [ ${#files[@]} -gt 0 ]; then
  ATTNPLUG_BENCH_DRY=1 run_pytest $((limit / 3)) --numprocesses "${WORKERS:-8}" --dist worksteal \
    -k "not million" "${files[@]}"
  tell "compiled: status $?, $took s" # what fails here fails again below, and is told there
fi
failed=0
for bench in "${benches[@]}"; do
  left=$((limit - SECONDS))
  if [ $left -lt 15 ]; then
    tell "not begun: $bench"
    failed=1
    continue
  fi
  read -r name chosen <<<"$bench"
  before=$(wc -l <"$rows")
  # shellcheck disable=SC2046,SC2086 # words
  run_pytest "$left" -s $(paths_of "$name") $chosen
  status=$?
  case $status in
    0) word="ended" ;;
    124 | 137) word="cut" ;;
    *) word="failed ($status)" ;;
  esac
  [ $status -eq 0 ] || failed=1
  tell "$word: $bench, $(($(wc -l <"$rows") - before)) rows, $took s"
done
exit $failed
