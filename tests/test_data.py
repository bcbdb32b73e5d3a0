"""Rows are read or reported, kept in files that are whole, and batches follow from the step."""

import gzip
import json
import re
import sys
import threading
import types
from dataclasses import replace

import numpy as np
import pytest

from eagle3.config import ConfigError
from eagle3.config_reader import read_config
from eagle3.text import ByteTokenizer
from eagle3.training import jobs
from eagle3.training.config import EvalConfig, TrainConfig
from eagle3.training.data import dataset as dataset_module
from eagle3.training.data import stdlib
from eagle3.training.data.batches import PADDING, Batches, pack
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.data.dataset import open_datasets, read_dataset
from eagle3.training.data.masking import Masker, TrainingTemplate
from eagle3.training.data.prefetch import Prefetcher
from eagle3.training.data.rows import Chat, Dropped, Text, Tokens, parse_row
from eagle3.training.data.sources import matching_files, read_rows, source_fingerprint
from eagle3.training.data.tokens import TrainingTokenizer

END = 0  # ends texts; no text here has a zero byte
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}\x00{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Fail on any use of the hub, rather than try the network."""

    def refuse(*args, **options):
        raise AssertionError("a test tried to load a dataset from the hub")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=refuse))


def masker(template: str | None = TEMPLATE):
    chat = TrainingTemplate(template) if template is not None else None
    return Masker(TrainingTokenizer(ByteTokenizer(), [END]), chat, 256)


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def config(tmp_path, files="", **changes):
    sources = changes.pop("sources", None) or {"rows": SourceConfig(files=files)}
    changes = {"length": 16, "batch_size": 2, "packing": "pack", **changes}
    return DataConfig(sources=sources, cache=str(tmp_path / "cache"), **changes)


def load(cfg, template: str | None = TEMPLATE):
    lines = []
    return open_datasets(cfg, masker(template), lines.append), lines


def texts(data):
    """Return every document as text, without the token that ends it."""
    pairs = zip(data.offsets, data.offsets[1:], strict=False)
    found = [bytes(data.tokens[a:b].astype(np.uint8).tolist()).decode() for a, b in pairs]
    return [text.removesuffix("\0") for text in found]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_files_of_every_kind_give_the_same_rows(tmp_path, name):
    rows = [{"text": f"text {n}\u2028é"} for n in range(5)]
    path = tmp_path / name
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        write(path, rows)
    found = list(read_rows(SourceConfig(files=str(path))))
    assert [row.fields for row in found] == rows
    assert found[3].where in (f"{path} line 4", f"{path} row 4")
    assert len(list(read_rows(SourceConfig(files=str(path), max_rows=2)))) == 2


def test_a_text_file_is_one_document_and_a_glob_is_read_in_order(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_bytes(f"{name}\r\n\nend".encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    found = list(read_rows(SourceConfig(files=str(tmp_path / "*.txt*"))))
    assert [row.fields["text"] for row in found] == ["a.txt\r\n\nend", "b.txt\r\n\nend", "packed"]


def test_a_source_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="no file matches"):
        matching_files(str(tmp_path / "*.jsonl"))
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(
        ConfigError, match=r"rows\.csv is of no known kind; expected one of \.jsonl"
    ):
        matching_files(str(tmp_path / "rows.csv"))


def damaged_files(folder):
    """Yield pairs of a damaged file and what its error must say."""
    line = b'{"text": "a"}\n'
    packed = gzip.compress(b"".join(b'{"text": "%d"}\n' % n for n in range(2000)))
    contents = {
        "cut.jsonl.gz": (packed[: len(packed) // 2], r"cannot be read after line \d+"),
        "flipped.jsonl.gz": (packed[:200] + b"\0" * 9 + packed[209:], r"gz (line|cannot)"),
        "plain.jsonl.gz": (line, "cannot be read after line 0"),
        "plain.parquet": (line, "cannot be read after row 0"),
    }
    for name, (content, message) in contents.items():
        (folder / name).write_bytes(content)
        yield folder / name, message


def test_damaged_files_are_one_clear_error_naming_file_and_line(tmp_path):
    pytest.importorskip("pyarrow")
    for path, message in damaged_files(tmp_path):
        with pytest.raises(ValueError, match=message) as error:
            list(read_rows(SourceConfig(files=str(path))))
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_line_that_cannot_be_read_costs_its_own_row(tmp_path):
    good = b'{"text": "good", "id": 7}\r\n'
    lines = {
        b"\xef\xbb\xbf" + good: None,  # a mark of the byte order is no part of the first row
        b'{"text": "\xff"}\n': "not UTF-8: .*0xff",
        b'{"text": "b\r\n': "not JSON",
        b'{"text": ' + b"[" * 100_000 + b"\n": "not JSON: .*recursion",
        b'{"tokens": [' + b"1" * 5000 + b"]}\n": "not JSON",
        b" \r\n": "",  # no row
        good: None,  # the same id again
        b'{"text": "cut': "not JSON",
    }
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(lines) + b"\n" + good * 4)
    found, report = load(config(tmp_path, str(path)))
    tally = found["rows"].tally
    assert texts(found["rows"]) == ["good"] * 6
    bad = [number for number, says in enumerate(lines.values(), start=1) if says]
    assert tally.dropped == {"unreadable": len(bad)}
    assert tally.first["unreadable"].startswith(f"{path} line {bad[0]}: not UTF-8")
    assert f"6 of {6 + len(bad)} examples kept; {len(bad)} unreadable" in report[-1]
    where = {row.where: row.fields for row in read_rows(SourceConfig(files=str(path)))}
    assert f"{path} line 6" not in where
    for number, says in enumerate(lines.values(), start=1):
        if says:
            assert re.match(says, where[f"{path} line {number}"].problem)


def test_a_text_that_is_not_utf8_is_a_row_less_and_a_file_of_such_lines_an_error(tmp_path):
    for name, content in (("a", b"good"), ("b", b"a\n\xff"), ("c", b"fine")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    found, _ = load(config(tmp_path, str(tmp_path / "*.txt")))
    assert texts(found["rows"]) == ["good", "fine"]
    detail = found["rows"].tally.first["unreadable"]
    assert detail.startswith(f"{tmp_path / 'b.txt'} line 2: not UTF-8")
    wide = tmp_path / "wide.jsonl"
    wide.write_bytes('{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"))
    with pytest.raises(ConfigError, match="more than half cannot be used.*UTF-8") as error:
        load(config(tmp_path, str(wide)))
    assert "convert the file" in str(error.value) and "\n" not in str(error.value)


def test_hub_rows_come_through_the_datasets_library(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return iter([{"text": "a"}, {"text": "b"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = SourceConfig(hub="some/rows", subset="en", streaming=True, revision="v1")
    assert [row.fields["text"] for row in read_rows(source)] == ["a", "b"]
    assert asked == [(("some/rows", "en"), {"split": "train", "revision": "v1", "streaming": True})]
    assert next(read_rows(source)).where == "some/rows train row 1"


def test_what_the_hub_says_is_one_line_and_a_missing_library_is_named(monkeypatch, tmp_path):
    def fail(*args, **options):
        raise ConnectionError("no\n  network")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=fail))
    with pytest.raises(ConfigError, match="'some/rows' cannot be read from the hub: no network"):
        list(read_rows(SourceConfig(hub="some/rows")))
    with pytest.raises(ConfigError, match="a path; give files"):
        list(read_rows(SourceConfig(hub=str(tmp_path))))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        list(read_rows(SourceConfig(hub="some/rows")))


def test_the_standard_library_is_split_by_path_and_needs_no_other_library():
    train, heldout = stdlib.module_paths("train"), stdlib.module_paths("heldout")
    assert not set(train) & set(heldout)
    assert 0.05 < len(heldout) / len(train + heldout) < 0.2
    assert {"json/decoder.py", "argparse.py"} <= {*train, *heldout}
    assert not [name for name in train + heldout if "test" in name.split("/")]
    found = next(read_rows(SourceConfig(split="heldout")))
    assert found.where == heldout[0] and found.fields["text"]


def test_the_fingerprint_of_a_source_changes_with_its_content(tmp_path, monkeypatch):
    source = SourceConfig(files=write(tmp_path / "rows.jsonl", [{"text": "a"}]))
    before = source_fingerprint(source)
    assert before == source_fingerprint(source)
    write(tmp_path / "rows.jsonl", [{"text": "b"}])
    assert source_fingerprint(source) != before
    hub = [SourceConfig(hub="x"), SourceConfig(hub="x", revision="1"), SourceConfig(hub="y")]
    assert len({source_fingerprint(source) for source in hub}) == 3
    for name in ("a.py", "b.py", "test/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass")
    monkeypatch.setattr(stdlib, "_root", lambda: tmp_path)
    assert stdlib.module_paths("train") + stdlib.module_paths("heldout") == ["a.py", "b.py"]
    prints = {stdlib.fingerprint("train")}
    (tmp_path / "a.py").write_text("pass # changed")
    assert stdlib.fingerprint("train") not in prints


def test_every_format_becomes_a_conversation_or_a_text():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert parse_row({"text": "t", "id": 3}, "auto") == Text("t")
    assert parse_row({"messages": turns, "prompt": "also there"}, "auto") == Chat(turns)
    assert parse_row({"conversations": shared}, "auto") == Chat(turns)
    assert parse_row({"conversations": turns}, "auto") == Chat(turns)
    assert parse_row({"prompt": "q", "response": "a"}, "auto") == Chat(turns, is_prompt=True)
    asked = parse_row({"system": "s", "prompt": "q", "response": "a"}, "prompt")
    assert isinstance(asked, Chat)
    assert [message["role"] for message in asked.messages] == ["system", "user", "assistant"]
    assert parse_row({"messages": turns, "text": "t"}, "text") == Text("t")
    assert parse_row({"tokens": [5, 6], "prompt_tokens": 1}, "auto") == Tokens([5, 6], 1, "")
    assert parse_row({"tokens": 17, "text": "t"}, "auto") == Text("t")  # a count


def test_single_turns_of_other_files_have_the_names_that_these_give_them():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    asked = Chat(turns, is_prompt=True)
    for form in ("auto", "prompt"):
        assert parse_row({"question": "q", "answer": "a"}, form) == asked
        assert parse_row({"instruction": "q", "input": "", "output": "a"}, form) == asked
    about = parse_row({"instruction": "Add.", "input": "1 2", "output": "a"}, "auto")
    assert about == Chat([{"role": "user", "content": "Add.\n\n1 2"}, turns[1]], is_prompt=True)
    both = {"prompt": "q", "response": "a", "question": "x", "answer": "y", "input": "not part"}
    assert parse_row(both, "auto") == asked
    assert parse_row({"text": "t", "question": "q", "answer": "a"}, "text") == Text("t")
    assert parse_row({"messages": turns, "question": "x", "answer": "y"}, "auto") == Chat(turns)
    with pytest.raises(Dropped, match="malformed: answer is NoneType, expected a string"):
        parse_row({"question": "q", "response": "a"}, "auto")
    with pytest.raises(Dropped, match="malformed: input is list"):
        parse_row({"instruction": "q", "input": ["x"], "output": "a"}, "auto")
    with pytest.raises(Dropped, match="nothing to train on"):
        parse_row({"question": "q", "answer": " "}, "auto")


ROWS = {
    "malformed": [
        {"question": "q"},
        {"answer": "a"},
        {"instruction": "q", "answer": "a"},
        {"text": "half of \ud83d"},
        {"messages": [{"role": "assistant", "content": "\udc00"}]},
        {"prompt": "\ud83d", "response": "a"},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]},
        {"conversations": [{"from": "narrator", "value": "x"}]},
        None,
        3.5,
        {"text": 3},
        {"messages": "q"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        {"prompt": "q"},
        {"prompt": "q", "response": None},
        ["a list"],
        {"tokens": ["a", "b"]},
        {"tokens": [1, True]},
        {"tokens": [1, -1]},
        {"tokens": [1, 256]},
        {"tokens": [1, 2], "prompt_tokens": 3},
        {"tokens": [1, 2], "prompt_tokens": -1},
        {"tokens": [1, 2], "prompt_tokens": None},
        {"tokens": [1, 2], "tokenizer": 3},
    ],
    "nothing to train on": [
        {"text": " "},
        {"messages": []},
        {"messages": [{"role": "user", "content": "q"}]},
        {"messages": [{"role": "system", "content": "be kind"}]},
        {"prompt": "q", "response": ""},
        {"tokens": []},
        {"tokens": [1, 2], "prompt_tokens": 2},
    ],
    "too long": [{"text": "x" * 64}, {"tokens": [1] * 64}],
    "refused by the chat template": [{"prompt": "q", "response": "\0"}],
}


@pytest.mark.parametrize("reason", ROWS)
def test_rows_that_cannot_be_used_are_counted_by_reason(tmp_path, reason):
    rows = [{"text": "good"}] * len(ROWS[reason]) + ROWS[reason]
    path = write(tmp_path / "rows.jsonl", rows)
    found, lines = load(config(tmp_path, path, length=48))
    tally = found["rows"].tally
    assert tally.dropped == {reason: len(ROWS[reason])} and tally.kept == len(ROWS[reason])
    assert tally.first[reason].startswith(f"{path} line {len(ROWS[reason]) + 1}: ")
    assert f"{len(ROWS[reason])} {reason} (first: {path}" in lines[-1]
    # Said again when it comes from the cache.
    assert load(config(tmp_path, path, length=48))[1] == lines[-1:]


def test_more_than_half_dropped_stops_with_an_explanation_and_leaves_no_cache(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "good"}] + [{"text": "x" * 64}] * 2)
    with pytest.raises(ConfigError, match="more than half") as error:
        load(config(tmp_path, path))
    said = str(error.value)
    assert "1 of 3 examples kept; 2 too long" in said and "data.truncate=true" in said
    assert "65 tokens, a row has 16" in said and "\n" not in said
    assert not list((tmp_path / "cache").iterdir())


def test_no_rows_at_all_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="source rows has no rows"):
        load(config(tmp_path, write(tmp_path / "rows.jsonl", [])))


def test_what_is_too_long_is_cut_if_asked_and_counted_if_nothing_is_left(tmp_path):
    rows = [{"text": "x" * 64}, {"text": "y"}, {"prompt": "q" * 64, "response": "a"}]
    path = write(tmp_path / "rows.jsonl", rows)
    found, _ = load(config(tmp_path, path, truncate=True))
    assert texts(found["rows"]) == ["x" * 16, "y"]
    assert found["rows"].tally.dropped == {"nothing to train on": 1}


def test_rows_of_tokens_are_taken_as_they_are_beside_others(tmp_path, monkeypatch):
    name = masker().tokenizer.fingerprint[:12]
    rows = [
        {"tokens": [7, 8, 9], "prompt_tokens": 2, "tokenizer": name},
        {"text": "abc"},
        {"tokens": [255, 0, 0, 1]},
        {"prompt": "q", "response": "a"},
        {"tokens": [4, 5], "prompt_tokens": 1},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr(dataset_module, "_BATCH", 3)
    found = load(config(tmp_path, path, length=48))[0]["rows"]
    pairs = list(zip(found.offsets, found.offsets[1:], strict=False))
    ids, masks = ([part[a:b].tolist() for a, b in pairs] for part in (found.tokens, found.mask))
    assert [ids[0], ids[2], ids[4]] == [[7, 8, 9], [255, 0, 0, 1], [4, 5]]
    assert [masks[0], masks[2], masks[4]] == [[False, False, True], [True] * 4, [False, True]]
    assert bytes(ids[1]) == b"abc\0" and bytes(ids[3]).startswith(b"<user>q")


def test_tokens_of_another_vocabulary_are_refused(tmp_path):
    path = write(tmp_path / "large.jsonl", [{"tokens": [3, 256]}, {"tokens": [1, 300]}])
    with pytest.raises(ConfigError, match="token 256 is outside the vocabulary of 256") as error:
        load(config(tmp_path, path))
    assert "\n" not in str(error.value)
    path = write(tmp_path / "other.jsonl", [{"tokens": [3, 4], "tokenizer": "0123abcd"}])
    with pytest.raises(ConfigError, match=r"tokens of another tokenizer \(0123abcd, the target"):
        load(config(tmp_path, path))


@pytest.fixture
def corpus(tmp_path):
    """Forty texts of 1 to 13 tokens, each another one."""
    rng = np.random.default_rng(0)
    rows = [{"text": f"{n:02d}"[: 1 + n % 2] + "x" * int(rng.integers(0, 11))} for n in range(40)]
    rows = [
        {"text": chr(97 + n % 26) * 2 + str(n) + row["text"][2:9]} for n, row in enumerate(rows)
    ]
    return write(tmp_path / "corpus.jsonl", rows), [row["text"] for row in rows]


def test_a_source_is_tokenised_once(tmp_path, corpus, monkeypatch):
    path, expected = corpus
    first, lines = load(config(tmp_path, path))
    assert texts(first["rows"]) == expected and "40 rows done" in lines[0]
    monkeypatch.setattr(dataset_module, "_build", None)
    again, lines = load(config(tmp_path, path, batch_size=3, seed=5))
    np.testing.assert_array_equal(again["rows"].tokens, first["rows"].tokens)
    assert len(lines) == 1 and "fingerprint" in lines[0]


def test_another_tokenizer_template_length_or_format_is_another_cache(tmp_path, corpus):
    path, _ = corpus
    prints = set()
    for changes in ({}, {"length": 17}, {"truncate": True}, {"packing": "window"}):
        prints.add(load(config(tmp_path, path, **changes))[0]["rows"].fingerprint)
    prints.add(load(config(tmp_path, path), template=None)[0]["rows"].fingerprint)
    source = {"rows": SourceConfig(files=path, format="text")}
    prints.add(load(config(tmp_path, sources=source))[0]["rows"].fingerprint)
    assert len(prints) == 6
    assert load(config(tmp_path, path, packing="pad"))[0]["rows"].fingerprint in prints


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_an_interrupted_build_leaves_nothing_and_is_built_again(
    tmp_path, corpus, monkeypatch, kind
):
    path, expected = corpus
    parse, calls = dataset_module.parse_row, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 20:
            raise kind
        return parse(*args)

    monkeypatch.setattr(dataset_module, "parse_row", interrupted)
    monkeypatch.setattr(dataset_module, "_BATCH", 10)  # some of it is in files by then
    with pytest.raises(kind):
        load(config(tmp_path, path))
    assert not list((tmp_path / "cache").iterdir())
    assert texts(load(config(tmp_path, path))[0]["rows"]) == expected


def test_a_build_that_was_killed_is_never_read(tmp_path, corpus):
    path, expected = corpus
    load(config(tmp_path, path))
    (folder,) = (tmp_path / "cache").iterdir()
    folder.rename(folder.with_name(f".{folder.name}-killed"))
    (folder.with_name(f".{folder.name}-killed") / "meta.json").unlink()
    assert texts(load(config(tmp_path, path))[0]["rows"]) == expected


def test_builds_at_the_same_time_make_one_good_cache(tmp_path, corpus):
    path, expected = corpus
    found, wait = [], threading.Barrier(4)

    def build():
        wait.wait()
        found.append(texts(load(config(tmp_path, path))[0]["rows"]))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4 and len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin", "offsets.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_cache_is_one_clear_error_that_says_what_to_delete(
    tmp_path, corpus, name, damage
):
    load(config(tmp_path, corpus[0]))
    (folder,) = (tmp_path / "cache").iterdir()
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        (folder / name).unlink()
    elif damage == "cut":
        (folder / name).write_bytes(content[: len(content) // 3])
    elif name != "meta.json":
        (folder / name).write_bytes(content)
    else:
        (folder / name).write_text("[]")
    with pytest.raises(ValueError, match="is damaged.*delete the folder and run again") as error:
        load(config(tmp_path, corpus[0]))
    assert str(folder) in str(error.value)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, corpus):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="data.cache .* cannot be written"):
        load(config(tmp_path, corpus[0]))
    with pytest.raises(ValueError, match="is damaged"):
        read_dataset(tmp_path / "nowhere")


def segments(batch):
    """Yield (text, mask) of every document or part of one in a batch."""
    for tokens, mask, ids in zip(*batch, strict=True):
        assert (np.diff(ids[ids != PADDING]) >= 0).all()
        assert not mask[ids == PADDING].any() and (ids != PADDING).any()
        for number in range(1, int(ids.max()) + 1):
            here = ids == number
            assert here.any()
            yield bytes(tokens[here].astype(np.uint8).tolist()).decode(), mask[here]


def one_epoch(batches, steps):
    return [text for step in range(steps) for text, _ in segments(batches.batch_at(step))]


@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_an_epoch_holds_every_example_exactly_once(tmp_path, corpus, packing):
    path, expected = corpus
    cfg = config(tmp_path, path, packing=packing, batch_size=1)
    batches = Batches(cfg, load(cfg)[0])
    found = one_epoch(batches, batches.num_rows)
    assert sorted(found) == sorted(text + "\0" for text in expected)
    assert batches.num_rows == 40 if packing == "pad" else batches.num_rows < 30
    again = [
        text
        for step in range(batches.num_rows, 2 * batches.num_rows)
        for text, _ in segments(batches.batch_at(step))
    ]
    assert sorted(again) == sorted(found) and again != found


def test_windows_cut_the_documents_one_after_the_other_with_ends_between(tmp_path, corpus):
    path, expected = corpus
    cfg = config(tmp_path, path, packing="window", batch_size=1, length=7)
    batches = Batches(cfg, load(cfg)[0])
    whole = "".join(text + "\0" for text in expected)
    cuts = [whole[place : place + 7] for place in range(0, len(whole), 7)]
    # A segment ends where a document does.
    expected = [[part for part in re.split("(?<=\0)", cut) if part] for cut in cuts]
    found = [list(segments(batches.batch_at(step))) for step in range(batches.num_rows)]
    assert all(mask.all() for row in found for _, mask in row)
    assert sorted([text for text, _ in row] for row in found) == sorted(expected)


def test_batches_have_the_shapes_and_types_that_training_wants(tmp_path, corpus):
    cfg = config(tmp_path, corpus[0], batch_size=3)
    batch = Batches(cfg, load(cfg)[0], pad_id=7).batch_at(0)
    assert [array.shape for array in batch] == [(3, 16)] * 3
    assert [array.dtype for array in batch] == [np.int32, bool, np.int32]
    assert (batch.tokens[batch.segment_ids == PADDING] == 7).all()


def test_a_step_gives_the_same_batch_after_everything_is_made_anew(tmp_path, corpus):
    path, _ = corpus
    other = write(tmp_path / "other.jsonl", [{"prompt": "q", "response": str(n)} for n in range(9)])
    sources = {"a": SourceConfig(files=path, weight=3.0), "b": SourceConfig(files=other)}
    for cfg in (config(tmp_path, path), config(tmp_path, sources=sources, length=32)):
        first = Batches(cfg, load(cfg)[0])
        ahead = [first.batch_at(step) for step in range(60)]
        for folder in (tmp_path / "cache").iterdir():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        second = Batches(cfg, load(cfg)[0])
        for step in (59, 3, 3, 31, 0):
            for x, y in zip(ahead[step], second.batch_at(step), strict=True):
                np.testing.assert_array_equal(x, y)


def test_another_seed_is_another_order_of_the_same_rows(tmp_path, corpus):
    cfgs = [config(tmp_path, corpus[0], batch_size=1, seed=seed) for seed in (0, 1)]
    one, two = (Batches(cfg, load(cfg)[0]) for cfg in cfgs)
    found = [one_epoch(batches, one.num_rows) for batches in (one, two)]
    assert found[0] != found[1] and sorted(found[0]) == sorted(found[1])


def test_a_larger_share_has_the_rows_of_a_smaller_one_by_the_same_numbers(tmp_path, corpus):
    whole = config(tmp_path, corpus[0], batch_size=1, packing="pad")
    found = {}
    for share in (0.25, 0.5, 1.0):
        cfg = replace(whole, share=share)
        batches = Batches(cfg, load(cfg)[0])
        assert batches.num_rows == 40
        kept = round(40 * share)
        numbers = [int(batches.rows_at(step)[0]) for step in range(kept)]
        again = [int(batches.rows_at(step)[0]) for step in range(kept, 2 * kept)]
        assert len(set(numbers)) == kept and sorted(numbers) == sorted(again)
        found[share] = dict(zip(numbers, one_epoch(batches, kept), strict=True))
    assert found[0.25].items() < found[0.5].items() < found[1.0].items()
    with pytest.raises(ConfigError, match=r"data.share is 0.0, it must be above 0"):
        replace(whole, share=0.0)


def test_what_is_held_out_is_the_same_for_every_share_of_the_data(tmp_path, corpus):
    found = []
    for share in (0.1, 1.0):
        data = config(tmp_path, corpus[0], share=share)
        held = EvalConfig(sources=data.sources, batches=3)
        run = TrainConfig(out=str(tmp_path), target="any", data=data, eval=held)
        batches, _ = jobs._heldout(run, masker(), print)
        found.append(np.concatenate([batch.tokens[0] for batch in batches]))
    assert len(np.unique(found[0], axis=0)) == 6
    np.testing.assert_array_equal(*found)


def test_a_mixture_of_shares_keeps_its_weights(tmp_path):
    sources = {}
    for name, size, weight in (("a", 40, 3.0), ("b", 20, 1.0)):
        path = write(tmp_path / f"{name}.jsonl", [{"text": f"{name}{n}"} for n in range(size)])
        sources[name] = SourceConfig(files=path, weight=weight)
    cfg = config(tmp_path, sources=sources, packing="pad", batch_size=10, share=0.25)
    batches = Batches(cfg, load(cfg)[0])
    found = one_epoch(batches, 100)
    assert [len({x for x in found if x[0] == name}) for name in "ab"] == [10, 5]
    assert sum(x[0] == "a" for x in found) == 750
    rows = np.concatenate([batches.rows_at(step) for step in range(100)])
    assert sum(np.unique(rows) < 40) == 10 and rows.max() < batches.num_rows == 60


def test_fewer_rows_than_a_batch_are_repeated(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "b"}])
    cfg = config(tmp_path, path, batch_size=5, packing="pad")
    found = [text for text, _ in segments(Batches(cfg, load(cfg)[0]).batch_at(0))]
    assert sorted(found[:2]) == sorted(found[2:4]) == ["a\0", "b\0"]


def test_a_mixture_keeps_its_weights_and_goes_through_each_source_in_turn(tmp_path):
    sizes, weights = {"a": 30, "b": 7, "c": 400}, {"a": 5.0, "b": 1.0, "c": 4.0}
    sources = {}
    for name, size in sizes.items():
        path = write(tmp_path / f"{name}.jsonl", [{"text": f"{name}{n}"} for n in range(size)])
        sources[name] = SourceConfig(files=path, weight=weights[name])
    cfg = config(tmp_path, sources=sources, packing="pad", batch_size=10)
    batches = Batches(cfg, load(cfg)[0])
    found = one_epoch(batches, 200)
    for name, size in sizes.items():
        mine = [text for text in found if text[0] == name]
        assert len(mine) == 2000 * weights[name] / 10
        for start in range(0, len(mine) - size, size):  # without replacement
            assert len(set(mine[start : start + size])) == size
        share = [text[0] for text in found[:200]].count(name) / 200
        assert abs(share - weights[name] / 10) < 0.12
    with pytest.raises(ConfigError, match="source b has less than 1/1000"):
        sources["b"] = SourceConfig(files=sources["b"].files, weight=1e-4)
        Batches(config(tmp_path, sources=sources, packing="pad"), load(cfg)[0])


def test_the_mask_of_a_conversation_survives_packing(tmp_path):
    rows = [{"prompt": f"q{n}", "response": f"a{n}"} for n in range(6)]
    cfg = config(tmp_path, write(tmp_path / "rows.jsonl", rows), length=80, batch_size=1)
    batches, found = Batches(cfg, load(cfg)[0]), []
    for step in range(batches.num_rows):
        for text, mask in segments(batches.batch_at(step)):
            found.append("".join(c for c, flag in zip(text, mask, strict=True) if flag))
    assert sorted(found) == [f"a{n}\0" for n in range(6)]


def test_packing_is_greedy_whole_and_the_same_each_time():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 65, 500)
    bins = pack(lengths, 64)
    assert sorted(i for row in bins for i in row) == list(range(500))
    assert all(lengths[row].sum() <= 64 for row in bins)
    assert len(bins) <= 1.05 * lengths.sum() / 64 + 1
    assert bins == pack(lengths, 64) and pack(np.array([], int), 4) == []
    with pytest.raises(ValueError, match="has 65 tokens"):
        pack(np.array([65]), 64)


def test_items_come_in_order_from_the_step_that_was_asked_for():
    with Prefetcher(lambda step: step * step, start=3, depth=2) as items:
        assert [next(items) for _ in range(50)] == [step * step for step in range(3, 53)]


def test_an_error_of_the_thread_is_raised_where_the_item_is_used():
    def make(step):
        if step == 2:
            raise ValueError(f"step {step} is bad")
        return step

    items = Prefetcher(make)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 is bad"):
        next(items)
    assert list(items) == [] and not items._thread.is_alive()
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(Prefetcher(lambda step: next(iter(()))))


def test_closing_ends_the_thread_and_makes_no_more_than_was_waiting():
    made = []
    items = Prefetcher(lambda step: made.append(step), depth=3)
    next(items)
    items.close()
    items.close()
    assert not items._thread.is_alive() and len(made) <= 6
    assert list(items) == []


def test_sources_are_named_and_can_be_changed_on_the_command_line(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text("length: 8\nsources: {chat: {files: a.jsonl}, code: {split: heldout}}\n")
    cfg = read_config(DataConfig, str(path), ["sources.chat.weight=2", "sources.web.hub=some/rows"])
    assert list(cfg.named_sources) == ["chat", "code", "web"]
    assert cfg.named_sources["chat"] == SourceConfig(files="a.jsonl", weight=2.0)
    assert [source.kind for source in cfg.named_sources.values()] == ["files", "stdlib", "hub"]
    assert DataConfig().named_sources == {"stdlib": SourceConfig()}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"files": "a", "hub": "b"}, "has files and hub"),
        ({"format": "chat"}, "format is 'chat'"),
        ({"format": "messages"}, "the standard library is text"),
        ({"weight": 0.0}, "weight is 0.0"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"max_rows": -1}, "max_rows is -1"),
        ({"streaming": True}, "streaming is set, which needs a source.hub"),
        ({"files": "a", "revision": "1"}, "revision is set"),
        ({"files": "a", "split": "train"}, "files have no splits"),
        ({"split": "test"}, "split is 'test'"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(values, message):
    with pytest.raises(ConfigError, match=message) as error:
        SourceConfig(**values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"length": 0}, "data.length is 0"),
        ({"batch_size": -1}, "data.batch_size is -1"),
        ({"prefetch": 0}, "data.prefetch is 0"),
        ({"packing": "none"}, "packing is 'none'"),
        ({"truncate": True}, "truncate has no effect"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_data_settings_that_no_run_can_use_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**values)


def test_dropped_says_reason_and_detail():
    with pytest.raises(Dropped, match="^malformed: has id; expected one of messages"):
        parse_row({"id": 1}, "auto")
