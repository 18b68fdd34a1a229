#!/usr/bin/env bash
# The newest torch and Triton for a GPU machine without a network: makes .carry/torch-0, -1 ... of at
# most 40 MiB each.
#
#     WORK=/tmp/torch-pack bash bench/torch_pack.sh   # here: half an hour of one core, 5 GB of disk
#     source bench/torch_setup.sh                     # there, in each call; see bench/README.md
#
# Only machine code for an H200 is packed, and torchvision goes with it, as the machine's own loads beside
# no other torch. CUDA's libraries are those of the machine's own torch, 2.11;
# its NCCL is older than torch 2.14 asks for, and the functions that it lacks are stubs that fail:
# nothing on one GPU calls them.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
cd "${WORK:?name a scratch folder in WORK}"
# shellcheck source=bench/pack.sh
source "$here/bench/pack.sh"
fetch tree torch==2.14.1 triton==3.8.0 torchvision==0.29.1
mkdir -p packed stubs
compress tree torch/lib/libtorch_cuda torch/lib/libtorch_cuda_linalg
strip --strip-unneeded tree/triton/_C/libtriton.so tree/torch/lib/libtorch_{cpu,python}.so
pack_tree tree --exclude=libtorch_cuda.so --exclude=libtorch_cuda_linalg.so --exclude=torch/include \
  --exclude=torch/test --exclude='*.a' --exclude=libproton.so --exclude=libnvperf_host.so \
  --exclude=ptxas-blackwell --exclude='cupti*' --exclude=triton/backends/amd/{lib,include}
# What torch 2.14's libraries name and NCCL 2.28 has not; 5 is ncclInvalidUsage.
for name in ncclCommGetUniqueId ncclCommGrow ncclCommMemStats ncclCommResume ncclCommSuspend \
  ncclGetLsaMultimemDevicePointer ncclGetPeerDevicePointer ncclPutSignal ncclSignal ncclWaitSignal \
  ncclWinGetUserPtr; do
  echo "int $name(void) { return 5; }"
done >stubs/nccl.c
gcc -shared -fPIC -O2 -o packed/nccl_later.so stubs/nccl.c
cut_pieces torch
