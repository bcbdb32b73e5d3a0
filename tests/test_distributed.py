"""Claims about several processes: the losses of one device, one end for all, and no lost run.

Two processes of two devices each train a draft, are killed and stopped, and one process with one
device goes on. All that is done once, by a fixture; what it costs is starting the processes.
"""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import COMPILED
from helpers import LLAMA, RTOL, random_model, relative_error
from training_runs import ROOT, TINY, text_run, told

import train
from eagle3.config import ConfigError
from eagle3.interop import load_draft
from eagle3.processes import join
from eagle3.training.config import EvalConfig, TrainConfig
from eagle3.training.data.config import DataConfig
from eagle3.training.jobs import build_job
from eagle3.training.run_log import RunLog
from gdn import save_pretrained

LIMIT = 300  # seconds after which a process is ended that should have come to its end by itself
TARGET = dataclasses.replace(
    LLAMA, vocab_size=256, num_hidden_layers=1, layer_types=("full_attention",)
)


def settings(folder: Path, target: Path) -> list[str]:
    """Return arguments of a long run of a small draft; more than is ever waited for."""
    argv = text_run(
        folder, "steps=2000", "log_every=1", "save.every=1", "eval.every=2", "eval.prompts=0",
        "stages.draft.draft.aux_layers=[0,1]", "stages.draft.ttt.steps=2",
        f"stages.draft.target={target}",
    )  # fmt: skip
    return ["--config", TINY, "--only", "draft", *argv]


def free_port(ports: Iterable[int]) -> int:
    """Return the first port that nothing listens at; 0 in `ports` is any."""
    for port in ports:
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return found.getsockname()[1]
    raise AssertionError("no free port")


def by_flags() -> list[tuple[list[str], dict[str, str]]]:
    """Return the arguments and variables by which two processes meet: all in arguments."""
    address = f"127.0.0.1:{free_port([0])}"
    argv = ["--coordinator", address, "--processes", "2", "--process-id"]
    return [([*argv, str(number)], {}) for number in range(2)]


def by_slurm() -> list[tuple[list[str], dict[str, str]]]:
    """Return the same for processes that were started by `srun`, which tells them in variables."""
    first = 2**16 - 2**12  # JAX takes the port from the number of the job
    job = free_port(range(first, 2**16)) - first
    shared = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2}
    return [
        (
            ["--coordinator", "auto"],
            {k: str(v) for k, v in shared.items()}
            | {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)},
        )
        for number in range(2)
    ]


@contextmanager
def pair(
    argv: list[str], meeting: list[tuple[list[str], dict[str, str]]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two processes that train together; they are gone at the end, or after LIMIT."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONFAULTHANDLER": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *argv, "mesh.fsdp=4", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment | variables,
        )
        for arguments, variables in meeting
    ]  # fmt: skip
    # Where it hangs, it says so: see PYTHONFAULTHANDLER.
    timers = [threading.Timer(LIMIT, process.send_signal, [signal.SIGABRT]) for process in started]
    for timer in timers:
        timer.start()
    try:
        yield started
    finally:
        for timer, process in zip(timers, started, strict=True):
            timer.cancel()
            process.kill()
            process.wait()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what a process says up to a line with a text."""
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if text in line:
            return said
    assert process.stderr is not None
    raise AssertionError(f"no {text!r} in {said}{process.stderr.read()[-3000:]}")


def run_here(argv: list[str], steps: int) -> int:
    """Train in this process, on one device, until Ctrl-C after some steps; returns the last one."""
    push, made = RunLog.push, []

    def push_and_count(log, step, *rest):
        push(log, step, *rest)
        made.append(step)
        if len(made) == steps:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "push", push_and_count)
        assert train.main(argv) == 0
    return made[-1]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """Train with a pair until one is killed, a pair until one is told to stop, and one; then anew.

    What is done anew, by one process on one device, is all that the three did together.
    """
    folder = tmp_path_factory.mktemp("pair")
    target = folder / "target"
    save_pretrained(random_model(TARGET), target)
    argv, values = settings(folder, target), {}
    with pair(argv, by_flags()) as (first, second):
        values["before"] = read_until(first, "step 5/")
        second.kill()
        _, values["error"] = first.communicate()
        values["lost"] = first.returncode
    with pair(argv, by_slurm()) as (first, second):
        values["again"] = read_until(first, "going on after step")
        read_until(first, "tau")  # of an evaluation
        second.send_signal(signal.SIGTERM)
        values["after"], _ = first.communicate()
        values["quiet"], _ = second.communicate()
        values["stopped"] = [first.returncode, second.returncode]
    last = run_here(argv, 2)
    alone = tmp_path_factory.mktemp("alone")
    assert run_here(settings(alone, target), last) == last
    values["losses"] = [told(place / "draft", "train/loss") for place in (folder, alone)]
    values["tau"] = [told(place / "draft", "eval/tau_simulated") for place in (folder, alone)]
    values["last"], values["draft"], values["target"] = last, folder / "draft", target
    return values


def test_losses_are_those_of_one_device_also_after_two_restarts(found):
    for several, one in (found["losses"], found["tau"]):
        # What the first process had not yet flushed when it ended is not there.
        assert {2, 4, found["last"] // 2 * 2} <= several.keys() <= one.keys()
        steps = sorted(several)
        values = [[float(told_at[step]) for step in steps] for told_at in (several, one)]
        assert relative_error(*values) < RTOL["float32"]


def test_a_killed_process_ends_the_other_with_a_line_and_the_run_goes_on(found):
    assert found["lost"] == 3
    line = found["error"].strip().splitlines()[-1]
    assert line.startswith("train.py: process 0 of 2: cannot go on, most likely because another")
    step = int(found["again"].rpartition("going on after step ")[2].split()[0])
    assert step >= 4  # a save of step 5 may not have been complete


def test_a_signal_to_one_process_stops_all_at_one_step_and_saves(found):
    assert found["stopped"] == [0, 0]
    assert found["after"].splitlines()[-1].startswith("stopped; to go on: python train.py")


def test_only_the_first_process_talks(found):
    own = [x for x in found["quiet"].splitlines() if x and not re.search(r"\[Gloo\]|peer ranks", x)]
    assert own == []  # of Gloo's threads, each may write in the middle of another's line


def test_the_first_process_exports_whole_weights(found):
    target = random_model(TARGET)
    draft = load_draft(found["draft"], target)
    assert draft.cfg.aux_layers == (0, 1)
    assert (found["draft"] / "best.json").exists()


def test_a_target_is_trained_by_two_processes_as_by_one(tmp_path):
    losses, short = [], ["steps=4", "log_every=1", "eval.prompts=0"]
    for name in ("two", "one"):
        folder = tmp_path / name
        folder.mkdir()
        argv = ["--config", TINY, "--only", "target", *text_run(folder, *short)]
        if name == "one":
            assert train.main(argv) == 0
        else:
            with pair(argv, by_flags()) as started:
                ends = [process.communicate() for process in started]
                if any(p.returncode for p in started):  # in full, not as an assertion cuts it
                    pytest.fail("\n".join(text for both in ends for text in both))
        losses.append(told(folder / "target", "train/loss"))
    assert losses[0].keys() == losses[1].keys() == {1, 2, 3, 4}
    values = [[float(found[step]) for step in sorted(found)] for found in losses]
    assert relative_error(*values) < RTOL["float32"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
def test_loading_takes_the_memory_of_the_own_shards_and_of_a_tensor(tmp_path):
    size = dict(vocab_size=8192, hidden_size=512, intermediate_size=8192, num_hidden_layers=5)
    cfg = dataclasses.replace(TARGET, **size, layer_types=("full_attention",) * 5)
    save_pretrained(random_model(cfg), tmp_path)
    argv = [sys.executable, str(ROOT / "tests/loading_worker.py"), str(tmp_path)]
    argv += [f"127.0.0.1:{free_port([0])}", "2"]
    # Tensors below 32 MiB, smaller than those of any model that needs this, would leave holes in
    # the heap of the C library, a third of the shards here.
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = os.environ | variables
    started = [
        subprocess.Popen([*argv, str(n)], stdout=subprocess.PIPE, text=True, env=environment)
        for n in range(2)
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    for text in said:
        memory = json.loads(text.splitlines()[-1])
        assert memory["own"] < 0.51 * memory["whole"] and memory["whole"] > 250 << 20
        # The tensor as it is mapped and read, and 32 MiB for what JAX does for the first time.
        most = memory["own"] + 2 * memory["largest"] + (32 << 20)
        assert memory["own"] < memory["peak"] < most < 0.8 * memory["whole"], memory


def test_what_one_process_only_can_do_is_refused_to_several(monkeypatch, tmp_path):
    monkeypatch.setattr("eagle3.training.jobs.is_alone", lambda: False)
    config = TrainConfig(out=str(tmp_path), target="somewhere")
    with pytest.raises(ConfigError, match="eval.prompts is 8, .* set it to 0"):
        build_job(config, print)
    data = DataConfig(feature_cache=str(tmp_path))
    config = dataclasses.replace(config, data=data, eval=EvalConfig(prompts=0))
    with pytest.raises(ConfigError, match="data.feature_cache is for one process"):
        build_job(config, print)


def test_arguments_that_do_not_make_a_group_are_refused():
    for arguments, text in (
        ((None, 2, None), "are for --coordinator"),
        (("127.0.0.1:1", 2, None), "with --processes N and --process-id I"),
        (("somewhere", 2, 0), "give HOST:PORT"),
        (("127.0.0.1:1", 2, 2), "ids are 0 to one less"),
    ):
        with pytest.raises(ConfigError, match=text):
            join(*arguments)
