"""The tokenizer of a new target: bytes, one that is there, or a BPE of the training data."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3.config import ConfigError
from eagle3.files import new_folder
from eagle3.processes import is_first
from eagle3.training.config import TrainConfig
from eagle3.training.data.bpe import train_bpe
from eagle3.training.data.rows import Chat, Dropped, Text, parse_row
from eagle3.training.data.sources import read_rows, source_fingerprint

_BYTES = 256
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def place_tokenizer(
    config: TrainConfig, vocab_size: int, report: Callable[[str], Any]
) -> str | None:
    """Copy the tokenizer's files to `config.out`; returns where they are from, None for bytes.

    Not where they are now: there, a run leaves a config.json that a later start would read too.

    Raises:
      ConfigError: the directory that was named has none.
    """
    source = config.target or config.tokenizer
    if source is None and vocab_size == _BYTES:
        return None
    folder = Path(source) if source is not None else _trained(config, report)
    if not (folder / "tokenizer.json").is_file():
        if config.target is not None and vocab_size == _BYTES:
            return None  # targets on bytes need no files
        raise ConfigError(f"{folder} has no tokenizer.json: give the directory of a tokenizer")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if is_first() and (folder / name).is_file():
            partial = out / (name + ".tmp")
            shutil.copyfile(folder / name, partial)
            partial.replace(out / name)
    return str(folder)


def _trained(config: TrainConfig, report: Callable[[str], Any]) -> Path:
    """Return the folder of a BPE of the sources, trained now or in an earlier run."""
    sources = config.data.named_sources
    parts = [[source_fingerprint(s), s.format] for s in sources.values()]
    content = json.dumps(["bpe", 1, config.generated.vocab_size, parts])
    name = f"bpe-{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    folder = Path(config.data.cache) / name
    if folder.exists():
        return folder
    report(f"training a tokenizer of {config.generated.vocab_size:,} entries")
    with new_folder(folder) as partial:
        train_bpe(_texts(config), config.generated.vocab_size, partial)
    return folder


def _texts(config: TrainConfig) -> Iterator[str]:
    """Yield the text of every row; rows that cannot be used are counted where they are masked."""
    for source in config.data.named_sources.values():
        for row in read_rows(source):
            try:
                found = parse_row(row.fields, source.format)
            except (Dropped, AttributeError, TypeError):
                continue
            if isinstance(found, Text):
                yield found.text
            elif isinstance(found, Chat):
                yield from (message["content"] for message in found.messages)
