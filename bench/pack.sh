# shellcheck shell=bash
# source bench/pack.sh, for scripts that pack something for a GPU machine without a network: wheels for
# its Python, libraries with machine code for an H200 alone, and pieces that a call can carry beside the
# repository. They run in a scratch folder, and `here` is the repository.
PIECE=$((40 << 20))
# shellcheck disable=SC2034
HEADERS=(--exclude='*.h' --exclude='*.hpp' --exclude='*.cuh') # for pack_tree, where nothing compiles with them

fetch() { # folder, packages: wheels for the machine's Python, unpacked
  local folder="$1"
  shift
  [ -d "$folder" ] && return
  python3 -m pip install --quiet --no-deps --no-compile --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_35_x86_64 --platform manylinux_2_34_x86_64 \
    --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 --target "$folder.part" "$@"
  mv "$folder.part" "$folder"
}

compress() { # folder, libraries in it without their ".so": to packed/, pruned
  local folder="$1" library name
  shift
  for library in "$@"; do
    name="${library//\//+}"
    [ -f "packed/$name.xz" ] && continue
    python3 "${here:?}/bench/vllm_pack.py" prune "$folder/$library.so" "packed/$name.so"
    strip --strip-unneeded "packed/$name.so"
    nice xz --lzma2=preset=6,dict=192MiB -T1 -c "packed/$name.so" >"packed/$name.part"
    mv "packed/$name.part" "packed/$name.xz" && rm "packed/$name.so"
  done
}

pack_tree() { # folder, options of tar: to packed/
  local folder="$1"
  shift
  [ -f "packed/$folder.tar.xz" ] && return
  tar -C "$folder" -c "$@" --exclude=__pycache__ . |
    nice xz -6 -T1 -c >"packed/$folder.part"
  mv "packed/$folder.part" "packed/$folder.tar.xz"
}

cut_pieces() { # name: all of packed/ as .carry/NAME-00, -01 ...
  local name="$1" part count folder
  rm -rf "${here:?}"/.carry/"$name"-[0-9]*
  tar -c -C packed . | split --bytes="$PIECE" --numeric-suffixes=0 --suffix-length=2 - whole.
  for part in whole.??; do
    mkdir -p "$here/.carry/$name-${part#whole.}" && mv "$part" "$here/.carry/$name-${part#whole.}/part"
  done
  count="$(find "$here/.carry" -maxdepth 1 -name "$name-[0-9]*" | wc -l)"
  for folder in "$here"/.carry/"$name"-[0-9]*; do echo "$count" >"$folder/pieces"; done
  du -sh "$here"/.carry/"$name"-[0-9]*
}
