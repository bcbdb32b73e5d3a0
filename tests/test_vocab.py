"""The draft's vocabulary is the most frequent tokens that a model has to produce."""

import numpy as np
import pytest

from eagle3.config import ConfigError
from eagle3.vocab import count_tokens, draft_vocabulary


def counts(**by_id):
    found = np.zeros(10, np.int64)
    for name, count in by_id.items():
        found[int(name[1:])] = count
    return found


def test_tokens_count_only_where_the_model_has_to_produce_them():
    tokens = np.array([3, 3, 5, 5, 5, 0], np.int32)
    mask = np.array([True, False, True, True, False, True])
    assert count_tokens(tokens, mask, 6).tolist() == [1, 0, 0, 1, 0, 2]


def test_counts_do_not_depend_on_the_parts_they_are_taken_in(monkeypatch):
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 50, 1000).astype(np.int32), rng.random(1000) < 0.5
    whole = count_tokens(tokens, mask, 50)
    monkeypatch.setattr("eagle3.vocab._PART", 7)
    np.testing.assert_array_equal(count_tokens(tokens, mask, 50), whole)
    assert whole.sum() == mask.sum()


def test_a_token_outside_the_vocabulary_means_a_wrong_tokenizer():
    with pytest.raises(ValueError, match="has token 9, the target has 5"):
        count_tokens(np.array([9]), np.array([True]), 5)


def test_the_most_frequent_are_chosen_and_come_in_ascending_order():
    found = draft_vocabulary(counts(i7=5, i2=9, i4=1, i1=3), 3)
    assert found.target_ids.tolist() == [1, 2, 7] and found.target_ids.dtype == np.int32
    assert found.coverage == pytest.approx(17 / 18)
    assert str(found) == "draft vocabulary: 3 tokens cover 94.44%"


def test_of_equally_frequent_tokens_the_lower_ids_are_chosen():
    assert draft_vocabulary(counts(i9=2, i8=2, i3=2, i5=7), 3).target_ids.tolist() == [3, 5, 8]


def test_forced_tokens_take_the_places_of_the_least_frequent():
    found = draft_vocabulary(counts(i7=5, i2=9, i1=3), 3, forced=[9, 2, 9])
    assert found.target_ids.tolist() == [2, 7, 9]
    assert found.coverage == pytest.approx(14 / 17)


def test_too_few_distinct_tokens_are_filled_up_with_the_lowest_ids():
    assert draft_vocabulary(counts(i7=5, i0=1), 4, forced=[9]).target_ids.tolist() == [0, 1, 7, 9]


def test_all_tokens_are_a_vocabulary_that_covers_everything():
    found = draft_vocabulary(counts(i7=5, i0=1), 10, forced=[3])
    assert found.target_ids.tolist() == list(range(10)) and found.coverage == 1.0


def test_nothing_counted_has_no_coverage():
    found = draft_vocabulary(counts(), 2)
    assert found.target_ids.tolist() == [0, 1] and np.isnan(found.coverage)


@pytest.mark.parametrize(
    ("size", "forced", "message"),
    [
        (0, (), "from 1 to 10"),
        (11, (), "from 1 to 10"),
        (2, (1, 2, 3), "no room for 3 control tokens"),
        (2, (10,), "expected 0 to 9"),
        (2, (-1,), "expected 0 to 9"),
    ],
)
def test_impossible_vocabularies_are_refused(size, forced, message):
    with pytest.raises(ConfigError, match=message):
        draft_vocabulary(counts(i1=1), size, forced)
