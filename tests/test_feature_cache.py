"""Claims about the feature cache: the target's own numbers, once written, and damage is seen."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import HYBRID, assert_same_bits, random_draft

from eagle3.config import ConfigError
from eagle3.training.data.batches import Batch, Batches
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.data.dataset import TokenDataset
from eagle3.training.data.rows import Tally
from eagle3.training.feature_cache import FeatureCache
from eagle3.training.features import FeaturedBatch, Features, head_rows, target_features
from eagle3.training.optim import OptimConfig, make_optimizer
from eagle3.training.step import DraftTask, TrainState, train_step

ROWS, LENGTH, AUX, WIDTH = 10, 5, 3, 7  # odd, so that records of bfloat16 end on odd places
OPTIMIZER = make_optimizer(OptimConfig(lr=1e-2, clip=0.5), 100)


def open_cache(directory, fingerprint="target and data", **changes) -> FeatureCache:
    options: dict[str, Any] = dict(num_rows=ROWS, length=LENGTH, num_aux=AUX, width=WIDTH)
    options |= dict(dtype=np.float32, limit_gb=0.001)
    return FeatureCache(directory, fingerprint, **options | changes)


def random_features(row_ids, seed=0, dtype=np.float32) -> Features:
    """Draw every bit at random, NaN and all; a row has the same bits wherever it is."""

    def draw(place, dtype, *shape) -> Any:
        whole = np.random.default_rng((seed, place)).bytes(
            ROWS * LENGTH * int(np.prod(shape)) * np.dtype(dtype).itemsize
        )
        return np.frombuffer(whole, dtype).reshape(ROWS, LENGTH, *shape)[row_ids]

    return Features(draw(0, dtype, AUX, WIDTH), draw(1, dtype, WIDTH), draw(2, np.int32))


def never(places) -> Features:
    raise AssertionError("the target is run")


def said(features: Features) -> Callable[[np.ndarray], Features]:
    """Return a target that says this of a batch, or of what it is asked about of it."""
    return lambda places: Features(*(x.reshape(-1, *x.shape[2:])[places] for x in features))


def fill(cache, row_ids, seed=0) -> Features:
    return cache.features(row_ids, said(random_features(row_ids, seed)))


def ids(*rows) -> np.ndarray:
    return np.array(rows, np.int64).reshape(1, -1)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_rows_are_read_bit_for_bit_in_later_epochs_and_runs(tmp_path, dtype):
    cache = open_cache(tmp_path, dtype=dtype)
    rng = np.random.default_rng(0)
    for row_ids in rng.permutation(ROWS).reshape(1, 5, 2):
        expected = random_features(row_ids, dtype=dtype)
        found = cache.features(row_ids, said(expected))
        assert_same_bits(found, expected)
    for again in (cache, open_cache(tmp_path, dtype=dtype)):
        row_ids = rng.permutation(ROWS).reshape(2, 5)
        found = again.features(row_ids, never)
        assert_same_bits(found, random_features(row_ids, dtype=dtype))


def test_a_draft_that_learns_from_the_cache_has_the_weights_of_one_that_runs_the_target(
    tmp_path, hybrid
):
    graph, params = nnx.split(hybrid)
    draft, weights, tables = nnx.split(random_draft(hybrid), nnx.Param, ...)
    weights, tables = nnx.to_pure_dict(weights), nnx.to_pure_dict(tables)
    taps = tuple(range(HYBRID.num_hidden_layers + 1))  # as random_draft has them
    task = DraftTask(draft, tuple(x.dtype for x in jax.tree.leaves(weights)), steps=2)
    frozen = (tables, head_rows(hybrid, tables["target_ids"]))
    rng = np.random.default_rng(0)
    shape = (1, 4, 16)
    tokens = rng.integers(0, HYBRID.vocab_size, shape).astype(np.int32)
    segments = 1 + (np.arange(16) >= rng.integers(3, 13, (1, 4, 1))).astype(np.int32)
    batch = Batch(tokens, rng.random(shape) < 0.8, segments)

    def online(places=None):
        return target_features(graph, nnx.to_pure_dict(params), taps, batch)

    def from_cache(compute):
        sizes: dict[str, Any] = dict(length=16, num_aux=len(taps), width=HYBRID.hidden_size)
        return open_cache(tmp_path, **sizes).features(ids(3, 0, 9, 4), compute)

    def trained(features):
        copied = jax.tree.map(jnp.copy, weights)
        state = TrainState(jnp.int32(0), copied, OPTIMIZER.init(copied), None)
        return train_step(task, OPTIMIZER, state, frozen, FeaturedBatch(batch, features))

    first, later = from_cache(online), from_cache(never)
    expected = online()
    assert_same_bits((first, later), (expected, expected))
    assert_same_bits(trained(later), trained(expected))


def test_a_batch_of_which_a_row_is_missing_adds_that_row(tmp_path):
    cache = open_cache(tmp_path)
    fill(cache, ids(1, 2))
    fill(cache, ids(2, 5))
    row_ids = ids(5, 1, 2)
    assert_same_bits(cache.features(row_ids, never), random_features(row_ids))


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        ([], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([1, 3, 4], [[0, 1, 2, 3], [4, 5, 6, 7]]),  # five are as dear as eight
        ([1, 3, 4, 9], [[0, 2, 5, 6]]),
        ([0, 1, 2, 5, 8], [[3, 4, 7, 3]]),
        ([1, 2, 3, 4, 5, 8], [[0, 7]]),
        ([0, 1, 2, 3, 4, 5, 8], [[7]]),
        ([0, 1, 2, 3, 4, 5, 8, 9], []),
    ],
)
def test_the_target_reads_only_what_is_missing_in_few_shapes(tmp_path, there, asked):
    cache, row_ids, found = open_cache(tmp_path), np.array([[0, 1, 2, 3], [4, 5, 8, 9]]), []
    if there:
        fill(cache, ids(*there))
    say = said(random_features(row_ids))

    def compute(places):
        found.extend(places.tolist())
        return say(places)

    assert_same_bits(cache.features(row_ids, compute), random_features(row_ids))
    assert found == asked
    assert_same_bits(cache.features(row_ids, never), random_features(row_ids))


def test_what_a_row_once_was_it_stays(tmp_path):
    """Where a target gives a row other bits beside other rows, or at another place."""
    cache = open_cache(tmp_path)
    fill(cache, ids(1, 2), seed=1)
    mixed = fill(cache, ids(4, 2, 3), seed=2)
    assert_same_bits(cache.features(ids(4, 2, 3), never), mixed)
    assert_same_bits(mixed.best[:, 1], random_features(ids(2), seed=1).best[:, 0])

    other = random_features(ids(6, 7), seed=3)
    twice = cache.features(ids(6, 6), said(other))
    assert_same_bits(cache.features(ids(6, 6), never), twice)
    assert_same_bits(twice.hidden[:, 1], other.hidden[:, 0])


@pytest.mark.parametrize("place", [0, 41, -5, -1])  # of a record: its data, and its checksum
def test_a_damaged_row_is_computed_again_and_no_other(tmp_path, place):
    cache, row_ids = open_cache(tmp_path), ids(*range(ROWS))
    expected = fill(cache, row_ids)
    content = bytearray(cache.path.read_bytes())
    content[4 * len(content) // ROWS + place % (len(content) // ROWS)] ^= 1
    cache.path.write_bytes(content)
    others = np.delete(row_ids, 4, axis=1)
    assert_same_bits(cache.features(others, never), random_features(others))
    assert_same_bits(fill(cache, row_ids), expected)
    assert_same_bits(cache.features(row_ids, never), expected)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_row_that_a_killed_process_left_half_written_is_computed_again(
    tmp_path, monkeypatch, share
):
    cache = open_cache(tmp_path)
    fill(cache, ids(7))  # beyond the one that is cut short, which is a hole in the file until then
    pwrite = os.pwrite

    def killed(file, data, offset):
        pwrite(file, data[: int(share * len(data))], offset)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwrite", killed)
        fill(cache, ids(2, 3))
    cache = open_cache(tmp_path)
    with pytest.raises(AssertionError, match="is run"):
        cache.features(ids(2), never)
    assert_same_bits(fill(cache, ids(3, 2)), random_features(ids(3, 2)))
    assert_same_bits(cache.features(ids(7, 2, 3), never), random_features(ids(7, 2, 3)))


def test_a_row_of_nothing_but_zeros_is_told_from_one_that_is_not_there(tmp_path):
    cache = open_cache(tmp_path)
    zeros = jax.tree.map(np.zeros_like, random_features(ids(1)))
    cache.features(ids(8), said(zeros))
    with pytest.raises(AssertionError, match="is run"):
        cache.features(ids(1), never)
    cache.features(ids(1), said(zeros))
    assert_same_bits(cache.features(ids(1), never), zeros)


def test_a_file_takes_room_for_the_rows_that_are_there(tmp_path):
    cache = open_cache(tmp_path, num_rows=1_000_000, limit_gb=1.0)
    fill(cache, ids(1, 2))
    far = ids(999_999)
    cache.features(far, said(random_features(ids(0))))
    assert cache.path.stat().st_size > 500e6 and cache.path.stat().st_blocks * 512 < 1e5
    assert_same_bits(cache.features(far, never), random_features(ids(0)))


def test_more_than_the_limit_is_an_error_that_says_how_much_and_both_ways_out(tmp_path):
    row = LENGTH * 4 * (1 + AUX * WIDTH + WIDTH) + 4
    rows = 20_010_000_000 // row
    message = (
        r"needs 20\.01 GB for .* rows, and data\.feature_cache_gb is 20\.0: raise it,"
        " or leave data.feature_cache empty"
    )
    with pytest.raises(ConfigError, match=message):
        open_cache(tmp_path, num_rows=rows, limit_gb=20.0)
    assert not list(tmp_path.iterdir())
    open_cache(tmp_path, num_rows=rows, limit_gb=20.02)


def test_another_fingerprint_or_size_is_another_folder(tmp_path):
    changes = [{}, {"fingerprint": "other"}, {"num_rows": 9}, {"length": 4}, {"num_aux": 2},
               {"width": 6}, {"dtype": jnp.bfloat16}]  # fmt: skip
    caches = [open_cache(tmp_path, **change) for change in changes]
    assert len({cache.path.parent for cache in caches}) == len(changes)
    fill(caches[0], ids(1))
    with pytest.raises(AssertionError, match="is run"):
        caches[1].features(ids(1), never)


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path, monkeypatch):
    lines = []
    cache = open_cache(tmp_path, report=lines.append)
    fill(cache, ids(0, 1))
    pwrite = os.pwrite

    def full(file, data, offset):
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        for row_ids in (ids(2, 3), ids(1, 4)):
            assert_same_bits(fill(cache, row_ids), random_features(row_ids))
    assert_same_bits(cache.features(ids(1, 0), never), random_features(ids(1, 0)))
    assert len(lines) == 1 and "No space left" in lines[0] and "training goes on" in lines[0]


def test_a_write_that_is_done_in_parts_is_done_whole(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:100], at))
    cache = open_cache(tmp_path)
    fill(cache, ids(6, 2))
    assert_same_bits(cache.features(ids(2, 6), never), random_features(ids(2, 6)))


def test_two_at_once_leave_each_row_as_one_of_them_wrote_it_or_not_at_all(tmp_path):
    def work(seed):
        cache = open_cache(tmp_path)
        for turn in range(40):
            fill(cache, np.random.default_rng(turn).permutation(ROWS)[None, :3], seed)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
    for row in range(ROWS):
        found = fill(open_cache(tmp_path), ids(row), seed=2)
        bits = [[np.asarray(x).tobytes() for x in random_features(ids(row), s)] for s in range(3)]
        assert [np.asarray(x).tobytes() for x in found] in bits


def test_features_and_rows_that_the_cache_is_not_of_are_errors(tmp_path):
    cache = open_cache(tmp_path)
    with pytest.raises(ValueError, match="aux_hidden as bfloat16"):
        cache.features(ids(1), said(random_features(ids(1), dtype=jnp.bfloat16)))
    for row in (-1, ROWS):
        with pytest.raises(ValueError, match="not all below 10"):
            cache.features(ids(0, row), never)


def test_a_directory_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data.feature_cache .*file/cache cannot be written"):
        open_cache(tmp_path / "file" / "cache")


def dataset(first: int, documents: int) -> TokenDataset:
    """Documents of three tokens each, no two of which are the same."""
    tokens = np.arange(first, first + 3 * documents, dtype=np.int32)
    offsets = 3 * np.arange(documents + 1, dtype=np.int64)
    return TokenDataset(tokens, tokens >= 0, offsets, Tally(documents), "")


@pytest.mark.parametrize("packing", ["window", "pack", "pad"])
def test_a_rows_number_stands_for_the_same_tokens_in_every_epoch(packing):
    sources = {name: SourceConfig(files=name) for name in ("a", "b")}
    data = {"a": dataset(100, 7), "b": dataset(1000, 12)}
    found: dict[int, tuple] = {}
    for seed in (0, 1):
        cfg = DataConfig(sources=sources, batch_size=5, length=8, packing=packing, seed=seed)
        batches = Batches(cfg, data)
        for step in range(20):
            numbers, batch = batches.rows_at(step), batches.batch_at(step)
            assert numbers.dtype == np.int64 and numbers.shape == (5,)
            for number, tokens in zip(numbers.tolist(), batch.tokens, strict=True):
                assert found.setdefault(number, tuple(tokens)) == tuple(tokens)
    assert sorted(found) == list(range(batches.num_rows))
    assert len(set(found.values())) == len(found)
