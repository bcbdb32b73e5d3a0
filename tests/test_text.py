"""Text that streams is the text that is; stop strings, tokenizers and chat templates."""

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle3.chat_template import ChatTemplate
from eagle3.config import ConfigError
from eagle3.text import (
    REPLACEMENT,
    AnswerText,
    ByteTokenizer,
    FileTokenizer,
    StopStrings,
    TextDecoder,
    load_tokenizer,
)

TEXTS = [
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Ünïcödé, naïve café; 数学は楽しい。漢字とかな交じり文。",
    "👩‍👩‍👧‍👦 family, 🇯🇵 flag, 👍🏽 thumb, 🤷‍♀️ shrug",
    "tabs\tand  double  spaces \r\n and a combining e\u0301",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A byte-level BPE so small that most characters beyond ASCII are several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    backend.save(str(path))
    return FileTokenizer(path)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """The Llama kind: words with a leading space, single bytes for what the vocabulary lacks."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgé", "▁ab", "▁c"]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(
        models.BPE(
            vocab,
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    path = tmp_path_factory.mktemp("byte_fallback") / "tokenizer.json"
    backend.save(str(path))
    return FileTokenizer(path)


def stream(tokenizer, ids):
    decoder = TextDecoder(tokenizer)
    pieces = [decoder.push(token) for token in ids]
    return pieces, decoder.finish()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_decoded_text_and_never_shows_half_a_character(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text)
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_characters_of_several_tokens_are_in_the_test(byte_level):
    text = "🤷‍♀️"
    assert len(byte_level.encode(text)) > len(text)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "bytes"])
def test_any_tokens_at_all_stream_to_what_they_decode_to(kind, request):
    """Random tokens are mostly broken UTF-8; 400 of them pass the window many times."""
    tokenizer = ByteTokenizer() if kind == "bytes" else request.getfixturevalue(kind)
    size = {"byte_level": 290, "byte_fallback": 260, "bytes": 256}[kind]
    for seed in range(12):
        rng = random.Random(seed)
        ids = [rng.randrange(1, size) for _ in range(400)]
        if seed % 3 == 0:  # whole characters between the broken ones
            ids[100:100] = tokenizer.encode("".join(TEXTS)) * 2
        pieces, rest = stream(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_each_prefix_prints_a_prefix(byte_level):
    ids = byte_level.encode(TEXTS[2])
    whole = byte_level.decode(ids)
    for count in range(len(ids)):
        pieces, _ = stream(byte_level, ids[:count])
        assert whole.startswith("".join(pieces))


def test_long_text_is_not_decoded_from_its_beginning_at_each_token(byte_level, monkeypatch):
    ids = byte_level.encode(TEXTS[0] * 20)
    sizes = []
    decode = byte_level.decode
    monkeypatch.setattr(
        byte_level, "decode", lambda ids, special=False: sizes.append(len(ids)) or decode(ids)
    )
    stream(byte_level, ids)
    assert len(ids) > 500 and max(sizes) < 60


def test_special_tokens_are_no_text(byte_level):
    ids = [*byte_level.encode("a"), *byte_level.encode("<|end|>"), *byte_level.encode("b")]
    pieces, rest = stream(byte_level, ids)
    assert "".join(pieces) + rest == "ab"
    assert byte_level.decode(ids, special=True) == "a<|end|>b"


def cut(text, stops):
    """Character by character: the text before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.parametrize("stops", [("ab",), ("aab", "b"), ("abab", "ba"), ("aaa", "aa"), ()])
def test_text_ends_before_the_first_stop_string_however_it_is_split(stops):
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(12)))
        filter_, given, rest = StopStrings(stops), "", text
        while rest and not filter_.is_found:
            size = rng.randrange(1, 4)
            given += filter_.push(rest[:size])
            rest = rest[size:]
            assert cut(text, stops).startswith(given)
        given += filter_.finish()
        assert given == cut(text, stops)
        assert filter_.is_found == any(stop in text for stop in stops)


def test_text_that_begins_no_stop_string_is_not_kept_back():
    stop = StopStrings(["\n\n"])
    assert [stop.push(x) for x in ("a", "\n", "b", "\n", "\n")] == ["a", "", "\nb", "", ""]


def answer(tokenizer, ids, stops=(), drafted=lambda place: place % 2 == 0):
    text, pieces = AnswerText(tokenizer, stops), []
    for place, token in enumerate(ids):
        pieces += text.push(token, drafted(place))
    return text, pieces + text.finish()


def test_each_piece_carries_the_mark_of_the_token_that_made_it(byte_level):
    ids = byte_level.encode("x = 数\n\n1")
    text, pieces = answer(byte_level, ids, stops=("\n\n\n",))
    assert text.text == "".join(piece.text for piece in pieces) == "x = 数\n\n1"
    marks = {piece.text: piece.is_drafted for piece in pieces if piece.text}
    kanji = next(n for n in range(len(ids)) if "数" in byte_level.decode(ids[: n + 1]))
    assert marks["数"] == (kanji % 2 == 0)


def test_a_stop_string_across_tokens_leaves_the_tokens_before_it(byte_level):
    ids = byte_level.encode("one two\n\nthree")
    text, pieces = answer(byte_level, ids, stops=("o\n\nth",))
    assert text.is_stopped and text.text == "one tw"
    assert "".join(piece.text for piece in pieces) == "one tw"
    kept = byte_level.decode(ids[: text.num_tokens])
    shorter = byte_level.decode(ids[: text.num_tokens - 1])
    assert kept.startswith("one tw") and not shorter.startswith("one tw")


@pytest.mark.parametrize("is_drafted", [False, True])
def test_text_kept_back_until_the_end_belongs_to_the_last_token(is_drafted):
    text, pieces = answer(ByteTokenizer(), b"a\xf0", drafted=lambda place: is_drafted)
    assert pieces == [("a", is_drafted), (REPLACEMENT, is_drafted)]
    assert text.num_tokens == 2
    assert answer(ByteTokenizer(), b"")[0].num_tokens == 0


def test_an_answer_that_is_cut_within_a_character_shows_that_at_its_end(byte_level):
    ids = byte_level.encode("a🤷")[:-1]
    text, _ = answer(byte_level, ids)
    assert text.text == byte_level.decode(ids) and text.text.endswith(REPLACEMENT)


def test_bytes_that_were_no_text_are_refused_by_every_tokenizer(byte_level):
    for tokenizer in (ByteTokenizer(), byte_level):
        with pytest.raises(ConfigError, match="not valid UTF-8 at character 1"):
            tokenizer.encode("a\udcff")


def test_a_missing_or_broken_tokenizer_is_an_error_that_names_the_file(tmp_path):
    assert isinstance(load_tokenizer(None, 256), ByteTokenizer)
    assert isinstance(load_tokenizer(str(tmp_path), 256), ByteTokenizer)
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(str(tmp_path), 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(str(tmp_path), 256)


def test_a_beginning_token_is_added_to_plain_text_and_not_to_a_template(tmp_path, byte_level):
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(byte_level._backend.to_str())
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("ab") == [backend.token_to_id("<s>"), *byte_level.encode("ab")]
    assert tokenizer.encode("ab", special=False) == byte_level.encode("ab")


TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "robot" %}{{ raise_exception("no robots") }}{% endif %}
    {%- if message.role == "skipped" %}{% continue %}{% endif %}
    {{- "<" + message.role + ">" }}
    {%- generation %}{{ message.content | trim }}{% endgeneration %}
    {{- eos_token }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
ASK = [{"role": "user", "content": " <b> & ü "}]


def directory(path, template=None, file=None, **changes):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    config |= {"add_bos_token": True, "add_eos_token": False} | changes
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    return path


def test_a_template_gets_tokens_loop_controls_and_the_generation_prompt(tmp_path):
    template = ChatTemplate.load(directory(tmp_path, TEMPLATE))
    asked = [{"role": "skipped", "content": "x"}, *ASK]
    assert template.render(asked) == "<s><user><b> & ü</s><assistant>"


def test_a_template_file_wins_over_the_config_and_default_over_other_names(tmp_path):
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert ChatTemplate.load(directory(tmp_path, named)).render(ASK) == "D"
    assert ChatTemplate.load(directory(tmp_path, [named[0]])).render(ASK) == "T"
    assert ChatTemplate.load(directory(tmp_path, "C", file="F")).render(ASK) == "F"


def test_a_template_may_ask_for_the_date(tmp_path):
    template = ChatTemplate.load(directory(tmp_path, "{{ strftime_now('%Y') }}"))
    assert template.render(ASK).isdigit()


def test_a_directory_without_template_is_one_clear_error(tmp_path):
    for template in (None, [], [1], [{"name": [1]}], 5):
        path = directory(tmp_path, template)
        with pytest.raises(ConfigError, match="has no chat template") as error:
            ChatTemplate.load(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no robots') }}", "no robots"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_an_error(source, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        ChatTemplate(source).render(ASK)
    assert "\n" not in str(error.value)


def test_a_broken_template_is_an_error_when_it_is_loaded(tmp_path):
    for source in ("{% if %}", "{{ " + "(" * 9999):
        with pytest.raises(ConfigError, match="cannot be read") as error:
            ChatTemplate.load(directory(tmp_path, source))
        assert "\n" not in str(error.value)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.load(tmp_path)
    for broken in ("{", "[]", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: (not JSON|found a list)"):
            ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("value", [5, [], {"content": 5}, {}])
def test_a_special_token_that_is_no_text_is_an_error_that_names_it(value, tmp_path):
    with pytest.raises(ConfigError, match="bos_token in .* it must be a text"):
        ChatTemplate.load(directory(tmp_path, TEMPLATE, bos_token=value))
