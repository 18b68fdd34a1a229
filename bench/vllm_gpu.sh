#!/usr/bin/env bash
# attnplug inside vLLM on a bare machine with one CUDA GPU, in calls of 9 minutes:
#
#   bash bench/vllm_gpu.sh tests [-k fp8]      # tests/serve/test_vllm_gpu.py; engines start together
#   bash bench/vllm_gpu.sh speed qwen7b        # first tokens and steps beside stock vLLM: rows
#   bash bench/vllm_gpu.sh decode qwen7b       # steps alone
#   bash bench/vllm_gpu.sh load qwen7b         # a served load
#
# Each wants vLLM's pieces in .carry/ (bench/vllm_pack.sh) until all of them are there, and export
# ATTNPLUG_COMMIT. Weights of small models that bench/carry_weights.py split, .carry/MODEL-N, are put
# together on the way; tests of models that are not whole skip. $OUT gets vllm.log, rows of speed and
# load as vllm-PART-SHAPE.json, and vllm-jobs.tgz: what each engine of the tests was told and said.
# POLICY (momo+gather) is what speed and load serve with. RESUME=1: stock's figures are those of the
# call before on this machine, which was cut behind them: an engine takes two minutes to start cold.
# SECONDS_AT_MOST (530) is when a call ends by itself. Nothing else may use the GPU: vLLM stops where another process frees memory while it looks.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${ATTNPLUG_COMMIT:?names the commit that is measured}"
out=${OUT:-/tmp} limit=${SECONDS_AT_MOST:-530} part=${1:-} shape=${2:-qwen7b}
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
# shellcheck source=bench/vllm_setup.sh
source bench/vllm_setup.sh
# Interrupted and not ended, pytest still says what failed.
within() { timeout --signal=INT --kill-after=15 "$((limit - SECONDS - 15))" "$@"; }

tests() {
  local folder
  folder=$(mktemp -d)/tests # of its own: lanes may run others beside
  within python3 -m pytest -m gpu tests/serve/test_vllm_gpu.py -p no:cacheprovider -v -s \
    --numprocesses 0 --tb=short --basetemp="$folder" "$@" >>"$out/vllm.log" 2>&1
  local status=$?
  # What engines were told and said, until a call was cut, but no weights.
  tar -czf "$out/vllm-jobs.tgz" --exclude='*.safetensors' -C "$folder" .
  grep -E "PASSED|FAILED|SKIPPED|ERROR|needles|rows: |^E  |passed|failed" "$out/vllm.log" | cut -c1-200
  return $status
}

measure() { # parts of the bench
  within python3 bench/vllm_engine.py --shape "$shape" --parts "$1" \
    --policy "${POLICY:-momo+gather}" ${RESUME:+--resume} --out "$out/vllm-$part-$shape.json" 2>&1 |
    tee -a "$out/vllm.log"
}

case $part in
  tests) tests "${@:2}" ;;
  speed) measure ttft,decode ;;
  decode) measure decode ;;
  load) measure load ;;
  *) echo "name a part: tests, speed SHAPE, decode SHAPE, load SHAPE" >&2; exit 2 ;;
esac
