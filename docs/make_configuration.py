"""Write docs/configuration.md from the dataclasses: `python docs/make_configuration.py`.

Name, type and default of a field are the dataclass's own, and what it means is the comment beside
it, or above it, in the source: so there is one place to say it. A test makes the page again and
compares.
"""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

from eagle3.config import DecodeConfig, GeneratedTarget, MeshConfig, SamplingConfig, TreeConfig
from eagle3.decoding.sampling import SamplingParams
from eagle3.files import write_whole
from eagle3.training.config import (
    DraftShape,
    EvalConfig,
    RegenerateConfig,
    SaveConfig,
    TrainConfig,
    TTTConfig,
)
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.optim import OptimConfig

PAGE = Path(__file__).parent / "configuration.md"
HEAD = """\
# Configuration

*Made by `python docs/make_configuration.py` from the comments in the source; not to be edited.*

`decode.py` and `train.py` take `--config FILE.yaml` and then `key=value`, as many as you like;
what is not given has the default below. Names are those of the tables: `tree.depth=6` on a command
line is `tree: {depth: 6}` in a file. A misspelt name is answered with the nearest one. Values are
read as YAML, so a list is `"[2, 16, 29]"`, in quotes for the shell; nothing at all is `null`.
Values that contradict each other are refused in one line that names the field.

A file for `train.py` may have `stages`: runs that are done in order, by name. Each has the other
keys of the file and its own, which win. `steps=500` is then for all of them,
`stages.draft.steps=500` for one, and `--only draft` runs that one alone.
"""
# Title, class, and how its fields are called in full; in the order of the page.
DECODING = (
    ("decode.py", DecodeConfig, ""),
    ("Trees", TreeConfig, "tree."),
    ("Sampling", SamplingConfig, "sampling."),
)
TRAINING = (
    ("train.py", TrainConfig, ""),
    ("The draft", DraftShape, "draft."),
    ("Training-time test", TTTConfig, "ttt."),
    ("Data", DataConfig, "data."),
    ("Sources of data", SourceConfig, "data.sources.NAME."),
    ("The target's own answers", RegenerateConfig, "regenerate."),
    ("Optimiser", OptimConfig, "optim."),
    ("Evaluation", EvalConfig, "eval."),
    ("Checkpoints", SaveConfig, "save."),
)
SHARED = (
    ("A new target", GeneratedTarget, "generated."),
    ("Several devices", MeshConfig, "mesh."),
)
_TITLES = {cls: title for title, cls, _ in (*DECODING, *TRAINING, *SHARED)}
_WORDS = {
    "Any": "any",
    "tuple[int, ...]": "list of int",
    "str | None": "str or null",
    "dict[Any, float]": "mapping",
}
_FIELD = re.compile(r"    (?P<name>\w+): (?P<type>[^=#]+?)(?: = (?P<default>[^#]*))?(?:  # (.*))?$")


def comments(cls: type) -> dict[str, str]:
    """Return what the source says of each field, as one line; empty if it says nothing."""
    found, above = {}, []
    for line in inspect.getsource(cls).splitlines():
        if line.startswith("    # "):
            above.append(line.strip("# "))
        elif match := _FIELD.match(line):
            found[match["name"]] = " ".join([*above, match[4] or ""]).strip()
            above = []
        elif line.startswith("    def "):
            break
    return found


def section(title: str, cls: type, prefix: str) -> str:
    """Return a heading, what the class is, and its table."""
    said = comments(cls)
    if cls is SamplingConfig:  # which refers to the other for what they mean
        theirs = comments(SamplingParams)
        said = {name: text or theirs[name] for name, text in said.items()}
    rows = ["| name | type | default | |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        kind, default = _type_and_default(field)
        text = said[field.name].replace("|", "\\|")
        rows.append(f"| `{prefix}{field.name}` | {kind} | {default} | {text} |")
    level = "#" if prefix else ""
    about = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return f"##{level} {title}\n\n{about}\n\n" + "\n".join(rows) + "\n"


def _type_and_default(field: dataclasses.Field) -> tuple[str, str]:
    """Return both as the page shows them; a section is a link to its table."""
    made: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
    if dataclasses.is_dataclass(made):
        title = _TITLES[type(made)]  # pyright: ignore[reportArgumentType]
        other = [
            f"{name}: {value}"
            for name, value in vars(made).items()
            if value != getattr(type(made)(), name)
        ]
        return f"[{title}](#{anchor(title)})", f"`{{{', '.join(other)}}}`" if other else ""
    kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    kind = kind.replace("typing.", "")
    if "SourceConfig" in kind:
        return f"[{_TITLES[SourceConfig]}](#{anchor(_TITLES[SourceConfig])}), by name", "none"
    return _WORDS.get(kind, kind), f"`{json.dumps(made)}`"


def anchor(title: str) -> str:
    """Return what a heading is linked by."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    parts += [section(*each) for each in DECODING]
    parts += [section(*each) for each in TRAINING]
    parts.append("## For both\n")
    parts += [section(*each) for each in SHARED]
    return "\n".join(parts)


if __name__ == "__main__":
    write_whole(PAGE, page())
