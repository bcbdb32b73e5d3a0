"""A draft's data in the target's own words: what it says to prompts made of the data, exactly."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3.config import ConfigError, GeneratedTarget
from eagle3.decoding.generate import generate
from eagle3.decoding.request import Request
from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.session import Session
from eagle3.generated import generated_target
from eagle3.training import regenerate as module
from eagle3.training.config import RegenerateConfig, TrainConfig
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.data.dataset import open_datasets
from eagle3.training.data.masking import Masker
from eagle3.training.prompts import next_turn, num_turns, windows
from eagle3.training.regenerate import FOLDER, regenerate
from gdn import load_pretrained, save_pretrained

NEW = 6
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}|{% endfor %}"
    "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
PROSE = ["def f(n):\n    return n + 1  # " + "x" * 9, "数学 is mathematics, ünï is not 🤷 a word"]
CHATS = [
    [("user", f"What is {n}?"), ("assistant", "?"), ("user", "Sure?"), ("assistant", "Yes.")]
    for n in range(2)
]


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A Hugging Face directory with a chat template, whose model ends some of its answers."""
    path = tmp_path_factory.mktemp("target")
    model = generated_target(GeneratedTarget(hidden_size=32, initializer_range=0.2), jnp.float32)
    save_pretrained(model, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (said, _) = generate(model, [Request(prompt=list(b"Sure"), max_new_tokens=NEW)] * 2)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": said.tokens[2]}))
    return str(path)


@pytest.fixture
def masker(target):
    return Masker.load(target, 256)


@pytest.fixture
def config(target, tmp_path):
    """Make the configuration of a run in `out` from rows of data."""

    def make(found, out="run", length=256, packing="pack", directory=target, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        common: dict[str, Any] = {"max_new_tokens": NEW, "prompt_tokens": 8, "batch_size": 2}
        data = DataConfig(
            sources={"rows": SourceConfig(files=str(path))}, length=length, packing=packing,
            cache=str(tmp_path / "cache"),
        )  # fmt: skip
        return TrainConfig(
            out=str(tmp_path / out), target=directory, data=data,
            regenerate=RegenerateConfig(**(common | settings)),
        )  # fmt: skip

    return make


def chat_rows(chats=CHATS):
    return [{"messages": [{"role": r, "content": text} for r, text in chat]} for chat in chats]


def lines(config, name):
    text = (folder_of(config) / name).read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]


def folder_of(config):
    return Path(config.out) / FOLDER


def made(config):
    """Return pairs of prompt and answer, as ids."""
    rows = lines(config, "rows.jsonl")
    return [
        (row["tokens"][: row["prompt_tokens"]], row["tokens"][row["prompt_tokens"] :])
        for row in rows
    ]


def plainly(config, masker, prompts, **sampling):
    """Decode prompts, two at a time as here, without any of what is tested."""
    model = load_pretrained(config.target, jnp.float32)
    found = []
    for start in range(0, len(prompts), 2):
        requests = [
            Request(
                prompt=prompt, max_new_tokens=NEW, stop_ids=masker.tokenizer.end_ids,
                sampling=SamplingParams(seed=start + n, **sampling),
            )
            for n, prompt in enumerate(prompts[start : start + 2])
        ]  # fmt: skip
        found += [answer.tokens for answer in generate(model, requests)]
    return found


def test_texts_are_begun_and_then_continued_from_places_throughout(config, masker):
    run = config([{"text": text} for text in PROSE], rows=6)
    said = []
    regenerate(run, masker, said.append)
    prompts = [bytes(prompt).decode() for prompt, _ in made(run)]
    starts = [text.encode()[:8].decode(errors="replace").strip("\ufffd") for text in PROSE]
    assert set(starts) <= set(prompts) and len(set(prompts)) == 6
    assert all(any(prompt in text for text in PROSE) for prompt in prompts)
    prompts, answers = map(list, zip(*made(run), strict=True))
    assert answers == plainly(run, masker, prompts)
    assert "6 answers of the target (6 asked for)" in said[-1]
    # The end is part of an answer.
    reasons = [line["finish_reason"] for line in lines(run, "answers-1.jsonl")]
    ended = [answer[-1] in masker.tokenizer.end_ids for answer in answers]
    assert sorted(ended) == sorted(reason == "stop" for reason in reasons)


def test_the_rows_are_trained_on_as_the_target_said_them(config, masker):
    run = config([{"text": text} for text in PROSE], rows=4)
    data = regenerate(run, masker, lambda text: None)
    assert data == dataclasses.replace(run.data, sources=data.sources)
    (found,) = open_datasets(data, masker, lambda text: None).values()
    for number, (prompt, answer) in enumerate(made(run)):
        here = slice(found.offsets[number], found.offsets[number + 1])
        assert found.tokens[here].tolist() == prompt + answer
        assert found.mask[here].tolist() == [False] * len(prompt) + [True] * len(answer)


def test_a_conversation_is_answered_turn_by_turn_after_the_targets_own_answers(config, masker):
    run = config(chat_rows(), rows=4)
    regenerate(run, masker, lambda text: None)
    prompts, answers = map(list, zip(*made(run), strict=True))
    assert answers == plainly(run, masker, prompts)
    first = {line["row"]: line["text"] for line in lines(run, "answers-1.jsonl")}
    for number in range(2):
        asked, again = (bytes(prompts[i]).decode() for i in (number, 2 + number))
        assert asked in [f"<u>What is {n}?|<a>" for n in range(2)]
        assert again == f"{asked}{first[number]}|<u>Sure?|<a>"


def test_a_prompt_is_answered_with_the_template_or_continued_without(
    config, masker, target, tmp_path
):
    rows = [{"prompt": f"{n} + 1 =", "response": "?"} for n in range(2)]
    run = config(rows, rows=2)
    regenerate(run, masker, lambda text: None)
    assert {bytes(prompt).decode() for prompt, _ in made(run)} == {
        f"<u>{n} + 1 =|<a>" for n in range(2)
    }
    plain = shutil.copytree(target, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    run, masker = config(rows, "other", rows=2, directory=str(plain)), Masker.load(str(plain), 256)
    regenerate(run, masker, lambda text: None)
    prompts, answers = map(list, zip(*made(run), strict=True))
    assert {bytes(prompt).decode() for prompt in prompts} == {f"{n} + 1 =" for n in range(2)}
    assert answers == plainly(run, masker, prompts)
    with pytest.raises(ConfigError, match="has conversations, and the target has no chat template"):
        regenerate(config(chat_rows(), "third", rows=2, directory=str(plain)), masker)


def test_what_is_done_is_not_done_again_and_other_settings_are_refused(config, masker, monkeypatch):
    run = config(chat_rows(), rows=4)
    data = regenerate(run, masker, lambda text: None)
    monkeypatch.setattr(module, "build", None)  # no model, no decoding
    said = []
    assert regenerate(config(chat_rows(), rows=4, batch_size=7), masker, said.append) == data
    assert len(said) == 1 and "4 answers of the target already" in said[0]
    others = {"temperature": 1.0, "rows": 3, "max_new_tokens": 5, "dtype": "int8", "seed": 1}
    for other in ({name: value} for name, value in others.items()):
        with pytest.raises(ConfigError, match="made with other settings") as error:
            regenerate(config(chat_rows(), **({"rows": 4} | other)), masker)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="made with other settings"):
        regenerate(config(chat_rows(CHATS[:1]), rows=4), masker)
    (folder_of(run) / "state.json").write_text("[")
    with pytest.raises(ConfigError, match=r"state\.json is damaged .* delete it"):
        regenerate(run, masker)


def test_the_target_may_answer_in_another_precision_than_the_run_has(config, masker, monkeypatch):
    run = config(chat_rows(), rows=4, dtype="int8")
    build, seen = module.build, []
    monkeypatch.setattr(module, "build", lambda config: seen.append(config.dtype) or build(config))
    regenerate(run, masker, lambda text: None)
    assert seen == ["int8"] and run.dtype == "float32" and len(made(run)) == 4
    with pytest.raises(ConfigError, match=r"regenerate\.dtype is 'int4', it must be"):
        RegenerateConfig(dtype="int4")


def test_an_interrupted_run_goes_on_to_the_same_rows(config, masker, monkeypatch):
    chats = chat_rows(CHATS + [[("user", "?"), *chat[1:]] for chat in CHATS])
    whole = config(chats, "whole", rows=8)
    regenerate(whole, masker, lambda text: None)
    expected = (folder_of(whole) / "rows.jsonl").read_bytes()
    advance, visits = Session.advance, []

    def interrupted(self):
        visits.append(1)
        if len(visits) in (1, 3):  # in the first batch of pass 1, and then of pass 2
            signal.raise_signal(signal.SIGINT)
        return advance(self)

    monkeypatch.setattr(Session, "advance", interrupted)
    run = config(chats, rows=8)
    for name in ("answers-1.jsonl", "answers-2.jsonl"):
        with pytest.raises(KeyboardInterrupt):
            regenerate(run, masker, lambda text: None)
        assert len(lines(run, name)) == 2 and not (folder_of(run) / "rows.jsonl").exists()
    regenerate(run, masker, lambda text: None)
    assert (folder_of(run) / "rows.jsonl").read_bytes() == expected
    # Killed while it wrote the third answer.
    (folder_of(run) / "rows.jsonl").unlink()
    path = folder_of(run) / "answers-1.jsonl"
    *done, third, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(done) + third[:-20])
    regenerate(run, masker, lambda text: None)
    assert (folder_of(run) / "rows.jsonl").read_bytes() == expected and len(visits) == 5


def test_sampled_answers_have_seeds_of_their_own(config, masker):
    row = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}] * 2
    }
    run = config([row] * 2, rows=4, temperature=1.0, seed=3)
    regenerate(run, masker, lambda text: None)
    (first, said), (same, other) = made(run)[:2]
    assert first == same and said != other
    seeds = [row["seed"] for number in (1, 2) for row in lines(run, f"prompts-{number}.jsonl")]
    assert seeds == [3, 4, 5, 6]
    again = config([row] * 2, "again", rows=4, temperature=1.0, seed=30)
    regenerate(again, masker, lambda text: None)
    assert made(again)[:2] != made(run)[:2]


def test_answers_end_where_the_row_does_and_prompts_without_room_are_reported(config, masker):
    rows = [{"prompt": "x" * size, "response": "?"} for size in (1, 2, 3, 4, 40)]
    run = config(rows, rows=5, length=12)
    said = []
    data = regenerate(run, masker, said.append)
    pairs = zip(lines(run, "prompts-1.jsonl"), made(run), strict=True)
    limits = {len(prompt): row["max_new_tokens"] for row, (prompt, _) in pairs}
    assert limits == {8: 4, 9: 3, 10: 2, 11: 1}  # the template adds seven
    assert all(len(answer) <= limits[len(prompt)] for prompt, answer in made(run))
    assert any("4 of 5 examples kept; 1 too long" in line for line in said)
    (found,) = open_datasets(data, masker, lambda text: None).values()
    assert found.tally.kept == 4 and not found.tally.dropped


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "no", "response": "x"}, "not this"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "answers no message"),
        ({"text": "\udcff"}, "not valid UTF-8"),
        ({"tokens": [1, 2]}, "taken as they are"),
        ({"text": 3}, "expected a string"),
        ([], "expected an object"),
    ],
)
def test_rows_that_give_no_prompt_are_one_error_that_says_why(config, masker, row, says):
    with pytest.raises(ConfigError, match=f"more than half .*{says}") as error:
        regenerate(config([row], rows=2), masker, lambda text: None)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="source rows has no rows"):
        regenerate(config([], rows=2), masker, lambda text: None)


def test_sources_have_their_share_of_the_answers(config, masker, tmp_path):
    run = config([{"prompt": f"{n}", "response": "?"} for n in range(9)], rows=8)
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(9)))
    sources = {"text": SourceConfig(files=str(path), weight=3.0), **run.data.sources}
    data = dataclasses.replace(run.data, sources=sources)
    run = dataclasses.replace(run, data=data)
    regenerate(run, masker, lambda text: None)
    is_text = [bytes(prompt).startswith(b"text") for prompt, _ in made(run)]
    assert sum(is_text) == 6 and len(is_text) == 8
    assert 0 < sum(is_text[:6]) < 6  # the sources are mixed: not one, then the other


@pytest.mark.parametrize(("temperature", "count"), [(0.0, 3), (1.0, 7)])
def test_a_prompt_is_asked_once_unless_answers_are_drawn(config, masker, temperature, count):
    rows = [{"prompt": f"{n % 3}", "response": f"{n}"} for n in range(7)]
    run, said = config(rows, rows=7), []
    settings = dataclasses.replace(run.regenerate, temperature=temperature)
    regenerate(dataclasses.replace(run, regenerate=settings), masker, said.append)
    assert len(made(run)) == count
    is_said = any("4 of 7 prompts were there before and are left out" in line for line in said)
    assert is_said == (count == 3)


def test_windows_are_even_different_and_never_the_beginning():
    texts = [np.arange(40), np.arange(100, 105), np.arange(200, 270)]
    found = windows(texts, 8, 20, np.random.default_rng(0))
    starts = [int(window[0]) for window in found]
    assert len(set(starts)) == 20 and all(len(window) == 8 for window in found)
    assert not {0, 100, 200} & set(starts)
    assert sum(start < 100 for start in starts) in (6, 7, 8)  # 32 of 94 places
    everything = windows(texts, 8, 1000, np.random.default_rng(0))
    assert [int(w[0]) for w in everything] == [*range(1, 33), *range(201, 263)]
    assert windows(texts, 200, 5, np.random.default_rng(0)) == []


def test_turns_are_answers_to_something():
    def said(text):
        return [{"role": {"u": "user", "a": "assistant"}[c.lower()], "content": c} for c in text]

    conversation = said("auaAua")
    assert num_turns(conversation) == 2
    first = next_turn([], conversation)
    assert first == {"messages": said("au"), "later": said("Aua")}
    own = {"role": "assistant", "content": "own"}
    assert first is not None
    second = next_turn([*first["messages"], own], first["later"])
    assert second == {"messages": [*said("au"), own, *said("u")], "later": []}
    assert second is not None
    assert next_turn([*second["messages"], own], second["later"]) is None
