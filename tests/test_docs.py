"""Claims about README.md and docs/: links lead somewhere, commands parse, settings exist.

Code blocks and `code` in a line are read apart from prose. Nothing that is found is run: commands
go through the parsers of `decode.py` and `train.py`, and of the files of Python the imports count.
"""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

import train
from docs.make_configuration import PAGE, anchor, page
from eagle3.cli.arguments import parse
from eagle3.config import DecodeConfig
from eagle3.config_reader import read_config
from eagle3.training.config import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {path.name: path.read_text(encoding="utf-8") for path in PAGES}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^    [^\n]*\n|^\n(?=    ))+)", re.M | re.S)
SETTINGS = set(re.findall(r"^\| `([\w.]+)` \|", page(), re.M))
SECTIONS = {name.split(".")[0] for name in SETTINGS if "." in name}
SOURCES = [ROOT / "train.py", ROOT / "eagle3/config_reader.py", ROOT / "eagle3/cli/arguments.py"]


def blocks(name: str) -> list[tuple[str, str]]:
    """Return the language and text of each block of code; indented ones have no language."""
    return [(found[1] or "", found[2] or found[3]) for found in _BLOCK.finditer(TEXT[name])]


def spans(name: str) -> list[str]:
    """Return what stands in `code` within lines, each as one line."""
    found = re.findall(r"`([^`]+)`", _BLOCK.sub("", TEXT[name]))
    return [" ".join(span.replace("\\|", "|").split()) for span in found]


def commands(script: str) -> list[list[str]]:
    """Return the arguments of every command for a script, or for all below a folder."""
    found = []
    for name in TEXT:
        code = [text.replace("\\\n", " ") for _, text in blocks(name)]
        lines = [line.strip() for text in code for line in text.splitlines()] + spans(name)
        found += [line for line in lines if line.startswith(f"python {script}")]
    return [shlex.split(line, comments=True)[1:] for line in found]


def flags_of(*paths: Path) -> set[str]:
    """Return what looks like a flag in sources."""
    return {flag for path in paths for flag in re.findall(r'"(--[\w-]+)"', path.read_text())}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make current a folder with what commands name: the configurations, and files that exist."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "FILE.yaml").symlink_to(ROOT / "configs/quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_of_settings_is_what_the_source_says():
    hint = "run python docs/make_configuration.py"
    assert PAGE.read_text(encoding="utf-8") == page(), hint


@pytest.mark.parametrize("name", TEXT)
def test_every_link_leads_to_a_file_and_a_heading(name):
    where = {path.name: path.parent for path in PAGES}[name]
    for link in re.findall(r"\]\(([^)\s]+)\)", _BLOCK.sub("", TEXT[name])):
        if link.startswith("http"):
            continue
        file, _, heading = link.partition("#")
        target = (where / file).resolve() if file else where / name
        assert target.exists(), link
        if heading:
            content = _BLOCK.sub("", target.read_text(encoding="utf-8"))
            titles = [anchor(title) for title in re.findall(r"^#+ (.+)$", content, re.M)]
            assert titles.count(heading) == 1, f"{link}: there are {titles}"


@pytest.mark.parametrize("name", TEXT)
def test_every_file_that_is_named_exists(name):
    pattern = (
        r"\b(?:configs|benchmarks|docs|eagle3|gdn|tests|notebooks)/[\w/]+\.(?:py|yaml|ipynb|md)"
    )
    for path in re.findall(pattern, TEXT[name]):
        assert (ROOT / path).exists(), path


def test_every_entry_of_the_layout_exists():
    (layout,) = (text for _, text in blocks("README.md") if text.startswith("train.py "))
    parent = Path()
    for line in layout.splitlines():
        entry = line.split()[0]
        if not line.startswith(" "):
            parent = Path(entry) if entry.endswith("/") else Path()
        assert (ROOT / (parent / entry if line.startswith(" ") else entry)).exists(), line


def test_every_command_for_decoding_parses(folder):
    found = commands("decode.py")
    assert len(found) > 5
    for script, *argv in found:
        for flag, value in zip(argv, argv[1:], strict=False):
            if flag == "--prompts":
                (folder / value).parent.mkdir(parents=True, exist_ok=True)
                (folder / value).touch()
        assert script == "decode.py" and parse(argv)


def test_every_command_for_training_is_understood(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "train", lambda config, report: seen.append(config) or True)
    monkeypatch.setattr(train, "pretend_devices", lambda count: None)
    monkeypatch.setattr(train, "join", lambda *flags: None)
    monkeypatch.setattr(train, "tell", lambda plans, memory: seen.append(memory))
    found = commands("train.py")
    assert len(found) > 5
    for number, (_, *argv) in enumerate(found, start=1):
        train.run(argv)
        assert len(seen) >= number


def test_every_command_for_a_benchmark_has_its_flags_and_settings():
    found = commands("benchmarks/")
    assert len(found) > 5
    for script, *argv in found:
        known = flags_of(ROOT / script, *SOURCES)
        assert {word for word in argv if word.startswith("--")} <= known, script
        kind = TrainConfig if script.endswith("studies.py") else DecodeConfig
        given = [word for word in argv if re.match(r"[a-z_.0-9]+=", word)]
        read_config(
            kind, None, [*given, "out=any", "target=other"] if kind is TrainConfig else given
        )


def test_stop_strings_of_the_readme_are_line_feeds():
    (stop,) = (x for argv in commands("decode.py") for x in argv if x.startswith("stop="))
    assert read_config(DecodeConfig, None, [stop]).stop_strings == ("\n\n",)


@pytest.mark.parametrize("name", [name for name in TEXT if name != PAGE.name])
def test_every_setting_and_flag_in_a_line_exists(name):
    flags = flags_of(*SOURCES, *(ROOT / "benchmarks").glob("*.py"))
    ends = [f".{known}." for known in SETTINGS]
    others = re.compile(r"python |[A-Z_]+=|key=value")  # commands, the environment, "a setting"
    for word in (x for span in spans(name) if not others.match(span) for x in span.split()):
        assert not re.fullmatch(r"--[\w-]+", word) or word in flags, word
        key = re.sub(r"^stages\.\w+\.", "", word.partition("=")[0].removesuffix(".*"))
        is_dotted = "." in key and key.split(".")[0] in SECTIONS and not key.endswith(".py")
        if is_dotted or re.match(r"[a-z_.]+=", word):
            assert any(f".{key}." in x for x in ends), word


def test_every_import_of_the_examples_is_there():
    found = [text for name in TEXT for kind, text in blocks(name) if kind == "python"]
    assert len(found) > 2
    for node in (node for text in found for node in ast.parse(text).body):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_every_example_of_a_configuration_is_one(folder):
    found = [text for name in TEXT for kind, text in blocks(name) if kind == "yaml"]
    assert found
    for text in found:
        assert yaml.safe_load(text)
        (folder / "example.yaml").write_text(text)
        read_config(TrainConfig, "example.yaml", ["task=target", "out=runs/x"])
