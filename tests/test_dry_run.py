"""Claims about `--dry-run`: published sizes, nothing made, and what devices tell each other."""

import json
from pathlib import Path

import pytest
import yaml
from flax import nnx

import decode
import train
from eagle3.config import ConfigError, GeneratedTarget
from eagle3.dry_run import abstract_target, number_of, parse_memory, target_shape
from eagle3.hlo import collectives
from gdn.published import NAMES, published_shape

ROOT = Path(__file__).parent.parent
# Billions of parameters of the text models, with embeddings, as published shapes give them.
PUBLISHED = {
    "Qwen3.5-0.8B": 0.752,
    "Qwen3.5-2B": 1.882,
    "Qwen3.5-4B": 4.206,
    "Qwen3.5-9B": 8.954,
    "Qwen3.5-27B": 26.896,
    "Qwen3.5-35B-A3B": 34.66,
    "Qwen3-Next-80B-A3B": 79.67,
}
PROGRAM = """HloModule jit_f
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %z = f32[] add(%x, %y)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %g = bf16[4,16]{1,0} all-gather(%h), channel_id=1, dimensions={1}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %r)
}

%condition (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %w = (s32[], f32[4,8]{1,0}) while(%s), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %v = (s32[], f32[4,8]{1,0}) while(%w), condition=%condition, body=%body
  ROOT %r = (f32[4,8]{1,0}, /*index=1*/f32[2]{0}) all-reduce(%a, %b), channel_id=2, to_apply=%add
}
"""  # noqa: E501


def test_published_shapes_have_the_published_numbers_of_parameters():
    assert set(PUBLISHED) == set(NAMES)
    for name, billions in PUBLISHED.items():
        digits = len(str(billions).partition(".")[2])
        shape = published_shape(name)
        assert shape is not None
        assert round(shape.num_parameters() / 1e9, digits) == billions


def test_targets_of_the_configurations_are_known_without_their_files():
    for path in ROOT.glob("configs/*.yaml"):
        directory = yaml.safe_load(path.read_text()).get("target") or ""
        if directory.startswith("checkpoints/"):
            name = Path(directory).name
            cfg = target_shape(directory, GeneratedTarget())
            assert round(cfg.num_parameters() / 1e9) == round(
                next(n for x, n in PUBLISHED.items() if name.startswith(x))
            )


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.5-35B-A3B"])
def test_models_without_memory_have_as_many_parameters(name):
    cfg = published_shape(name)
    assert cfg is not None
    assert number_of(nnx.state(abstract_target(cfg, "bfloat16"))) == cfg.num_parameters()


def test_an_unknown_target_is_an_error_that_says_what_is_known():
    with pytest.raises(ConfigError, match="nowhere has no config.json, .* Qwen3.5-27B"):
        target_shape("nowhere", GeneratedTarget())


def test_collectives_are_counted_as_often_as_they_run():
    """Three times in a loop that is known to, once in one that is not."""
    traffic = collectives(PROGRAM)
    assert traffic.count == {"all-gather": 4, "all-reduce": 1}
    assert traffic.bytes == {"all-gather": 4 * 4 * 16 * 2, "all-reduce": 4 * 8 * 4 + 2 * 4}


def test_memory_is_read_in_either_unit():
    assert parse_memory("80GiB") == 80 << 30 and parse_memory("1.5 GB") == 1_500_000_000
    for text in ("80Gb", "many", "1.2.3GB", ""):
        with pytest.raises(ConfigError, match="it must be a size such as 80GiB"):
            parse_memory(text)


def test_a_run_in_stages_is_planned_and_nothing_is_made(tmp_path, capsys):
    """The draft's target is not there: an earlier stage would train it."""
    places = [f"stages.{x}.out={tmp_path / x}" for x in ("target", "draft")]
    argv = ["--config", str(ROOT / "configs/tiny.yaml"), *places, "--dry-run"]
    argv += [f"stages.draft.target={tmp_path / 'target'}", f"data.cache={tmp_path / 'cache'}"]
    assert train.main([*argv, "--device-memory", "1MiB"]) == 0
    told = capsys.readouterr().out
    assert "target 67,440" in told and "draft 26,752" in told
    assert "collectives, step: none" in told
    assert told.count("does not fit") == 2
    assert not list(tmp_path.iterdir())


def test_decoding_with_a_draft_that_is_still_to_be_trained_is_planned(tmp_path, capsys):
    path = tmp_path / "decode.yaml"
    path.write_text(json.dumps({"draft": "none-yet", "prefill_chunk": 32, "max_new_tokens": 32}))
    assert decode.main(["--config", str(path), "--dry-run", "--device-memory", "1GiB"]) == 0
    told = capsys.readouterr().out
    assert "8 rows of 64 tokens" in told and "round of 8 nodes a row" in told
    assert "GiB: fits" in told
    adapts = ["tree.kind=auto", "tree.max_nodes=6", "tree.max_depth=3"]
    assert decode.main(["--config", str(path), "--dry-run", *adapts]) == 0
    assert "round of 6 nodes a row" in capsys.readouterr().out
