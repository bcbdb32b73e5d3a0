"""eagle3/plots.py, and the figure that TensorBoard is given."""

import importlib
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from eagle3.training.evaluate import acceptance_picture
from eagle3.training.metrics import Metrics

PARENTS = [-1, 0, 0, 1, 1, 2, 4]
LABELS = ["the", "red", "big", "$ball$", "apple", "dog", "s"]


@pytest.fixture(scope="module")
def plots():
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    return importlib.import_module("eagle3.plots")


@pytest.fixture(scope="module")
def drawn(plots):
    two = plots.Scaling([1.0, 2.0], [3.0, 4.0])
    return [
        plots.draft_tree(PARENTS, LABELS, [1, 4], "and"),
        plots.ttt_mask(3, 4),
        plots.acceptance_by_depth({"a": [0.5, 0.25], "b": [0.75]}),
        plots.cost_curve([1, 2, 4], {"float32": [1.0, 1.1, 1.3]}),
        plots.data_scaling([0.25, 0.5, 1.0], {"chain": [1.3, 1.5, 1.6], "tree": [1.5, 1.8, 2.0]}),
        *plots.context_scaling([1024, 4096], {"hybrid": two, "attention only": two}),
    ]


def test_every_figure_is_drawn_and_its_axes_say_what_they_show(plots, drawn):
    for ax in drawn:
        assert ax.get_xlabel() and (ax.get_ylabel() or not len(ax.get_yticks()))
        assert plots.png(ax)[:4] == b"\x89PNG"


def test_what_was_committed_is_a_straight_line(drawn):
    places = {text.get_text(): text.get_position() for text in drawn[0].texts}
    line = [places[label] for label in ("the", "red", "apple", "and")]
    assert line == [(depth, 0.0) for depth in range(4)]
    assert len(set(places.values())) == len(PARENTS) + 1  # none lies on another


def test_a_token_that_looks_like_a_formula_is_shown_as_it_is(drawn):
    assert r"\$ball\$" in {text.get_text() for text in drawn[0].texts}


def test_a_query_sees_the_targets_features_before_it_and_its_own_guesses(plots):
    steps, slots = 3, 4
    seen = plots.visible_keys(steps, slots).reshape(steps, slots, steps, slots)
    for k in range(steps):
        for t in range(slots):
            expected = {(0, s) for s in range(t + 1)} | {(i, t) for i in range(1, k + 1)}
            assert set(zip(*np.nonzero(seen[k, t]), strict=True)) == expected


def test_series_differ_in_more_than_hue(plots):
    for style in zip(*plots.STYLES, strict=True):  # hues, strokes, markers, hatchings
        assert len(set(style)) == len(plots.STYLES)


def test_without_matplotlib_the_error_names_the_extra_and_tensorboard_goes_without(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "eagle3.plots", raising=False)
    monkeypatch.delattr(sys.modules["eagle3"], "plots", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[plots\]'"):
        importlib.import_module("eagle3.plots")
    assert acceptance_picture([0.5], 1.5) == {}


def test_tensorboard_shows_acceptance_by_depth_as_a_picture(plots, tmp_path):
    (name, png), *_ = acceptance_picture([0.5, 0.25], 1.6).items()
    with Metrics(tmp_path) as metrics:
        metrics.image(7, name, png)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.SummaryMetadata(name).plugin_data.plugin_name == "images"
    (event,) = events.Tensors(name)
    width, height, found = tensor_util.make_ndarray(event.tensor_proto)
    assert found == png and int(width) > int(height) > 100
