"""Claims about checkpoints: what is saved is loaded, and what does not fit is said in one error."""

import json
import logging
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    HYBRID,
    LLAMA,
    QWEN3,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    TIED_HYBRID,
    assert_same_bits,
    float32,
    parameters,
    random_model,
)
from safetensors.numpy import load_file, save_file

import gdn.tensor_files
from gdn import load_pretrained, save_pretrained

GOLDEN = Path(__file__).parent / "golden"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FAMILIES = {
    "hybrid": HYBRID,
    "tied_hybrid": TIED_HYBRID,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "llama": LLAMA,
    "qwen3": QWEN3,
}
every_family = pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def change(directory, edit, file=SINGLE):
    """Apply `edit` to the dict of tensors of a file."""
    tensors = load_file(directory / file)
    edit(tensors)
    save_file(tensors, directory / file)


def assert_same_model(found, expected):
    assert found.cfg == expected.cfg
    assert_same_bits(parameters(found), parameters(expected))


@pytest.fixture(scope="module")
def saved_hybrid(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hybrid")
    save_pretrained(random_model(HYBRID), directory)
    return directory


@pytest.fixture
def hybrid_dir(saved_hybrid, tmp_path):
    """A checkpoint of one file, to be spoilt."""
    return Path(shutil.copytree(saved_hybrid, tmp_path / "checkpoint"))


@pytest.fixture
def sharded_dir(tmp_path):
    save_pretrained(random_model(HYBRID), tmp_path / "sharded", max_shard_bytes=20_000)
    return tmp_path / "sharded"


@every_family
@pytest.mark.parametrize("max_shard_bytes", [5 << 30, 20_000], ids=["single", "sharded"])
def test_load_gives_back_what_was_saved_bit_for_bit(cfg, max_shard_bytes, tmp_path):
    model = random_model(cfg)
    save_pretrained(model, tmp_path, max_shard_bytes)
    assert (tmp_path / SINGLE).exists() == (max_shard_bytes > 1 << 30)
    assert_same_model(load_pretrained(tmp_path), model)


@pytest.mark.parametrize("cfg", [QWEN3_NEXT, TIED_HYBRID], ids=["qwen3_next", "tied_hybrid"])
def test_bfloat16_models_pass_bit_for_bit_too(cfg, tmp_path):
    model = random_model(cfg, dtype=jnp.bfloat16)
    save_pretrained(model, tmp_path)
    assert_same_model(load_pretrained(tmp_path, jnp.bfloat16), model)


def test_shards_hold_what_they_may_and_the_index_names_every_tensor(sharded_dir):
    index = json.loads((sharded_dir / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found, total = {}, 0
    for file in files:
        tensors = load_file(sharded_dir / file)
        found |= dict.fromkeys(tensors, file)
        size = sum(x.nbytes for x in tensors.values())
        assert size <= 20_000 or len(tensors) == 1
        total += size
    assert found == index["weight_map"] and total == index["metadata"]["total_size"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_saving_what_transformers_wrote_gives_its_tensors_back(name, tmp_path):
    # The moe file holds fused experts, as released ones do; qwen3_next one tensor per expert.
    save_pretrained(load_pretrained(GOLDEN / name), tmp_path)
    found, expected = load_file(tmp_path / SINGLE), load_file(GOLDEN / name / SINGLE)
    assert sorted(found) == sorted(expected)
    assert_same_bits(dict(sorted(found.items())), dict(sorted(expected.items())))


def test_bfloat16_load_rounds_the_weights_and_keeps_what_is_always_float32(hybrid_dir):
    found = parameters(load_pretrained(hybrid_dir, jnp.bfloat16))
    for name, exact in parameters(load_pretrained(hybrid_dir)).items():
        if name.endswith(("A_log", "dt_bias", "linear_attn.norm")):
            assert_same_bits(found[name], exact)
        else:
            assert_same_bits(found[name], np.asarray(exact).astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_files_load_as_float32(hybrid_dir, dtype):
    exact = parameters(load_pretrained(hybrid_dir))
    change(hybrid_dir, lambda t: t.update({k: x.astype(dtype) for k, x in t.items()}))
    found = parameters(load_pretrained(hybrid_dir))
    rounded = {name: float32(np.asarray(x).astype(dtype)) for name, x in exact.items()}
    assert_same_bits(found, rounded)


def test_vision_and_mtp_tensors_are_skipped_with_one_log_line(caplog):
    directory = GOLDEN / "qwen3_5_wrapped"
    with caplog.at_level(logging.INFO, logger="gdn"):
        load_pretrained(directory)
    names = json.loads((directory / INDEX).read_text())["weight_map"]
    extra = [name for name in names if name.startswith(("mtp.", "model.visual."))]
    (record,) = caplog.records
    assert f"skipped {len(extra)} tensors" in record.getMessage()
    assert "mtp." in record.getMessage() or "visual." in record.getMessage()


def test_nothing_is_logged_when_every_tensor_is_used(hybrid_dir, caplog):
    with caplog.at_level(logging.INFO, logger="gdn"):
        load_pretrained(hybrid_dir)
    assert not caplog.records


def test_a_tied_head_in_the_file_is_ignored(tmp_path):
    model = random_model(TIED_HYBRID)
    save_pretrained(model, tmp_path)
    change(tmp_path, lambda t: t.update({"lm_head.weight": np.ones((64, 32), np.float32)}))
    assert_same_model(load_pretrained(tmp_path), model)


def test_an_untied_head_is_needed(hybrid_dir):
    change(hybrid_dir, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing parameters \(1\): lm_head"):
        load_pretrained(hybrid_dir)


def test_a_single_file_over_shards_leaves_only_the_new_files(sharded_dir):
    (sharded_dir / "tokenizer.json").write_text("{}")
    (sharded_dir / "model-draft.safetensors").write_text("not ours")
    model = random_model(LLAMA, seed=1)
    save_pretrained(model, sharded_dir)
    kept = ["model-draft.safetensors", "tokenizer.json"]
    assert names_in(sharded_dir) == sorted(["config.json", SINGLE, *kept])
    assert_same_model(load_pretrained(sharded_dir), model)


def test_shards_over_a_single_file_or_other_shards_leave_only_the_new_files(hybrid_dir):
    model = random_model(LLAMA, seed=1)
    for size in (20_000, 12_000, 30_000):
        save_pretrained(model, hybrid_dir, size)
        files = set(json.loads((hybrid_dir / INDEX).read_text())["weight_map"].values())
        assert len(files) > 1
        assert names_in(hybrid_dir) == sorted([*files, INDEX, "config.json"])
        assert_same_model(load_pretrained(hybrid_dir), model)


def test_a_save_that_breaks_off_leaves_the_old_file_whole(hybrid_dir, monkeypatch):
    def break_off(tensors, path, metadata):
        Path(path).write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(gdn.tensor_files, "save_file", break_off)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(random_model(LLAMA), hybrid_dir)
    assert_same_model(load_pretrained(hybrid_dir), random_model(HYBRID))


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
CONV = "model.layers.0.linear_attn.conv1d.weight"
A_LOG = "model.layers.0.linear_attn.A_log"


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda t: t.pop(A_LOG), [r"missing parameters \(1\): layers.0.linear_attn.A_log"]),
        (
            lambda t: t.update({"model.layers.7.mlp.up_proj.weight": t[Q_PROJ]}),
            [r"unexpected tensors \(1\): model.layers.7.mlp.up_proj.weight"],
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": t[A_LOG]}),
            [r"unexpected tensors \(1\): model.layers.1.self_attn.q_proj.bias"],
        ),
        (
            lambda t: t.update({Q_PROJ: np.ascontiguousarray(t[Q_PROJ].T)}),
            [rf"misshapen tensors \(1\): {Q_PROJ} is F32 \(32, 128\), .*\(128, 32\)"],
        ),
        (
            lambda t: t.update({CONV: t[CONV][:, 0]}),
            [rf"misshapen tensors \(1\): {CONV} is F32 \(80, 4\), .*\(80, 1, 4\)"],
        ),
        (
            lambda t: t.update({A_LOG: t[A_LOG].astype(np.int32)}),
            [rf"misshapen tensors \(1\): {A_LOG} is I32 \(4,\), not floating-point"],
        ),
        (
            lambda t: t.update({"model.language_model.norm.weight": t["model.norm.weight"]}),
            [r"tensors that are there under two names \(1\): \S*norm.weight"],
        ),
        (
            lambda t: t.update(
                {
                    "extra.weight": t[A_LOG],
                    A_LOG: t.pop("lm_head.weight"),
                    CONV: np.zeros((80, 2, 4), np.float32),
                    Q_PROJ: t[Q_PROJ].astype(np.int8),
                    "model.language_model.norm.weight": t["model.norm.weight"],
                }
            ),
            [
                r"missing parameters \(1\): lm_head",
                r"unexpected tensors \(1\): extra.weight",
                r"misshapen tensors \(3\): ",
                rf"{A_LOG} is F32 \(64, 32\)",
                rf"{CONV} is F32 \(80, 2, 4\)",
                rf"{Q_PROJ} is I8 \(128, 32\)",
                r"tensors that are there under two names \(1\): \S*norm.weight",
            ],
        ),
    ],
    ids="missing unexpected_layer bias transposed flat_conv integer twice all_at_once".split(),
)
def test_tensors_that_do_not_fit_are_all_named_in_one_error(hybrid_dir, edit, said):
    change(hybrid_dir, edit)
    with pytest.raises(ValueError, match="the weights in .*checkpoint do not fit") as error:
        load_pretrained(hybrid_dir)
    for pattern in said:
        assert error.match(pattern)


@pytest.mark.parametrize(
    "name, said",
    [
        ("model.layers.0.mlp.experts.1.up_proj.weight", "missing parameters .*gate_up_proj"),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", "missing .*in_proj_qkv.*in_proj_z"),
        ("model.layers.0.linear_attn.in_proj_ba.weight", "missing .*in_proj_[ab].*in_proj_[ab]"),
    ],
)
def test_a_missing_part_of_a_fused_parameter_is_missed(tmp_path, name, said):
    save_pretrained(random_model(QWEN3_NEXT), tmp_path)
    change(tmp_path, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=said):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["in_proj_qkvz", "in_proj_ba"])
def test_a_misshapen_fused_projection_is_named(tmp_path, kind):
    save_pretrained(random_model(QWEN3_NEXT), tmp_path)
    name = f"model.layers.0.linear_attn.{kind}.weight"
    change(tmp_path, lambda t: t.update({name: t[name][:-1]}))
    with pytest.raises(ValueError, match=rf"misshapen tensors \(1\): {name}"):
        load_pretrained(tmp_path)


def test_an_expert_too_many_is_unexpected(tmp_path):
    save_pretrained(random_model(QWEN3_NEXT), tmp_path)
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    change(tmp_path, lambda t: t.update({name.format(6): t[name.format(5)]}))
    with pytest.raises(ValueError, match=rf"unexpected tensors \(1\): {name.format(6)}"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_cut_short_is_named(hybrid_dir, keep):
    whole = (hybrid_dir / SINGLE).read_bytes()
    (hybrid_dir / SINGLE).write_bytes(whole[:keep])
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short"):
        load_pretrained(hybrid_dir)


def test_a_missing_file_is_named(hybrid_dir):
    (hybrid_dir / SINGLE).unlink()
    with pytest.raises(
        ValueError, match=r"(?s)checkpoint cannot be read.*model\.safetensors does not exist"
    ):
        load_pretrained(hybrid_dir)


def test_every_missing_or_damaged_shard_is_named_in_one_error(sharded_dir):
    first, second, third, *_ = sorted(sharded_dir.glob("model-*.safetensors"))
    first.unlink()
    third.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(ValueError) as error:
        load_pretrained(sharded_dir)
    for path in (first, second, third):
        assert path.name in str(error.value)


def test_a_missing_shard_is_named(sharded_dir):
    _, second, *_ = sorted(sharded_dir.glob("model-*.safetensors"))
    second.unlink()
    with pytest.raises(ValueError, match=f"{second.name} does not exist"):
        load_pretrained(sharded_dir)


def test_a_tensor_that_only_the_index_knows_is_named(sharded_dir):
    index = json.loads((sharded_dir / INDEX).read_text())
    index["weight_map"]["model.lost.weight"] = sorted(index["weight_map"].values())[0]
    (sharded_dir / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="tensors that no file holds: model.lost.weight"):
        load_pretrained(sharded_dir)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a"',
        "{}",
        "[]",
        "null",
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": 1}}',
    ],
)
def test_a_broken_index_is_named(sharded_dir, text):
    (sharded_dir / INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"{INDEX} is not a safetensors index"):
        load_pretrained(sharded_dir)


def test_an_unknown_model_type_is_named_with_what_is_supported(hybrid_dir):
    config = json.loads((hybrid_dir / "config.json").read_text()) | {"model_type": "qwen3_6"}
    (hybrid_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type: found 'qwen3_6', supported: .*qwen3_next"):
        load_pretrained(hybrid_dir)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load_pretrained(tmp_path / "nowhere")


def test_an_expert_under_two_names_does_not_stand_for_a_missing_one(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "qwen3_next", tmp_path / "next"))
    tensors = load_file(directory / SINGLE)
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    del tensors[name.format(1)]
    tensors[name.format(0).replace("model.", "model.language_model.")] = tensors[name.format(0)]
    save_file(tensors, directory / SINGLE)
    with pytest.raises(ValueError, match=r"(?s)missing .*down_proj.*under two names \(1\)"):
        load_pretrained(directory)


def test_a_single_file_beside_an_index_is_refused(sharded_dir):
    shutil.copy(GOLDEN / "qwen3_5" / SINGLE, sharded_dir)
    with pytest.raises(ValueError, match="holds both model.safetensors and .*index.json"):
        load_pretrained(sharded_dir)


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_an_interrupted_save_never_mixes_old_and_new_weights(sharded_dir, monkeypatch, stop_after):
    replace, calls = os.replace, []

    def killed(source, target):
        calls.append(target)
        if len(calls) > stop_after:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(random_model(HYBRID, seed=1), sharded_dir, max_shard_bytes=20_000)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="config.json"):
        load_pretrained(sharded_dir)
    model = random_model(HYBRID, seed=1)
    save_pretrained(model, sharded_dir)  # a later save mends it and leaves no remains
    assert_same_bits(parameters(load_pretrained(sharded_dir)), parameters(model))
    assert {path.name for path in sharded_dir.iterdir()} == {"config.json", SINGLE}


def test_experts_in_both_layouts_are_refused(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "qwen3_5_moe", tmp_path / "moe"))
    tensors = load_file(directory / SINGLE)
    fused = tensors["model.layers.0.mlp.experts.down_proj"]
    tensors["model.layers.0.mlp.experts.0.down_proj.weight"] = fused[0].copy()
    save_file(tensors, directory / SINGLE)
    with pytest.raises(ValueError, match=r"under two names \(1\): \S*experts.down_proj"):
        load_pretrained(directory)


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(tmp_path, monkeypatch):
    save_pretrained(random_model(LLAMA), tmp_path)
    monkeypatch.setattr("gdn.tensor_files._MAPPED", 1)  # bytes: opened anew after every tensor
    load_pretrained(tmp_path)

    def replaced(_, value):
        shutil.copy(tmp_path / "model.safetensors", tmp_path / "another")
        os.replace(tmp_path / "another", tmp_path / "model.safetensors")
        return value

    with pytest.raises(ValueError, match="changed while it was read: load it again"):
        load_pretrained(tmp_path, convert=replaced)
