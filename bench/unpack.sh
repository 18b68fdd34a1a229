# shellcheck shell=bash
# source bench/unpack.sh, on a GPU machine: `join_pieces NAME FOLDER` keeps the pieces .carry/NAME-N that
# this call brought in FOLDER, and once all of them are there unpacks what bench/pack.sh packed. Fails,
# and says how many are missing, until then. A machine that is still warm keeps what earlier calls
# brought.
join_pieces() {
  local name="$1" folder="$2" root piece library path
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  mkdir -p "$folder/parts"
  for piece in "$root/.carry/$name"-[0-9]*; do
    [ -f "$piece/part" ] || continue
    [ -f "$folder/parts/${piece##*-}" ] || cp "$piece/part" "$folder/parts/${piece##*-}"
    cp "$piece/pieces" "$folder/pieces"
  done
  if [ ! -f "$folder/pieces" ] || [ "$(find "$folder/parts" -type f | wc -l)" -lt "$(cat "$folder/pieces")" ]; then
    echo "$name: $(find "$folder/parts" -type f | wc -l) of $(cat "$folder/pieces" 2>/dev/null || echo '?') pieces are here"
    return 1
  fi
  [ -f "$folder/ready" ] && return
  mkdir -p "$folder/packed"
  cat "$folder"/parts/* | tar -x -C "$folder/packed"
  for path in "$folder"/packed/*.tar.xz; do
    mkdir -p "$folder/$(basename "$path" .tar.xz)"
    tar -xJf "$path" -C "$folder/$(basename "$path" .tar.xz)"
  done
  for library in "$folder"/packed/*+*.xz; do
    path="$(basename "$library" .xz)"
    xz -dc "$library" >"$folder/tree/${path//+//}.so" &
  done
  wait
  touch "$folder/ready"
}
