"""Questions of benchmarks are read or counted, and `benchmarks/spec_bench.py` decodes them."""

import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest
from test_cli import BIAS, press_ctrl_c, write_draft, write_target

from eagle3.cli.figures import Figures, report
from eagle3.config import ConfigError
from eagle3.decoding.session import Session
from eagle3.questions import Question, parse_turns, read_questions, task_name

FOLDER = Path(__file__).parent.parent / "benchmarks"
POSITIONS, NEW = 160, 6


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


# Reading


@pytest.mark.parametrize(
    ("name", "row", "question"),
    [
        (
            "mt_bench.jsonl",
            {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x"]},
            Question("mt_bench", ("a", "b"), "81"),
        ),
        (
            "gsm8k.jsonl",
            {"question_id": 0, "category": "math", "turns": ["a"]},
            Question("gsm8k", ("a",), "0"),
        ),
        (
            "HumanEval.jsonl.gz",
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "x"},
            Question("HumanEval", ("def f():\n",), "HumanEval/0"),
        ),
        (
            "school/test_dev.jsonl",
            {"question": "q", "answer": "a"},
            Question("school", ("q",), "row 1"),
        ),
        (
            "hard/question_v2.0.jsonl.gz",
            {"uid": "2e", "category": "hard_prompt", "prompt": "q"},
            Question("hard", ("q",), "2e"),
        ),
    ],
)  # fmt: skip
def test_files_of_the_field_become_questions_with_the_name_of_their_task(
    tmp_path, name, row, question
):
    questions, tallies = read_questions([write(tmp_path / name, [row])])
    assert questions == [question]
    assert str(tallies[str(tmp_path / name)]) == "1 of 1 examples kept"


def test_a_file_of_several_tasks_is_split_as_spec_bench_does(tmp_path):
    categories = ["writing", "math", "qa", "math_reasoning", "summarization", "humanities", "new"]
    rows = [{"turns": [name], "category": name} for name in categories]
    path = write(tmp_path / "bench" / "question.jsonl", rows)
    tasks = {q.turns[0]: q.task for q in read_questions([path])[0]}
    assert tasks == {
        "writing": "mt_bench", "math": "mt_bench", "humanities": "mt_bench", "qa": "qa",
        "math_reasoning": "math_reasoning", "summarization": "summarization", "new": "bench",
    }  # fmt: skip
    assert task_name(Path("data/qa.jsonl")) == "qa"
    assert task_name(Path("data/train.jsonl.gz")) == "data"


def test_rows_that_are_no_questions_are_counted_by_reason(tmp_path):
    bad = {
        "unreadable": [b'{"turns": ["\xff"]}', b"not JSON", b'{"prompt": ' + b"[" * 100_000],
        "malformed": [
            b"[]", b"null", b'{"text": "q"}', b'{"turns": "q"}', b'{"turns": [{"role": "user"}]}',
            b'{"prompt": null}', b'{"question": "\\ud800"}', b'{"messages": []}',
        ],
        "without a question": [b'{"prompt": " "}', b'{"turns": []}', b'{"turns": ["q", ""]}'],
        "asked before": [b'{"question": "q1", "id": "another id"}'],
    }  # fmt: skip
    good = [
        f'{{"question": "q{n}", "id": "one id", "category": ["x"]}}'.encode() for n in range(20)
    ]
    lines = [*good, b"", *(line for found in bad.values() for line in found)]
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    questions, tallies = read_questions([str(path)])
    assert [q.turns for q in questions] == [(f"q{n}",) for n in range(20)]
    assert {q.name for q in questions} == {"one id"}
    tally = tallies[str(path)]
    assert tally.dropped == {reason: len(found) for reason, found in bad.items()}
    assert tally.kept == 20 and tally.first["unreadable"].startswith(f"{path} line 22: not UTF-8")


def test_names_that_cannot_be_shown_are_replaced_by_the_place(tmp_path):
    names = ["a", 3, "", None, True, "\ud800", "a\nb", ["a"]]
    rows = [{"id": name, "prompt": str(n)} for n, name in enumerate(names)]
    found, _ = read_questions([write(tmp_path / "a.jsonl", rows)])
    assert [q.name for q in found] == ["a", "3", *(f"row {n}" for n in range(3, 9))]


def test_a_question_is_asked_once_however_many_files_have_it(tmp_path):
    rows = [{"turns": [f"q{n}"], "category": ("qa", "writing")[n % 2]} for n in range(4)]
    whole = write(tmp_path / "question.jsonl", rows)
    part = write(tmp_path / "qa.jsonl", rows[::2])
    questions, tallies = read_questions([whole, part])
    assert len(questions) == 4
    assert tallies[part].dropped == {"asked before": 2} and tallies[part].kept == 0


def test_a_limit_takes_as_many_of_each_task_spread_over_the_file(tmp_path):
    rows = [{"turns": [f"{n}"], "category": ("qa", "writing")[n % 2]} for n in range(20)]
    path = write(tmp_path / "question.jsonl", rows)
    found = [q.turns[0] for q in read_questions([path], 2)[0]]
    assert found == ["0", "10", "1", "11"]
    assert len(read_questions([path], 50)[0]) == 20


def test_files_without_questions_are_one_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "t"}, {"text": "t"}, {"prompt": "q"}])
    with pytest.raises(ConfigError, match="more than half .* 1 of 3 .* 2 malformed") as error:
        read_questions([path])
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="has no rows"):
        read_questions([write(tmp_path / "b.jsonl", [])])
    with pytest.raises(ConfigError, match="no file matches"):
        read_questions([str(tmp_path / "none.jsonl")])
    assert parse_turns({"turns": ["a"], "prompt": "b"}) == ("a",)


# Figures


def line(task, seconds, temperature=0.0, **changes):
    """Ten plain tokens and, in four rounds, ten with the draft: 1 + 3, 1 + 3, 1 + 0, 1 + 0."""
    drafted = [1, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    plain = {"tokens": [1] * 10, "seconds": seconds[0], "is_drafted": [0] * 10}
    sides = {"plain": [plain], "speculative": [{**plain, "seconds": seconds[1]}]}
    sides["speculative"][0]["is_drafted"] = drafted
    fields = {"task": task, "temperature": temperature, "identical": True, "difference": None}
    return {**fields, **sides, **changes}


def test_a_tasks_speed_is_all_tokens_over_all_seconds_and_tau_all_tokens_over_all_rounds():
    parted = {"identical": False, "difference": {"margin": -0.25}}
    lines = [line("a", (10.0, 5.0)), line("a", (30.0, 15.0), **parted), line("a", (2.0, 2.0))]
    figures = Figures.of(lines)
    assert figures.speeds == pytest.approx((30 / 42, 30 / 22)) and figures.tokens == 30
    assert figures.ratio == pytest.approx(42 / 22) and figures.spread == (1.5, 2.0)
    assert figures.tau == 2.5 and figures.by_depth == [0.5, 1.0, 1.0]
    assert (figures.identical, figures.prompts, figures.margin) == (2, 3, 0.25)


def test_tables_have_a_row_a_temperature_and_the_mean_of_the_tasks():
    ended = {"identical": False, "difference": {"margin": None}}
    lines = [line("a", (2.0, 1.0)), line("a", (2.0, 1.0)), line("b", (4.0, 1.0))]
    lines += [line("a", (1.0, 1.0), 1.0, **ended)]
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in report(lines, ["why"]).splitlines()
        if row.startswith("|")
    ]
    assert rows[0] == ["temperature", "a", "b", "mean"]
    assert rows[2] == ["0", "2.00x / 2.50", "4.00x / 2.50", "3.00x / 2.50"]
    assert rows[3] == ["1", "1.00x / 2.50", "", "1.00x / 2.50"]
    assert [row[:3] for row in rows[6:]] == [
        ["0", "a", "2"], ["0", "b", "1"], ["0", "all", "3"], ["1", "a", "1"], ["1", "all", "1"]
    ]  # fmt: skip
    assert rows[6][-2:] == ["2 of 2", ""] and rows[-1][-2:] == ["0 of 1", ""]


# The script, on a byte-level target with a draft that knows the letter b


@pytest.fixture(scope="module")
def spec_bench():
    sys.path.append(str(FOLDER))  # at the end: there is a decode.py in it
    yield importlib.import_module("spec_bench")
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target = write_target(tmp_path_factory.mktemp("target"), max_position_embeddings=POSITIONS)
    return target, write_draft(target, tmp_path_factory.mktemp("draft"))


@pytest.fixture
def bench(spec_bench, models, capsys):
    """Call the script with the models and settings; returns status, stdout, stderr."""

    def call(*arguments):
        flags = ["--target", models[0], "--draft", models[1], "--max-new-tokens", str(NEW)]
        settings = [BIAS, "stream_every=2", "tree.kind=chain", "tree.depth=2", "prefill_chunk=16"]
        status = spec_bench.main([*flags, *arguments, *settings])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


ROWS = [
    {"question_id": 1, "turns": ["hi", "and?"]},
    {"question_id": 2, "turns": ["x" * POSITIONS]},
    {"question_id": 3, "turns": ["no"]},  # what the template refuses
    {"question_id": 4, "turns": ["y" * 100, "z" * 100]},
    {"question_id": 5, "turns": ["def f(x):"]},
]


@pytest.fixture
def questions(tmp_path):
    return write(tmp_path / "tiny.jsonl", ROWS)


def lines_of(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def without_times(path):
    """Return what does not depend on the machine."""
    keys = ("text", "tokens", "is_drafted", "prompt_tokens", "finish_reason")
    return [
        [row["row"], row["key"], *([t[k] for k in keys] for s in SIDES for t in row[s])]
        for row in sorted(lines_of(path), key=lambda row: row["row"])
    ]


SIDES = ("plain", "speculative")


def test_every_question_is_decoded_both_ways_at_every_temperature(bench, questions, tmp_path):
    out, table = tmp_path / "out.jsonl", tmp_path / "table.md"
    files = ("--questions", questions, "--out", str(out), "--markdown", str(table))
    status, printed, err = bench(*files, "--temperature", "0", "1")
    assert status == 0 and table.read_text() == printed
    lines = lines_of(out)
    assert [(x["question"], x["temperature"]) for x in lines] == [
        ("1", 0.0), ("4", 0.0), ("5", 0.0), ("1", 1.0), ("4", 1.0), ("5", 1.0)
    ]  # fmt: skip
    for row in lines:
        assert row["identical"] and row["difference"] is None and row["task"] == "tiny"
        for turns in (row["plain"], row["speculative"]):
            assert not any(turn["includes_compilation"] for turn in turns)
            assert all(len(turn["tokens"]) == NEW for turn in turns)
    for first, second in (lines[0]["plain"], lines[0]["speculative"]):
        assert second["prompt_tokens"] == len(f"<u>hi<a>{first['text']}<u>and?<a>")
        assert second["reused_tokens"] == len("<u>hi<a>") + NEW - 1
    assert any(any(t["is_drafted"]) for row in lines for t in row["speculative"])
    assert "3 of 3" in printed and "6 of 6: tiny 5, temperature 1" in err
    assert "3 of 5 examples kept; 1 too long (first: tiny 2: " in printed
    assert "1 refused by the chat template (first: tiny 3: " in printed
    assert "2 conversations end before a turn: too long" in printed
    for row in lines:
        ended = row["ended_before"]
        assert (ended is None) == (row["question"] != "4")
        assert ended is None or (ended["turn"], ended["reason"]) == (1, "too long")


def test_a_stopped_run_goes_on_and_ends_the_same(bench, questions, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert bench("--questions", questions, "--out", str(whole))[0] == 0
    arguments = ("--questions", questions, "--out", str(out))
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, visit=2)
        status, printed, _ = bench(*arguments)
    assert status == 130 and printed == "" and out.read_text() == ""
    first, rest = whole.read_text().split("\n", 1)
    out.write_text(first + "\n" + rest[:50])  # as a kill leaves it
    status, printed, err = bench(*arguments)
    assert status == 0 and "1 of 3 are in" in err and "cut short" in err
    assert without_times(out) == without_times(whole)
    monkeypatch.setattr(Session, "start", lambda *_: pytest.fail("nothing is left to decode"))
    again = bench(*arguments)
    assert again[0] == 0 and again[1] == printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--questions", "Q", "--out", "FOREIGN"], "choose another --out"),
        (["--questions", "none.jsonl"], "no file matches none.jsonl"),
        (["--questions", "Q", "--temperature", "warm"], "--temperature takes numbers"),
        (["--questions", "Q", "--temperature", "-1"], "sampling.temperature is -1.0"),
        (["--questions", "Q", "--temperature", "sampling.temperature=-2"], "temperature is -2.0"),
        (["--questions", "Q", "--limit", "-1"], "--limit is -1"),
        (["--questions", "Q", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--questions", "Q", "dtype=int3"], "it must be one of float32, bfloat16, int8"),
        (["--questions", "Q", "--max-new-tokens", "200"], "can answer no question"),
        (["--question", "Q"], "Did you mean: '--questions'"),
        ([], "together, or none"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_status_two(
    bench, questions, tmp_path, arguments, says
):
    (tmp_path / "foreign.jsonl").write_text("my notes\n")
    names = {"Q": questions, "FOREIGN": str(tmp_path / "foreign.jsonl")}
    status, out, err = bench(*(names.get(x, x) for x in arguments))
    assert status == 2 and out == ""
    (said,) = err.splitlines()
    assert said.startswith("spec_bench.py: ") and says in said


def test_where_texts_part_the_line_says_at_which_turn_and_by_how_much(
    bench, questions, tmp_path, monkeypatch
):
    advance = Session.advance

    def wrong(self):  # the draft's last token of each visit is another letter
        chunks = advance(self)
        if self._drafter.depth and len(self.answers[0].tokens) == NEW:
            self.answers[0].tokens[-1] ^= 1
        return chunks

    monkeypatch.setattr(Session, "advance", wrong)
    out = tmp_path / "out.jsonl"
    status, printed, err = bench("--questions", questions, "--out", str(out), "--limit", "1")
    (row,) = lines_of(out)
    found = row["difference"]
    assert status == 0 and not row["identical"] and "logits" in err and "0 of 1" in printed
    assert (found["turn"], found["position"]) == (0, NEW - 1) and found["margin"] is not None
