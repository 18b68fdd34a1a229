#!/usr/bin/env bash
# FlashInfer's top-k for the GPU machine, in .peers/flashinfer.tar.xz: `bash bench/flashinfer_pack.sh`.
#
# That is what `flashinfer.topk` imports and what nvcc compiles there for a minute, none of the rest
# of FlashInfer: 150 MB of sources and the packages that its other kernels need stay behind.
# gpu_join.sh unpacks it. PIP names a pip of this machine; wheels come from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
pip=${PIP:-pip} here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
gpu=(--python-version 3.12 --only-binary :all: --platform manylinux_2_28_x86_64)
$pip download -q --no-deps --dest "$here/wheels" "${gpu[@]}" \
  flashinfer-python==0.6.13 apache-tvm-ffi==0.1.15.post2 nvidia-ml-py==13.580.82 tabulate==0.9.0
for wheel in "$here"/wheels/*.whl; do unzip -q -o "$wheel" -d "$here/all"; done
site=$here/site data=flashinfer/data
mkdir -p "$site/$data/csrc" "$site/$data/cccl"
cd "$here/all"
cp -r tvm_ffi apache_tvm_ffi-* pynvml.py tabulate* "$site"
cp -r flashinfer/*.py flashinfer/jit flashinfer/trace "$site/flashinfer"
: >"$site/flashinfer/__init__.py" # which imports everything
cp $data/csrc/*topk* $data/csrc/tvm_ffi_utils.h "$site/$data/csrc"
cp -r $data/include "$site/$data"
for part in cub/cub thrust/thrust libcudacxx/include; do
  mkdir -p "$site/$data/cccl/${part%/*}"
  cp -r "$data/cccl/$part" "$site/$data/cccl/$part"
done
cd - >/dev/null
mkdir -p .peers
tar -C "$site" -cJf .peers/flashinfer.tar.xz .
ls -l .peers/flashinfer.tar.xz
