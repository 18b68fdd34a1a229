#!/usr/bin/env bash
# attnplug inside SGLang on a bare machine with one CUDA GPU, beside SGLang's own FlashAttention:
#
#   bash bench/sglang_gpu.sh tiny [arguments of sglang_engine.py]     # or qwen7b, llama8b
#
# Each call wants the pieces of torch and SGLang in .carry/ (bench/torch_pack.sh, bench/sglang_pack.sh)
# until all of them are there, and export ATTNPLUG_COMMIT. SECONDS_AT_MOST (530) is when a call ends by
# itself. $OUT gets sglang.log, with all that the engines said, and a line of JSON for each engine.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${ATTNPLUG_COMMIT:?names the commit that is measured}"
out=${OUT:-/tmp} limit=${SECONDS_AT_MOST:-530} shape=${1:-tiny}
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
# shellcheck source=bench/sglang_setup.sh
source bench/sglang_setup.sh || exit
# Not through a pipe alone: what an engine said is there when the call is cut, too.
timeout --signal=INT --kill-after=15 "$((limit - SECONDS - 15))" python3 bench/sglang_engine.py \
  --shape "$shape" --out "$out/sglang-$shape.json" "${@:2}" >"$out/sglang.log" 2>&1
status=$?
tail -n 30 "$out/sglang.log" | cut -c1-300
exit $status
