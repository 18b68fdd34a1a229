"""Runs the notebooks from top to bottom and writes what they print and draw into them.

    python scripts/notebooks.py [NAME ...]    # such as first-steps; all of them without a name

tests/test_notebooks.py runs them the same way."""

import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
CELL_SECONDS = 900  # the first run on a machine compiles, and the machine may be busy


class ThisPython(KernelSpecManager):
    """Knows one kernel, that of the Python which runs this, whatever the user has installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        # Progress bars are not drawn: nobody misses the widgets for them.
        python = [sys.executable, "-W", "ignore:IProgress not found"]
        launcher = ["-m", "ipykernel_launcher", "--log-level=ERROR", "-f", "{connection_file}"]
        return KernelSpec(argv=[*python, *launcher], display_name="Python 3", language="python")


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs; the file stays as it is. An error of a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    about = notebook.metadata.copy()
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython())
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_SECONDS,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(cleanup_kc=True)  # the kernel ends, and its sockets
    notebook.metadata = about  # and not the version of the Python that ran it
    return notebook


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            nbformat.write(run(path), path)
            print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
