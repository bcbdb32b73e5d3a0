"""Claims about draft checkpoints: three layouts pass bit for bit, and what is wrong is all said."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import HYBRID, LLAMA, assert_same_bits, random_model
from safetensors.numpy import load_file, save_file

import gdn.tensor_files
from eagle3.draft import Eagle3Draft
from eagle3.draft_config import DraftConfig, RopeScaling
from eagle3.interop import load_draft, save_draft

GOLDEN = Path(__file__).parent / "golden"
SINGLE, INDEX, IDS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "eagle_aux_hidden_state_layer_ids",
)
LAYOUTS = ("sglang", "vllm", "speculators")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CFG = DraftConfig(
    hidden_size=32,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,  # 4 * 6 is not hidden_size
    vocab_size=64,
    draft_vocab_size=20,
    target_hidden_size=32,
    aux_layers=(0, 1, 2),
    rms_norm_eps=1e-3,
    rope_theta=300.0,
    max_position_embeddings=512,
    initializer_range=0.1,
)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=128)
# What each layout can hold, between them everything.
EXPRESSIBLE = {
    "sglang": dict(fc_bias=True, fc_norm=True, norm_output=True, rope_scaling=LLAMA3),
    "sglang, other width": dict(hidden_size=16, head_dim=8),
    "sglang, whole vocabulary": dict(draft_vocab_size=64, aux_layers=(1, 2)),
    "vllm": dict(norm_before_fc=True, norm_before_residual=True),
    "vllm, other width": dict(hidden_size=16, rope_scaling=RopeScaling(kind="linear", factor=2.0)),
    "speculators": dict(qk_norm=True, norm_before_fc=True, norm_before_residual=True),
    "speculators, EAGLE-3.1": dict(fc_norm=True, norm_output=True, rope_scaling=LLAMA3),
}


def random_draft(embed_tokens, seed=0, dtype=jnp.float32, **changes) -> Eagle3Draft:
    """Draw every parameter, and a draft vocabulary, for an embedding or one of another width."""
    cfg = dataclasses.replace(CFG, **changes)
    rng = np.random.default_rng(seed)
    if cfg.hidden_size != embed_tokens.shape[1]:
        embed_tokens = jnp.asarray(rng.standard_normal((cfg.vocab_size, cfg.hidden_size)), dtype)
    ids = np.sort(rng.choice(cfg.vocab_size, cfg.draft_vocab_size, replace=False))
    draft = Eagle3Draft(cfg, embed_tokens, ids, dtype=dtype, rngs=nnx.Rngs(seed))
    for _, leaf in nnx.to_flat_state(nnx.state(draft, nnx.Param)):
        leaf[...] = jnp.asarray(1 + 0.3 * rng.standard_normal(leaf.shape), leaf.dtype)
    return draft


def arrays_of(draft: Eagle3Draft) -> dict:
    return {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(draft))
    }


def assert_same_draft(found: Eagle3Draft, expected: Eagle3Draft):
    assert found.cfg == expected.cfg
    assert_same_bits(arrays_of(found), arrays_of(expected))


def shares(draft, target):
    return draft.embed_tokens.get_value() is target.embed_tokens.get_value()


def change(directory, edit):
    """Apply `edit` to the dict of tensors."""
    tensors = load_file(directory / SINGLE)
    edit(tensors)
    save_file(tensors, directory / SINGLE)


def change_config(directory, edit):
    """Apply `edit` to the dict of config.json."""
    config = read_config(directory)
    edit(config)
    (directory / "config.json").write_text(json.dumps(config))


def read_config(directory) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@pytest.fixture(scope="module")
def draft(hybrid):
    return random_draft(hybrid.embed_tokens[...])


@pytest.fixture(scope="module")
def saved(draft, tmp_path_factory):
    """The draft in each layout."""
    root = tmp_path_factory.mktemp("drafts")
    for layout in LAYOUTS:
        save_draft(draft, root / layout, layout, target_name="some/target")
    return root


@pytest.fixture
def folder(saved, tmp_path):
    """A checkpoint in the first layout, to be spoilt."""
    return Path(shutil.copytree(saved / "sglang", tmp_path / "draft"))


@pytest.fixture
def package(saved, tmp_path):
    """A checkpoint in the speculators layout, to be spoilt."""
    return Path(shutil.copytree(saved / "speculators", tmp_path / "package"))


@pytest.mark.parametrize("case", EXPRESSIBLE)
def test_load_gives_back_what_was_saved_bit_for_bit(case, hybrid, tmp_path):
    draft = random_draft(hybrid.embed_tokens[...], **EXPRESSIBLE[case])
    save_draft(draft, tmp_path, case.split(",")[0], target_name="some/target")
    found = load_draft(tmp_path, hybrid)
    assert_same_draft(found, draft)
    assert shares(found, hybrid) == (draft.cfg.hidden_size == 32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_drafts_pass_bit_for_bit_too(layout, tmp_path):
    target = random_model(LLAMA, dtype=jnp.bfloat16)
    draft = random_draft(target.embed_tokens[...], dtype=jnp.bfloat16)
    save_draft(draft, tmp_path, layout, target_name="some/target")
    assert_same_draft(load_draft(tmp_path, target), draft)
    wide = load_draft(tmp_path, target, jnp.float32)
    assert wide.fc[...].dtype == jnp.float32 and shares(wide, target)


@pytest.mark.parametrize("variant", ["base", "eagle31", "qk_norm", "speculators_default"])
def test_saving_what_speculators_wrote_gives_its_tensors_back(variant, tmp_path):
    sizes = dict(num_hidden_layers=4, layer_types=("full_attention",) * 4)
    target = random_model(dataclasses.replace(LLAMA, vocab_size=80, hidden_size=16, **sizes))
    source = GOLDEN / f"draft_{variant}"
    save_draft(
        load_draft(source, target, jnp.bfloat16), tmp_path, "speculators", target_name="tiny"
    )
    found, expected = load_file(tmp_path / SINGLE), load_file(source / SINGLE)
    assert sorted(found) == sorted(expected)
    assert_same_bits(dict(sorted(found.items())), dict(sorted(expected.items())))
    stated, wrote = read_config(tmp_path), read_config(source)
    for name in (*FLAGS, IDS, "draft_vocab_size", "tie_word_embeddings", "speculators_model_type"):
        assert stated[name] == wrote[name]
    assert (
        stated["transformer_layer_config"].items()
        >= {
            key: value
            for key, value in wrote["transformer_layer_config"].items()
            if key in stated["transformer_layer_config"]
        }.items()
    )


def test_layer_ids_count_inputs_at_the_top_level_and_outputs_in_eagle_config(saved):
    for layout in LAYOUTS:
        assert read_config(saved / layout)[IDS] == [0, 1, 2]
    for layout in ("sglang", "vllm"):
        assert read_config(saved / layout)["eagle_config"][IDS] == [-1, 0, 1]
    assert "eagle_config" not in read_config(saved / "speculators")


@pytest.mark.parametrize("keep", ["", "eagle_config", "neither"])
def test_layer_ids_are_read_in_either_numbering_or_are_the_default(keep, folder, hybrid):
    def edit(config):
        config[IDS] = [0, 1, 2] if keep == "" else None
        if keep != "eagle_config":
            del config["eagle_config"]

    change_config(folder, edit)
    assert load_draft(folder, hybrid).cfg.aux_layers == (0, 1, 2)
    assert hybrid.cfg.default_aux_layers == (0, 1, 2)


def test_every_key_that_readers_disagree_about_is_written(saved):
    for layout in LAYOUTS:
        config = read_config(saved / layout)
        layer = config.get("transformer_layer_config", config)
        assert {name: config[name] for name in FLAGS} == dict.fromkeys(FLAGS, False)
        assert config["tie_word_embeddings"] is False and config["target_hidden_size"] == 32
        assert config["draft_vocab_size"] == 20 and layer["vocab_size"] == 64
        assert layer["head_dim"] == 6 and layer["max_position_embeddings"] == 512
        tables = load_file(saved / layout / SINGLE)
        assert tables["d2t"].dtype == np.int64 and tables["t2d"].dtype == np.bool_
        target_ids = tables["d2t"] + np.arange(20)
        assert np.array_equal(np.flatnonzero(tables["t2d"]), target_ids)
    nested = read_config(saved / "sglang")["eagle_config"]
    assert {name: nested[name] for name in FLAGS} == dict.fromkeys(FLAGS, False)
    verifier = read_config(saved / "speculators")["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "some/target"


def test_the_embedding_is_written_where_readers_need_it(saved, draft, hybrid, tmp_path):
    is_there = {k: "embed_tokens.weight" in load_file(saved / k / SINGLE) for k in LAYOUTS}
    assert is_there == {"sglang": False, "vllm": False, "speculators": True}
    save_draft(draft, tmp_path, "vllm", embedding=True)
    assert "embed_tokens.weight" in load_file(tmp_path / SINGLE)
    assert shares(load_draft(tmp_path, hybrid), hybrid)


def test_an_embedding_of_the_drafts_own_survives_load_and_save(package, hybrid, tmp_path):
    change(package, lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"] + 1}))
    draft = load_draft(package, hybrid)
    assert_same_bits(draft.embed_tokens[...], hybrid.embed_tokens[...] + 1)
    save_draft(nnx.merge(*nnx.split(draft)), tmp_path, "sglang")
    assert_same_draft(load_draft(tmp_path, hybrid), draft)


PREFIXES = ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_spelling_of_the_layer_is_read(prefix, folder, draft, hybrid):
    tensors = load_file(folder / SINGLE)
    outer = "model." if prefix.startswith("model.") else ""
    renamed = {
        name.replace("midlayer.", prefix) if name.startswith("midlayer.") else outer + name: array
        for name, array in tensors.items()
    }
    save_file(renamed, folder / SINGLE)
    assert_same_draft(load_draft(folder, hybrid), draft)


@pytest.mark.parametrize("where", ["top", "eagle_config"])
def test_the_older_names_of_the_norms_before_fc_are_read(where, hybrid, tmp_path):
    draft = random_draft(hybrid.embed_tokens[...], fc_norm=True)
    save_draft(draft, tmp_path)

    def edit(config):
        del config["fc_norm"], config["eagle_config"]["fc_norm"]
        (config if where == "top" else config["eagle_config"])["use_aux_norm"] = True

    change_config(tmp_path, edit)
    names = ("low", "mid", "high")
    change(
        tmp_path,
        lambda t: [
            t.update({f"aux_norm_{name}.weight": t.pop(f"fc_norm.{i}.weight")})
            for i, name in enumerate(names)
        ],
    )
    assert_same_draft(load_draft(tmp_path, hybrid), draft)


def test_sharded_files_are_read(folder, draft, hybrid):
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: files[i % 2] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: array for name, array in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_same_draft(load_draft(folder, hybrid), draft)


def test_rotary_tables_and_copies_of_the_target_are_skipped(folder, draft, hybrid):
    extra = np.ones(3, np.float32)
    names = ("midlayer.self_attn.rotary_emb.inv_freq", "verifier_norm.weight")
    change(folder, lambda t: t.update(dict.fromkeys(names, extra)))
    assert_same_draft(load_draft(folder, hybrid), draft)


@pytest.mark.parametrize("stated", [True, False])
def test_a_whole_vocabulary_needs_no_table(stated, hybrid, tmp_path):
    draft = random_draft(hybrid.embed_tokens[...], draft_vocab_size=64)
    save_draft(draft, tmp_path)
    change(tmp_path, lambda t: (t.pop("d2t"), t.pop("t2d")))
    change_config(tmp_path, lambda c: c.update(draft_vocab_size=64 if stated else None))
    assert_same_draft(load_draft(tmp_path, hybrid), draft)


@pytest.mark.parametrize("rows", [64, 20])
def test_without_a_head_and_its_size_the_targets_rows_are_the_head(rows, folder, draft, hybrid):
    change_config(folder, lambda c: c.update(draft_vocab_size=None))
    change(folder, lambda t: t.pop("lm_head.weight"))
    if rows == 64:
        change(folder, lambda t: (t.pop("d2t"), t.pop("t2d")))
    found = load_draft(folder, hybrid)
    ids = np.asarray(draft.target_ids[...]) if rows == 20 else np.arange(64)
    assert found.cfg.draft_vocab_size == rows
    assert_same_bits(found.target_ids[...], ids.astype(np.int32))
    assert_same_bits(found.lm_head[...], hybrid.lm_head[...][ids])


def test_a_target_width_that_only_fc_shows_is_read_off_it(hybrid, tmp_path):
    draft = random_draft(hybrid.embed_tokens[...], hidden_size=16)
    save_draft(draft, tmp_path)
    change_config(tmp_path, lambda c: c.pop("target_hidden_size"))
    assert_same_draft(load_draft(tmp_path, hybrid), draft)


def nested(**values):
    return lambda config: config["eagle_config"].update(values)


def stated(**values):
    return lambda config: config.update(values)


def in_layer(**values):
    return lambda config: config["transformer_layer_config"].update(values)


@pytest.mark.parametrize(
    "edit, said",
    [
        (stated(attention_bias=True), "attention_bias: found True, supported: False"),
        (stated(mlp_bias=True), "mlp_bias: found True"),
        (stated(num_hidden_layers=2), "num_hidden_layers: found 2, supported: 1"),
        (stated(hidden_act="gelu"), "hidden_act: found 'gelu', supported: 'silu'"),
        (stated(partial_rotary_factor=0.25), "partial_rotary_factor: found 0.25"),
        (stated(tie_word_embeddings=True), "tie_word_embeddings: found True"),
        (stated(quantization_config={"bits": 4}), "quantization_config: found"),
        (stated(sliding_window=128), "sliding_window: found 128, supported: none"),
        (
            stated(sliding_window=128, layer_types=["sliding_attention"]),
            "sliding_window: found 128, supported: none, or max_position_embeddings .512.",
        ),
        (stated(layer_types=["linear_attention"]), "layer_types: found"),
        (stated(layer_types=[]), r"layer_types: found \[\]"),
        (
            stated(rope_scaling={"rope_type": "yarn", "factor": 4}),
            "rope_scaling.rope_type: .*'yarn'",
        ),
        (stated(rope_scaling={"type": "mrope"}), "rope_type: found 'mrope', supported: default, "),
        (stated(rope_scaling={"type": "linear"}), "rope_scaling.factor: found None"),
        (stated(rope_scaling={"type": "default", "factor": 2}), "rope_scaling.factor: found 2"),
        (stated(rope_scaling="linear"), "rope_scaling: found 'linear', expected an object"),
        (
            stated(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
            "rope_parameters.partial_rotary_factor: found 0.5",
        ),
        (
            stated(rope_parameters={"rope_type": "default", "rope_theta": 10}),
            "rope_parameters.rope_theta = 10 and rope_theta = 300.0: found different bases",
        ),
        (
            stated(
                rope_parameters={"rope_type": "linear", "factor": 2},
                rope_scaling={"rope_type": "linear", "factor": 4},
            ),
            "rope_scaling: found beside a different rope_parameters",
        ),
        (
            stated(rope_parameters={"full_attention": {"rope_theta": 1}}),
            "rope_parameters.full_attention: found an object",
        ),
        (stated(bias="no"), "bias: found 'no', expected true or false"),
        (stated(norm_output="yes"), "norm_output: found 'yes', expected true or false"),
        (
            nested(norm_output=True),
            "norm_output = False and eagle_config.norm_output = True: found different values",
        ),
        (
            nested(use_aux_norm=True),
            "fc_norm = False and .*eagle_config.use_aux_norm = True: found different values",
        ),
        (nested(use_aux_hidden_state=False), "eagle_config.use_aux_hidden_state: found False"),
        (nested(num_aux_hidden_states=5), "num_aux_hidden_states: found 5, expected 3"),
        (
            nested(**{IDS: [0, 1, 2]}),
            rf"{IDS} = \[0, 1, 2\] and eagle_config.{IDS} = \[0, 1, 2\]: found different layers",
        ),
        (stated(**{IDS: [2, 1, 0]}), rf"{IDS}: found \[2, 1, 0\], expected ascending"),
        (stated(**{IDS: "all"}), f"{IDS}: found 'all', expected ascending"),
        (
            lambda c: (c.update({IDS: [1, 2, 3]}), c.pop("eagle_config")),
            r"aux_layers \(1, 2, 3\) go beyond the 2 layers of the target",
        ),
        (stated(eagle_config=[]), r"eagle_config: found \[\], expected an object"),
        (stated(hidden_size=None), "hidden_size: missing, and there is no safe default"),
        (stated(hidden_size="32"), "hidden_size: found '32', expected an integer"),
        (stated(rms_norm_eps=0), "rms_norm_eps: found 0.0, expected a positive number"),
        (stated(rope_theta="1e4"), "rope_theta: found '1e4', expected a positive number"),
        (stated(target_hidden_size=True), "target_hidden_size: found True, expected an integer"),
        (stated(head_dim=7), "head_dim: 7 is odd"),
        (stated(draft_vocab_size=65), "draft_vocab_size: 65 is more than vocab_size"),
        (stated(num_attention_heads=5), "num_attention_heads: 5 is not a multiple"),
    ],
)
def test_what_the_draft_cannot_compute_is_refused_by_name(edit, said, folder, hybrid):
    change_config(folder, edit)
    with pytest.raises(ValueError, match=said) as error:
        load_draft(folder, hybrid)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "edit, said",
    [
        (stated(speculators_model_type="dflash"), "speculators_model_type: found 'dflash'"),
        (in_layer(model_type="gpt_oss"), "model_type: found 'gpt_oss', supported: 'llama'"),
        (in_layer(model_type=None), "model_type: found 'nothing'"),
        (in_layer(model_type="qwen3", head_dim=None), "head_dim: missing"),
        (in_layer(attention_bias=True), "attention_bias: found True"),
        (in_layer(model_type="qwen3"), r"missing tensors \(2\): .*k_norm.weight, .*q_norm.weight"),
        (
            in_layer(rope_parameters={"rope_type": "yarn"}),
            "rope_parameters.rope_type: found 'yarn'",
        ),
        (stated(transformer_layer_config=3), "transformer_layer_config: found 3"),
    ],
)
def test_the_speculators_layout_is_held_to_the_same(edit, said, package, hybrid):
    change_config(package, edit)
    with pytest.raises(ValueError, match=said):
        load_draft(package, hybrid)


@pytest.mark.parametrize(
    "values",
    [
        dict(sliding_window=128, use_sliding_window=False),
        dict(sliding_window=128, layer_types=["full_attention"]),
        dict(sliding_window=512),
        dict(bos_token_id=1, pad_token_id=0, torch_dtype="bfloat16", some_future_key=[1]),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 300}),
        dict(num_key_value_heads=2, tie_word_embeddings=None),
    ],
)
def test_keys_that_change_nothing_change_nothing(values, folder, draft, hybrid):
    change_config(folder, stated(**values))
    assert_same_draft(load_draft(folder, hybrid), draft)


FC, Q_PROJ = "fc.weight", "midlayer.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda t: t.pop("d2t"), "d2t is missing: 20 draft ids of a vocabulary of 64"),
        (lambda t: t["d2t"].__iadd__(50), "target ids lie in .*, outside 0..63; d2t holds diff"),
        (lambda t: t["d2t"].__isub__(60), "target ids lie in -"),
        (
            lambda t: t.update(d2t=t["d2t"] + np.arange(20)),  # ids, where differences belong
            "d2t holds differences, target id = draft id",
        ),
        (lambda t: t["d2t"].__setitem__(5, t["d2t"][4] - 1), "not ascending and distinct"),
        (lambda t: t.update(t2d=~t["t2d"]), "t2d marks 44 target ids, other ones than the 20"),
        (lambda t: t.update(t2d=t["t2d"][:-1]), r"t2d is BOOL \(63,\), expected BOOL \(64,\)"),
        (lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t is I64 \(19,\), expected I64/I32 \(20,\)"),
        (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), "d2t is F32"),
        (
            lambda t: t.update({FC: t[FC][:, :64]}),
            r"fc.weight is F32 \(32, 64\), expected .*\(32, 96\) \(target_hidden_size 32 for each"
            r" of the layers \(0, 1, 2\)\)",
        ),
        (lambda t: t.pop(FC), r"missing tensors \(1\): fc.weight"),
        (lambda t: t.pop(Q_PROJ), rf"missing tensors \(1\): {Q_PROJ}"),
        (lambda t: t.pop("lm_head.weight"), r"missing tensors \(1\): lm_head.weight"),
        (
            lambda t: t.update({"midlayer.self_attn.q_proj.bias": t["norm.weight"]}),
            r"unknown tensors \(1\): midlayer.self_attn.q_proj.bias; .* remove them",
        ),
        (
            lambda t: t.update({"layers.1.hidden_norm.weight": t["norm.weight"]}),
            r"unknown tensors \(1\): layers.1.hidden_norm.weight",
        ),
        (
            lambda t: t.update({"fc_norm.0.weight": t["norm.weight"]}),
            r"tensors that the config rules out \(1\): fc_norm.0.weight; set in config.json",
        ),
        (
            lambda t: t.update({"aux_norm_low.weight": t["norm.weight"]}),
            r"tensors that the config rules out \(1\): aux_norm_low.weight",
        ),
        (
            lambda t: t.update({Q_PROJ: np.ascontiguousarray(t[Q_PROJ].T)}),
            rf"{Q_PROJ} is F32 \(64, 24\), expected .*\(24, 64\)",
        ),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.int8)}), rf"{Q_PROJ} is I8"),
        (
            lambda t: t.update({"layers.0.self_attn.q_proj.weight": t[Q_PROJ]}),
            rf"tensors under two names \(1\): layers.0.self_attn.q_proj.weight and {Q_PROJ}",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(edit, said, folder, hybrid):
    change(folder, edit)
    with pytest.raises(ValueError, match=said) as error:
        load_draft(folder, hybrid)
    assert "1 problem(s)" in str(error.value)


def test_everything_that_is_wrong_comes_in_one_error(folder):
    change_config(folder, stated(attention_bias=True, **{IDS: [0, 1]}))
    change_config(folder, lambda config: config.pop("eagle_config"))

    def spoil(tensors):
        del tensors["d2t"], tensors["norm.weight"]
        tensors["extra.weight"] = tensors["midlayer.hidden_norm.weight"]
        tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)

    change(folder, spoil)
    target = random_model(dataclasses.replace(LLAMA, vocab_size=48, hidden_size=24))
    with pytest.raises(ValueError) as error:
        load_draft(folder, target)
    for said in (
        "attention_bias: found True",
        r"unknown tensors \(1\): extra.weight",
        r"under two names \(1\): layers.0.hidden_norm.weight and midlayer.hidden_norm.weight",
        "vocab_size is 64 in the draft, the target has 48",
        "target_hidden_size is 32 in the draft, the target has 24",
        r"missing tensors \(1\): norm.weight",
        r"fc.weight is F32 \(32, 96\), expected .*\(32, 64\)",
        "lm_head.weight is I32",
        "d2t is missing",
    ):
        assert error.match(f"(?s){said}")


def test_layer_ids_that_are_missing_are_mentioned_when_fc_has_another_width(folder, hybrid):
    change_config(folder, lambda c: (c.pop("eagle_config"), c.pop(IDS)))
    change(folder, lambda t: t.update({FC: t[FC][:, :64]}))
    with pytest.raises(ValueError, match=f"{IDS} is missing; .* state them"):
        load_draft(folder, hybrid)


def test_a_draft_of_another_width_needs_an_embedding_and_a_head_of_its_own(hybrid, tmp_path):
    save_draft(random_draft(hybrid.embed_tokens[...], hidden_size=16), tmp_path)
    change(tmp_path, lambda t: (t.pop("embed_tokens.weight"), t.pop("lm_head.weight")))
    change_config(tmp_path, stated(draft_vocab_size=None))
    with pytest.raises(
        ValueError, match="share neither the target's embedding nor its head"
    ) as error:
        load_draft(tmp_path, hybrid)
    assert error.match(r"missing tensors \(2\): embed_tokens.weight, lm_head.weight")


def test_pickled_weights_are_refused_with_the_way_out(folder, hybrid):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds pytorch_model.bin and no safetensors; convert"):
        load_draft(folder, hybrid)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_cut_short_is_named(keep, folder, hybrid):
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:keep])
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short"):
        load_draft(folder, hybrid)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", b"\xff\xfe"])
def test_a_broken_config_is_named(text, folder, hybrid):
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"config.json: (not JSON|found a \w+, expected a JSON)"):
        load_draft(folder, hybrid)


def test_a_missing_folder_is_named(tmp_path, hybrid):
    with pytest.raises(ValueError, match="nowhere.config.json: cannot be read"):
        load_draft(tmp_path / "nowhere", hybrid)


@pytest.mark.parametrize(
    "layout, changes, said",
    [
        ("sglang", dict(qk_norm=True), "do not compute qk_norm; save as 'speculators'"),
        ("vllm", dict(qk_norm=True), "do not compute qk_norm; save as 'speculators'"),
        ("sglang", dict(norm_before_fc=True), "norm_before_fc; save as 'vllm' or 'speculators'"),
        ("sglang", dict(norm_before_residual=True), "norm_before_residual; save as 'vllm'"),
        ("vllm", dict(fc_bias=True), "do not compute fc_bias; save as 'sglang'"),
        ("speculators", dict(fc_bias=True), "do not compute fc_bias; save as 'sglang'"),
        (
            "speculators",
            dict(hidden_size=16),
            "other than the target's; save as 'sglang' or 'vllm'",
        ),
        ("vllm", dict(fc_bias=True, qk_norm=True), "qk_norm, fc_bias; no layout has them all"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(layout, changes, said, hybrid, tmp_path):
    draft = random_draft(hybrid.embed_tokens[...], **changes)
    with pytest.raises(ValueError, match=said):
        save_draft(draft, tmp_path / "draft", layout, target_name="some/target")
    assert not (tmp_path / "draft").exists()


def test_the_speculators_layout_needs_the_targets_name(draft, tmp_path):
    with pytest.raises(ValueError, match="find the target by name; give target_name"):
        save_draft(draft, tmp_path, "speculators")


def test_an_unknown_layout_is_refused_with_the_nearest_name(draft, tmp_path):
    with pytest.raises(ValueError, match="found 'speculator', .*did you mean 'speculators'"):
        save_draft(draft, tmp_path, "speculator")


@pytest.mark.parametrize("stop_after", [0, 1])
def test_an_interrupted_save_leaves_no_draft_that_is_half_new(
    stop_after, folder, hybrid, monkeypatch
):
    replace, calls = os.replace, []

    def killed(source, target):
        calls.append(target)
        if len(calls) > stop_after:
            raise KeyboardInterrupt
        replace(source, target)

    draft = random_draft(hybrid.embed_tokens[...], seed=1)
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_draft(draft, folder)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="config.json: cannot be read"):
        load_draft(folder, hybrid)
    save_draft(draft, folder)  # a later save mends it and leaves no remains
    assert_same_draft(load_draft(folder, hybrid), draft)
    assert {path.name for path in folder.iterdir()} == {"config.json", SINGLE}


def test_a_save_that_breaks_off_leaves_the_old_draft_whole(folder, draft, hybrid, monkeypatch):
    def break_off(tensors, path, metadata):
        Path(path).write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(gdn.tensor_files, "save_file", break_off)
    with pytest.raises(OSError, match="disk full"):
        save_draft(random_draft(hybrid.embed_tokens[...], seed=1), folder)
    assert_same_draft(load_draft(folder, hybrid), draft)


def test_files_of_an_earlier_save_are_removed_and_others_kept(folder, draft, hybrid):
    (folder / "model-00001-of-00002.safetensors").write_text("stale")
    (folder / INDEX).write_text("stale")
    (folder / "README.md").write_text("kept")
    save_draft(draft, folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", SINGLE, "README.md"}
    assert_same_draft(load_draft(folder, hybrid), draft)


def test_a_tied_targets_embedding_is_the_head_that_is_shared(folder):
    target = random_model(dataclasses.replace(HYBRID, tie_word_embeddings=True))
    change_config(folder, stated(draft_vocab_size=None))
    change(folder, lambda t: t.pop("lm_head.weight"))
    found = load_draft(folder, target)
    assert_same_bits(found.lm_head[...], target.embed_tokens[...][found.target_ids[...]])
