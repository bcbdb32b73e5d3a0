"""Claims about the files in configs/: they load, and those for released checkpoints are right.

No checkpoint is needed: the shapes of released targets are known, drafts are made without memory,
and the figures in the comments are computed again.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from eagle3.config_reader import read_stages
from eagle3.draft import Eagle3Draft
from eagle3.draft_config import DraftConfig
from eagle3.draft_hf_config import LAYER_IDS, read_fields, write_config
from eagle3.training.config import TrainConfig
from gdn.config import TargetConfig
from gdn.published import NAMES, published_shape

FOLDER = Path(__file__).parent.parent / "configs"
CONTENT = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
TRAINING = [name for name, content in CONTENT.items() if {"task", "stages"} & content.keys()]
# Made from checkpoints that users download, not from what another stage has trained.
REAL = [n for n in TRAINING if str(CONTENT[n].get("target")).startswith("checkpoints/")]


def target_of(name: str) -> TargetConfig:
    """Return the architecture of the checkpoint that a file trains for."""
    shape = published_shape(Path(CONTENT[name]["target"]).name)
    assert shape is not None
    return shape


def training_of(name: str) -> TrainConfig:
    """Return the one stage of a file."""
    return read_stages(TrainConfig, str(FOLDER / f"{name}.yaml"))[""]


def draft_of(name: str) -> DraftConfig:
    """Return the shape of the draft that a file trains."""
    return training_of(name).draft.for_target(target_of(name))


def number_of_parameters(cfg: DraftConfig) -> int:
    """Count what is trained of a draft, without making it."""

    def make():
        embedding = jnp.zeros((cfg.vocab_size, cfg.hidden_size))
        return Eagle3Draft(cfg, embedding, np.arange(cfg.draft_vocab_size), rngs=nnx.Rngs(0))

    _, params, _ = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def comment_of(name: str) -> str:
    """Return what stands above the settings, as one line."""
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    head = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.removeprefix("#").strip() for line in head)


def found_in(pattern: str, text: str) -> list[str]:
    """Return the groups of a pattern that has to be there."""
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in: {text}"
    return list(match.groups())


@pytest.mark.parametrize("name", TRAINING)
def test_every_training_file_loads(name):
    for config in read_stages(TrainConfig, str(FOLDER / f"{name}.yaml")).values():
        assert config.steps > 0


def test_there_are_files_for_released_checkpoints():
    assert len(REAL) == len(NAMES)
    assert all(published_shape(Path(CONTENT[name]["target"]).name) for name in REAL)


@pytest.mark.parametrize("name", REAL)
def test_comment_names_the_checkpoint_and_the_parameters_of_the_draft(name):
    comment, checkpoint = comment_of(name), Path(CONTENT[name]["target"]).name
    assert f"hf download Qwen/{checkpoint} --local-dir {CONTENT[name]['target']} " in comment
    (stated,) = found_in(r"draft has ([\d,]+) parameters", comment)
    assert int(stated.replace(",", "")) == number_of_parameters(draft_of(name))


@pytest.mark.parametrize("name", REAL)
def test_memory_in_the_comment_follows_its_formula(name):
    config, cfg = training_of(name), draft_of(name)
    assert config.dtype == "bfloat16" and config.optim.kind == "adamw" and not config.optim.ema
    devices = config.mesh.size
    assert devices == config.mesh.fsdp  # which divides all three
    tokens = config.data.batch_size * config.data.length / devices
    assert config.accumulate > 1  # else there is no sum of gradients
    steps = config.ttt.steps
    layer = 6 * cfg.intermediate_size + 8 * cfg.hidden_size
    expected = [
        2 * target_of(name).num_parameters() / devices,
        22 * number_of_parameters(cfg) / devices,
        4 * tokens * ((steps + 2) * cfg.draft_vocab_size + steps * layer),
    ]
    number = r"([\d.]+)"
    pattern = rf"target {number} \+ draft {number} \+ batch {number} = {number} GB"
    *stated, total = map(float, found_in(pattern, comment_of(name)))
    assert stated == [round(size / 1e9, 1) for size in expected]
    assert total == pytest.approx(sum(stated), abs=0.01)
    # The devices that the comment asks for hold it.
    count, size = found_in(r"Fits (a|\d) devices? of (\d+) GB", comment_of(name))
    assert devices == (1 if count == "a" else int(count)) and total < 0.93 * float(size)


@pytest.mark.parametrize("name", REAL)
def test_attention_of_the_draft_is_that_of_the_target(name):
    cfg, target = draft_of(name), target_of(name)
    for field in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(cfg, field) == getattr(target, field)
    assert cfg.intermediate_size == target.intermediate_size or target.moe_layers
    assert cfg.max_position_embeddings == target.max_position_embeddings  # or servers stop short
    assert cfg.draft_vocab_size == 32000


@pytest.mark.parametrize("name", REAL)
def test_taps_are_those_that_servers_assume_or_follow_full_attention(name):
    cfg, target = draft_of(name), target_of(name)
    assert cfg.aux_layers == training_of(name).draft.aux_layers  # stated, not left to the default
    assert all(0 < layer < target.num_hidden_layers for layer in cfg.aux_layers)
    kinds = {target.layer_types[layer - 1] for layer in cfg.aux_layers}
    count = target.num_hidden_layers
    assert cfg.aux_layers == (2, count // 2, count - 3) or kinds == {"full_attention"}


@pytest.mark.parametrize("name", REAL)
def test_exported_config_says_what_the_draft_is(name):
    config, cfg = training_of(name), draft_of(name)
    written = write_config(cfg, config.draft.layout, "bfloat16", config.target)
    values, problems = read_fields(json.loads(json.dumps(written)))
    assert problems == []
    assert {field: getattr(cfg, field) for field in values} == values
    outputs = written["eagle_config"][LAYER_IDS]  # SGLang's numbering; vLLM reads the other one
    assert [layer + 1 for layer in outputs] == list(cfg.aux_layers) == written[LAYER_IDS]


@pytest.mark.parametrize("name", REAL)
def test_data_comes_from_the_hub_and_is_not_measured_on(name):
    config = training_of(name)
    trained = [(source.hub, source.split) for source in config.data.sources.values()]
    held = [(source.hub, source.split) for source in config.eval.sources.values()]
    assert trained and held and not set(trained) & set(held)
    for source in (*config.data.sources.values(), *config.eval.sources.values()):
        assert source.kind == "hub" and source.format != "auto"
    tokens = config.steps * config.accumulate * config.data.batch_size * config.data.length
    text = (FOLDER / f"{name}.yaml").read_text()
    (per_step,) = found_in(r"# ([\d,]+) tokens a step", text)
    (billion,) = found_in(r"# ([\d.]+) billion tokens", text)
    assert int(per_step.replace(",", "")) * config.steps == tokens
    assert float(billion) == round(tokens / 1e9, 2)
