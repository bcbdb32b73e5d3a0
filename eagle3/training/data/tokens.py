"""A target's tokenizer as training needs it: many texts at once, and which tokens are special."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from eagle3.text import (
    REPLACEMENT,
    ByteTokenizer,
    FileTokenizer,
    end_ids,
    load_tokenizer,
    read_object,
)


class TrainingTokenizer:
    """Text to token ids and back, with the tokens that begin and end texts."""

    def __init__(self, tokenizer: ByteTokenizer | FileTokenizer, end_ids: Sequence[int] = ()):
        """Wrap a tokenizer.

        Args:
          end_ids: tokens the target stops at; the first of them ends plain text.
        """
        self._tokenizer = tokenizer
        # One rule for the private attribute: this module reads it, nothing else does.
        self._backend = tokenizer._backend if isinstance(tokenizer, FileTokenizer) else None
        added = self._backend.get_added_tokens_decoder() if self._backend is not None else {}
        self.special_texts = tuple(token.content for token in added.values() if token.special)
        self.end_ids = tuple(dict.fromkeys(end_ids))
        self.control_ids = tuple(sorted({*added, *end_ids}))  # what a draft has to be able to say
        self.first_ids = tuple(i for i in tokenizer.encode("") if i not in self.end_ids)
        self.last_ids = self.end_ids[:1]
        content = self._backend.to_str() if self._backend is not None else "bytes"
        self.fingerprint = hashlib.sha256(f"{content} {self.end_ids}".encode()).hexdigest()

    @classmethod
    def load(cls, directory: str | None, vocab_size: int) -> "TrainingTokenizer":
        """Read the tokenizer of a target, and from its configuration files where texts end.

        Raises:
          ConfigError: there is no tokenizer, or a file cannot be used.
        """
        tokenizer = load_tokenizer(directory, vocab_size)
        if directory is None:
            return cls(tokenizer)
        return cls(tokenizer, end_ids(directory, tokenizer, vocab_size))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return token ids; `special` adds those a text starts with, if there are any."""
        return self._tokenizer.encode(text, special)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, none added, on all cores."""
        if self._backend is None:
            return [self._tokenizer.encode(text, False) for text in texts]
        # Headers and the like are the same in many rows. Fast: without offsets.
        distinct = list(dict.fromkeys(texts))
        found = self._backend.encode_batch_fast(distinct, add_special_tokens=False)
        ids = {text: encoding.ids for text, encoding in zip(distinct, found, strict=True)}
        return [ids[text] for text in texts]

    def prompt_of(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens come from, as `encode` begins one with `first_ids`.

        Of a character that is cut in two, nothing is left.
        """
        first = len(self.first_ids)
        begins = first > 0 and tuple(ids[:first]) == self.first_ids
        return self.decode(ids[first if begins else 0 :], special=True).rstrip(REPLACEMENT)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text; `special` keeps the special tokens in it."""
        return self._tokenizer.decode(ids, special)


def has_template(directory: str | Path) -> bool:
    """Tell whether a target comes with a chat template."""
    directory = Path(directory)
    names = read_object(directory / "tokenizer_config.json")
    return bool(names.get("chat_template")) or (directory / "chat_template.jinja").exists()
