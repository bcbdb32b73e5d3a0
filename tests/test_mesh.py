"""Claims about meshes: the same losses, the same tokens, and each device with its own part only.

What needs several devices is run once, by `mesh_worker.py`, on eight that are forced on the CPU.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from conftest import COMPILED
from flax import nnx
from helpers import LLAMA, QWEN3_5_MOE, QWEN3_NEXT, RTOL, random_draft, random_model, relative_error
from jax.sharding import AxisType

from eagle3.cli.engine import _packer
from eagle3.config import ConfigError, DecodeConfig, MeshConfig, TreeConfig
from eagle3.sharding import AXES, RULES, check_shape, on_mesh
from eagle3.training.config import TrainConfig
from eagle3.training.data.config import DataConfig

WORKER = Path(__file__).parent / "mesh_worker.py"
TRAINED = (("target", "all"), ("draft", "fsdp"), ("draft", "all"))  # 2 x 2 x 2, and 8 devices


@pytest.fixture(scope="module")
def found():
    """Run everything that needs eight devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    settings = {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "PYTHONPATH": os.pathsep.join([str(WORKER.parent.parent), str(WORKER.parent)]),
    }
    done = subprocess.run(
        [sys.executable, str(WORKER)], env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["devices"] == 8
    return values


@pytest.mark.parametrize(("kind", "mesh"), TRAINED)
def test_losses_and_gradients_are_those_of_one_device(found, kind, mesh):
    one, many = (found["losses"][f"{kind} {name}"]["values"] for name in ("one", mesh))
    assert one[0] != one[-2]  # the weights have moved
    assert relative_error(many, one) < RTOL["float32"]


@pytest.mark.parametrize(("kind", "mesh"), TRAINED)
def test_a_step_leaves_its_arrays_where_the_table_has_them_and_compiles_once(found, kind, mesh):
    run = found["losses"][f"{kind} {mesh}"]
    assert run["lies"] and run["programs"] == 1


def test_a_run_goes_on_from_its_checkpoint_on_another_mesh(found):
    straight, resumed = found["resumed"]
    assert relative_error(resumed, straight) < RTOL["float32"]


def test_sharded_decoding_says_the_same_tokens(found):
    one, many = found["decoded"]["one"], found["decoded"]["all"]
    assert many["lies"]
    assert many["tokens"] == one["tokens"]
    assert [len(tokens) for tokens in many["tokens"]] == [24] * 4


def test_each_device_holds_what_a_dry_run_says_and_no_more(found):
    for planned, held, *_ in found["planned"].values():
        assert planned == held
    whole, eighth = (found["planned"][name][1] for name in ("one", "fsdp"))
    assert whole / 8 < eighth < whole / 7  # norms and the like are on every device
    assert found["planned"]["data"][1] == whole


def test_rows_that_do_not_divide_are_on_every_device(found):
    assert {name: values[2:] for name, values in found["planned"].items()} == {
        "one": [1, 1], "data": [8, 1], "fsdp": [8, 1], "all": [4, 1]
    }  # fmt: skip


def test_every_matrix_has_a_rule():
    target = random_model(QWEN3_NEXT)
    for module in (target, random_draft(target), random_model(QWEN3_5_MOE), random_model(LLAMA)):
        for path, leaf in nnx.to_flat_state(nnx.state(module)):
            if len(leaf.shape) > 1:
                assert (path[-1], len(leaf.shape)) in RULES


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="data.batch_size is 6, .* = 4"):
        TrainConfig(
            task="target", out="x", data=DataConfig(batch_size=6), mesh=MeshConfig(data=2, fsdp=2)
        )
    with pytest.raises(ConfigError, match="batch_size is 3, .* = 2"):
        DecodeConfig(batch_size=3, mesh=MeshConfig(data=2))


def test_heads_and_widths_that_do_not_divide_are_all_named():
    with pytest.raises(ConfigError) as error:
        check_shape(MeshConfig(tensor=4), QWEN3_NEXT)
    for part in ("mesh.tensor is 4", "num_key_value_heads (2)", "num_experts (6)"):
        assert part in str(error.value)
    assert "vocab_size" not in str(error.value)
    with pytest.raises(ConfigError, match=r"mesh.fsdp is 5, .* hidden_size \(32\) of the target"):
        check_shape(MeshConfig(fsdp=5), QWEN3_NEXT)


def test_what_works_on_one_device_only_is_refused_on_a_mesh():
    mesh = MeshConfig(tensor=2)
    with pytest.raises(ConfigError, match="int8 is for one device"):
        DecodeConfig(dtype="int8", mesh=mesh)
    with pytest.raises(ConfigError, match="tree.kind auto"):
        DecodeConfig(draft="x", tree=TreeConfig(kind="auto"), mesh=mesh)


def test_more_devices_than_there_are_and_none_are_refused():
    with pytest.raises(ConfigError, match="mesh wants 4096 devices .* see what it would take"):
        on_mesh(MeshConfig(data=4096))
    with pytest.raises(ConfigError, match="mesh.fsdp is 0"):
        MeshConfig(fsdp=0)


def test_kernels_are_off_on_a_mesh_and_that_is_said(caplog):
    mesh = jax.make_mesh((1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING):
        assert not _packer(DecodeConfig()).native
    assert caplog.messages == ["native kernels are for one device: on this mesh they are off"]
