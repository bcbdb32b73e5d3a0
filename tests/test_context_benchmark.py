"""benchmarks/context.py: the two models it compares, its caches, its table and its figure."""

import importlib

import pytest

from eagle3.config import GeneratedTarget


@pytest.fixture(scope="module")
def context():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("benchmarks")  # scripts there import one another
        yield importlib.import_module("context")


@pytest.fixture(scope="module")
def sides(context):
    return context.make_sides(GeneratedTarget(num_hidden_layers=4, hidden_size=32), "float32")


@pytest.fixture(scope="module")
def found(context, sides):
    return {length: context.measure(sides, length, 4, 2) for length in (64, 128)}


def test_both_models_have_one_width_and_depth_and_as_many_parameters(context):
    hybrid, full = (
        side.cfg
        for side in context.make_sides(
            GeneratedTarget(num_hidden_layers=8, hidden_size=64), "float32"
        ).values()
    )
    assert hybrid.layer_types.count("full_attention") == 2
    assert full.layer_types == ("full_attention",) * 8
    assert (hybrid.hidden_size, hybrid.head_dim) == (full.hidden_size, full.head_dim)
    assert full.num_parameters() == pytest.approx(hybrid.num_parameters(), rel=0.01)


def test_decoding_ends_where_the_cache_is_full(context, sides):
    side = sides["hybrid"]
    state = context.started(side, 64, 60)
    state, seconds = context.visit(side, state, 4)
    assert state.cache.lengths.tolist() == [64]
    assert seconds > 0


def test_the_caches_of_attention_grow_with_the_context_and_those_of_deltanet_do_not(context, found):
    cached = {length: {n: p.cached for n, p in points.items()} for length, points in found.items()}
    assert cached[128]["attention"] == 2 * cached[64]["attention"]
    grown = {name: cached[128][name] - cached[64][name] for name in context.NAMES}
    assert grown["attention"] == 4 * grown["hybrid"]  # of four layers, one has keys


def test_a_length_without_room_is_refused(context, sides):
    with pytest.raises(SystemExit, match="length 8 has no room"):
        context.measure(sides, 8, 4, 2)


def test_the_table_has_a_cell_for_every_heading(context, found, capsys):
    point = context.Point(0.002, 3_000_000, None)
    row = context.table_row(1024, {"hybrid": point, "attention": point._replace(seconds=0.003)})
    assert row == "| 1,024 | 2.0 ms | 3.0 ms | 1.50 | 3.0 MB | 3.0 MB | - | - |"


def test_the_figure_is_written(context, found, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    path = tmp_path / "context.png"
    context.draw(found, str(path))
    assert path.read_bytes()[:4] == b"\x89PNG"
