"""The command line of `decode.py`: every mode on a tiny byte-level target with a draft of one word.

The target has random weights, with a bias towards eight letters so that its text is text. The draft
knows the letter b alone, so some of its guesses are right.
"""

import dataclasses
import io
import json
import math
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import forward
from jax.errors import JaxRuntimeError
from tokenizers import Tokenizer, models

import decode
from eagle3.cli import chat, compare, conversation
from eagle3.cli.answers import Result
from eagle3.cli.batch import fingerprint, in_batches
from eagle3.cli.console import Console
from eagle3.cli.engine import build
from eagle3.cli.rows import Row, row_problem
from eagle3.config import ConfigError, DecodeConfig, GeneratedTarget, SamplingConfig
from eagle3.config_reader import read_config
from eagle3.decoding import generate
from eagle3.decoding.costs import Costs
from eagle3.decoding.request import Answer, Request
from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.session import Session
from eagle3.draft import draft_for
from eagle3.draft_config import DraftConfig
from eagle3.generated import generated_target
from eagle3.interop import save_draft
from eagle3.text import ByteTokenizer
from gdn import load_pretrained, save_pretrained
from gdn.ops import native

NEW = 12
BIAS = f"sampling.logit_bias={ {ord(letter): 30 for letter in 'abcdefgh'} }"
SETTINGS = [
    BIAS, f"max_new_tokens={NEW}", "stream_every=2", "tree.kind=chain", "tree.depth=2",
    "prefill_chunk=16", "batch_size=2",
]  # fmt: skip
PROMPT = "def f(x):"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    "{% if messages[-1].content == 'zero' %}{{ 1 / 0 }}{% endif %}<a>"
)


def write_target(path, **shape):
    """Write a Hugging Face directory with a chat template; returns it."""
    cfg = GeneratedTarget(hidden_size=32, initializer_range=0.2, **shape)
    save_pretrained(generated_target(cfg, jnp.dtype("float32")), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


def write_draft(target, path):
    """Write an untrained draft in the SGLang layout, with a vocabulary of one token; returns it."""
    model = load_pretrained(target, jnp.float32)
    cfg = DraftConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=256, draft_vocab_size=1, target_hidden_size=32,
        aux_layers=(1, 2, 3),
    )  # fmt: skip
    made = draft_for(model, cfg, np.array([ord("b")]), rngs=nnx.Rngs(0))
    save_draft(made, path, "sglang")
    return str(path)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def draft(target, tmp_path_factory):
    return write_draft(target, tmp_path_factory.mktemp("draft"))


@pytest.fixture
def run(target, draft, capsys):
    """Call the command with target, draft and settings; returns status, stdout, stderr."""

    def call(*arguments, plain=False):
        both = ["--target", target] if plain else ["--target", target, "--draft", draft]
        status = decode.main([*both, *SETTINGS, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def answer(run):
    """The answer to PROMPT as `--json` gives it."""
    status, out, _ = run("--prompt", PROMPT, "--json")
    assert status == 0
    return json.loads(out)


def strict_json(text):
    """Parse JSON without NaN and infinities, which other readers refuse."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def press_ctrl_c(monkeypatch, visit):
    """Send SIGINT during the `visit`-th visit to the device, counted from 1."""
    advance, count = Session.advance, 0

    def interrupted(self):
        nonlocal count
        count += 1
        if count == visit:
            signal.raise_signal(signal.SIGINT)
        return advance(self)

    monkeypatch.setattr(Session, "advance", interrupted)


# Configuration


def config_of(*overrides, path=None, **texts):
    return read_config(DecodeConfig, path, overrides, **texts)


def test_overrides_win_over_the_file_flags_over_both_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("prompt: hello\nmax_new_tokens: 5\nsampling: {top_k: 3}\n")
    config = config_of("max_new_tokens=7", "tree.depth=2", "target=a", path=str(path), target="b")
    assert (config.prompt, config.max_new_tokens, config.target) == ("hello", 7, "b")
    assert (config.sampling.top_k, config.tree.depth, config.dtype) == (3, 2, "float32")


@pytest.mark.parametrize(
    ("override", "prompt"),
    [
        ("prompt=def f(n):", "def f(n):"),
        ("prompt=${HOME} # {x: 1}", "${HOME} # {x: 1}"),
        ("prompt='quoted: text'", "quoted: text"),
        (r'prompt="a\nb"', "a\nb"),
        ("prompt=12", "12"),
    ],
)
def test_a_prompt_is_taken_as_it_is_whatever_yaml_would_make_of_it(override, prompt):
    assert config_of(override).prompt == prompt


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("max_new_tokens=0", "max_new_tokens is 0"),
        ("max_new_tokens=many", "max_new_tokens"),
        ("dtype=int3", "it must be one of float32, bfloat16, int8"),
        ("draft_dtype=int4", "draft_dtype is 'int4', it must be one of float32, bfloat16, int8"),
        ("native=on", "native is True, it must be auto or off"),
        ("promt=x", "Did you mean: 'prompt'"),
        ("temperature=1", "Did you mean: 'sampling.temperature'"),
        ("seed=1", "Did you mean: 'generated.seed' or 'sampling.seed'"),
        ("sampling.topp=1", "Did you mean: 'sampling.top_p'"),
        ("nonsense=1", "There are: target, draft"),
        ("nonsense", "write key=value"),
        ("generated.hidden_size=40", "multiple of 32"),
        ("sampling.temperature=-1", "sampling.temperature is -1.0"),
        ("sampling.temperature=nan", "sampling.temperature is nan"),
        ("sampling.top_p=0", "sampling.top_p is 0.0"),
        ("sampling.top_p=1.5", "sampling.top_p is 1.5"),
        ("sampling.logit_bias={x: 1}", "'x', it must be a token id"),
        ("sampling.seed=-1", "sampling.seed is -1"),
        ("tree.kind=bush", "chain, static, dynamic or auto"),
        ("tree.depth=0", "depth is 0"),
        ("tree.paths=eagle9", "eagle1 or lists of ranks"),
        ("tree={kind: static, paths: [[0, 1]]}", "without the node above it"),
        ("method=eagle2", "eagle3, autoregressive or null"),
        ("method=eagle3", "give draft=DIR"),
        ("stop=['']", "non-empty texts"),
        ("stop=[a", "flow sequence"),
        ("batch_size=0", "batch_size is 0"),
    ],
)
def test_a_bad_value_is_one_error_that_names_it(override, names):
    with pytest.raises(ConfigError, match=names) as error:
        config_of(override)
    assert "\n" not in str(error.value)


def test_trees_and_sampling_come_out_as_decoding_takes_them():
    config = config_of("sampling.logit_bias={5: -1}", "sampling.logit_bias.7=2", "stop=ab")
    assert config.sampling.params().logit_bias == ((5, -1.0), (7, 2.0))
    assert config.sampling.params(seed=3).seed == 3
    assert config.stop_strings == ("ab",)
    plan = config.tree.plan()
    assert (plan.depth, plan.branching, plan.size) == (4, 3, 8)
    assert config_of("tree.kind=chain").tree.plan().size == 5
    assert config_of("tree.kind=static").tree.plan().size == 26
    assert config_of("tree={kind: static, paths: [[0], [1]]}").tree.plan().size == 3


def test_sampling_has_the_fields_and_defaults_that_decoding_has():
    ours, theirs = map(dataclasses.fields, (SamplingConfig, SamplingParams))
    assert [field.name for field in ours] == [field.name for field in theirs]
    assert SamplingConfig().params() == SamplingParams()


# Bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "x"], "--config FILE or --target DIR"),
        (["--config", "none.yaml"], "none.yaml does not exist"),
        (["--target", "none", "--prompt", "x"], "target none is no directory"),
        (["--target", "T"], "prompt is empty"),
        (["--target", "T", "--prompt", ""], "prompt is empty"),
        (["--target", "T", "--promt", "x"], "Did you mean: '--prompt'"),
        (["--target"], "expected one argument"),
        (["--target", "T", "--prompt", "x", "--chat"], "exclude each other"),
        (["--target", "T", "--chat", "--compare"], "exclude each other"),
        (["--target", "T", "--prompt", "x", "--prompts", "p"], "exclude each other"),
        (["--target", "T", "--prompts", "none.jsonl"], "no such file"),
        (["--target", "T", "--prompt", "x", "--out", "o"], "--out is for"),
        (["--target", "T", "--prompts", "C", "--out", "/dev/null"], "no regular file"),
        (["--target", "T", "--prompts", "C", "--out", "."], "no regular file"),
        (["--target", "T", "--prompt", "x", "--json", "--show-acceptance"], "--show-acceptance"),
        (["--target", "T", "--prompt", "x", "--compare"], "give --draft DIR"),
        (["--target", "T", "--prompt", "x", "--draft", "none"], "draft none is no directory"),
        (["--target", "T", "--prompt", "x", "max_new_tokens=5000"], "4096 positions"),
        (["--target", "T", "--prompt", "\udcff"], "not valid UTF-8"),
        (["--target", "T", "--prompt", "x", "sampling.logit_bias={999: 1}"], "token 999"),
        (["--chat", "generated.hidden_size=32", "--config", "C"], "give --target DIR"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_status_two(
    arguments, says, target, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "C").write_text("max_new_tokens: 1\n")
    replaced = [target if x == "T" else x for x in arguments]
    assert decode.main(replaced) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [x for x in captured.err.splitlines() if "random weights" not in x]
    assert len(lines) == 1 and lines[0].startswith("decode.py: ") and says in lines[0]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("target", "config.json"),
        ("target", "generation_config.json"),
        ("target", "tokenizer_config.json"),
        ("draft", "config.json"),
    ],
)
def test_json_too_deep_to_read_is_one_line_that_names_the_file(
    model, name, target, draft, tmp_path, monkeypatch, capsys
):
    folders = {"target": target, "draft": draft}
    folders[model] = shutil.copytree(folders[model], tmp_path / "copy")
    (folders[model] / name).write_text('{"x": ' + "[" * 100_000)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    arguments = [x for key, value in folders.items() for x in (f"--{key}", str(value))]
    assert decode.main([*arguments, *SETTINGS, "--chat"]) == 2
    err = capsys.readouterr().err
    assert f"{folders[model] / name}: not JSON" in err and err.count("\n") == 1


def test_end_tokens_that_are_none_are_an_error_that_names_the_file(target, tmp_path):
    copy = shutil.copytree(target, tmp_path / "copy")
    for wrong in ("abc", [[1]], [1, "a"], 1.5, True, 999, -1, {}):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is") as error:
            build(config_of(target=str(copy)))
        assert repr(wrong) in str(error.value) and "0..255" in str(error.value)


def test_a_token_that_only_the_tokenizers_file_names_ends_texts(target, tmp_path):
    copy = shutil.copytree(target, tmp_path / "copy")
    vocabulary = {"<unk>": 0, "a": 1, "<|im_end|>": 7}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.save(str(copy / "tokenizer.json"))
    (copy / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert 7 in build(config_of(target=str(copy))).eos_ids


@pytest.mark.skipif(native.problem() is not None, reason="needs the native kernels")
def test_a_draft_is_kept_as_small_as_may_be_beside_the_targets_embedding(target, draft):
    for setting, kind in (("", "int8"), ("draft_dtype=float32", "float32")):
        settings = [*SETTINGS, setting] if setting else SETTINGS
        engine = build(config_of(*settings, target=target, draft=draft))
        drafter: Any = engine.drafter
        assert drafter.draft.lm_head[...].data.dtype == kind
        kept = (model.embed_tokens[...] for model in (engine.target, drafter.draft))
        assert all(x.data.dtype == "float32" for x in kept)


def test_a_device_that_is_full_is_one_line_that_says_what_to_lower(run, monkeypatch):
    def full(self):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(Session, "advance", full)
    status, _, err = run("--prompt", PROMPT)
    assert status == 2 and "too little memory: lower batch_size" in err and "Trace" not in err


def test_random_targets_of_other_vocabularies_have_no_text(capsys):
    settings = ["draft=null", "target=null", "generated.vocab_size=512"]
    assert decode.main(["--config", "configs/decode.yaml", "--prompt", "hi", *settings]) == 2
    assert "leave generated.vocab_size at 256" in capsys.readouterr().err


# One prompt


def test_a_prompt_is_continued_with_a_closing_line(run, answer):
    status, out, err = run("--prompt", PROMPT)
    assert status == 0
    assert out == PROMPT + answer["text"] + "\n"
    closing = err.splitlines()[-1]
    assert f"{NEW} tokens in" in closing and "tokens/s" in closing
    assert f"tau {answer['acceptance_length']:.2f} in {answer['rounds']} rounds" in closing
    assert "max_new_tokens reached" in closing


def test_json_is_one_object_with_all_of_it(answer):
    assert answer["text"] == ByteTokenizer().decode(answer["tokens"])
    assert len(answer["text"]) == NEW and set(answer["text"]) <= set("abcdefgh")
    assert len(answer["logprobs"]) == NEW and all(x <= 0 for x in answer["logprobs"])
    assert (answer["finish_reason"], answer["prompt_tokens"]) == ("length", len(PROMPT))
    assert answer["acceptance_length"] == pytest.approx(NEW / answer["rounds"], abs=1e-3)
    assert 1 < answer["acceptance_length"] < 3, "the tests want right and wrong guesses"
    assert all(0 <= x <= 1 for x in answer["acceptance_by_depth"])
    assert answer["tokens_per_second"] == pytest.approx(NEW / answer["seconds"], rel=0.02)


def test_the_text_is_the_same_without_the_draft(run, answer):
    for arguments in (["--prompt", PROMPT, "--json"], ["prompt=" + PROMPT, "--json"]):
        plain = json.loads(run(*arguments, plain=True)[1])
        assert plain["tokens"] == answer["tokens"] and plain["rounds"] == NEW
    named = json.loads(run("method=autoregressive", "--prompt", PROMPT, "--json")[1])
    assert named["rounds"] == NEW


def test_the_answer_ends_before_a_stop_string_that_spans_tokens(run, answer):
    text = answer["text"]
    stop = text[4:7]
    before = text[: text.find(stop)]
    status, out, _ = run("--prompt", PROMPT, "--json", f"stop=['{stop}', zzz]")
    stopped = json.loads(out)
    assert status == 0 and stopped["text"] == before
    assert stopped["tokens"] == answer["tokens"][: len(before)]
    assert len(stopped["logprobs"]) == len(before)
    assert stopped["finish_reason"] == "stop"


def test_the_end_token_of_the_generation_config_ends_the_text_and_is_not_in_it(
    run, answer, target, draft, tmp_path, capsys
):
    copy = tmp_path / "target"
    shutil.copytree(target, copy)
    end = answer["tokens"][5]
    first = answer["tokens"].index(end)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 255]}))
    arguments = ["--target", str(copy), "--draft", draft, *SETTINGS, "--prompt", PROMPT, "--json"]
    assert decode.main(arguments) == 0
    ended = json.loads(capsys.readouterr().out)
    assert ended["text"] == answer["text"][:first]
    assert ended["tokens"] == answer["tokens"][: first + 1]
    assert ended["finish_reason"] == "stop"
    assert decode.main([*arguments, "ignore_eos=true"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == answer["text"]
    (copy / "generation_config.json").write_text("[]")
    assert decode.main(arguments) == 2
    assert "generation_config.json: found a list" in capsys.readouterr().err


@pytest.mark.parametrize("color", ["auto", "always"])
def test_accepted_tokens_are_marked_by_colour_or_brackets_with_a_legend(run, answer, color):
    status, out, err = run("--prompt", PROMPT, "--show-acceptance", "--color", color)
    begin, end = ("\x1b[32m", "\x1b[0m") if color == "always" else ("⟦", "⟧")
    assert status == 0 and f"{begin}accepted draft tokens{end}" in err
    assert out.replace(begin, "").replace(end, "") == PROMPT + answer["text"] + "\n"
    marked = "".join(part.split(end)[0] for part in out.split(begin)[1:])
    # Every round brings one token of the target's own, but a last one may end with a drafted one.
    assert NEW - len(marked) in (answer["rounds"], answer["rounds"] - 1)
    assert set(marked) == {"b"}
    assert "\x1b" not in out or color == "always"


def test_text_comes_while_it_is_made(run, monkeypatch):
    events, advance, write = [], Session.advance, Console.write

    def watched_advance(self):
        events.append("visit")
        return advance(self)

    def watched_write(self, pieces):
        events.append("".join(piece.text for piece in pieces))
        write(self, pieces)

    monkeypatch.setattr(Session, "advance", watched_advance)
    monkeypatch.setattr(Console, "write", watched_write)
    _, out, _ = run("--prompt", PROMPT)
    visits, texts = events[::2], events[1::2]
    assert set(visits) == {"visit"} and len(visits) > 2
    assert all(texts) and PROMPT + "".join(texts) + "\n" == out


def test_ctrl_c_ends_with_what_was_made(run, answer, monkeypatch):
    press_ctrl_c(monkeypatch, visit=2)
    status, out, err = run("--prompt", PROMPT)
    made = out.removeprefix(PROMPT).removesuffix("\n")
    assert status == 130 and 2 <= len(made) < NEW and answer["text"].startswith(made)
    assert err.splitlines()[-1].endswith("interrupted")
    assert err.count("a second Ctrl-C ends it at once") == 1
    press_ctrl_c(monkeypatch, visit=1)
    status, out, _ = run("--prompt", PROMPT, "--json")
    assert status == 130 and json.loads(out)["finish_reason"] == "cancelled"


def test_json_has_null_where_a_number_is_none(run, monkeypatch):
    advance = Session.advance

    def spoilt(self):
        chunks = advance(self)
        self.answers[0].logprobs[:2] = [math.nan, -math.inf]
        return chunks

    monkeypatch.setattr(Session, "advance", spoilt)
    status, out, _ = run("--prompt", PROMPT, "--json")
    assert status == 0 and strict_json(out)["logprobs"][:2] == [None, None]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("flag", ["--json", "--compare"])
def test_output_that_cannot_be_written_is_one_line_and_status_two(run, flag, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        status, _, err = run("--prompt", PROMPT, flag)
        full.flush()  # as at exit: there is nothing left that fails
    assert status == 2 and "No space left" in err.splitlines()[-1]
    assert "Traceback" not in err


# A file of prompts


ROWS = [
    {"prompt": PROMPT, "id": "first", "category": "left alone"},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"prompt": "import", "max_new_tokens": 3, "seed": 5},
]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    path.write_text(lines[0] + "\n\n" + "\n".join(lines[1:]))
    return path


@pytest.fixture
def out_file(tmp_path):
    return tmp_path / "out.jsonl"


def without_times(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = ("row", "key", "id", "text", "tokens", "finish_reason", "rounds")
    return sorted(
        ({k: line[k] for k in kept if k in line} for line in lines), key=lambda x: x["row"]
    )


def test_every_row_is_answered_as_if_alone(run, answer, prompts, out_file):
    status, out, err = run("--prompts", str(prompts), "--out", str(out_file))
    assert status == 0 and out == "" and "(3 of 3)" in err
    first, second, third = without_times(out_file)
    assert first["text"] == answer["text"] and first["id"] == "first"
    asked = json.loads(run("--prompt", "<u>hi<a>", "--json")[1])
    assert second["text"] == asked["text"] and "id" not in second
    assert len(third["tokens"]) == 3 and third["finish_reason"] == "length"
    status, out, _ = run("--prompts", str(prompts))
    assert status == 0
    texts = {line["row"]: line["text"] for line in map(json.loads, out.splitlines())}
    assert texts == {row["row"]: row["text"] for row in (first, second, third)}


def test_where_an_answer_ends_the_next_prompt_begins(run, tmp_path, out_file, monkeypatch):
    path, begun, start = tmp_path / "prompts.jsonl", [], Session.start
    rows = [{"prompt": PROMPT[: 2 + n], "max_new_tokens": 3 + 5 * (n % 2)} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(Session, "start", lambda self, x: begun.append(len(x)) or start(self, x))
    assert run("--prompts", str(path), "--out", str(out_file))[0] == 0
    assert begun == [2]
    for row, line in zip(rows, without_times(out_file), strict=True):
        alone = run("--prompt", row["prompt"], "--json", f"max_new_tokens={row['max_new_tokens']}")
        assert line["tokens"] == json.loads(alone[1])["tokens"]


def test_after_ctrl_c_no_further_prompt_is_read(run, tmp_path, out_file, monkeypatch):
    path, read, admit = tmp_path / "prompts.jsonl", [], Session.admit

    def press(self, row, request):
        signal.raise_signal(signal.SIGINT)
        read.append(row)
        admit(self, row, request)

    path.write_text((json.dumps({"prompt": PROMPT, "max_new_tokens": 3}) + "\n") * 6)
    monkeypatch.setattr(Session, "admit", press)
    assert run("--prompts", str(path), "--out", str(out_file))[0] == 130
    assert read == [0]  # both had ended
    assert len(out_file.read_text().splitlines()) == 2


def test_prompts_of_like_length_are_answered_together():
    lengths = [5, 90, 7, 40, 6, 95, 41, 8, 92]
    rows = [Row(i, {}, Request(prompt=[1] * n)) for i, n in enumerate(lengths)]
    found = [[len(row.request.prompt) for row in batch] for batch in in_batches(rows, 4)]
    assert sorted(found) == [[5, 6, 7, 8], [40, 41, 90, 92], [95]]
    assert [batch[0].index for batch in in_batches(rows, 1)] == list(range(9))
    assert in_batches([], 4) == []


def test_an_interrupted_file_goes_on_and_ends_the_same(
    run, prompts, out_file, tmp_path, monkeypatch
):
    whole = tmp_path / "whole.jsonl"
    run("--prompts", str(prompts), "--out", str(whole))
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, visit=3)
        status, _, err = run("--prompts", str(prompts), "--out", str(out_file))
    assert status == 130 and "run it again" in err
    some = out_file.read_text()
    assert len(some.splitlines()) < 3
    # As a kill would leave it: the beginning of one more line.
    out_file.write_text(some + whole.read_text().splitlines()[-1][:40])
    status, out, err = run("--prompts", str(prompts), "--out", str(out_file), "--json")
    assert status == 0 and "cut short" in err
    assert out_file.read_text().startswith(some)
    assert len(out.splitlines()) == 3 - len(some.splitlines())
    assert without_times(out_file) == without_times(whole)
    monkeypatch.setattr(Session, "start", lambda *_: pytest.fail("there is nothing left to do"))
    assert run("--prompts", str(prompts), "--out", str(out_file))[0] == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("settings", "other settings or models"),
        ("row", "row 0 of the prompts has changed"),
        ("fewer", "no row 2"),
        ("foreign", "no answer of this program"),
        ("foreign line", "something else"),
        ("deep", "no answer of this program"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(
    run, prompts, out_file, change, says, monkeypatch
):
    run("--prompts", str(prompts), "--out", str(out_file))
    extra = []
    if change == "settings":
        extra = ["max_new_tokens=11"]
    elif change == "row":
        prompts.write_text(prompts.read_text().replace(PROMPT, "def g(x):"))
    elif change == "fewer":
        prompts.write_text("\n".join(prompts.read_text().split("\n")[:3]))
    elif change == "deep":
        out_file.write_text("[" * 100_000 + "\n")
    else:
        out_file.write_text("my notes" + ("\n" if change == "foreign" else ""))
    before = out_file.read_bytes()
    monkeypatch.setattr(Session, "start", lambda *_: pytest.fail("nothing may be decoded"))
    status, _, err = run("--prompts", str(prompts), "--out", str(out_file), *extra)
    assert status == 2 and says in err and err.count("\n") == 1
    assert out_file.read_bytes() == before


def test_a_full_disk_is_one_line_and_what_was_written_stays(run, prompts, out_file):
    run("--prompts", str(prompts), "--out", str(out_file))
    whole = without_times(out_file)
    room = len(out_file.read_text().splitlines()[0]) + 100
    out_file.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        status, _, err = run("--prompts", str(prompts), "--out", str(out_file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 2 and "File too large" in err.splitlines()[-1] and "Traceback" not in err
    assert len(out_file.read_text().splitlines()) == 2  # the second one cut short
    assert run("--prompts", str(prompts), "--out", str(out_file))[0] == 0
    assert without_times(out_file) == whole


def test_settings_without_effect_on_answers_do_not_matter_and_retrained_weights_do(
    target, tmp_path
):
    config = config_of("batch_size=3", "stream_every=1", "prompt=x", target=target)
    for same in ([], ["draft_dtype=int8"]):
        assert fingerprint(config) == fingerprint(config_of(*same, target=target))
    assert fingerprint(config) != fingerprint(config_of("sampling.seed=1", target=target))
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    assert fingerprint(config_of(target=str(copy))) == fingerprint(config_of(target=target))
    (copy / "folder.json").mkdir()
    (copy / "gone.json").symlink_to(copy / "nowhere")
    assert fingerprint(config_of(target=str(copy))) == fingerprint(config_of(target=target))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(config_of(target=str(copy))) != fingerprint(config_of(target=target))


def test_all_bad_rows_are_reported_with_their_lines_before_anything_is_decoded(
    run, tmp_path, monkeypatch
):
    bad = [
        ('{"prompt": "a"', "not JSON"),
        ('{"prompt": "good"}', None),
        ("[1]", "expected an object"),
        ('{"prompt": "a", "messages": []}', "both prompt and messages"),
        ('{"id": 3}', "neither prompt nor messages"),
        ('{"prompt": "a", "max_new_tokens": 5000}', "4096 positions"),
        ('{"prompt": "\\ud800"}', "not valid UTF-8"),
        ('{"prompt": "a", "seed": 4294967296}', "seed is 4294967296"),
        ('{"messages": [{"role": "user", "content": "no"}]}', "not this"),
        ('{"messages": [{"role": "user", "content": "zero"}]}', "division by zero"),
        ('{"prompt": "a", "id": "\\ud800"}', "id cannot be written"),
        ('{"prompt": "a", "x": ' + "[" * 100_000, "not JSON"),
    ]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(line for line, _ in bad))
    monkeypatch.setattr(Session, "start", lambda *_: pytest.fail("nothing may be decoded"))
    status, out, err = run("--prompts", str(path))
    assert status == 2 and out == ""
    for number, (_, says) in enumerate(bad, start=1):
        found = [line for line in err.splitlines() if f"line {number}:" in line]
        assert (len(found) == 1 and says in found[0]) if says else not found
    path.write_text("\n")
    assert "has no rows" in run("--prompts", str(path))[2]


def test_a_token_outside_the_vocabulary_is_found_before_anything_is_decoded(
    target, tmp_path, monkeypatch, capsys
):
    copy = shutil.copytree(target, tmp_path / "copy")
    backend = Tokenizer(models.WordLevel({"a": 97, "z": 999}, unk_token="a"))
    backend.save(str(copy / "tokenizer.json"))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "z"}')
    monkeypatch.setattr(Session, "start", lambda *_: pytest.fail("nothing may be decoded"))
    assert decode.main(["--target", str(copy), "--prompts", str(path), "batch_size=1"]) == 2
    assert "line 2: token 999 is outside the vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": ""}, "not empty"),
        ({"prompt": 3}, "must be text"),
        ({"prompt": "a", "max_new_tokens": 0}, "at least 1"),
        ({"prompt": "a", "max_new_tokens": True}, "integer"),
        ({"prompt": "a", "seed": 1.5}, "integer"),
        ({"prompt": "a", "temperature": 1.0}, "temperature cannot be set for one row"),
        ({"prompt": "a", "stop": ["x"]}, "stop cannot be set for one row"),
        ({"messages": []}, "not empty"),
        ({"messages": ["hi"]}, "object with role and content"),
        ({"messages": [{"role": "user"}]}, "object with role and content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "not text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the assistant's own"),
        ({"prompt": "a", "id": ["\ud800"]}, "id cannot be written"),
        ({"prompt": "a", "id": math.inf}, "id cannot be written"),
        ({"prompt": "a", "id": json.loads("[" * 100 + "]" * 100)}, "levels deep"),
        ({"prompt": "a", "id": json.loads("[" * 99 + "]" * 99)}, None),
        ({"prompt": "a", "id": [1], "metadata": {"x": 1}, "seed": 1}, None),
    ],
)
def test_a_row_of_the_wrong_shape_is_refused_and_fields_that_are_no_settings_are_not(row, says):
    problem = row_problem(row)
    assert problem is None if says is None else says in str(problem)


# Chat


@pytest.fixture
def talk(run, monkeypatch):
    """Chat with the lines given, as JSON; returns status, answers, stderr."""

    def call(*lines, arguments=("--json",)):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status, out, err = run("--chat", *arguments, "max_new_tokens=6")
        return status, [json.loads(x) for x in out.splitlines()] if arguments else out, err

    return call


def test_a_conversation_goes_on_from_the_caches(talk, run):
    status, (first, second), _ = talk("hi", "", "and?")
    assert status == 0
    history = f"<u>hi<a>{first['text']}"
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] == len("<u>hi<a>") + 6 - 1
    prompt = f"{history}<u>and?<a>"
    assert second["prompt_tokens"] == len(prompt)
    alone = json.loads(run("--prompt", prompt, "--json", "max_new_tokens=6")[1])
    assert alone["tokens"] == second["tokens"] and alone["reused_tokens"] == 0


def test_commands_reset_and_end_and_unknown_ones_are_told(talk):
    status, answers, err = talk("hi", "/reset", "/rest", "hi", "/exit", "never read")
    assert status == 0 and len(answers) == 2
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert "there is no command /rest" in err and "starts anew" in err


def test_a_refused_message_leaves_the_conversation_as_it_was(talk):
    status, answers, err = talk("hi", "no", "zero", "x" * 4096, "\udcff", "and?")
    assert status == 0
    for says in ("not this", "division by zero", "4096 positions", "not valid UTF-8"):
        assert says in err
    assert len(answers) == 2 and answers[1]["reused_tokens"] == len("<u>hi<a>") + 6 - 1


def test_ctrl_c_ends_an_answer_which_stays_and_at_the_prompt_the_program(talk, monkeypatch):
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, visit=1)
        status, (first, second), _ = talk("hi", "and?")
    assert status == 0 and first["finish_reason"] == "cancelled"
    made = len(first["tokens"])
    assert 0 < made < 6 and second["reused_tokens"] == len("<u>hi<a>") + made - 1

    def pressed():
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_lines", lambda is_shown: (pressed() for _ in range(1)))
    assert talk()[0] == 130


def test_chat_prints_the_answer_on_its_own_line_and_the_closing_line(talk):
    status, out, err = talk("hi", arguments=())
    assert status == 0 and out.endswith("\n") and len(out) == 7
    assert "tau" in err.splitlines()[-1]


def test_only_the_rest_is_encoded_where_the_held_tokens_read_as_the_beginning():
    tokenizer = ByteTokenizer()
    assert conversation.continued_ids(tokenizer, [97, 98], "abc") == [97, 98, 99]
    assert conversation.continued_ids(tokenizer, [120], "abc") == [97, 98, 99]
    assert conversation.continued_ids(tokenizer, [], "abc") == [97, 98, 99]
    broken = [97, 0xF0]  # an answer cut within a character keeps its own tokens
    assert conversation.continued_ids(tokenizer, broken, "a\ufffdc") == [97, 0xF0, 99]


# Comparison


def test_comparing_reports_speed_acceptance_and_that_the_texts_are_identical(run, prompts, answer):
    status, out, err = run("--prompts", str(prompts), "--compare", "--json")
    *pairs, last = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(pairs) == 3
    assert pairs[0]["plain"]["tokens"] == pairs[0]["speculative"]["tokens"] == answer["tokens"]
    for pair in pairs:
        assert pair["identical"] and pair["first_difference"] is None
        assert not pair["plain"]["includes_compilation"]
        assert not pair["speculative"]["includes_compilation"]
        speeds = [pair[side]["tokens_per_second"] for side in ("speculative", "plain")]
        assert pair["ratio"] == pytest.approx(speeds[0] / speeds[1], rel=0.01)
    totals = last["totals"]
    made = sum(len(pair["speculative"]["tokens"]) for pair in pairs)
    rounds = sum(pair["speculative"]["rounds"] for pair in pairs)
    assert totals["acceptance_length"] == pytest.approx(made / rounds, abs=1e-3)
    assert totals["identical"] == 3 and "compile" in err
    status, out, _ = run("--prompt", PROMPT, "--compare")
    assert status == 0
    for words in ("tokens/s", "ratio", "identical", "tau", "depth"):
        assert words in out


def test_comparing_trees_that_adapt_tells_what_they_were(run, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs, asked = Costs(((1, 1.0), (2, 1.0)), (1e-6, 1e-6), 1e-6), []
    monkeypatch.setattr(generate, "measure_costs", lambda *_: asked.append(0) or costs)
    tree = "tree={kind: auto, top_k: 1, max_depth: 2, max_nodes: 2}"
    arguments = ("--prompts", str(prompts), "--compare", tree)
    status, out, _ = run(*arguments, "--json")
    *pairs, last = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and all(pair["identical"] for pair in pairs)
    rounds = sum(pair["speculative"]["rounds"] for pair in pairs)
    assert last["totals"]["rounds_by_nodes_verified"] == {"2": rounds}
    assert last["totals"]["rounds_by_levels_drafted"] == {"2": rounds}
    out = run(*arguments, "--recalibrate")[1]
    assert "rounds by nodes verified: 2: 100%" in out
    assert len(asked) == 2 and len(list(tmp_path.rglob("costs/*.json"))) == 1


def test_an_answer_without_tokens_is_compared_without_a_ratio(run, answer):
    arguments = ("--prompt", PROMPT, "--compare", f"stop=['{answer['text'][0]}']")
    status, out, _ = run(*arguments, "--json")
    pair, last = map(strict_json, out.splitlines())
    assert status == 0 and pair["plain"]["tokens"] == [] and pair["identical"]
    assert pair["ratio"] is None and last["totals"]["ratio"] is None
    assert last["totals"]["acceptance_length"] == 0
    status, out, _ = run(*arguments)
    assert status == 0 and "1 of 1 texts identical" in out


def test_answers_of_the_same_text_in_other_tokens_differ_in_json_too(run, monkeypatch):
    sides = iter([[97, 98], [97, 99]] * 2)

    def made(*_):
        tokens = next(sides)
        answer = Answer(tokens, [False, False], [0.0, 0.0], "length")
        return Result("same", answer, 1, 0, 2.0, False)

    monkeypatch.setattr(compare, "decode_one", made)
    arguments = ("--prompt", PROMPT, "--compare", "sampling.temperature=1")
    pair = json.loads(run(*arguments, "--json")[1].splitlines()[0])
    assert not pair["identical"] and pair["first_difference"]["position"] == 1
    out = run(*arguments)[1]
    assert "differs: tokens 98 and 99 after 1 equal ones, sampled\n" in out


def test_the_margin_at_a_difference_is_between_the_targets_logits_there(target):
    model = load_pretrained(target, jnp.float32)
    prompt, plain = list(PROMPT.encode()), [97, 98, 99]
    request = Request(prompt=prompt)
    found = compare.first_difference(model, request, plain, [97, 100, 99])
    tokens = jnp.array([[*prompt, 97]])
    logits = np.asarray(model.logits(forward(model, tokens).hidden))[0, -1]
    top = np.sort(logits)
    assert found is not None and (found.position, found.tokens) == (1, (98, 100))
    assert found.margin == pytest.approx(logits[98] - logits[100], abs=1e-4)
    assert found.top_margin == pytest.approx(top[-1] - top[-2], abs=1e-4)
    assert "after 1 equal" in found.describe()
    assert compare.first_difference(model, request, plain, plain) is None
    shorter = compare.first_difference(model, request, plain, plain[:2])
    assert shorter is not None and shorter.tokens == (99, None) and shorter.margin is None
    sampled = Request(prompt=prompt, sampling=SamplingParams(temperature=1.0))
    found = compare.first_difference(model, sampled, plain, [97, 100, 99])
    assert found is not None and found.margin is None and found.top_margin is None
