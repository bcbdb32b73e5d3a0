"""Runs that are stopped, killed, contradicted or broken: what is lost, and what is said."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import assert_same_bits
from training_runs import FOX, ROOT, TINY, newest, run, text_run

import train
from eagle3.training.checkpoint import Checkpoints, ocp
from eagle3.training.run_log import RunLog


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


def test_a_run_is_made_longer_from_where_its_rate_began_to_fall(tmp_path, capsys):
    plan = ["optim.schedule=wsd", "optim.decay=0.5", "optim.warmup=1", "save.keep_last=1"]
    states = []
    for name, steps in (("short", ["4"]), ("long", ["4", "8"]), ("whole", ["8"])):
        (tmp_path / name).mkdir()
        argv = [*text_run(tmp_path / name, *plan), f"data.cache={tmp_path / 'cache'}"]
        for count in steps:
            command = ["--config", TINY, "--only", "target", *argv, f"steps={count}"]
            if count == "8" and name == "long":
                assert train.main(command) == 2  # the rate has fallen
                error = capsys.readouterr().err
                assert "steps was 4 and is 8" in error and "remove the folders" in error
                shutil.rmtree(tmp_path / "long" / "target" / "checkpoints" / "4")
            assert train.main(command) == 0
        states.append(newest(tmp_path / name, [*argv, f"steps={steps[-1]}"], "target"))
    assert "going on after step 2 of 8" in capsys.readouterr().out
    assert [int(state.step) for state in states] == [4, 8, 8]
    assert_same_bits(states[1], states[2])


def test_a_field_that_is_younger_than_a_checkpoint_had_its_default_then(straight, tmp_path, capsys):
    shutil.copytree(straight / "target", tmp_path / "target")
    argv = text_run(tmp_path, "steps=4", "save.every=1")
    config = Checkpoints.config

    def old(checkpoints):
        found = config(checkpoints)
        del found["config"]["data"]["share"], found["config"]["optim"]["decay"]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "config", old)
        assert train.main(["--config", TINY, "--only", "target", *argv]) == 0
        assert train.main(["--config", TINY, "--only", "target", *argv, "data.share=0.5"]) == 2
    assert "data.share was 1.0 and is 0.5" in capsys.readouterr().err


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


def test_features_from_a_file_give_the_run_that_features_from_the_target_give(straight, tmp_path):
    argv = text_run(tmp_path, "steps=4", "save.every=1")
    argv += [f"stages.draft.data.feature_cache={tmp_path / 'features'}"]
    argv = [a.replace(str(tmp_path / "target"), str(straight / "target")) for a in argv]
    for _ in range(2):
        assert train.main(["--config", TINY, "--only", "draft", *argv]) == 0
        whole = newest(straight, text_run(straight, "steps=4", "save.every=1"), "draft")
        assert_same_bits(newest(tmp_path, argv, "draft"), whole)
        shutil.rmtree(tmp_path / "draft")
    (path,) = (tmp_path / "features").rglob("rows.bin")
    with path.open("r+b") as file:  # the checksum of the last row: it is read again, by itself
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    assert train.main(["--config", TINY, "--only", "draft", *argv]) == 0
    for a, b in zip(*map(jax.tree.leaves, (newest(tmp_path, argv, "draft"), whole)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(tmp_path, capsys):
    argv = text_run(tmp_path, "steps=1", "save.every=1", "optim.clip=0", "eval.prompts=0")
    argv += ["stages.target.optim.lr=1e38", "optim.warmup=0"]
    assert train.main(["--config", TINY, "--only", "target", *argv]) == 2
    assert "norm of the weights after it of step 1 is" in capsys.readouterr().err
    assert not (tmp_path / "target" / "config.json").exists()
    with Checkpoints(tmp_path / "target" / "checkpoints", keep_last=2) as checkpoints:
        assert checkpoints.latest() is None


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
