"""Training as a user runs it: a target, its draft, decoding with both; stopped, killed, resumed."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_bits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

import decode
import train
from eagle3.config import ConfigError, read_stages
from eagle3.text import load_tokenizer
from eagle3.training.checkpoint import Checkpoints, ocp
from eagle3.training.config import TrainConfig
from eagle3.training.data.bpe import train_bpe
from eagle3.training.jobs import build_job
from eagle3.training.run_log import RunLog
from gdn import load_pretrained

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs/tiny.yaml")
FOX = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 3


def overrides(folder: Path, *more: str) -> list[str]:
    """Put what the smallest configuration writes into a folder."""
    target, draft = folder / "target", folder / "draft"
    places = [f"stages.target.out={target}", f"stages.draft.out={draft}"]
    return [*places, f"stages.draft.target={target}", f"data.cache={folder / 'cache'}", *more]


def run(folder: Path, *more: str) -> int:
    return train.main(["--config", TINY, *overrides(folder, *more)])


def told(folder: Path, tag: str) -> dict[int, np.ndarray]:
    """Return what TensorBoard shows under a tag, by step."""
    everything = {"tensors": 0}  # the default is a sample
    events = EventAccumulator(str(folder / "tensorboard"), everything).Reload()
    return {e.step: tensor_util.make_ndarray(e.tensor_proto) for e in events.Tensors(tag)}


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
    tau = {step: float(value) for step, value in told(demo / "draft", "eval/tau_real").items()}
    assert set(tau) == {0, 80, 160}
    assert tau[160] > 1.5 and tau[160] - 1 > 3 * (tau[0] - 1)


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


def test_the_best_weights_are_kept_and_not_the_last(demo, tmp_path):
    best = json.loads((demo / "draft" / "best.json").read_text())
    tau = {step: float(value) for step, value in told(demo / "draft", "eval/tau_real").items()}
    assert best["score"] == pytest.approx(max(tau.values()))
    assert tau[best["step"]] == pytest.approx(best["score"])


def text_run(folder: Path, *more: str) -> list[str]:
    """Return arguments of a run on one short text, measured on the same."""
    path = folder / "fox.txt"
    path.write_text(FOX)
    return overrides(
        folder, f"data.sources.fox.files={path}", f"eval.sources.fox.files={path}",
        "eval.every=0", *more,
    )  # fmt: skip


def newest(folder: Path, argv: list[str], stage: str):
    """Return the state of a run's newest checkpoint."""
    config = read_stages(TrainConfig, TINY, argv, stage)[stage]
    job = build_job(config, lambda text: None)
    with Checkpoints(folder / stage / "checkpoints", keep_last=2) as checkpoints:
        return checkpoints.load(job.state)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Run both stages for four steps in one piece."""
    folder = tmp_path_factory.mktemp("straight")
    assert train.main(["--config", TINY, *text_run(folder, "steps=4", "save.every=1")]) == 0
    return folder


def test_two_steps_ctrl_c_and_two_more_are_four_bit_for_bit(
    straight, tmp_path, capsys, monkeypatch
):
    argv = text_run(tmp_path, "steps=4", "save.every=3")
    argv = [a.replace(str(tmp_path / "target"), str(straight / "target")) for a in argv]
    command = ["--config", TINY, "--only", "draft", *argv]
    push = RunLog.push

    def push_and_interrupt(log, step, *rest):
        push(log, step, *rest)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "push", push_and_interrupt)
        assert train.main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("stopped; to go on: python train.py")
    assert train.main(command) == 0
    assert "going on after step 2 of 4" in capsys.readouterr().out
    whole = newest(straight, text_run(straight, "steps=4", "save.every=1"), "draft")
    assert_same_bits(newest(tmp_path, argv, "draft"), whole)


def spawn(*argv: str) -> subprocess.Popen[str]:
    """Start a training run of its own, with the suite's settings of the compiler."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),  # as in conftest
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--config", TINY, *argv],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


def wait_for(path: Path, pattern: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not any(path.glob(pattern)):
        assert time.monotonic() < deadline, f"no {pattern} in {path}"
        time.sleep(0.002)


def test_a_run_that_is_killed_while_it_saves_goes_on_to_the_same_weights(straight, tmp_path):
    argv = text_run(tmp_path, "steps=4", "save.every=1")
    process = spawn("--only", "target", *argv)
    # A save has a temporary name until it is complete.
    wait_for(tmp_path / "target" / "checkpoints", "[2-4].*tmp*")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert train.main(["--config", TINY, "--only", "target", *argv]) == 0
    whole = newest(straight, text_run(straight, "steps=4", "save.every=1"), "target")
    assert_same_bits(newest(tmp_path, argv, "target"), whole)


def test_sigterm_saves_and_ends_well_with_the_command_to_go_on(tmp_path):
    argv = text_run(tmp_path, "steps=100000", "save.every=100000", "log_every=1")
    process = spawn("--only", "target", *argv)
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0, "".join(lines) + rest
    assert "to go on: python train.py --config" in rest.splitlines()[-1]
    found = newest(tmp_path, argv, "target")
    assert 3 <= int(found.step) < 100000


def test_a_signal_while_data_is_prepared_ends_at_once_and_well(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr("eagle3.training.trainer.build_job", interrupted)
    assert run(tmp_path, "--only", "target") == 0
    assert "to go on: python train.py" in capsys.readouterr().out


def test_another_configuration_is_refused_with_the_fields_that_differ(straight, capsys):
    changes = ["steps=4", "save.every=1", "stages.target.optim.lr=1e-4", "data.batch_size=2"]
    argv = [*text_run(straight), *changes]
    assert train.main(["--config", TINY, *argv]) == 2
    error = capsys.readouterr().err
    assert "data.batch_size was 4 and is 2" in error
    assert "optim.lr was 0.005 and is 0.0001" in error
    assert "choose another out" in error and error.count("\n") == 1


def test_other_text_is_another_configuration(straight, capsys):
    argv = text_run(straight, "steps=4", "save.every=1")
    (straight / "fox.txt").write_text(FOX.upper())
    try:
        assert train.main(["--config", TINY, "--only", "target", *argv]) == 2
    finally:
        (straight / "fox.txt").write_text(FOX)
    assert "identity.data.fox was" in capsys.readouterr().err


def test_one_more_source_is_another_configuration(straight, capsys):
    argv = text_run(straight, "steps=4", "save.every=1")
    argv += [f"data.sources.more.files={straight / 'fox.txt'}"]
    assert train.main(["--config", TINY, "--only", "target", *argv]) == 2
    assert "identity.data.more was None" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run_with_step_loss_and_checkpoint(
    tmp_path, capsys, monkeypatch
):
    argv = text_run(tmp_path, "steps=12", "save.every=1")
    push = RunLog.push

    def push_a_broken_one(log, step, found, tokens):
        broken = found._replace(loss=np.float32("nan")) if step == 3 else found
        push(log, step, broken, tokens)

    monkeypatch.setattr(RunLog, "push", push_a_broken_one)
    assert train.main(["--config", TINY, "--only", "target", *argv]) == 2
    error = capsys.readouterr().err
    assert "the loss of step 3 is nan" in error
    assert "the last checkpoint is 2" in error and error.count("\n") == 1
    # What is left can be loaded, and no model's files were written.
    assert int(newest(tmp_path, argv, "target").step) == 2
    assert not (tmp_path / "target" / "config.json").exists()


def test_a_full_disk_is_told_and_the_checkpoints_before_are_whole(tmp_path, capsys, monkeypatch):
    argv = text_run(tmp_path, "steps=4", "save.every=2")
    command = ["--config", TINY, "--only", "target", *argv]
    save = ocp.training.Checkpointer.save_checkpointables_async

    def save_until_full(self, step, items):
        if step > 2:
            raise OSError(28, "No space left on device")
        return save(self, step, items)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", save_until_full)
        assert train.main(command) == 2
    error = capsys.readouterr().err
    assert "No space left" in error and "the last whole one is 2" in error
    assert train.main(command) == 0
    assert int(newest(tmp_path, argv, "target").step) == 4


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


def test_features_from_a_file_give_the_run_that_features_from_the_target_give(straight, tmp_path):
    argv = text_run(tmp_path, "steps=4", "save.every=1")
    argv += [f"stages.draft.data.feature_cache={tmp_path / 'features'}"]
    argv = [a.replace(str(tmp_path / "target"), str(straight / "target")) for a in argv]
    for _ in range(2):
        assert train.main(["--config", TINY, "--only", "draft", *argv]) == 0
        whole = newest(straight, text_run(straight, "steps=4", "save.every=1"), "draft")
        assert_same_bits(newest(tmp_path, argv, "draft"), whole)
        shutil.rmtree(tmp_path / "draft")
    assert list((tmp_path / "features").rglob("rows.bin"))


def test_a_draft_can_learn_from_what_the_target_says(demo, tmp_path, capsys):
    argv = [*overrides(tmp_path), f"stages.draft.target={demo / 'target'}", "steps=3"]
    argv += ["regenerate.rows=6", "regenerate.max_new_tokens=24", "regenerate.prompt_tokens=8"]
    stage = read_stages(TrainConfig, TINY, ["stages.draft.steps=3"], "draft")["draft"]
    assert stage.regenerate.rows == 0
    argv = [a.replace("regenerate.", "stages.draft.regenerate.") for a in argv]
    assert train.main(["--config", TINY, "--only", "draft", *argv]) == 0
    assert "6 answers of the target" in capsys.readouterr().out
    assert (tmp_path / "draft" / "config.json").exists()


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(tmp_path, capsys):
    argv = text_run(tmp_path, "steps=1", "save.every=1", "optim.clip=0", "eval.prompts=0")
    argv += ["stages.target.optim.lr=1e38", "optim.warmup=0"]
    assert train.main(["--config", TINY, "--only", "target", *argv]) == 2
    assert "norm of the weights after it of step 1 is" in capsys.readouterr().err
    assert not (tmp_path / "target" / "config.json").exists()
    with Checkpoints(tmp_path / "target" / "checkpoints", keep_last=2) as checkpoints:
        assert checkpoints.latest() is None


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


def test_files_of_another_run_in_the_directory_are_not_taken_for_the_best(straight, tmp_path):
    shutil.copytree(straight / "target", tmp_path / "target")
    shutil.rmtree(tmp_path / "target" / "checkpoints")
    best = tmp_path / "target" / "best.json"
    best.write_text(json.dumps(json.loads(best.read_text()) | {"score": 1e9}))
    argv = text_run(tmp_path, "steps=4", "save.every=1")
    assert train.main(["--config", TINY, "--only", "target", *argv]) == 0
    assert json.loads(best.read_text())["score"] < 0


def test_a_run_into_its_own_target_is_refused(straight, capsys):
    argv = text_run(straight, f"stages.draft.out={straight / 'target'}")
    assert train.main(["--config", TINY, "--only", "draft", *argv]) == 2
    assert "out and target are both" in capsys.readouterr().err
    everywhere = f"stages.target.out={straight / 'draft'}"
    assert train.main(["--config", TINY, *text_run(straight), everywhere]) == 2
    assert "two stages have the out" in capsys.readouterr().err


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


def test_a_draft_without_its_target_is_one_line_and_status_two(tmp_path, capsys):
    assert run(tmp_path, "--only", "draft") == 2
    assert "is no directory: train or download it first" in capsys.readouterr().err


def test_training_without_a_configuration_is_one_line_and_status_two(capsys):
    assert train.main([]) == 2
    assert capsys.readouterr().err == "train.py: give a configuration: --config FILE\n"


def test_one_override_of_a_stage_wins_over_one_for_all():
    own = ["stages.draft.steps=3", "stages.draft.dtype=float32"]
    found = read_stages(TrainConfig, TINY, [*own, "steps=7", "dtype=bfloat16"])
    assert (found["target"].steps, found["draft"].steps) == (7, 3)
    assert (found["target"].dtype, found["draft"].dtype) == ("bfloat16", "float32")
    with pytest.raises(ConfigError, match="There are: target, draft"):
        read_stages(TrainConfig, TINY, [], "both")
