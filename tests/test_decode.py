"""Plain greedy decoding and its command line."""

import jax.numpy as jnp
import numpy as np
import pytest

import decode
import train
from eagle3.config import ConfigError, DecodeConfig, GeneratedTarget, TrainConfig, load_config
from eagle3.decoding.generate import generate_greedy, most_likely
from eagle3.generated import generated_target
from eagle3.training.pretrain import batch_at, standard_library

PROMPTS = [b"def f(x):", b"a"]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def model():
    return generated_target(
        GeneratedTarget(hidden_size=32, initializer_range=0.2), jnp.dtype("float32")
    )


@pytest.fixture(scope="module")
def padded():
    lengths = jnp.array([len(p) for p in PROMPTS], jnp.int32)
    rows = [np.frombuffer(p.ljust(len(PROMPTS[0]), b"\0"), np.uint8) for p in PROMPTS]
    return jnp.asarray(np.stack(rows), jnp.int32), lengths


@pytest.fixture(scope="module")
def expected(model):
    """Greedy continuations by recomputing the whole sequence for every token."""
    width = len(PROMPTS[0]) + NEW_TOKENS
    rows = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens = jnp.array([ids + [0] * (width - len(ids))], jnp.int32)
            logits = model.logits(model(tokens).hidden)[0, len(ids) - 1]
            top = np.sort(np.asarray(logits))
            assert top[-1] - top[-2] > 1e-3, "a near-tie proves nothing: choose other prompts"
            ids.append(int(jnp.argmax(logits)))
        rows.append(ids[len(prompt) :])
    return np.array(rows)


def test_greedy_decoding_of_a_batch_equals_full_recomputation(model, padded, expected):
    prompts, lengths = padded
    tokens, counts = generate_greedy(model, prompts, lengths, NEW_TOKENS)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(counts, [NEW_TOKENS, NEW_TOKENS])


def test_a_row_ends_with_its_eos_and_the_other_goes_on(model, padded, expected):
    eos = int(expected[0, 2])
    first = [
        int(np.flatnonzero(row == eos)[0]) + 1 if eos in row else NEW_TOKENS for row in expected
    ]
    prompts, lengths = padded
    tokens, counts = generate_greedy(model, prompts, lengths, NEW_TOKENS, (eos,))
    np.testing.assert_array_equal(counts, first)
    for row, want, count in zip(np.asarray(tokens), expected, first, strict=True):
        np.testing.assert_array_equal(row[:count], want[:count])
        assert not row[count:].any()


def test_most_likely_takes_the_lowest_of_equal_maxima():
    assert most_likely(jnp.array([[0.0, 3.0, 3.0, -1.0]])).tolist() == [1]


def config_file(tmp_path, text="prompt: hello\n"):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = config_file(tmp_path, "prompt: hello\nmax_new_tokens: 5\n")
    config = load_config(DecodeConfig, ["--config", path, "max_new_tokens=7", "generated.seed=3"])
    assert (config.prompt, config.max_new_tokens, config.generated.seed) == ("hello", 7, 3)
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("max_new_tokens=0", "max_new_tokens"),
        ("max_new_tokens=many", "max_new_tokens"),
        ("dtype=int3", "float32 or bfloat16"),
        ("prompt=''", "prompt is empty"),
        ("promt=x", "Did you mean: 'prompt'"),
        ("generated.hidden_size=40", "multiple of 32"),
    ],
)
def test_a_bad_value_is_one_error_that_names_it(tmp_path, override, names):
    with pytest.raises(ConfigError, match=names) as error:
        load_config(DecodeConfig, ["--config", config_file(tmp_path), override])
    assert "\n" not in str(error.value)


def test_the_command_prints_the_prompt_and_fails_with_two(tmp_path, capsys):
    path = config_file(tmp_path)
    small = ["generated.hidden_size=32", "max_new_tokens=4"]
    assert decode.main(["--config", path, *small]) == 0
    assert capsys.readouterr().out.startswith("hello")
    for bad in (["target=/no/such/folder"], ["max_new_tokens=5000"]):
        assert decode.main(["--config", path, *bad]) == 2
        assert "decode.py: " in capsys.readouterr().err
    assert decode.main(["--config", str(tmp_path / "none.yaml")]) == 2


def test_training_lowers_the_loss_and_its_target_decodes(tmp_path, capsys):
    path = config_file(tmp_path, "log_every: 1\n")
    small = ["generated.hidden_size=32", "batch_size=4", "length=32", "steps=12"]
    assert train.main(["--config", path, *small, f"out={tmp_path / 'target'}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    losses = [float(line.split()[3]) for line in lines]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    prompt = config_file(tmp_path)
    arguments = ["--config", prompt, f"target={tmp_path / 'target'}", "max_new_tokens=4"]
    assert decode.main(arguments) == 0
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
