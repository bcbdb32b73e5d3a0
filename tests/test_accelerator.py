"""benchmarks/accelerator.py: it runs on a CPU, and its two ways to verify are the same one."""

import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from gdn.ops.reference import tree_delta_rule_reference


@pytest.fixture(scope="module")
def accelerator():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("benchmarks")  # scripts there import one another
        yield importlib.import_module("accelerator")


@pytest.fixture(scope="module")
def found(accelerator, tmp_path_factory):
    path = tmp_path_factory.mktemp("accelerator") / "found.json"
    accelerator.main(["--small", "--rounds", "2", "--out", str(path)])
    return json.loads(path.read_text())


def test_the_device_and_the_shape_are_told(found, accelerator):
    assert (found["platform"], found["dtype"], found["size"]) == ("cpu", "bfloat16", "small")
    assert found["shape"]["hidden_size"] == accelerator.TINY["hidden_size"]
    assert found["device"] and found["jax"] and found["parameters"] > 0 and found["rounds"] == 2


def test_costs_are_those_of_one_node(found, accelerator):
    curve = found["decode"]["curve"]
    assert [x["nodes"] for x in curve] == list(accelerator.SMALL.nodes)
    assert curve[0]["cost"] == 1.0
    last = curve[-1]["seconds"]
    assert 0 < last["low"] <= last["median"] <= last["high"]


def test_states_in_closed_form_and_copied_are_compared(found, accelerator):
    (only,) = found["verify"]
    assert only["nodes"] == accelerator.SMALL.trees[0]
    assert only["difference"] < 1e-5
    assert only["ratio"] == only["copies"]["median"] / only["closed"]["median"]
    assert only["closed_bytes"] < only["copies_bytes"]


def test_a_step_of_training_is_told_in_tokens_and_operations(found):
    step = found["train"]["step"]
    assert step["tokens_per_second"] == found["train"]["tokens"] / step["seconds"]["median"]
    peak = found["train"]["peak_flops"]
    assert step["utilisation"] == pytest.approx(step["flops"] / step["seconds"]["median"] / peak)


def test_copied_states_are_those_of_the_specification(accelerator):
    cfg, rows, parents = accelerator.small_target(), 2, jnp.array([-1, 0, 0, 2])
    inputs = accelerator.random_inputs(cfg, rows, 4, 0)
    heads = cfg.linear_num_value_heads
    shape = (rows, heads, cfg.linear_key_head_dim, cfg.linear_value_head_dim)
    state = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    states = jnp.zeros((5, *shape)).at[0].set(state)
    out, states = accelerator.copied_states(inputs, states, parents)
    every = jnp.broadcast_to(parents, (rows, 4))
    expected = tree_delta_rule_reference(*inputs, state=state, parents=every)
    assert_close(out, expected[0])
    assert_close(jnp.swapaxes(states[1:], 0, 1), expected[1])


def test_ways_that_differ_are_an_error(accelerator):
    tree = accelerator.Verification(accelerator.small_target(), 4, 2)
    tree.states = [x + 1 for x in tree.states]
    with pytest.raises(SystemExit, match="the two ways to verify differ by"):
        tree.difference()
