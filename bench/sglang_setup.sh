# shellcheck shell=bash
# source bench/sglang_setup.sh: unpacks the pieces .carry/sglang-N that this call brought, on the GPU
# machine, and once all of them are there puts SGLang, its torch and this checkout's attnplug on
# PYTHONPATH. A machine that is still warm keeps what earlier calls brought. SG: where to, /tmp/sg by
# default. Not run yet.
SG="${SG:-/tmp/sg}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$SG/parts"
for piece in "$root"/.carry/sglang-*; do
  [ -f "$piece/part" ] || continue
  cp -n "$piece/part" "$SG/parts/${piece##*-}"
  cp "$piece/pieces" "$SG/pieces"
done
if [ ! -f "$SG/pieces" ] || [ "$(find "$SG/parts" -type f | wc -l)" -lt "$(cat "$SG/pieces")" ]; then
  echo "SGLang: $(find "$SG/parts" -type f | wc -l) of $(cat "$SG/pieces" 2>/dev/null || echo '?') pieces are here"
  return 1 2>/dev/null || exit 1
fi
if [ ! -f "$SG/ready" ]; then
  mkdir -p "$SG/packed" "$SG/site" "$SG/tree"
  cat "$SG"/parts/* | tar -x -C "$SG/packed"
  tar -xJf "$SG/packed/site.tar.xz" -C "$SG/site" &
  tar -xJf "$SG/packed/tree.tar.xz" -C "$SG/tree"
  for library in "$SG"/packed/*+*.xz; do
    name="$(basename "$library" .xz)"
    xz -dc "$library" >"$SG/tree/${name//+//}.so" &
  done
  wait
  touch "$SG/ready"
fi
# CUDA's libraries are those that came with the machine's own torch.
packages="$(env -u PYTHONPATH python3 -c 'import torch; print(torch.__path__[0])')/../nvidia"
libraries="$(find "$packages" -maxdepth 3 -type d -name lib | paste -sd:)"
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# What an installed attnplug would tell SGLang.
info="$SG/plug/attnplug-0.1.0.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: attnplug\nVersion: 0.1.0\n' >"$info/METADATA"
printf '[sglang.srt.plugins]\nattnplug = attnplug.serve.sglang:register\n' >"$info/entry_points.txt"
export PYTHONPATH="$SG/tree:$SG/plug:$root:$SG/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# Two GPUs: no NVLink multicast, which could take the host's GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
