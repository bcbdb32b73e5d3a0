"""Run notebooks from top to bottom, and write them back with the one figure that each shows.

    python notebooks/render.py                            # all beside this file
    python notebooks/render.py notebooks/02_lossless.ipynb

The cell whose output is kept has the tag `figure`. Everything else that a run leaves behind (texts,
counts, times, versions) is left out, so that a file changes only where somebody changed it.
"""

import argparse
import base64
import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
COLORS = 128  # of a figure in a file: enough for bars and lines, and a third of the bytes
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, folder: Path = ROOT, environment: dict[str, str] | None = None):
    """Run a notebook in a kernel of its own and return it with all that it put out.

    Args:
      folder: that the kernel works in.
      environment: more variables for the kernel.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.resources = {"metadata": {"path": str(folder)}}
    # The checkout's package, whether it is installed or not.
    known = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    return client.execute(env=known)


def pictures(cell) -> list[str]:
    """Return the PNG files that a cell has put out, in base64."""
    data = [output.get("data", {}) for output in cell.get("outputs", [])]
    return [found["image/png"] for found in data if "image/png" in found]


def stripped(notebook):
    """Leave of all outputs the figure alone, and of the metadata what every viewer needs.

    Raises:
      ValueError: not exactly one picture comes from the cell with the tag `figure`.
    """
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        is_figure = "figure" in cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": ["figure"]} if is_figure else {})
        if cell.cell_type != "code":
            continue
        shown = pictures(cell) if is_figure else []
        if is_figure and len(shown) != 1:
            raise ValueError(f"cell {cell.id} has the tag figure and {len(shown)} pictures, not 1")
        cell.execution_count = None
        cell.outputs = [
            nbformat.v4.new_output("display_data", data={"image/png": smaller(png)})
            for png in shown
        ]
    return notebook


def smaller(picture: str) -> str:
    """Return a PNG file with a palette, both in base64."""
    from PIL import Image  # comes with matplotlib

    buffer = BytesIO()
    image = Image.open(BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(COLORS).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Render what the command line names."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path)
    paths = parser.parse_args(arguments).notebooks
    for path in paths or sorted(Path(__file__).parent.glob("*.ipynb")):
        text = nbformat.writes(stripped(execute(path)))
        partial = path.with_suffix(".tmp")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
        print(f"{path.name}: {len(text) // 1024} kB")


if __name__ == "__main__":
    main()
