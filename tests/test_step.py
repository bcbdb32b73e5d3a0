"""Claims about a training step, its optimiser, its checkpoints and what it tells."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    HYBRID,
    assert_close,
    assert_same_bits,
    forward,
    random_draft,
    random_model,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from eagle3.config import ConfigError
from eagle3.training.checkpoint import Checkpoints
from eagle3.training.data.batches import Batch
from eagle3.training.features import FeaturedBatch, head_rows, target_features
from eagle3.training.metrics import Metrics
from eagle3.training.optim import (
    OptimConfig,
    hold_end,
    learning_rate,
    make_optimizer,
    same_rates,
)
from eagle3.training.step import DraftTask, TargetTask, TrainState, train_step

LENGTH, STEPS = 16, 2
TAPS = tuple(range(HYBRID.num_hidden_layers + 1))  # as random_draft has them
CONFIG = {"steps": 4}
OPTIMIZER = make_optimizer(OptimConfig(lr=1e-2, clip=0.5), 100)


def random_batch(seed: int, pieces: int) -> Batch:
    """Four rows in all, each of two documents."""
    rng = np.random.default_rng(seed)
    shape = (4, LENGTH)
    tokens = rng.integers(0, HYBRID.vocab_size, shape).astype(np.int32)
    segments = 1 + (np.arange(LENGTH) >= rng.integers(3, 13, (4, 1))).astype(np.int32)
    rows = Batch(tokens, rng.random(shape) < 0.8, segments)
    return Batch(*(x.reshape(pieces, 4 // pieces, LENGTH) for x in rows))


def split(module):
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    return graph, tuple(x.dtype for x in jax.tree.leaves(params)), params, rest


@pytest.fixture(scope="module", params=["target", "draft"])
def job(request, hybrid):
    """A task, a function that makes its first state, and what it does not train."""
    if request.param == "target":
        graph, dtypes, params, _ = split(random_model(HYBRID))
        task, frozen = TargetTask(graph, dtypes, rows=24), ()
    else:
        graph, dtypes, params, tables = split(random_draft(hybrid))
        task = DraftTask(graph, dtypes, steps=STEPS)
        frozen = (tables, head_rows(hybrid, tables["target_ids"]))

    def first() -> TrainState:
        copied = jax.tree.map(jnp.copy, params)
        return TrainState(jnp.int32(0), copied, OPTIMIZER.init(copied), None)

    return task, first, frozen, hybrid


def run(job, state, steps, pieces=1):
    task, _, frozen, _ = job
    metrics: Any = None
    for step in steps:
        batch: Any = random_batch(step, pieces)
        if isinstance(task, DraftTask):
            graph, _, params, _ = split(job[3])
            batch = FeaturedBatch(batch, target_features(graph, params, TAPS, batch))
        state, metrics = train_step(task, OPTIMIZER, state, frozen, batch)
    return state, metrics


def test_a_batch_in_pieces_moves_the_weights_as_the_batch_at_once(job):
    whole, in_pieces = (run(job, job[1](), range(1), pieces) for pieces in (1, 2))
    assert_close(in_pieces[1], whole[1])
    # Adam divides by the gradient's own size: where that is nothing but rounding, so is the step.
    moved = [jax.tree.map(lambda a, b: np.asarray(a - b), s.params, job[1]().params)
             for s, _ in (in_pieces, whole)]  # fmt: skip
    far = [np.abs(a - b) > 1e-4 for a, b in zip(*map(jax.tree.leaves, moved), strict=True)]
    assert sum(x.sum() for x in far) < 1e-3 * sum(x.size for x in far)


def test_two_steps_a_checkpoint_and_two_more_are_four_steps_bit_for_bit(job, tmp_path):
    straight, _ = run(job, job[1](), range(4))
    half, _ = run(job, job[1](), range(2))
    with Checkpoints(tmp_path / "run", keep_last=1) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(half, {"steps": 4, "nested": {"names": ["a", None]}})
    with Checkpoints(tmp_path / "run", keep_last=1) as checkpoints:
        assert checkpoints.latest() == 2
        assert checkpoints.config() == {"steps": 4, "nested": {"names": ["a", None]}}
        resumed, _ = run(job, checkpoints.load(job[1]()), range(2, 4))
    assert_same_bits(resumed, straight)


def test_the_loss_falls(job):
    state, first = run(job, job[1](), [0])
    for _ in range(12):
        state, last = run(job, state, [0])
    assert float(last.loss) < 0.9 * float(first.loss)


def test_the_targets_loss_is_the_mean_over_tokens_to_be_predicted_within_their_document(hybrid):
    graph, dtypes, params, _ = split(hybrid)
    batch = random_batch(5, 1)
    tokens, mask, segments = (x[0] for x in batch)
    logits = np.asarray(hybrid.logits(forward(hybrid, tokens, segments).hidden), np.float64)
    losses, hits = [], []
    for row, place in np.ndindex(4, LENGTH - 1):
        if mask[row, place + 1] and segments[row, place] == segments[row, place + 1]:
            scores, token = logits[row, place], tokens[row, place + 1]
            losses.append(np.log(np.exp(scores - scores[token]).sum()))
            hits.append(scores.argmax() == token)
    task = TargetTask(graph, dtypes, rows=24)
    piece = Batch(*(jnp.asarray(x[0]) for x in batch))
    loss, sums = jax.jit(lambda p: task.loss(p, (), piece, task.counts(piece)))(params)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    assert (float(sums.tokens), float(sums.hit)) == (len(losses), sum(hits))


def test_weights_are_float32_whatever_is_computed_in(hybrid):
    graph, dtypes, params, _ = split(hybrid)
    half = tuple(jnp.bfloat16 if x.ndim > 1 else x.dtype for x in jax.tree.leaves(params))
    assert jnp.bfloat16 in half
    batch, state = random_batch(0, 1), None
    for kind in (half, dtypes):
        task = TargetTask(graph, kind)
        copied = jax.tree.map(jnp.copy, params)
        state = TrainState(jnp.int32(0), copied, OPTIMIZER.init(copied), copied)
        state = state._replace(average=jax.tree.map(jnp.copy, params))
        state, metrics = train_step(task, OPTIMIZER, state, (), batch, ema=0.9)
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
        assert np.isfinite(float(metrics.loss))
    expected = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, params, state.params)
    assert_close(state.average, expected)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_rate_rises_to_its_peak_and_falls_to_nothing(schedule):
    config = OptimConfig(lr=0.5, warmup=0.1, schedule=schedule)
    rates = [float(np.asarray(learning_rate(config, 100)(step))) for step in range(101)]
    assert 0 < rates[0] < rates[5] < rates[10] and rates[10] == pytest.approx(0.5)
    if schedule == "constant":
        assert rates[100] == rates[10]
    else:
        assert rates[10] >= rates[80] > rates[90] > rates[99] > 0
        assert (rates[10] == rates[80]) == (schedule == "wsd")
        assert rates[100] == pytest.approx(0, abs=1e-9)


def test_a_longer_plan_is_the_same_until_the_rate_of_the_shorter_falls():
    short, long = (OptimConfig(schedule="wsd", warmup=5.0, decay=decay) for decay in (0.2, 0.5))
    assert hold_end(short, 50) == 40 and hold_end(long, 100) == 50
    assert same_rates(short, 50, long, 100, 40) and same_rates(short, 50, long, 100, 41)
    assert not same_rates(short, 50, long, 100, 42)  # the first that is lower
    assert not same_rates(short, 50, short, 30, 31)  # longer than the second is to be
    ever = OptimConfig(schedule="constant", warmup=5.0)
    assert same_rates(ever, 50, ever, 5000, 50)
    assert not same_rates(OptimConfig(), 50, OptimConfig(), 60, 50)


def test_muon_moves_every_weight():
    params = {"matrix": jnp.ones((4, 6)), "vector": jnp.ones(3)}
    optimizer = make_optimizer(OptimConfig(kind="muon"), 10)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert all((np.asarray(x) != 0).all() for x in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "sgd"), ("lr", 0.0), ("schedule", "step"), ("warmup", 1.5), ("warmup", -1.0),
     ("decay", 0.0), ("clip", -1.0), ("b2", 1.0), ("ema", 1.0), ("weight_decay", -0.1)],
)  # fmt: skip
def test_a_value_that_no_optimiser_can_use_is_an_error_that_names_it(field, value):
    with pytest.raises(ConfigError, match=f"optim.{field} is"):
        OptimConfig(**{field: value})


def small_state(step: int, size: int = 3) -> TrainState:
    params = {"layers": {0: jnp.full(size, step, jnp.float32)}}
    return TrainState(jnp.int32(step), params, OPTIMIZER.init(params), None)


def test_the_newest_and_every_so_manieth_checkpoint_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep_last=2, keep_every=10, keep=[7]) as checkpoints:
        for step in (5, 7, 10, 12, 14):
            checkpoints.save(small_state(step), CONFIG)
            checkpoints.save(small_state(step), CONFIG)  # there already: nothing to do
    names = {int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()}
    assert names == {7, 10, 12, 14}


def test_a_checkpoint_of_another_model_is_an_error_that_names_the_parameter(tmp_path):
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        checkpoints.save(small_state(1), CONFIG)
        checkpoints.wait()
        with pytest.raises(ValueError, match=r"layers\.0, \(3,\) there and \(4,\) here"):
            checkpoints.load(small_state(1, size=4))


def test_a_save_that_was_cut_short_is_not_taken_for_a_checkpoint(tmp_path):
    with Checkpoints(tmp_path, keep_last=5) as checkpoints:
        for step in (1, 2):
            checkpoints.save(small_state(step), CONFIG)
    cut = next(path for path in tmp_path.iterdir() if path.name == "2")
    cut.rename(tmp_path / "2.orbax-checkpoint-tmp")  # the name a save has until it is complete
    with Checkpoints(tmp_path, keep_last=5) as checkpoints:
        assert checkpoints.latest() == 1
        assert_same_bits(checkpoints.load(small_state(0)), small_state(1))
        checkpoints.save(small_state(2), CONFIG)
        checkpoints.wait()
        assert checkpoints.latest() == 2


def test_what_was_told_can_be_read_back(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.scalars(3, {"train/loss": 1.5, "perf/tokens_per_second": 20})
        metrics.text(3, "config", "a: 1\nb: 2")
        metrics.bars(3, "eval/acceptance", [0.5, 0.25])
    events = EventAccumulator(str(tmp_path)).Reload()

    def read(tag):
        event = events.Tensors(tag)[0]
        return event.step, tensor_util.make_ndarray(event.tensor_proto)

    assert read("train/loss") == (3, 1.5) and read("perf/tokens_per_second") == (3, 20.0)
    assert "a: 1\\n    b: 2" in str(read("config")[1])
    np.testing.assert_array_equal(read("eval/acceptance")[1][:, 2], [0.5, 0.25])
