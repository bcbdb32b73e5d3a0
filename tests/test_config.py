"""Claims about TargetConfig and about reading and writing Hugging Face configs."""

import dataclasses
import json

import pytest

from gdn.config import TargetConfig

# The layout of a released dense Qwen3.5: wrapped text section, nested rope, explicit layer list.
WRAPPED_QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "image_token_id": 248056,
    "vision_config": {"model_type": "qwen3_5", "depth": 27, "hidden_size": 1152},
    "text_config": {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "use_cache": True,
        "vocab_size": 248320,
    },
}

# The older flat layout, with the interval in place of the list.
FLAT_QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}

QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

TEXT = WRAPPED_QWEN3_5["text_config"]
MOE = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN3_5_MOE = {k: v for k, v in TEXT.items() if k != "intermediate_size"} | MOE
QWEN3_5_MOE |= {"model_type": "qwen3_5_moe_text"}
ALL = {
    "wrapped": WRAPPED_QWEN3_5,
    "flat text": TEXT,
    "moe": QWEN3_5_MOE,
    "qwen3_next": FLAT_QWEN3_NEXT,
    "partly sparse": FLAT_QWEN3_NEXT | {"mlp_only_layers": [0, 5], "norm_topk_prob": False},
    "llama": LLAMA,
    "qwen3": QWEN3,
}


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def errors_of(config) -> str:
    with pytest.raises(ValueError) as caught:
        TargetConfig.from_hf(config)
    return str(caught.value)


def test_wrapped_and_flat_configs_of_one_model_are_equal():
    config = TargetConfig.from_hf(WRAPPED_QWEN3_5)
    assert config == TargetConfig.from_hf(TEXT)
    assert config == TargetConfig.from_hf(TEXT | {"model_type": "qwen3_5"})
    assert config.model_type == "qwen3_5_text"
    assert (config.rope_theta, config.rotary_dim) == (1e7, 64)
    assert (config.num_value_groups, config.conv_channels) == (3, 2 * 16 * 128 + 48 * 128)
    assert config.norm_unit_offset and config.qk_norm and config.attn_output_gate
    assert config.eos_token_ids == (248044,) and config.bos_token_id is None
    assert config.moe_layers == () and config.num_experts == 0


def test_nested_and_flat_rope_layouts_are_equal():
    nested = TEXT | {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    flat = without(TEXT, "rope_parameters") | {"rope_theta": 5e6, "partial_rotary_factor": 0.5}
    scaling = flat | {"rope_scaling": {"type": "default", "mrope_section": [11, 11, 10]}}
    assert TargetConfig.from_hf(nested) == TargetConfig.from_hf(flat)
    assert TargetConfig.from_hf(scaling) == TargetConfig.from_hf(flat)
    assert TargetConfig.from_hf(nested | {"rope_theta": 1e4}).rope_theta == 5e6


def test_class_defaults_fill_only_what_they_fill_in_transformers():
    absent = ("rope_parameters", "layer_types", "full_attention_interval", "rms_norm_eps")
    absent += ("linear_conv_kernel_dim", "initializer_range")
    config = TargetConfig.from_hf(without(TEXT, *absent))
    assert config == dataclasses.replace(TargetConfig.from_hf(TEXT), rope_theta=10000.0)


def test_interval_gives_the_layer_list_that_files_spell_out():
    config = TargetConfig.from_hf(FLAT_QWEN3_NEXT)
    assert config.layer_types == (*["linear_attention"] * 3, "full_attention") * 12
    every_second = TargetConfig.from_hf(FLAT_QWEN3_NEXT | {"full_attention_interval": 2})
    assert every_second.layer_types == ("linear_attention", "full_attention") * 24


def test_sparse_layers_follow_the_step_and_the_exceptions():
    read = TargetConfig.from_hf
    assert read(FLAT_QWEN3_NEXT).moe_layers == (True,) * 48
    assert read(QWEN3_5_MOE).moe_layers == (True,) * 64
    stepped = read(FLAT_QWEN3_NEXT | {"decoder_sparse_step": 3, "mlp_only_layers": [5]})
    assert [i for i, is_sparse in enumerate(stepped.moe_layers) if is_sparse] == [
        2,
        *range(8, 48, 3),
    ]
    dense = read(FLAT_QWEN3_NEXT | {"num_experts": 0})
    assert dense.moe_layers == () and dense.moe_intermediate_size == 0
    assert dense == read(FLAT_QWEN3_NEXT | {"mlp_only_layers": list(range(48))})


def test_llama_heads_default_to_multi_head_attention():
    config = TargetConfig.from_hf(without(LLAMA, "num_key_value_heads"))
    assert (config.num_key_value_heads, config.head_dim) == (32, 128)
    assert not (config.norm_unit_offset or config.qk_norm or config.attn_output_gate)
    assert set(config.layer_types) == {"full_attention"} and config.rotary_dim == 128
    assert TargetConfig.from_hf(LLAMA | {"head_dim": 64}).head_dim == 64
    assert "head_dim: missing" in errors_of(LLAMA | {"hidden_size": 4100})


def test_qwen3_window_is_ignored_only_while_it_is_off():
    config = TargetConfig.from_hf(QWEN3)
    assert config.qk_norm and not config.norm_unit_offset
    assert TargetConfig.from_hf(QWEN3 | {"sliding_window": 4096}) == config
    assert "use_sliding_window" in errors_of(QWEN3 | {"use_sliding_window": True})
    assert "sliding_window: found 4096" in errors_of(LLAMA | {"sliding_window": 4096})
    mixed = ["full_attention", "sliding_attention"] * 14
    assert "found 'sliding_attention'" in errors_of(QWEN3 | {"layer_types": mixed})


@pytest.mark.parametrize(("found", "expected"), [(7, (7,)), ([7, 9], (7, 9)), ([], ()), (None, ())])
def test_eos_may_be_one_id_or_several_or_none(found, expected):
    assert TargetConfig.from_hf(TEXT | {"eos_token_id": found}).eos_token_ids == expected


def test_wrapper_supplies_what_the_text_section_lacks():
    text = without(TEXT, "eos_token_id") | {"pad_token_id": -1}
    wrapped = WRAPPED_QWEN3_5 | {
        "text_config": text,
        "eos_token_id": [1, 2],
        "bos_token_id": 3,
        "tie_word_embeddings": True,
    }
    config = TargetConfig.from_hf(wrapped)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((1, 2), 3, None)
    assert config.tie_word_embeddings
    tied_text = WRAPPED_QWEN3_5 | {"text_config": text | {"tie_word_embeddings": True}}
    assert TargetConfig.from_hf(without(tied_text, "tie_word_embeddings")).tie_word_embeddings


@pytest.mark.parametrize("name", ALL)
def test_round_trip_through_json_keeps_the_config(name):
    config = TargetConfig.from_hf(ALL[name])
    written = json.loads(json.dumps(config.to_hf()))
    assert TargetConfig.from_hf(written) == config
    assert hash(TargetConfig.from_hf(written)) == hash(config)
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"] == config.rope_theta


def test_written_config_names_the_text_only_class():
    written = {name: TargetConfig.from_hf(ALL[name]).to_hf() for name in ALL}
    assert written["wrapped"]["architectures"] == ["Qwen3_5ForCausalLM"]
    assert written["wrapped"]["model_type"] == "qwen3_5_text"
    assert written["moe"]["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert written["partly sparse"]["mlp_only_layers"] == [0, 5]
    assert written["llama"]["eos_token_id"] == [128001, 128009]
    assert written["wrapped"]["eos_token_id"] == 248044


def test_file_and_folder_are_read_alike(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    config = TargetConfig.from_hf(LLAMA)
    assert config == TargetConfig.from_hf(path)
    assert config == TargetConfig.from_hf(tmp_path)
    assert config == TargetConfig.from_hf(str(tmp_path))


def test_file_errors_name_the_path(tmp_path):
    path = tmp_path / "config.json"
    assert "no such file" in errors_of(tmp_path / "nowhere")
    assert "config.json: no such file" in errors_of(tmp_path)
    path.write_text("{not json")
    assert f"{path}: not JSON" in errors_of(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    assert f"{path}: not JSON" in errors_of(tmp_path)
    path.write_text("[1]")
    assert f"{path}: found a list" in errors_of(path)


UNSUPPORTED = [
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "found 'linear'"),
    (LLAMA, {"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor"),
    (QWEN3, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: found 'yarn'"),
    (QWEN3, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one rope for all"),
    (QWEN3, {"rope_parameters": [1]}, "rope_parameters: found [1]"),
    (TEXT, {"rope_scaling": {"type": "default"}}, "rope_scaling: found beside"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5, expected 1.0"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act: found 'gelu', supported: 'silu'"),
    (LLAMA, {"attention_bias": True}, "attention_bias: found True"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias: found True"),
    (LLAMA, {"pretraining_tp": 2}, "pretraining_tp: found 2"),
    (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: found"),
    (LLAMA, {"layer_types": ["linear_attention"] * 32}, "layer_types: found 'linear_attention'"),
    (LLAMA, {"text_config": LLAMA}, "text_config: found in a llama config"),
    (TEXT, {"output_gate_type": "sigmoid"}, "output_gate_type: found 'sigmoid'"),
    (TEXT, {"attn_output_gate": False}, "attn_output_gate: found False"),
    (TEXT, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: found 'bfloat16'"),
    (TEXT, {"layer_types": ["mamba"] * 64}, "layer_types: found 'mamba'"),
    (TEXT, {"layer_types": ["full_attention"] * 3}, "layer_types: found 3 entries"),
    (TEXT, {"layer_types": "linear_attention"}, "expected a list"),
    (TEXT, {"text_config": "none"}, "text_config: found 'none'"),
    (TEXT, {"head_dim": 20}, "rotates 5 of head_dim = 20"),
    (TEXT, {"hidden_size": -1}, "hidden_size: found -1"),
    (TEXT, {"hidden_size": 5120.0}, "hidden_size: found 5120.0"),
    (TEXT, {"hidden_size": True}, "hidden_size: found True"),
    (TEXT, {"num_hidden_layers": "64"}, "num_hidden_layers: found '64'"),
    (TEXT, {"rms_norm_eps": "1e-6"}, "rms_norm_eps: found '1e-6'"),
    (TEXT, {"rope_parameters": {"rope_theta": 0}}, "rope_theta: found 0.0"),
    (TEXT, {"num_key_value_heads": 5}, "num_attention_heads: found 24"),
    (TEXT, {"linear_num_value_heads": 24}, "linear_num_value_heads: found 24"),
    (TEXT, {"linear_key_head_dim": 0}, "linear_key_head_dim: found 0"),
    (TEXT, {"tie_word_embeddings": "yes"}, "tie_word_embeddings: found 'yes'"),
    (TEXT, {"eos_token_id": [248320]}, "eos_token_ids: found (248320,)"),
    (TEXT, {"bos_token_id": "x"}, "bos_token_id: found 'x'"),
    (FLAT_QWEN3_NEXT, {"full_attention_interval": 0}, "full_attention_interval: found 0"),
    (FLAT_QWEN3_NEXT, {"mlp_only_layers": [48]}, "mlp_only_layers: found [48]"),
    (FLAT_QWEN3_NEXT, {"mlp_only_layers": ["1"]}, "mlp_only_layers: found ['1']"),
    (FLAT_QWEN3_NEXT, {"decoder_sparse_step": 0}, "decoder_sparse_step: found 0"),
    (FLAT_QWEN3_NEXT, {"num_experts_per_tok": 513}, "at most num_experts = 512"),
    (FLAT_QWEN3_NEXT, {"mlp_only_layers": [1], "intermediate_size": 0}, "intermediate_size: found"),
    (QWEN3_5_MOE, {"norm_topk_prob": False}, "norm_topk_prob: found False"),
    (QWEN3_5_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers: found [1]"),
    (QWEN3_5_MOE, {"num_experts": 0}, "num_experts: found 0"),
]


@pytest.mark.parametrize(("base", "change", "message"), UNSUPPORTED)
def test_unsupported_value_is_refused_and_is_the_only_complaint(base, change, message):
    text = errors_of(base | change)
    assert message in text
    assert "1 problem(s)" in text


@pytest.mark.parametrize(
    "base", [TEXT, QWEN3_5_MOE, FLAT_QWEN3_NEXT, QWEN3], ids=lambda base: base["model_type"]
)
def test_each_missing_size_is_named(base):
    sizes = {n for n, v in base.items() if type(v) is int and not n.endswith("token_id")}
    sizes -= {"full_attention_interval", "linear_conv_kernel_dim", "decoder_sparse_step"}
    sizes -= {"mtp_num_hidden_layers", "rope_theta"}
    if base is FLAT_QWEN3_NEXT:
        sizes.remove("intermediate_size")  # every layer is sparse
    for name in sizes:
        assert f"{name}: missing" in errors_of(without(base, name))
        if (base["model_type"], name) != ("qwen3", "num_key_value_heads"):  # null: as many as heads
            assert f"{name}: missing" in errors_of(base | {name: None})


def test_all_problems_come_in_one_error():
    broken = without(TEXT, "vocab_size") | {
        "hidden_act": "gelu",
        "num_key_value_heads": 5,
        "hidden_size": -1,
        "rope_parameters": {"rope_type": "yarn"},
        "layer_types": ["sliding_attention"] * 3,
    }
    text = errors_of(broken)
    expected = ["vocab_size: missing", "hidden_act", "num_attention_heads", "hidden_size: found -1"]
    expected += ["rope_parameters.rope_type", "sliding_attention", "layer_types: found 3 entries"]
    assert [part for part in expected if part not in text] == []


def test_unknown_model_type_gets_the_nearest_match():
    assert "did you mean 'qwen3_5_moe'?" in errors_of(TEXT | {"model_type": "qwen3.5_moe"})
    assert "supported: qwen3_5, " in errors_of(TEXT | {"model_type": "mixtral"})
    assert "model_type: missing" in errors_of(without(TEXT, "model_type"))


def test_wrapper_and_text_section_must_be_of_one_family():
    assert "text_config.model_type" in errors_of(WRAPPED_QWEN3_5 | {"model_type": "qwen3_5_moe"})
    assert "text_config.model_type" in errors_of(LLAMA | {"text_config": TEXT})
    assert "found 'other_vl'" in errors_of(WRAPPED_QWEN3_5 | {"model_type": "other_vl"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "norm_unit_offset: found True, expected False for llama"),
        ({"layer_types": ("full_attention",) * 63}, "layer_types: found 63 entries"),
        ({"moe_layers": (False,) * 64}, "moe_layers: found only False"),
        ({"num_experts": 4}, "num_experts: found 4, expected 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: found 1.5"),
        ({"linear_num_key_heads": -16}, "linear_num_key_heads: found -16"),
    ],
)
def test_constructor_rejects_contradictions(changes, message):
    config = TargetConfig.from_hf(TEXT)
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(config, **changes)
    assert message in str(caught.value)


def test_config_is_frozen_and_hashable():
    config = TargetConfig.from_hf(TEXT)
    assert {config: 1}[TargetConfig.from_hf(WRAPPED_QWEN3_5)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("depth", "taps"),
    [
        (64, (2, 32, 61)),
        (24, (2, 12, 21)),
        (8, (2, 4, 5)),
        (6, (2, 3, 4)),
        (5, (1, 2, 3)),
        (4, (1, 2, 3)),
        (3, (0, 1, 2)),
        (2, (0, 1, 2)),
        (1, (0, 1)),
    ],
)
def test_default_taps_are_distinct_and_inside_the_model(depth, taps):
    config = TargetConfig.from_hf(LLAMA | {"num_hidden_layers": depth})
    assert config.default_aux_layers == taps


def hybrid(hidden, depth, heads, kv_heads, value_heads, mlp, *, tied=False) -> dict:
    """Return the flat config of a published size; `mlp` is a width or the expert sizes."""
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_value_heads": value_heads,
        "tie_word_embeddings": tied,
    }
    base = without(TEXT, "layer_types", "intermediate_size") | sizes
    if isinstance(mlp, int):
        return base | {"intermediate_size": mlp}
    return base | dict(zip(MOE, mlp, strict=True)) | {"model_type": "qwen3_5_moe_text"}


PUBLISHED = [
    ("0.8B", hybrid(1024, 24, 8, 2, 16, 3584, tied=True), "0.752"),
    ("2B", hybrid(2048, 24, 8, 2, 16, 6144, tied=True), "1.882"),
    ("4B", hybrid(2560, 32, 16, 4, 32, 9216, tied=True), "4.206"),
    ("9B", hybrid(4096, 32, 16, 4, 32, 12288), "8.954"),
    ("27B", hybrid(5120, 64, 24, 4, 48, 17408), "26.896"),
    ("35B-A3B", hybrid(2048, 40, 16, 2, 32, (256, 8, 512, 512)), "34.66"),
    ("122B-A10B", hybrid(3072, 48, 32, 2, 64, (256, 8, 1024, 1024)), "122.1"),
    ("397B-A17B", hybrid(4096, 60, 32, 2, 64, (512, 10, 1024, 1024)), "396.3"),
    ("Next-80B-A3B", FLAT_QWEN3_NEXT, "79.67"),
    ("Llama-3-8B", LLAMA, "8.030"),
]


@pytest.mark.parametrize(
    ("config", "billions"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED]
)
def test_parameter_count_matches_the_published_size(config, billions):
    decimals = len(billions.split(".")[1])
    assert f"{TargetConfig.from_hf(config).num_parameters() / 1e9:.{decimals}f}" == billions
