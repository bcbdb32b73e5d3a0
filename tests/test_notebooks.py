"""The notebooks: what is kept of them, and that each runs from top to bottom."""

import base64
import importlib
import json
import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.])(/(home|root|tmp|usr|opt|mnt|work|Users)/|[A-Z]:\\)")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture(scope="module")
def render():
    for name in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(name, reason="the notebooks extra is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "notebooks")
        yield importlib.import_module("render")


def test_a_notebook_keeps_one_small_figure_and_nothing_else_of_a_run(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"] == METADATA
    figures = []
    for cell in notebook["cells"]:
        if "figure" in cell["metadata"].get("tags", []):
            (output,) = cell["outputs"]
            assert output["output_type"] == "display_data" and not output["metadata"]
            assert set(output["data"]) == {"image/png"}
            figures.append(base64.b64decode(output["data"]["image/png"]))
        elif cell["cell_type"] == "code":
            assert cell["outputs"] == []
        assert cell.get("execution_count") is None
        assert set(cell["metadata"]) <= {"tags"}
    (figure,) = figures
    assert figure[:4] == b"\x89PNG" and len(figure) < 60_000


def test_a_notebook_can_be_read_on_any_machine(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    identifiers = [cell["id"] for cell in cells]
    assert len(set(identifiers)) == len(cells)
    for cell in cells:
        assert not ABSOLUTE.search("".join(cell["source"]))


def test_a_notebook_runs_from_top_to_bottom(path, render, tmp_path):
    """What it claims it asserts; here it has to come to its end, and show what it is to show."""
    environment = {
        "TMPDIR": str(tmp_path),
        "IPYTHONDIR": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.values["jax_disable_most_optimizations"]),
    }
    done = render.stripped(render.execute(path, tmp_path, environment))
    assert sum(len(cell.get("outputs", [])) for cell in done.cells) == 1
