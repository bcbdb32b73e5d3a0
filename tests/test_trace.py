"""Traces: rounds fit together, the text is that of no trace, the page is safe and works.

The target writes tokens 0 to 63, which as bytes are control characters, line feeds, `<` and `>`:
what pages have to bear.
"""

import functools
import html
import json
import re
import shutil
import signal
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers import PROMPTS, eagle3, serve
from test_cli import press_ctrl_c

import decode
from eagle3.cli.arguments import parse
from eagle3.cli.engine import Engine
from eagle3.cli.trace import page, page_data, token_text
from eagle3.config import ConfigError, DecodeConfig
from eagle3.decoding.auto import AutoDrafter
from eagle3.decoding.costs import Costs
from eagle3.decoding.drafter import NoDraft
from eagle3.decoding.request import Request
from eagle3.decoding.sampling import SamplingParams
from eagle3.decoding.trace import Round, TracedSession, acceptance_length, trace
from eagle3.decoding.tree import auto_plan, chain_plan, dynamic_plan
from eagle3.text import ByteTokenizer, Piece

ROW, NEW = 2, 100  # the draft knows some 60 of them by heart, and then is wrong
PROMPT = bytes(PROMPTS[ROW]).decode()
COSTS = Costs(((1, 1.0), (4, 1.4)), (0.1, 0.12), 0.05)
BROWSERS = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
BROWSER = next(filter(None, BROWSERS), None)


@pytest.fixture(scope="module")
def drafters(hybrid, fitted_for):
    draft = fitted_for(hybrid)
    return {
        "dynamic": eagle3(draft, dynamic_plan(3, 3, 8)),
        "chain": eagle3(draft, chain_plan(2)),
        "auto": AutoDrafter(draft, auto_plan(2, 3, 4), COSTS),
        "none": NoDraft(),
    }


@pytest.fixture(scope="module")
def traced(hybrid, drafters):
    """Return a request and its rounds by kind of tree; those of the chain are sampled."""

    @functools.cache
    def run(kind):
        sampling = SamplingParams(temperature=0.8, seed=3) if kind == "chain" else SamplingParams()
        request = Request(prompt=PROMPTS[ROW], max_new_tokens=NEW, sampling=sampling)
        return request, trace(hybrid, drafters[kind], request)

    return run


KINDS = ["dynamic", "chain", "auto", "none"]


def tokens_of(rounds):
    return [int(token) for one in rounds for token in one.emitted]


@pytest.mark.parametrize("kind", KINDS)
def test_every_round_is_a_tree_with_an_accepted_path_and_at_most_one_more_token(traced, kind):
    request, rounds = traced(kind)
    before = request.prompt[-1]
    for one in rounds:
        size = len(one.tokens)
        assert one.tokens[0] == before and one.parents[0] == -1
        assert ((one.parents[1:] >= 0) & (one.parents[1:] < np.arange(1, size))).all()
        assert one.parents[one.path].tolist() == [0, *one.path[:-1]][: len(one.path)]
        accepted = len(one.path)
        assert one.emitted[:accepted].tolist() == one.tokens[one.path].tolist()
        assert len(one.emitted) == len(one.target_log_probs) == accepted + 1 or one is rounds[-1]
        if len(one.emitted) > accepted:  # the target's own is no child of where the path ends
            end = one.path[-1] if accepted else 0
            assert one.emitted[-1] not in one.tokens[one.parents == end]
        assert one.seconds > 0 and (one.target_log_probs <= 1e-6).all()
        before = one.emitted[-1]
    assert len(tokens_of(rounds)) == NEW
    assert acceptance_length(rounds) == NEW / len(rounds)
    assert not rounds[-1].is_compiled


@pytest.mark.parametrize("kind", ["dynamic", "chain"])
def test_nodes_have_the_probability_of_their_path_by_the_draft(traced, kind):
    _, rounds = traced(kind)
    assert any(len(one.path) > 1 for one in rounds), "the tests want accepted paths"
    for one in rounds:
        assert one.log_probs[0] == 0
        for node in range(len(one.tokens)):
            children = one.log_probs[one.parents == node]
            assert np.exp(children).sum() <= np.exp(one.log_probs[node]) * (1 + 1e-5)


def test_trees_that_adapt_are_drawn_as_they_were_verified(traced):
    sizes = {len(one.tokens) for one in traced("auto")[1]}
    assert sizes == {1, 4}
    assert {len(one.tokens) for one in traced("none")[1]} == {1}
    assert traced("none")[1][0].log_probs is None


@pytest.mark.parametrize("kind", ["dynamic", "auto", "none"])
def test_the_text_is_that_of_plain_decoding(traced, kind, text_of, hybrid):
    assert tokens_of(traced(kind)[1]) == text_of(hybrid).answers[ROW].tokens[:NEW]


def test_sampled_rounds_are_those_of_a_session_without_a_trace(traced, hybrid, drafters):
    request, rounds = traced("chain")
    (answer,) = serve(hybrid, drafters["chain"], [request], min_capacity=256)
    assert tokens_of(rounds) == answer.tokens
    is_drafted = [place < len(one.path) for one in rounds for place in range(len(one.emitted))]
    assert is_drafted == answer.is_drafted and len(rounds) == answer.rounds


def test_a_text_cut_by_the_host_has_the_rounds_of_what_is_left(hybrid, drafters, traced):
    request, rounds = traced("dynamic")
    session = TracedSession(hybrid, drafters["dynamic"])
    session.start([request])
    while len(session.answers[0].tokens) < 12:
        session.advance()
    session.stop(0, keep=7)
    assert tokens_of(session.rounds) == tokens_of(rounds)[:7] == session.answers[0].tokens
    assert all(len(one.path) <= len(one.emitted) > 0 for one in session.rounds)
    session.stop(0, keep=0)
    assert session.rounds == []
    with pytest.raises(ValueError, match="2 requests: rounds are kept of one"):
        session.start([request, request])


# The command


@pytest.fixture
def run(hybrid, drafters, monkeypatch, capsys):
    """Call the command on the tiny models; returns status, stdout, stderr."""

    def build(config):
        return Engine(config, hybrid, drafters["dynamic"], ByteTokenizer(), ())

    def call(*arguments):
        status = decode.main(
            ["--target", "T", "--draft", "D", "--prompt", PROMPT, f"max_new_tokens={NEW}"]
            + list(arguments)
        )
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    monkeypatch.setattr(decode, "build", build)
    return call


class Scripts(HTMLParser):
    """Collects the start tags of a page, and the JSON in it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.json = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs).get("id")))

    def handle_data(self, data):
        if self.tags and self.tags[-1] == ("script", "data"):
            self.json += data


def read_page(path):
    return json.loads(Scripts(path.read_text(encoding="utf-8")).json.strip())


def test_the_command_prints_what_it_always_does_and_writes_the_page(run, text_of, hybrid, tmp_path):
    path = tmp_path / "page.html"
    status, out, err = run("--trace", str(path), "--json")
    answer, data = json.loads(out), read_page(path)
    expected = text_of(hybrid).answers[ROW].tokens[:NEW]
    assert status == 0 and answer["tokens"] == expected
    assert f"{answer['rounds']} rounds in {path}" in err
    assert data["prompt"] == PROMPT and len(data["rounds"]) == answer["rounds"]
    assert [token for one in data["rounds"] for token in one["emitted"]] == expected
    written = [piece for one in data["rounds"] for piece in one["text"]]
    assert "".join(text for text, _ in written) == answer["text"] == bytes(expected).decode()
    assert all(0 <= x <= 1 for one in data["rounds"] for x in (*one["chances"], *one["target"]))
    text = answer["text"]
    status, out, _ = run("--trace", str(path), f"stop={json.dumps([text[9:12]])}")
    cut = text[: text.find(text[9:12])]
    assert status == 0 and out.rstrip("\n") == (PROMPT + cut).rstrip("\n")
    assert "".join(piece[0] for one in read_page(path)["rounds"] for piece in one["text"]) == cut


def test_ctrl_c_ends_with_a_page_of_what_was_made_or_none(run, tmp_path, monkeypatch):
    path, start = tmp_path / "page.html", TracedSession.start

    def interrupted(self, requests):
        signal.raise_signal(signal.SIGINT)
        return start(self, requests)

    with monkeypatch.context() as patch:
        press_ctrl_c(patch, visit=3)
        assert run("--trace", str(path))[0] == 130
    assert len(read_page(path)["rounds"]) == 3
    path.unlink()
    monkeypatch.setattr(TracedSession, "start", interrupted)
    status, _, err = run("--trace", str(path))
    assert status == 130 and "nothing was decoded" in err and not path.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--chat"], "--trace replays one --prompt"),
        (["--prompts", "C"], "--trace replays one --prompt"),
        (["--prompt", "x", "--compare"], "--trace replays one --prompt"),
        (["--prompt", "x", "--dry-run"], "--trace replays one --prompt"),
        (["--prompt", "x", "--trace", "none/page.html"], "cannot be written (No such file"),
        (["--prompt", "x", "--trace", "."], "is no regular file"),
        (["--prompt", "x", "--trace", "n" * 300], "cannot be written (File name too long"),
        (["--prompt", "x", "method=autoregressive"], "nothing to draw without a draft"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_anything_is_loaded(
    arguments, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "C").write_text("")
    (tmp_path / "page.html").write_text("an older page")
    with pytest.raises(ConfigError, match=re.escape(says)) as error:
        parse(["--target", "T", "--draft", "D", "--trace", "page.html", *arguments])
    assert "\n" not in str(error.value)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["C", "page.html"]
    assert (tmp_path / "page.html").read_text() == "an older page"


# The page


HOSTILE = [
    "</script><script>throw 1</script>", "<img src=x onerror=alert(1)>", "<!--<script>",
    "\x00\x1b[31m",
    "\u2028\u2029\u202e", " the", "\n\n", "\ud800", "]]>&amp;\\", "名前" * 20,
]  # fmt: skip


class Words(ByteTokenizer):
    """A tokenizer of whole words."""

    def decode(self, ids, special=False):
        return "".join(HOSTILE[token] for token in ids)


@pytest.fixture(scope="module")
def hostile():
    """Return the data of a page of six rounds of all kinds, whose words are hostile."""
    nodes = np.arange(64, dtype=np.int32)
    tree = nodes % 10, np.where(nodes == 0, -1, np.maximum(nodes - 9, 0))
    path, emitted = np.array([1, 10], np.int32), np.array([1, 0, 2], np.int32)
    log_probs = np.array([0, -0.1, -3, -0.2, -4, -5, -6, -700, -1e30, -9, -7], np.float32)
    ends = np.log(np.array([0.5, 0.25, 1e-5], np.float32))
    wide = Round(*tree, None, path, emitted, ends, 0.01, False)
    usual = wide._replace(tokens=tree[0][:11], parents=tree[1][:11], log_probs=log_probs)
    rounds = [
        usual._replace(is_compiled=True, seconds=9.0),
        usual,
        usual._replace(path=path[:0], emitted=emitted[2:], target_log_probs=ends[2:]),
        usual._replace(
            tokens=tree[0][:1], parents=tree[1][:1], log_probs=log_probs[:1],
            path=path[:0], emitted=emitted[:1], target_log_probs=ends[:1],
        ),
        wide,
        usual._replace(emitted=emitted[:2], target_log_probs=ends[:2]),
    ]  # fmt: skip
    pieces = [[Piece(HOSTILE[token], i < len(one.path)) for i, token in enumerate(one.emitted)]
              for one in rounds]  # fmt: skip
    config = DecodeConfig(prompt="<b></script>\x00")
    return page_data(config, Words(), rounds, pieces)


def test_no_text_of_a_model_is_markup(hostile):
    made = page(hostile)
    found = Scripts(made)
    assert found.tags == Scripts(page({})).tags and "img" not in dict(found.tags)
    assert json.loads(found.json.strip()) == json.loads(json.dumps(hostile))
    assert made.isascii() or not set("\u2028\x00\ud800") & set(made)
    assert not re.search(r"(src|href)\s*=|url\(|@import", page({})), "the page needs another file"


def test_a_token_has_the_space_that_it_has_in_a_text():
    class Metaspace(ByteTokenizer):
        def decode(self, ids, special=False):
            return "".join([" the", "\ufffd", ""][token] for token in ids).removeprefix(" ")

    assert [token_text(Metaspace(), token) for token in range(3)] == [" the", "\ufffd", ""]


WATCH = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
console.error = (...parts) => errors.push(parts.join(" "));
</script>"""
CLICK = """<pre id="report"></pre><script>{
const said = () => byId("number").textContent + ": " + byId("tau").textContent;
const press = (key, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const steps = [said()];
const act = (what) => { what(); steps.push(said()); };
act(() => byId("next").click());
act(() => byId("last").click());
act(() => byId("previous").click());
const wide = document.querySelectorAll("#tree rect").length;
act(() => byId("first").click());
act(() => press("ArrowRight"));
act(() => press("End"));
act(() => press("ArrowRight"));
act(() => press("ArrowLeft"));
act(() => press("Home"));
act(() => { byId("slider").value = 4; byId("slider").dispatchEvent(new Event("input")); });
const plain = byId("summary").textContent, speed = byId("speed").textContent;
act(() => press(" "));
const label = byId("play").textContent;
setTimeout(() => {
  steps.push(said());
  const labels = Array.from(document.querySelectorAll("button"), (b) => b.textContent);
  const report = { errors, steps, wide, plain, speed, label, labels,
    text: byId("text").textContent, markup: document.querySelectorAll("img, b").length };
  byId("report").textContent = JSON.stringify(report);
}, 5000);
}</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_in_a_browser_every_control_moves_and_nothing_fails(hostile, tmp_path):
    text = page(hostile).replace("<head>", "<head>" + WATCH).replace("</body>", CLICK)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    shown = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom",
            (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    found = re.search(r'<pre id="report">(.*?)</pre>', shown, re.DOTALL)
    assert found, shown[-2000:]
    report = json.loads(html.unescape(found[1]))
    assert report["errors"] == [] and report["markup"] == 0
    taus = ["3.00", "3.00", "2.33", "2.00", "2.20", "2.17"]  # 3, 3, 1, 1, 3 and 2 tokens
    visited = [1, 2, 6, 5, 1, 2, 6, 6, 5, 1, 4, 4, 6]  # the last one by playing on from 4
    assert report["steps"] == [f"round {n} of 6: {taus[n - 1]}" for n in visited]
    assert report["wide"] == 65  # 64 nodes and the target's own
    assert report["plain"].startswith("No tree was verified")
    assert report["speed"] == "166.7"  # 5 tokens in 0.03 s; the first round compiled
    assert report["label"] == "Pause" and "Play" in report["labels"]
    assert report["text"].startswith("<b></script>‹00›<img src=x")
    assert report["text"].endswith("<img src=x onerror=alert(1)></script><script>throw 1</script>")
