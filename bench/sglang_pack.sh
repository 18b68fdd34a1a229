#!/usr/bin/env bash
# SGLang for a GPU machine without a network: makes .carry/sglang-0, -1 ... of at most 40 MiB each.
#
#     WORK=/tmp/sglang-pack bash bench/sglang_pack.sh   # here: most of an hour of one core, 8 GB of disk
#     source bench/sglang_setup.sh                      # there, in each call; see bench/README.md
#
# Not run on a GPU machine yet. SGLang's kernels ask for the torch that it pins and do not load with an
# older one, so torch travels, too; CUDA's own libraries are those of the machine's torch. Only machine
# code for an H200 is packed.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
cd "${WORK:?name a scratch folder in WORK}"
version=0.5.23 kernels=0.4.10 torch=2.14.1 triton=3.8.0 piece=$((40 << 20))
python=3.12 prune="$here/bench/vllm_pack.py"

fetch() { # folder, packages: wheels for the machine's Python, unpacked
  local folder="$1"
  shift
  [ -d "$folder" ] && return
  python3 -m pip install --quiet --no-deps --no-compile --only-binary=:all: --python-version "$python" \
    --implementation cp --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 --target "$folder.part" "$@"
  mv "$folder.part" "$folder"
}
fetch tree "sglang==$version" "sglang-kernel==$kernels" "torch==$torch" "triton==$triton"
# What its engine imports and the machine lacks, or has in another version.
fetch site transformers==5.19.0 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 \
  einops loguru msgspec orjson partial-json-parser pybase64 python-multipart setproctitle soundfile \
  cffi pycparser uvloop xgrammar==0.2.7 pyzmq ipython traitlets openai==2.8.0 jiter sniffio distro \
  fastapi starlette uvicorn pydantic pydantic-core annotated-types typing-inspection gguf dill \
  interegular llguidance torchvision==0.29.1

mkdir -p packed
for library in torch/lib/libtorch_cuda torch/lib/libtorch_cuda_linalg sgl_kernel/flash_ops.abi3 \
  sgl_kernel/sm90/common_ops.abi3; do
  name="${library//\//+}"
  [ -f "packed/$name.xz" ] && continue
  python3 "$prune" prune "tree/$library.so" "packed/$name.so"
  strip --strip-unneeded "packed/$name.so"
  nice xz --lzma2=preset=6,dict=192MiB -T1 -c "packed/$name.so" >"packed/$name.part"
  mv "packed/$name.part" "packed/$name.xz" && rm "packed/$name.so"
done
[ -f packed/tree.tar.xz ] || tar -C tree -c --exclude=libtorch_cuda.so --exclude=libtorch_cuda_linalg.so \
  --exclude=flash_ops.abi3.so --exclude=common_ops.abi3.so --exclude='infllm_ops*' --exclude='flashmla_ops*' \
  --exclude=sglang/multimodal_gen --exclude=torch/include --exclude=torch/test --exclude='*.h' \
  --exclude='*.hpp' --exclude=__pycache__ . | nice xz -6 -T1 -c >packed/tree.tar.xz
[ -f packed/site.tar.xz ] || tar -C site -c --exclude=__pycache__ --exclude=tests . |
  nice xz -6 -T1 -c >packed/site.tar.xz

# One file, cut in pieces that a call of the GPU machine can carry beside the repository.
rm -rf "$here"/.carry/sglang-*
tar -c -C packed . | split --bytes="$piece" --numeric-suffixes=0 --suffix-length=2 - whole.
for part in whole.??; do
  mkdir -p "$here/.carry/sglang-${part#whole.}" && mv "$part" "$here/.carry/sglang-${part#whole.}/part"
done
count="$(find "$here/.carry" -maxdepth 1 -name 'sglang-*' | wc -l)"
for folder in "$here"/.carry/sglang-*; do echo "$count" >"$folder/pieces"; done
du -sh "$here"/.carry/sglang-*
