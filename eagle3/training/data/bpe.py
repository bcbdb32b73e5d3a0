"""Train a byte-level BPE and save it in the files that released checkpoints have.

Byte-level: every text has tokens and decodes to itself. The same texts give the same files.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle3.config import ConfigError

END_OF_TEXT = "<|endoftext|>"  # token 0
_SMALLEST = 257  # the bytes and the end of text


def train_bpe(texts: Iterable[str], vocab_size: int, directory: str | Path) -> int:
    """Write `tokenizer.json` and `tokenizer_config.json`, which transformers reads as well.

    Returns:
      The tokens it has: `vocab_size`, or fewer if the texts are too short for so many.

    Raises:
      ConfigError: a vocabulary so small that it does not hold the bytes.
    """
    if vocab_size < _SMALLEST:
        raise ConfigError(f"vocab_size is {vocab_size}, a byte-level BPE has at least {_SMALLEST}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,  # or transformers decodes " ." to "."
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return backend.get_vocab_size()
