#!/usr/bin/env bash
# The quality table of every default, both small models, on a machine with one GPU of 140 GB:
#   bash bench/eval_gpu.sh SECONDS [options of attnplug eval]
#
# SECONDS count from its start, weights included; bringing the samples in takes a few more.
# Without options: the default suite, all policies. $OUT gets MODEL.jsonl and MODEL.log of each, as
# eval_shares.sh says, also where SECONDS end it. What bench/results/samples/ has is not run again, so
# that calls go on where the last one was cut; FRESH=1 asks everything anew. A captured step is a
# thousand short kernels, so that processes (GEMMA, 2; SMOLLM, 2: batches are large, and 140 GB hold no
# more of them) share the GPU through MPS, which this script starts and ends. Weights come in pieces
# (gpu_join.sh) and lie in ATTNPLUG_CACHE.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
[ $# -gt 0 ] || set -- --suite default --policies all --lengths 32768,8192,4096 --tasks \
  "long-decode,topic-change,ten-needles,common-words,multi-query,multi-value,variable-tracking,frequent-words,needle-noise,needle-prose,multi-key,captured-mass,fidelity,perplexity"
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
mkdir -p /tmp/mps /tmp/mps-log
nvidia-cuda-mps-control -d || echo "no MPS: processes take turns" >&2
trap 'echo quit | nvidia-cuda-mps-control' EXIT
left=$((seconds - SECONDS))
[ $left -gt 0 ] || { echo "no seconds left behind the weights" >&2 && exit 1; } # 0 would be no limit
ids=()
for share in "gemma3-270m ${GEMMA:-2}" "smollm2-135m ${SMOLLM:-2}"; do
  read -r model processes <<<"$share"
  [ "$processes" -gt 0 ] || continue
  known=
  if [ -z "${FRESH:-}" ]; then
    known=$(mktemp)
    python3 -c "import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())" \
      "bench/results/samples/$model.jsonl.xz" >"$known" || exit
  fi
  KNOWN=$known timeout --kill-after=20 "$left" bash bench/eval_shares.sh "$processes" \
    "$model" "$model" "$@" &
  ids+=($!)
done
failed=0
for id in "${ids[@]}"; do wait "$id" || failed=1; done
exit $failed
