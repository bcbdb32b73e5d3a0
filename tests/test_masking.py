"""Masks are True for exactly what the model has to produce, whatever the chat template does."""

import json
from itertools import groupby

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle3.config import ConfigError
from eagle3.text import ByteTokenizer, FileTokenizer
from eagle3.training.data.bpe import train_bpe
from eagle3.training.data.masking import Example, Marked, Masker, TrainingTemplate
from eagle3.training.data.rows import Chat, Dropped, Text, parse_row
from eagle3.training.data.tokens import TrainingTokenizer

# ChatML, with a system message of its own where a conversation brings none.
CHATML = """{% for m in messages %}
{% if loop.first and m.role != 'system' %}<|start|>system
Be kind.<|end|>
{% endif %}
<|start|>{{ m.role }}
{{ m.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""

# As Qwen3 does: the thoughts of a turn are rendered only while it is the last, if need be empty,
# and the empty block is part of the prompt when thinking is off.
THINKING = """{% for m in messages %}
{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}
<|start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}
{% set thought = m.content.split('</think>')[0] if '</think>' in m.content else '' %}
{{ '<think>\n' + thought.split('<think>')[-1].strip('\n') + '\n</think>\n\n' -}}
{% endif %}
{{ answer if m.role == 'assistant' else m.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant
{% if enable_thinking is defined and not enable_thinking %}
{{ '<think>\n\n</think>\n\n' }}
{%- endif %}
{% endif %}"""

# Headers with two tokens, trimmed contents, a token at the very beginning.
HEADERS = """{{ bos_token }}{% for m in messages -%}
<|start|>{{ m.role }}<|header|>{{ '\n\n' }}{{ m.content | trim }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|header|>{{ '\n\n' }}{% endif %}"""

# Tags around the whole turn, as some templates have them: wider than what the model produces.
TAGGED = """{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}{{ '<|start|>assistant\n' + m.content + '<|end|>\n' }}{% endgeneration %}
{% else %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS, "tagged": TAGGED}
SPECIAL = ["<|start|>", "<|end|>", "<|header|>", "<|bos|>"]
TEXTS = [
    "Be kind. system user assistant What is the time? It is noon, and the sun shines.\n\n" * 3,
    "def f(n):\n    return n + 1\n" * 5,
    "数学 ünï 🤷 1, 2, 3",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 320, folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(folder / "tokenizer.json"))
    (end,) = backend.encode("<|end|>").ids
    return TrainingTokenizer(FileTokenizer(folder / "tokenizer.json"), [end])


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return Chat([{"role": roles[role], "content": text} for role, text in turns])


def examples(tokenizer, template, row):
    found = attempts(tokenizer, template, row)
    assert all(isinstance(example, Example) for example in found), found
    return [example for example in found if isinstance(example, Example)]


def attempts(tokenizer, template, row):
    """Return examples, and errors in place of those that cannot be masked."""
    masker = Masker(tokenizer, TrainingTemplate(template, {"bos_token": "<|bos|>"}))
    return masker.encode(masker.mark(row))


def answers(tokenizer, example):
    """Decode every run of masked tokens."""
    runs, place = [], 0
    for flag, group in groupby(example.mask.tolist()):
        size = len(list(group))
        if flag:
            runs.append(tokenizer.decode(example.tokens[place : place + size].tolist(), True))
        place += size
    return runs


CHATS = [
    chat(("u", "What is the time?"), ("a", "It is noon.")),
    chat(("s", "Be brief."), ("u", "1?"), ("a", "2"), ("u", "3?"), ("a", "4\n\n5")),
    chat(("u", "def f(n):\n"), ("a", "return 🤷\n"), ("u", ""), ("a", "数学 ünï"), ("u", "more")),
    chat(("u", "a"), ("t", "result"), ("a", "end"), ("u", "b"), ("a", "assistant")),
    chat(("u", "It is noon."), ("a", "It is noon."), ("u", "It is noon."), ("a", "It is noon.")),
]


@pytest.mark.parametrize("row", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_masked_tokens_decode_to_the_answers_and_their_end_of_turn(tokenizer, name, row):
    found = examples(tokenizer, TEMPLATES[name], row)
    said = [m["content"] for m in row.messages if m["role"] == "assistant"]
    if name == "headers":
        said = [text.strip() for text in said]
    masked = [run for example in found for run in answers(tokenizer, example)]
    assert masked == [text + "<|end|>" for text in said]


@pytest.mark.parametrize("row", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_before_an_answer_is_the_prompt_that_decoding_renders(tokenizer, name, row):
    template = TrainingTemplate(TEMPLATES[name], {"bos_token": "<|bos|>"})
    masker = Masker(tokenizer, template)
    turns = [n for n, m in enumerate(row.messages) if m["role"] == "assistant"]
    found = masker.encode(masker.mark(row))
    starts = []
    for example in found:
        assert isinstance(example, Example)
        begins = np.flatnonzero(np.diff(example.mask.astype(int), prepend=0) == 1)
        starts += [example.tokens[:begin].tolist() for begin in begins]
    for turn, start in zip(turns, starts, strict=True):
        asked = template.prompts(row.messages[:turn])
        assert start in [tokenizer.encode(text, special=False) for text in asked]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_whole_text(tokenizer, name):
    masker = Masker(tokenizer, TrainingTemplate(TEMPLATES[name], {"bos_token": "<|bos|>"}))
    for row in CHATS:
        marked = masker.mark(row)
        for item, example in zip(marked, masker.encode(marked), strict=True):
            assert isinstance(example, Example)
            assert example.tokens.tolist() == tokenizer.encode(item.text, special=False)
            assert example.tokens.dtype == np.int32 and example.mask.dtype == bool


def test_one_example_holds_all_turns_unless_history_is_rendered_differently(tokenizer):
    for name in ("chatml", "headers", "tagged"):
        assert len(examples(tokenizer, TEMPLATES[name], CHATS[1])) == 1
    assert len(examples(tokenizer, THINKING, CHATS[1])) == 2


def test_thoughts_are_trained_on_in_their_own_turn_and_gone_in_the_next(tokenizer):
    thought = "<think>\nIt is noon, and 1\n</think>\n\n"
    row = chat(("u", "1?"), ("a", thought + "2"), ("u", "3?"), ("a", thought + "4"))
    first, second = examples(tokenizer, THINKING, row)
    assert answers(tokenizer, first) == [thought + "2<|end|>"]
    assert answers(tokenizer, second) == [thought + "4<|end|>"]
    history = tokenizer.decode(second.tokens[~second.mask].tolist(), True)
    assert "2<|end|>" in history and "think" not in history


def test_an_empty_thought_is_given_to_the_model_and_not_trained_on(tokenizer):
    for text in ("4", "<think>\n\n</think>\n\n4"):
        (example,) = examples(tokenizer, THINKING, chat(("u", "3?"), ("a", text)))
        assert answers(tokenizer, example) == ["4<|end|>"]
        given = tokenizer.decode(example.tokens[~example.mask].tolist(), True)
        assert given.endswith("<|start|>assistant\n<think>\n\n</think>\n\n")


def test_thoughts_without_a_switch_in_the_template_are_text_like_any_other(tokenizer):
    text = "<think>\n\n</think>\n\n4"
    (example,) = examples(tokenizer, CHATML, chat(("u", "3?"), ("a", text)))
    assert answers(tokenizer, example) == [text + "<|end|>"]


def test_a_template_that_begins_thinking_in_the_prompt_leaves_that_out(tokenizer):
    begin = (
        "{% if enable_thinking is not defined %}{{ '<think>\n' }}{% elif enable_thinking is defined"
    )
    template = THINKING.replace("{% if enable_thinking is defined", begin)
    thought = "<think>\n1, 2\n</think>\n\n"
    row = chat(("u", "1?"), ("a", thought + "2"), ("u", "3?"), ("a", "4"))
    first, second = examples(tokenizer, template, row)
    assert answers(tokenizer, first) == ["1, 2\n</think>\n\n2<|end|>"]
    assert answers(tokenizer, second) == ["4<|end|>"]


def test_thoughts_in_a_field_of_their_own_reach_the_template(tokenizer):
    template = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    turns = [{"role": "user", "content": "1"}]
    turns.append({"role": "assistant", "content": "4", "reasoning_content": "2 3"})
    (example,) = examples(tokenizer, template, parse_row({"messages": turns}, "auto"))
    assert answers(tokenizer, example) == ["2 34<|end|>"]


def test_tags_around_the_content_alone_still_train_the_end_of_turn(tokenizer):
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    for row in CHATS[:3]:
        (example,) = examples(tokenizer, template, row)
        (plain,) = examples(tokenizer, CHATML, row)
        np.testing.assert_array_equal(example.mask, plain.mask)
        np.testing.assert_array_equal(example.tokens, plain.tokens)


def test_what_tags_leave_out_is_not_trained_on(tokenizer):
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}note:{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    (example,) = examples(tokenizer, template, CHATS[1])
    assert answers(tokenizer, example) == ["2<|end|>", "4\n\n5<|end|>"]


def test_tags_that_enclose_no_answer_or_are_lost_are_reported(tokenizer):
    nothing = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(Dropped, match="nothing to train on.*enclose no answer"):
        examples(tokenizer, nothing, CHATS[0])
    lost = "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | length }}"
    with pytest.raises(Dropped, match="do not enclose"):
        examples(tokenizer, lost, CHATS[0])


def test_an_end_of_turn_that_no_file_names_is_the_special_token_after_the_content(tokenizer):
    unnamed = TrainingTokenizer(tokenizer._tokenizer)
    assert unnamed.end_ids == ()
    for name in TEMPLATES:
        for row in CHATS:
            for found, known in zip(
                examples(unnamed, TEMPLATES[name], row),
                examples(tokenizer, TEMPLATES[name], row),
                strict=True,
            ):
                np.testing.assert_array_equal(found.mask, known.mask)
    last = "{% if not add_generation_prompt %}<|bos|>{% endif %}"
    after = CHATML.replace("<|end|>\n{% endfor %}", "<|end|>\n{% endfor %}" + last)
    (example,) = examples(unnamed, after, CHATS[0])
    assert answers(unnamed, example) == ["It is noon.<|end|>"]


def test_without_special_tokens_an_answer_ends_where_its_text_does(tokenizer):
    template = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{{ ' ' }}{% endif %}"""
    letters = TrainingTokenizer(ByteTokenizer())
    (example,) = examples(letters, template, CHATS[1])
    assert answers(letters, example) == ["2\n", "4\n\n5\n"]


def test_a_special_token_within_an_answer_is_not_its_end(tokenizer):
    template = """{% for m in messages %}{{ m.role }}:
{{ m.content }}

{% endfor %}{% if add_generation_prompt %}assistant:
{% endif %}"""
    unnamed = TrainingTokenizer(tokenizer._tokenizer)
    (example,) = examples(unnamed, template, chat(("u", "1"), ("a", "a<|bos|>b")))
    assert answers(unnamed, example) == ["a<|bos|>b\n\n"]


def test_answers_after_one_another_are_both_trained_on_or_reported(tokenizer):
    row = chat(("u", "1"), ("a", "end"), ("a", "assistant"))
    (example,) = examples(tokenizer, CHATML, row)
    assert answers(tokenizer, example) == ["end<|end|>", "assistant<|end|>"]
    # Here the first is the last message when the second is asked for, and rendered as such.
    with pytest.raises(Dropped, match="refused by the chat template"):
        examples(tokenizer, THINKING, row)


def test_a_token_across_a_border_is_reported_and_not_masked_nearly_right(tokenizer):
    template = CHATML.replace("assistant\n{% endif %}", "assistant {% endif %}").replace(
        "<|start|>{{ m.role }}\n", "<|start|>{{ m.role }} "
    )
    assert len(tokenizer.encode("assistant It")) < len(tokenizer.encode("assistant ")) + 2
    (found,) = attempts(tokenizer, template, CHATS[0])
    assert isinstance(found, Dropped) and found.reason.startswith("tokens across the border")
    (found,) = attempts(tokenizer, CHATML, chat(("u", "1"), ("a", "    indented")))
    assert isinstance(found, Dropped)


def test_a_tokenizer_that_treats_the_first_word_differently_is_masked_exactly():
    """The Llama kind writes a space before a text, so pieces alone have other tokens."""
    words = ["<unk>", "</s>", "▁", *"USER:ASTNabcdefg\n", "▁a", "▁ab", "▁USER"]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁a", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    path = ByteTokenizer()
    tokenizer = TrainingTokenizer(path)
    tokenizer.encode_batch = lambda texts: [backend.encode(text).ids for text in texts]
    tokenizer.encode = lambda text, special=True: backend.encode(text).ids
    masker = Masker(tokenizer)
    text = "USER: ab ASSISTANT: ab a</s>"
    start = text.index(" ab a")
    (example,) = masker.encode([Marked(text, ((start, len(text)),))])
    assert isinstance(example, Example)
    assert [backend.id_to_token(i) for i in example.tokens[example.mask]] == ["▁ab", "▁a", "</s>"]


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (CHATML, chat(("u", "1"), ("a", "x<|end|>y")), "contains the token that ends"),
        ("{{ raise_exception('no  robots') }}", CHATS[0], "no robots"),
        (
            "{{ messages[0].content }}{% if add_generation_prompt %}?{% endif %}",
            CHATS[0],
            "follows",
        ),
        ("{{ messages[0].content }}", chat(("a", "first")), "no element 0"),
    ],
)
def test_what_a_template_cannot_render_is_dropped_with_the_reason(tokenizer, template, row, reason):
    with pytest.raises(Dropped, match=reason) as error:
        examples(tokenizer, template, row)
    assert error.value.reason == "refused by the chat template"


def test_plain_text_is_masked_whole_and_ends_with_the_end_of_text(tokenizer):
    (example,) = Masker(tokenizer).encode(Masker(tokenizer).mark(Text("It is noon.")))
    assert isinstance(example, Example) and example.mask.all()
    ids = tokenizer.encode("It is noon.")
    assert example.tokens.tolist() == [*ids, *tokenizer.end_ids]


def test_a_beginning_token_is_given_and_not_trained_on(tokenizer):
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(tokenizer._backend.to_str())
    bos = backend.token_to_id("<|bos|>")
    backend.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    inner = FileTokenizer.__new__(FileTokenizer)
    inner._backend = backend
    with_bos = TrainingTokenizer(inner, tokenizer.end_ids)
    masker = Masker(with_bos)
    (example,) = masker.encode(masker.mark(Text("It is")))
    assert isinstance(example, Example)
    assert example.tokens[0] == bos and example.tokens.tolist().count(bos) == 1
    assert not example.mask[0] and example.mask[1:].all()
    assert with_bos.encode(with_bos.prompt_of(example.tokens.tolist())) == example.tokens.tolist()
    (example,) = examples(with_bos, HEADERS, CHATS[0])
    assert example.tokens.tolist().count(bos) == 1  # the template's, not one more


def test_the_prompt_of_tokens_that_end_within_a_character_ends_before_it():
    letters = TrainingTokenizer(ByteTokenizer())
    assert letters.prompt_of(list("né".encode())) == "né"
    assert letters.prompt_of(list("né".encode()[:-1])) == "n"


def test_without_a_template_a_prompt_is_continued_and_a_conversation_is_an_error(tokenizer):
    masker = Masker(tokenizer)
    row = parse_row({"prompt": "1, 2,", "response": " 3"}, "auto")
    (example,) = masker.encode(masker.mark(row))
    assert answers(tokenizer, example) == [" 3<|end|>"]
    assert isinstance(example, Example)
    assert tokenizer.decode(example.tokens.tolist()) == "1, 2, 3"
    with pytest.raises(ConfigError, match="no chat template"):
        masker.mark(CHATS[0])


def write_target(folder, tokenizer, **config):
    (folder / "tokenizer.json").write_text(tokenizer._backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_tokenizer_template_and_ends_come_from_the_directory_of_the_target(tmp_path, tokenizer):
    folder = write_target(tmp_path, tokenizer, eos_token={"content": "<|end|>"})
    end = tokenizer.end_ids[0]
    masker = Masker.load(folder, 400)
    assert masker.template is None and masker.tokenizer.end_ids == (end,)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 0}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 0]}))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    masker = Masker.load(folder, 400)
    assert masker.tokenizer.end_ids == (0, end)
    assert set(masker.tokenizer.control_ids) >= {0, end, tokenizer.encode("</think>")[0]}
    (example,) = masker.encode(masker.mark(CHATS[0]))
    assert answers(tokenizer, example) == ["It is noon.<|end|>"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 400}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is 400"):
        Masker.load(folder, 400)


def test_the_fingerprint_changes_with_whatever_decides_tokens_or_masks(tokenizer):
    plain = TrainingTokenizer(tokenizer._tokenizer)
    letters = TrainingTokenizer(ByteTokenizer())
    templates = [None, TrainingTemplate(CHATML), TrainingTemplate(CHATML, {"bos_token": "x"})]
    kinds = {Masker(t, m).fingerprint for t in (tokenizer, plain, letters) for m in templates}
    assert len(kinds) == 9
    assert Masker(tokenizer, vocab_size=400).fingerprint not in kinds


def test_a_trained_tokenizer_is_the_same_twice_and_loses_nothing(tmp_path):
    sizes = [train_bpe(TEXTS, 300, tmp_path / name) for name in ("one", "two")]
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two"))
    assert first == second and sizes == [300, 300]
    masker = Masker.load(str(tmp_path / "one"), 300)
    assert masker.tokenizer.end_ids == (0,)
    text = "new: ✓ \t\r\n\x00 <|x|> é"
    assert masker.tokenizer.decode(masker.tokenizer.encode(text)) == text
    with pytest.raises(ConfigError, match="at least 257"):
        train_bpe(TEXTS, 256, tmp_path)
