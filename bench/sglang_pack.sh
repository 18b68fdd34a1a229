#!/usr/bin/env bash
# SGLang for a GPU machine without a network: makes .carry/sglang-00, -01 ... of at most 40 MiB each.
#
#     WORK=/tmp/sglang-pack bash bench/sglang_pack.sh   # here: half an hour of one core, 4 GB of disk
#     source bench/sglang_setup.sh                      # there, in each call; see bench/README.md
#
# Not run on a GPU machine yet. SGLang's kernels ask for the torch that it pins and do not load with an
# older one, so that the pieces of bench/torch_pack.sh travel, too. Only machine code for an H200 is
# packed.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
cd "${WORK:?name a scratch folder in WORK}"
# shellcheck source=bench/pack.sh
source "$here/bench/pack.sh"
fetch tree sglang==0.5.23 sglang-kernel==0.4.10
# What its engine imports and the machine lacks, or has in another version.
fetch site transformers==5.19.0 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 \
  einops loguru msgspec orjson partial-json-parser pybase64 python-multipart setproctitle soundfile \
  cffi pycparser uvloop xgrammar==0.2.7 pyzmq ipython traitlets openai==2.8.0 jiter sniffio distro \
  fastapi starlette uvicorn pydantic pydantic-core annotated-types typing-inspection gguf dill \
  interegular llguidance torchvision==0.29.1
mkdir -p packed
compress tree sgl_kernel/flash_ops.abi3 sgl_kernel/sm90/common_ops.abi3
pack_tree tree "${HEADERS[@]}" --exclude=flash_ops.abi3.so --exclude=common_ops.abi3.so --exclude='infllm_ops*' \
  --exclude='flashmla_ops*' --exclude=sglang/multimodal_gen
pack_tree site "${HEADERS[@]}" --exclude=tests
cut_pieces sglang
