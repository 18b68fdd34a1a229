#!/usr/bin/env bash
# Everything that calls of a bare GPU machine carry beside the repository (git ignores all of it):
#
#     WORK=/tmp/vllm-pack PYTHON312=... bash bench/gpu_pack.sh   # here; a quarter of an hour at first
#
# .whl/: small wheels. .carry/MODEL-N: weights, at most three of these in a call. .carry/vllm-N: vLLM
# for an H200 (vllm_pack.sh, whose scratch folder WORK is). .peers/: FlashAttention 3 out of it, for
# rows_gpu.sh. attnplug must be importable. WORK's compressed libraries are not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m pip download --quiet --no-deps --dest .whl gguf==0.19.0 platformdirs==4.14.5 \
  plotly==7.1.0 narwhals==2.29.0
for model in smollm2-135m gemma3-270m; do
  python bench/carry_weights.py split "$model"
done
mkdir -p "${WORK:?name a scratch folder in WORK}" .peers
bash bench/vllm_pack.sh
cp "$WORK/0.20.2/packed/vllm+vllm_flash_attn+_vllm_fa3_C.abi3.xz" .peers/_vllm_fa3_C.abi3.so.xz
du -sh .whl .peers .carry/*
