#!/usr/bin/env bash
# Several jobs at once on a machine of several GPUs, each with GPUs and CPU cores of its own:
#
#   export ATTNPLUG_COMMIT=...
#   bash bench/lanes.sh SECONDS GPUS COMMAND [GPUS COMMAND]...
#   bash bench/lanes.sh 540 0,1 'torchrun --nproc-per-node 2 bench/tensor_parallel.py' \
#     2 'bash bench/gpu_suite.sh tests/models' 3 'python3 -m pytest bench/test_steps.py'
#
# What the call carried is put in place first (gpu_join.sh, and the setup scripts of
# torch, vLLM and SGLang where pieces of them came). A job sees its GPUs as 0, 1, ...; its $OUT is a folder of its own, and rows that benches
# measure go to rows.jsonl there. SECONDS end every job, by an interrupt and a kill 10 s later. $OUT gets
# lanes.tgz with the folders, whose `log` is what a job said, and the last lines are printed. GPUS -
# is a job without a GPU. Exits with 1 unless all jobs did with 0.
set -uo pipefail
cd "$(dirname "$0")/.."
limit=$1 out=${OUT:-/tmp} failed=0
shift
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
export ATTNPLUG_JOINED=1
for brought in torch vllm sglang; do
  if compgen -G ".carry/$brought-[0-9]*" >/dev/null; then
    # shellcheck disable=SC1090
    (source "bench/${brought}_setup.sh") || true # says how many pieces are missing
  fi
done
export PYTHONPATH="$PWD:$PWD/bench:$PYTHONPATH" PYTHONUNBUFFERED=1
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
cores=$(($(nproc) / (gpus > 0 ? gpus : 1)))

cores_of() { # of GPUs, as taskset wants them
  local gpu list=
  for gpu in ${1//,/ }; do list+=",$((gpu * cores))-$(((gpu + 1) * cores - 1))"; done
  echo "${list#,}"
}

here=$(mktemp -d)
lanes=()
while [ $# -ge 2 ]; do
  folder=$here/${#lanes[@]} own=$1
  mkdir -p "$folder"
  echo "$1: $2" >"$folder/command"
  bound=()
  if [ "$own" = - ]; then own=; elif [ "$gpus" -gt 0 ]; then bound=(taskset -c "$(cores_of "$own")"); fi
  CUDA_VISIBLE_DEVICES=$own OUT=$folder ATTNPLUG_BENCH_ROWS=$folder/rows.jsonl \
    "${bound[@]}" timeout --signal=INT --kill-after=10 "$((limit > SECONDS ? limit - SECONDS : 1))" bash -c "$2" \
    >"$folder/log" 2>&1 &
  lanes+=($!)
  shift 2
done
for lane in "${!lanes[@]}"; do
  wait "${lanes[$lane]}"
  status=$?
  [ $status -eq 0 ] || failed=1
  echo "== $lane ($(cat "$here/$lane/command")): status $status, $SECONDS s"
  tail -n "${LINES_SHOWN:-12}" "$here/$lane/log" | cut -c1-220
done
tar -czf "$out/lanes.tgz" -C "$here" .
exit $failed
