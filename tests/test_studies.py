"""The studies of a draft: which runs they make, and what they tell of them."""

import dataclasses
import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import ConfigError
from eagle3.training.config import RegenerateConfig, TrainConfig
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.optim import OptimConfig, hold_end, same_rates
from gdn import save_pretrained

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # last: it has a decode.py
studies: Any = importlib.import_module("studies")


@pytest.fixture(scope="module")
def config(tmp_path_factory, hybrid) -> TrainConfig:
    folder = tmp_path_factory.mktemp("studies")
    save_pretrained(hybrid, folder / "target")
    (folder / "rows.jsonl").write_text('{"tokens": [1, 2]}\n' * 20)
    answers = SourceConfig(files=str(folder / "rows.jsonl"), format="tokens")
    data = DataConfig(sources={"regenerated": answers}, packing="pack")
    return TrainConfig(target=str(folder / "target"), out=str(folder / "out"), data=data, steps=16)


def test_shares_of_the_data_are_read_as_often_as_all_of_it(config):
    runs = studies.runs_of_data(config)
    found = [(run.config.steps, run.config.data.share) for run in runs]
    assert found == [(2, 1 / 8), (4, 1 / 4), (8, 1 / 2), (16, 1.0)]
    assert len({run.folder for run in runs}) == 4 and runs[-1].name == "all"
    with pytest.raises(ConfigError, match="7 steps have no 8th"):
        studies.runs_of_data(dataclasses.replace(config, steps=7))
    half = dataclasses.replace(config, data=dataclasses.replace(config.data, share=0.5))
    assert [run.config.data.share for run in studies.runs_of_data(half)][::3] == [1 / 16, 0.5]


def test_runs_of_shares_of_the_steps_begin_as_the_one_before(config, tmp_path):
    with pytest.raises(ConfigError, match=r"for optim.schedule=wsd"):
        studies.runs_of_tokens(config)
    optim = OptimConfig(schedule="wsd", decay=0.25, warmup=0.0125)
    runs = studies.runs_of_tokens(dataclasses.replace(config, optim=optim, steps=80))
    assert [run.config.steps for run in runs] == [10, 20, 40, 80]
    assert {run.config.optim.warmup for run in runs} == {1.0}
    assert [run.before for run in runs] == [None, *runs[:-1]]
    with pytest.raises(ConfigError, match="warmup is 9 steps, and .* of 10 begins to fall after 8"):
        slow = dataclasses.replace(optim, warmup=9.0)
        studies.runs_of_tokens(dataclasses.replace(config, optim=slow, steps=80))
    for early, late in pairwise(run.config for run in runs):
        held = hold_end(early.optim, early.steps)
        assert same_rates(early.optim, early.steps, late.optim, late.steps, held)
        assert not same_rates(early.optim, early.steps, late.optim, late.steps, held + 2)


def test_a_run_takes_the_checkpoint_over_at_which_the_rate_of_the_one_before_fell(
    config, tmp_path, monkeypatch, capsys
):
    optim = OptimConfig(schedule="wsd", decay=0.25)
    begun = {}

    def train(config, report):
        folder, end = Path(config.out) / "checkpoints", hold_end(config.optim, config.steps)
        begun[config.steps] = {int(path.parent.name) for path in folder.glob("*/params")}
        for step in (end, config.steps):
            (folder / str(step) / "params").mkdir(parents=True)
        (Path(config.out) / "best.json").write_text(json.dumps({"step": 1, "score": 1.0}))
        return True

    monkeypatch.setattr(studies, "train", train)
    config = dataclasses.replace(config, optim=optim, steps=64)
    (tmp_path / "tokens_1_of_4" / "checkpoints.tmp" / "6").mkdir(parents=True)  # was killed there
    assert studies.study("tokens", config, tmp_path)
    assert begun == {8: set(), 16: {6}, 32: {12}, 64: {24}}
    assert not list(tmp_path.glob("*/checkpoints.tmp")) and (tmp_path / "tokens.png").exists()
    assert "| 1/8 | " in capsys.readouterr().out


def test_the_study_of_data_is_a_table_and_a_figure(config, tmp_path, monkeypatch, capsys):
    taus = iter([1.25, 1.5, 1.75, 2.0])

    def train(config, report):
        Path(config.out).mkdir()
        text = json.dumps({"step": config.steps, "score": next(taus)})
        (Path(config.out) / "best.json").write_text(text)
        return True

    monkeypatch.setattr(studies, "train", train)
    assert studies.study("data", config, tmp_path)
    a_step = config.data.batch_size * config.data.length
    assert f"| 1/4 | {4 * a_step:,} | 4 | 1.50 |" in capsys.readouterr().out
    assert (tmp_path / "data.png").read_bytes().startswith(b"\x89PNG")


def test_parts_are_changed_one_at_a_time(config, hybrid):
    runs = {run.folder: run.config for run in studies.runs_of_parts(config)}
    top = (hybrid.cfg.num_hidden_layers,)
    assert runs["whole"] == config
    assert runs["one_step"] == dataclasses.replace(
        config, ttt=dataclasses.replace(config.ttt, steps=1)
    )
    assert runs["top_layer"].draft.aux_layers == runs["neither"].draft.aux_layers == top
    assert runs["top_layer"].ttt == config.ttt and runs["neither"].ttt.steps == 1
    assert runs["norms"].draft == dataclasses.replace(config.draft, fc_norm=True, norm_output=True)


def test_a_study_says_what_each_run_left_and_stops_where_one_was_interrupted(
    config, tmp_path, monkeypatch, capsys
):
    taus = {"whole": 2.5, "one_step": 1.75}

    def train(config, report):
        name = config.out.rpartition("/")[2]
        if name not in taus:
            return False
        found = {"step": 12, "score": taus[name]}
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "best.json").write_text(json.dumps(found))
        return True

    monkeypatch.setattr(studies, "train", train)
    assert not studies.study("parts", config, tmp_path)
    table = (tmp_path / "parts.md").read_text()
    read = 16 * config.data.batch_size * config.data.length
    assert f"| EAGLE-3 | {read:,} | 12 | 2.50 |" in table
    assert "| without training-time test (K = 1) |" in table and "| 1.75 |" in table
    taus.update(top_layer=2.0, neither=1.5, norms=2.6)
    assert studies.study("parts", config, tmp_path)
    assert (tmp_path / "parts.md").read_text().count("\n| ") == 7
    assert "EAGLE-3.1's norms" in capsys.readouterr().out


def test_after_a_stop_the_studies_that_were_named_later_wait(config, tmp_path, monkeypatch):
    begun = []

    def train(config, report):
        begun.append(config.out)
        return False

    monkeypatch.setattr(studies, "train", train)
    monkeypatch.setattr(studies, "read_stages", lambda *_: {"": config})
    argv = ["data", "parts", "--config", "any.yaml", "--out", str(tmp_path)]
    assert studies.main(argv) == 130 and len(begun) == 1


def test_drafts_are_not_compared_without_prompts(config):
    sizes = dataclasses.replace(config.eval, prompts=0)
    with pytest.raises(ConfigError, match=r"eval\.prompts is 0"):
        studies.with_answers(dataclasses.replace(config, eval=sizes))


def test_answers_are_made_for_drafts_only_and_left_alone_if_none_are_asked_for(config):
    assert studies.with_answers(config) is config
    with pytest.raises(ConfigError, match="trains no draft"):
        studies.with_answers(dataclasses.replace(config, task="target", target=None))
    assert config.regenerate == RegenerateConfig()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shares", "--config", "x.yaml", "--out", "y"], "'shares' is no study: data, tokens"),
        (["data", "--config", "x.yaml"], "together, or none"),
        (["--config", "x.yaml", "--out", "y"], "together, or none"),
    ],
)
def test_a_command_line_that_says_too_little_is_one_line(argv, message, capsys):
    assert studies.main(argv) == 2
    assert message in capsys.readouterr().err
