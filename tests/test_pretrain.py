"""Training the small byte-level target, and its command line."""

import numpy as np
import pytest

import decode
import train
from eagle3.config import ConfigError, TrainConfig, load_config
from eagle3.training.pretrain import batch_at, standard_library


def config_file(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_training_lowers_the_loss_and_its_target_decodes(tmp_path, capsys):
    path = config_file(tmp_path, "log_every: 1\n")
    small = ["generated.hidden_size=32", "batch_size=4", "length=32", "steps=12"]
    target = str(tmp_path / "target")
    assert train.main(["--config", path, *small, f"out={target}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    losses = [float(line.split()[3]) for line in lines]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    assert decode.main(["--target", target, "--prompt", "hello", "max_new_tokens=4"]) == 0
    assert capsys.readouterr().out.startswith("hello")


def test_a_batch_depends_on_seed_and_step_alone():
    corpus = standard_library()
    assert len(corpus) > 1_000_000
    first = batch_at(corpus, 0, 3, 2, 16)
    assert first.shape == (2, 17)
    np.testing.assert_array_equal(first, batch_at(corpus, 0, 3, 2, 16))
    assert (first != batch_at(corpus, 0, 4, 2, 16)).any()
    assert (first != batch_at(corpus, 1, 3, 2, 16)).any()


@pytest.mark.parametrize("override", ["steps=0", "learning_rate=-1", "batch_size=0"])
def test_a_bad_training_value_is_an_error_that_names_it(tmp_path, override):
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        load_config(TrainConfig, ["--config", config_file(tmp_path, "seed: 1\n"), override])


def test_training_without_a_configuration_is_one_line_and_status_two(capsys):
    assert train.main([]) == 2
    assert capsys.readouterr().err == "train.py: give a configuration: --config FILE\n"
