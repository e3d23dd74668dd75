"""Executes notebook.ipynb from top to bottom without a browser, as in a job, and keeps it with its output.

    .venv/bin/python execute.py --run-dir runs/notebook --device cuda

Wants `./install.sh --with nbclient --with ipykernel`. Leaves RUN_DIR/notebook.ipynb; a cell that fails is exit code 1.
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/notebook"), help="default: %(default)s")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--ranks", type=int, help="of the last part (default: one a visible GPU)")
    flags = parser.parse_args()

    notebook = nbformat.read(Path(__file__).with_name("notebook.ipynb"), as_version=4)
    after = next(place for place, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    values = dict(run_dir=str(flags.run_dir), device=flags.device, ranks=flags.ranks)
    lines = (f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(after + 1, nbformat.v4.new_code_cell("\n".join(lines)))

    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(Path(__file__).parent)}})
    error = None
    try:
        client.execute()
    except CellExecutionError as failure:
        error = failure
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            print(output.get("text") or output.get("data", {}).get("text/plain", ""), end="", flush=True)
    flags.run_dir.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, flags.run_dir / "notebook.ipynb")
    if error:
        print(error)
    return 1 if error else 0


if __name__ == "__main__":
    raise SystemExit(main())
