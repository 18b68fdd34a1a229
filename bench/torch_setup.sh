# shellcheck shell=bash
# source bench/torch_setup.sh: unpacks the pieces .carry/torch-N that this call brought, on the GPU
# machine, and once all of them are there puts that torch and its Triton on PYTHONPATH, in front of the
# machine's own. A machine that is still warm keeps what earlier calls brought. TORCH_AT: where to,
# /tmp/th by default.
TORCH_AT="${TORCH_AT:-/tmp/th}"
# shellcheck source=bench/unpack.sh
source "$(dirname "${BASH_SOURCE[0]}")/unpack.sh"
join_pieces torch "$TORCH_AT" || return 1
# CUDA's libraries are those that came with the machine's own torch.
packages="$(env -u PYTHONPATH python3 -c 'import torch; print(torch.__path__[0])')/../nvidia"
libraries="$(find "$packages" -maxdepth 3 -type d -name lib | paste -sd:)"
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_PRELOAD="$TORCH_AT/packed/nccl_later.so${LD_PRELOAD:+:$LD_PRELOAD}"
export PYTHONPATH="$TORCH_AT/tree${PYTHONPATH:+:$PYTHONPATH}"
# Two GPUs: no NVLink multicast, which could take the host's GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
