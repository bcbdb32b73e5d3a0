"""The draft's vocabulary: the target's most frequent tokens, where a model has to produce them.

A draft scores only these, so what they cover bounds how often it can be right; its head is the
smaller for it, as most of a large vocabulary is rare.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from eagle3.config import ConfigError

_PART = 1 << 22  # tokens counted at once; bounds memory


class DraftVocabulary(NamedTuple):
    """Which tokens a draft can propose."""

    target_ids: np.ndarray  # int32 [Vd], ascending: for Eagle3Draft
    coverage: float  # share of the counted tokens that are among them; nan if none were counted

    def __str__(self) -> str:
        """Return one line."""
        return f"draft vocabulary: {len(self.target_ids):,} tokens cover {self.coverage:.2%}"


def count_tokens(tokens: np.ndarray, mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return how often each id occurs where the mask is True.

    Raises:
      ValueError: an id is not in the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _PART):
        part = slice(start, start + _PART)
        found = np.bincount(tokens[part][mask[part]], minlength=vocab_size)
        if len(found) > vocab_size:
            raise ValueError(
                f"the data has token {len(found) - 1}, the target has {vocab_size}: the tokenizer"
                " is not the target's"
            )
        counts += found
    return counts


def draft_vocabulary(counts: np.ndarray, size: int, forced: Iterable[int] = ()) -> DraftVocabulary:
    """Choose the `size` most frequent ids; of equally frequent ones, the lower.

    Args:
      counts: by id, as `count_tokens` returns them; add those of several sources.
      forced: ids that are in however rare, such as the end of text: without it no draft could ever
        end an answer.

    Raises:
      ConfigError: `size` is more than there are ids, or fewer than are forced.
    """
    must = np.unique(np.fromiter(forced, np.int64))
    if not 1 <= size <= len(counts):
        raise ConfigError(f"draft vocabulary of {size}, it must be from 1 to {len(counts)}")
    if len(must) and not 0 <= must[0] <= must[-1] < len(counts):
        raise ConfigError(
            f"forced ids are {must[0]} to {must[-1]}, expected 0 to {len(counts) - 1}"
        )
    if len(must) > size:
        raise ConfigError(
            f"draft vocabulary of {size} has no room for {len(must)} control tokens; raise it"
        )
    order = np.argsort(-counts, kind="stable")  # stable: ties, and those never seen, by id
    others = order[~np.isin(order, must)][: size - len(must)]
    ids = np.sort(np.concatenate([must, others])).astype(np.int32)
    total = counts.sum()
    return DraftVocabulary(ids, float(counts[ids].sum() / total) if total else float("nan"))
