"""Claims about benchmarks/peers.py that need no peer: workers, arithmetic, GGUF files."""

import dataclasses
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import HYBRID, LLAMA, QWEN3_NEXT, float32, parameters, random_model

from gdn import save_pretrained

# The scripts import each other by name, so the folder has to be on the path, of workers as well.
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
engines: Any = importlib.import_module("engines")
peers: Any = importlib.import_module("peers")
peers_report: Any = importlib.import_module("peers_report")
gguf_export: Any = importlib.import_module("gguf_export")


class Fake:
    """An engine that can do nothing but what these tests ask."""

    def __init__(self, settings):
        if settings is None:
            raise ValueError("no settings\nat all")
        self.held = bytearray(settings)

    def size(self, more):
        """Return how many bytes are held, and more."""
        return len(self.held) + more

    def die(self):
        """End the process as a crash in C would."""
        os._exit(3)


def test_a_worker_answers_commands_and_tells_its_own_peak_memory():
    small, large = engines.Worker(Fake, 10), engines.Worker(Fake, 300 << 20)
    assert small.ask("size", 5) == 15
    assert large.ask("size", 0) == 300 << 20
    memory = large.stop() - small.stop()
    assert 290 << 20 < memory < 310 << 20
    assert not small.process.is_alive() and not large.process.is_alive()


def test_errors_of_a_worker_arrive_as_one_line():
    with pytest.raises(engines.EngineError, match=r"^ValueError: no settings$"):
        engines.Worker(Fake, None)
    with pytest.raises(engines.EngineError, match=r"^AttributeError: .* 'generate'$"):
        engines.Worker(Fake, 1).ask("generate", [1], 2)


def test_a_worker_that_dies_does_not_leave_the_run_waiting():
    worker = engines.Worker(Fake, 1)
    with pytest.raises(engines.EngineError, match="exit code 3"):
        worker.ask("die")


def generated(count: int, passes: int, seconds: float, total: float = 0.0):
    return engines.Generated(list(range(count)), passes, seconds, total)


FOUND = {
    ("generate", "a", 0): [generated(10, 5, 1.0), generated(10, 5, 2.0), generated(10, 5, 4.0)],
    ("generate", "b", 1): [generated(30, 10, 3.0), generated(30, 10, 3.0), generated(30, 10, 6.0)],
    ("first", 512): [generated(1, 1, 0.1, 0.5), generated(1, 1, 0.1, 0.7)],
    ("verify", 1): [0.5, 0.25, 0.75],
    ("verify", 8): [1.0, 1.0, 2.0],
}


def test_tokens_per_second_are_taken_over_all_prompts_of_a_round():
    found = peers_report.summary(FOUND, 100.0, 1000.0)
    assert found["tokens_per_second"] == 8.0 and found["spread"] == (4.0, 10.0)
    assert found["by_file"] == {"a": 5.0, "b": 10.0}
    assert found["tokens_a_pass"] == pytest.approx(40 / 15)
    assert found["first"] == {512: pytest.approx(0.6)}
    assert found["verify"] == {1: 0.5, 8: 1.0}


def test_the_share_of_the_bandwidth_counts_passes_not_tokens():
    # 8 tokens/s at 40 tokens in 15 passes are 3 passes/s of 100 bytes, of 1000 bytes/s.
    assert peers_report.summary(FOUND, 100.0, 1000.0)["share"] == pytest.approx(0.3)
    assert peers_report.summary(FOUND, None, 1000.0)["share"] is None


def test_a_tied_head_is_read_once_and_an_embedding_not_at_all():
    tied = dataclasses.replace(LLAMA, tie_word_embeddings=True)
    for cfg in (LLAMA, tied):
        found = peers.weight_bytes(cfg, "bfloat16")
        assert set(found.values()) == {2 * tied.num_parameters()}
    assert peers.weight_bytes(LLAMA, "int8")[peers.LLAMA] == tied.num_parameters() * 34 / 32


def test_the_report_compares_with_llama_cpp_and_names_every_engine(capsys):
    slower = {task: [2 * x if task[0] == "verify" else x for x in y] for task, y in FOUND.items()}
    found = {
        name: peers_report.summary(x, 100.0, 1000.0) | {"memory": 5_000_000}
        for name, x in ((peers.OURS, FOUND), (peers.LLAMA, slower))
    }
    peers_report.report(found, {peers.LLAMA: 2e-6}, [1e9, 2e9])
    text = capsys.readouterr().out
    assert f"times {peers.LLAMA}" in text
    assert "| this package | 8.0 | 4.0 to 10.0 | 1.00 | 2.67 | 30% | 0.60 s | 5 MB |" in text
    assert "| this package | 500.00 ms | 2.00 |" in text
    assert "| llama.cpp | 1000.00 ms | 2.00 |" in text
    assert "logits differ by 2.0e-06 of the largest; 40 of 40 tokens" in text


def test_prompts_that_cannot_be_read_are_one_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "abc"}\r\n\n{"prompt": "defg"}\n')
    found = peers.read_prompts([str(path)], str(tmp_path), 256, 4, 3)
    assert found == [(str(path), [*b"abc"]), (str(path), [*b"efg"])]
    for text, said in (("{", "not JSON"), ('{"text": "a"}', "neither prompt nor messages")):
        path.write_text(text)
        with pytest.raises(SystemExit, match=said):
            peers.read_prompts([str(path)], str(tmp_path), 256, 4, 3)


def test_tokens_are_the_same_up_to_the_first_difference():
    assert peers_report.same_tokens([1, 2, 3], [1, 2, 3]) == 3
    assert peers_report.same_tokens([1, 2, 3], [1, 5, 3]) == 1


class Steady:
    """An engine that always says the same."""

    logits = np.ones((2, 3), np.float32)

    def __init__(self, settings):
        pass

    def generate(self, prompt, count):
        """Return `count` tokens."""
        return generated(count, count, 0.5)

    def verify(self, nodes):
        """Return seconds."""
        return 0.25

    def score(self, ids):
        """Return logits."""
        return self.logits


class Wrong(Steady):
    """An engine of another model."""

    logits = np.full((2, 3), 1.01, np.float32)


class Failing(Steady):
    """An engine that loads and cannot do the work."""

    def verify(self, nodes):
        """Fail as llama.cpp would."""
        raise ValueError("llama_decode returned 1")


def group_of(monkeypatch, **changes):
    names = [peers.OURS, *(getattr(peers, name) for name in changes)]
    kinds = dict(zip(names, (Steady, *changes.values()), strict=True))
    monkeypatch.setattr(peers, "ENGINES", kinds)
    monkeypatch.setattr(peers, "read_bandwidth", lambda: 1e9)
    return peers.Group(engines.Settings("", "float32", 64), names)


def test_a_peer_that_fails_is_given_up_and_the_rest_is_measured(monkeypatch, capsys):
    group = group_of(monkeypatch, TORCH=Failing, LLAMA=Steady)
    tasks = peers.make_tasks([("file", [1, 2])], [8], [1], 4, 16)
    group.measure(tasks, rounds=2)
    found = group.summaries({})
    given_up = "- transformers: given up, ValueError: llama_decode returned 1"
    assert given_up in capsys.readouterr().out
    assert list(found) == [peers.OURS, peers.LLAMA]
    assert found[peers.OURS]["tokens_per_second"] == 8.0
    assert found[peers.LLAMA]["verify"] == {1: 0.25}
    assert len(group.bandwidths) == 2


def test_the_run_ends_where_an_engine_computes_another_model(monkeypatch):
    group = group_of(monkeypatch, LLAMA=Wrong)
    group.compare([1, 2], None, strict=False)
    assert group.errors == {peers.LLAMA: pytest.approx(0.01, rel=1e-3)}
    with pytest.raises(SystemExit, match=r"llama\.cpp computes another model: .* 1\.0e-02"):
        group.compare([1, 2], None, strict=True)
    for worker in group.workers.values():
        worker.stop()


def test_a_model_that_llama_cpp_lacks_is_named(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    assert peers.missing(LLAMA) == {}
    assert "one size for key and value heads, not 8 and 12" in peers.missing(HYBRID)[peers.LLAMA]
    assert "no export of qwen3_next" in peers.missing(QWEN3_NEXT)[peers.LLAMA]


def test_peers_that_are_not_installed_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    reasons = peers.missing(LLAMA)
    assert set(reasons) == {peers.TORCH, peers.LLAMA}
    assert "llama_cpp and gguf not installed; CMAKE_ARGS=" in reasons[peers.LLAMA]
    assert all("pip install" in reason for reason in reasons.values())


def exported(cfg, folder: Path, kind: str):
    """Return the tensors of a random model's GGUF file, read back, and the model's own."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install -e '.[bench]'")
    model = random_model(cfg)
    save_pretrained(model, folder)
    gguf_export.export(folder, folder / "model.gguf", kind)
    fields = gguf.GGUFReader(folder / "model.gguf")
    read = {x.name: gguf.dequantize(x.data, x.tensor_type) for x in fields.tensors}
    return read, parameters(model)


@pytest.mark.parametrize("kind, error", [("f32", 0.0), ("bf16", 2.0**-8), ("q8_0", 1 / 127)])
def test_gguf_files_hold_every_weight_in_the_precision_asked_for(tmp_path, kind, error):
    read, own = exported(LLAMA, tmp_path, kind)
    assert len(read) == len(own)
    for name, path in (("output", "lm_head"), ("blk.1.ffn_up", "layers.1.mlp.up_proj")):
        expected = float32(own[path])
        assert np.abs(read[f"{name}.weight"] - expected).max() <= error * np.abs(expected).max()
    norm = float32(own["layers.0.post_attention_layernorm.weight"])
    np.testing.assert_array_equal(read["blk.0.ffn_norm.weight"], norm)


def test_rows_of_rotated_pairs_become_neighbours_for_llama(tmp_path):
    read, own = exported(LLAMA, tmp_path, "f32")
    rows = float32(own["layers.0.self_attn.k_proj"])
    order = [8 * head + place for head in range(2) for i in range(4) for place in (i, i + 4)]
    np.testing.assert_array_equal(read["blk.0.attn_k.weight"], rows[order])
    values = float32(own["layers.0.self_attn.v_proj"])
    np.testing.assert_array_equal(read["blk.0.attn_v.weight"], values)


def test_value_heads_of_hybrids_are_ordered_so_that_key_heads_repeat_as_a_block(tmp_path):
    cfg = dataclasses.replace(HYBRID, linear_value_head_dim=HYBRID.linear_key_head_dim)
    read, own = exported(cfg, tmp_path, "f32")
    heads = [0, 2, 1, 3]  # of two key heads with two value heads each
    rate = float32(own["layers.0.linear_attn.A_log"])
    np.testing.assert_allclose(read["blk.0.ssm_a"], -np.exp(rate[heads]), rtol=1e-6)
    columns = np.concatenate([np.arange(8 * head, 8 * head + 8) for head in heads])
    out = float32(own["layers.0.linear_attn.out_proj"])
    np.testing.assert_array_equal(read["blk.0.ssm_out.weight"], out[:, columns])
    mixed, keys = float32(own["layers.0.linear_attn.in_proj_qkv"]), 2 * 2 * 8
    expected = np.concatenate([mixed[:keys], mixed[keys:][columns]])
    np.testing.assert_array_equal(read["blk.0.attn_qkv.weight"], expected)
    norm = float32(own["norm.weight"])
    np.testing.assert_array_equal(read["output_norm.weight"], norm + 1)
