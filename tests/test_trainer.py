"""Training as a user runs it: a target, its draft, and decoding with both."""

import json
import math
import re

import pytest
from helpers import LLAMA
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import FOX, TINY, overrides, run, text_run, told

import decode
import train
from eagle3.config import ConfigError
from eagle3.config_reader import read_stages
from eagle3.text import load_tokenizer
from eagle3.training.config import DraftShape, TrainConfig
from eagle3.training.data.bpe import train_bpe
from eagle3.training.jobs import build_job
from gdn import load_pretrained


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run the demo's path at its smallest, with an evaluation before the first step."""
    folder = tmp_path_factory.mktemp("demo")
    more = ["eval.every=80", "steps=160", "stages.draft.eval.prompts=3"]
    assert run(folder, *more) == 0
    return folder


def test_the_demos_path_leaves_a_target_a_draft_and_prompts_to_compare_them_on(demo, capsys):
    target, draft = str(demo / "target"), str(demo / "draft")
    assert load_pretrained(target).cfg.vocab_size == 256
    prompts = str(demo / "draft" / "prompts.jsonl")
    command = ["--target", target, "--draft", draft, "--prompts", prompts, "--compare", "--json"]
    assert decode.main([*command, "max_new_tokens=16", "tree.kind=chain"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    totals = lines[-1]["totals"]
    assert totals["prompts"] == 3 and totals["identical"] == 3
    assert totals["acceptance_length"] > 1


def test_a_trained_draft_accepts_far_more_than_an_untrained_one_on_held_out_text(demo):
    def tau(kind):
        values = told(demo / "draft", f"eval/tau_{kind}")
        return {step: float(value) for step, value in values.items()}

    simulated, real = tau("simulated"), tau("real")
    assert set(simulated) == set(real) == {0, 80, 160}
    assert simulated[160] > 1.5 and simulated[160] - 1 > 3 * (simulated[0] - 1)
    # What a target this small writes soon goes in circles; whether the draft follows it there
    # depends on the last bits of both, which are not those of another processor.
    assert real[160] - 1 > 3 * (real[0] - 1)


def test_a_run_tells_tensorboard_what_one_needs_to_judge_it(demo):
    tags = set(EventAccumulator(str(demo / "draft" / "tensorboard")).Reload().Tags()["tensors"])
    for k in range(3):
        for what in ("loss", "accuracy", "joint_accuracy", "conditional_accuracy", "overlap"):
            assert {f"train/{what}_step_{k}", f"eval/{what}_step_{k}"} <= tags
    for tag in (
        "config", "train/loss", "train/learning_rate", "train/gradient_norm",
        "train/tau_simulated", "eval/tau_simulated", "eval/tau_real", "eval/acceptance_by_depth",
        "eval/sample", "perf/tokens_per_second", "perf/model_flop_utilisation",
    ):  # fmt: skip
        assert tag in tags
    loss = told(demo / "draft", "train/loss")
    assert all(math.isfinite(x) for x in loss.values()) and loss[160] < loss[1]
    utilisation = told(demo / "target", "perf/model_flop_utilisation")
    assert all(0 < x < 1 for x in utilisation.values())


def test_a_run_that_is_done_is_left_as_it_is(demo, capsys):
    files = {p: p.stat().st_mtime_ns for p in demo.rglob("*.safetensors")}
    more = ["eval.every=80", "steps=160", "stages.draft.eval.prompts=3"]
    assert run(demo, *more) == 0
    assert "after step 160 of 160" in capsys.readouterr().out
    assert files == {p: p.stat().st_mtime_ns for p in demo.rglob("*.safetensors")}
    more = ["eval.every=0", "steps=160", "stages.draft.eval.prompts=3"]
    assert run(demo, *more) == 0  # looking less often makes no score another one
    assert files == {p: p.stat().st_mtime_ns for p in demo.rglob("*.safetensors")}


def test_the_best_weights_are_kept_and_not_the_last(demo, tmp_path):
    best = json.loads((demo / "draft" / "best.json").read_text())
    tau = {step: float(value) for step, value in told(demo / "draft", "eval/tau_real").items()}
    assert best["score"] == pytest.approx(max(tau.values()))
    assert tau[best["step"]] == pytest.approx(best["score"])


def test_overfitting_one_text_brings_tau_to_depth_plus_one(tmp_path):
    """A target that knows a text by heart, and a draft that knows the target there."""
    argv = text_run(
        tmp_path, "steps=150", "eval.prompts=1", "eval.prompt_tokens=16", "eval.max_new_tokens=50",
        "eval.tree.depth=4", "stages.draft.ttt.steps=4", "log_every=50",
    )  # fmt: skip
    (tmp_path / "fox.txt").write_text(FOX[:70])
    argv += ["data.length=96", "data.batch_size=1"]  # the whole text in one row
    assert train.main(["--config", TINY, *argv]) == 0
    assert float(told(tmp_path / "target", "eval/accuracy")[150]) > 0.95
    assert float(told(tmp_path / "draft", "eval/tau_real")[150]) > 4.5


def test_a_draft_can_learn_from_what_the_target_says(demo, tmp_path, capsys):
    argv = [*overrides(tmp_path), f"stages.draft.target={demo / 'target'}", "steps=3"]
    argv += ["regenerate.rows=6", "regenerate.max_new_tokens=24", "regenerate.prompt_tokens=8"]
    stage = read_stages(TrainConfig, TINY, ["stages.draft.steps=3"], "draft")["draft"]
    assert stage.regenerate.rows == 0
    argv = [a.replace("regenerate.", "stages.draft.regenerate.") for a in argv]
    assert train.main(["--config", TINY, "--only", "draft", *argv]) == 0
    assert "6 answers of the target" in capsys.readouterr().out
    assert (tmp_path / "draft" / "config.json").exists()


def test_a_target_with_a_tokenizer_ends_texts_as_it_does_and_can_be_resumed(tmp_path):
    """Files that the first export leaves beside the tokenizer change nothing."""
    train_bpe([FOX], 300, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "!"))
    argv = text_run(tmp_path, f"tokenizer={tmp_path / 'tokenizer'}", "generated.vocab_size=300")
    config = read_stages(TrainConfig, TINY, argv, "target")["target"]
    first = build_job(config, lambda text: None)
    first.export(first.state.params)
    exported = load_pretrained(config.out).cfg
    assert exported.eos_token_ids == (load_tokenizer(config.out, 300).encode("!")[0],)
    assert build_job(config, lambda text: None).identity == first.identity


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("stages.draft=5", "write stages.NAME.key=value"),
        ("task=both", "task is 'both'"),
        ("steps=0", "steps is 0"),
        ("ttt.decay=1.5", "ttt.decay is 1.5"),
        ("draft.layout=gguf", "draft.layout is 'gguf'"),
        ("eval.promts=3", "Did you mean: 'eval.prompts'"),
        ("regenerate.rows=4", "regenerate.rows is set"),
        ("data.feature_cache=x", "data.feature_cache is set"),
        ("save.every=0", "save.every is 0"),
        ("dtype=int8", "dtype is 'int8'"),
        ("stages.darft.steps=3", "there is no stage 'darft'"),
    ],
)
def test_a_bad_value_is_one_line_and_status_two(tmp_path, capsys, override, named):
    assert train.main(["--config", TINY, *overrides(tmp_path, override)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: ") and named in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_norm": True}, "layout 'sglang': its readers do not compute qk_norm; save as"),
        ({"aux_layers": (1, 0)}, "aux_layers: found (1, 0), expected ascending layer numbers"),
    ],
)
def test_a_draft_that_no_file_could_hold_is_refused_before_it_is_trained(changes, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        DraftShape(**changes).for_target(LLAMA)


def test_a_draft_without_its_target_is_one_line_and_status_two(tmp_path, capsys):
    assert run(tmp_path, "--only", "draft") == 2
    assert "is no directory: train or download it first" in capsys.readouterr().err


def test_training_without_a_configuration_is_one_line_and_status_two(capsys):
    assert train.main([]) == 2
    assert capsys.readouterr().err == "train.py: give a configuration: --config FILE\n"


def test_one_override_of_a_stage_wins_over_one_for_all(tmp_path):
    own = ["stages.draft.steps=3", "stages.draft.dtype=float32"]
    found = read_stages(TrainConfig, TINY, [*own, "steps=7", "dtype=bfloat16"])
    assert (found["target"].steps, found["draft"].steps) == (7, 3)
    assert (found["target"].dtype, found["draft"].dtype) == ("bfloat16", "float32")
    path = tmp_path / "numbered.yaml"
    path.write_text("task: target\nstages: {1: {steps: 3, out: a}, 2: {out: b}}")
    numbered = read_stages(TrainConfig, str(path), ["stages.2.steps=5"])
    assert {name: config.steps for name, config in numbered.items()} == {"1": 3, "2": 5}
    with pytest.raises(ConfigError, match="There are: target, draft"):
        read_stages(TrainConfig, TINY, [], "both")
