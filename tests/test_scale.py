"""Claims about rooflines on paper: bytes are those of the models, limits hold, the page is new."""

import importlib
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import HYBRID, QWEN3_5_MOE, TIED_HYBRID

from eagle3.dry_run import abstract_draft, abstract_target, bytes_of, number_of
from gdn import HybridLM, chain_tree, init_cache
from gdn.cache import KVCache, RecurrentState, RecurrentUpdate
from gdn.published import NAMES

BATCH, NODES, CAPACITY = 2, 5, 8
DTYPE = jnp.bfloat16


@pytest.fixture(scope="module")
def scale():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("benchmarks")  # scripts there import one another
        yield importlib.import_module("scale")


@pytest.fixture(scope="module")
def roofline(scale):
    return importlib.import_module("roofline")


@pytest.fixture(scope="module")
def setting(roofline):
    def make(name: str, device: str, batch: int, context: int):
        found = next(x for x in roofline.DEVICES if x.name == device)
        return roofline.Setting(roofline.shape(name), found, batch, context)

    return make


@pytest.mark.parametrize("cfg", [HYBRID, TIED_HYBRID, QWEN3_5_MOE], ids=["plain", "tied", "moe"])
def test_many_tokens_read_all_weights_but_an_untied_embedding(roofline, cfg):
    model = abstract_target(cfg, DTYPE)
    unread = 0 if cfg.tie_word_embeddings else cfg.vocab_size * cfg.hidden_size
    expected = 2 * (number_of(nnx.state(model)) - unread)
    assert roofline.weight_bytes(cfg, 10**6) == pytest.approx(expected, rel=1e-6)


def test_one_token_reads_the_experts_it_visits(roofline):
    cfg = QWEN3_5_MOE
    idle = cfg.num_experts - cfg.num_experts_per_tok
    unread = 2 * 3 * cfg.hidden_size * cfg.moe_intermediate_size * idle * sum(cfg.moe_layers)
    assert roofline.distinct_experts(cfg, 1) == pytest.approx(cfg.num_experts_per_tok)
    found = roofline.weight_bytes(cfg, 10**6) - roofline.weight_bytes(cfg, 1)
    assert found == pytest.approx(unread, rel=1e-6)


def test_caches_and_updates_take_the_bytes_that_decoding_gives_them(roofline):
    def verify(model):
        tokens, tree = jnp.zeros((BATCH, NODES), jnp.int32), chain_tree(BATCH, NODES)
        cache = init_cache(HYBRID, BATCH, CAPACITY, DTYPE)
        return cache.layers, HybridLM.verify(model, tokens, tree, cache).updates

    layers, updates = jax.eval_shape(verify, abstract_target(HYBRID, DTYPE))

    def size(entries, kind):
        return sum(bytes_of(x) for x in entries if isinstance(x, kind))

    assert size(layers, KVCache) == BATCH * CAPACITY * roofline.kv_bytes(HYBRID)
    assert size(layers, RecurrentState) == BATCH * roofline.state_bytes(HYBRID)
    assert size(updates, RecurrentUpdate) == BATCH * NODES * roofline.update_bytes(HYBRID)


@pytest.mark.parametrize("name", [NAMES[0], NAMES[-1]])
def test_a_draft_reads_its_weights_and_the_fusing_layer_once_a_round(roofline, name):
    cfg = roofline.draft_of(roofline.shape(name))
    weights = number_of(nnx.state(abstract_draft(cfg, DTYPE), nnx.Param))
    empty = [roofline.draft_pass(cfg, 0, 0, 1, fused).bytes for fused in (True, False)]
    assert empty[0] == pytest.approx(2 * weights, rel=1e-3)  # norms are left out
    assert empty[0] - empty[1] == 2 * 3 * cfg.target_hidden_size * cfg.hidden_size


def test_copies_move_as_many_states_as_nodes_and_the_closed_form_three(roofline):
    cfg = roofline.shape(NAMES[0])
    state = roofline.state_bytes(cfg)
    for nodes in (2, 8, 32):
        moved = {form: roofline.state_traffic(cfg, nodes, form) for form in roofline.FORMS}
        assert moved["copies"] == 2 * nodes * state
        assert moved["chain copies"] == (nodes + 1) * state
        assert moved["closed"] == 3 * state + 2 * nodes * roofline.update_bytes(cfg)
    assert len({roofline.state_traffic(cfg, 1, form) for form in roofline.FORMS}) == 1


def test_a_tree_has_the_likeliest_paths(roofline):
    places = range(len(roofline.ACCEPTED))
    paths = (x for depth in range(8) for x in itertools.product(places, repeat=depth))
    chances = [math.prod(roofline.ACCEPTED[i] for i in path) for path in paths]
    assert roofline.best_tree(8).tau == pytest.approx(sum(sorted(chances)[-8:]))
    assert roofline.best_tree(2) == roofline.chain(1)


def test_a_dense_model_is_bound_by_memory_alone_and_by_arithmetic_in_a_crowd(roofline, setting):
    alone, crowd = (setting("Qwen3.5-9B", "2 CPU cores", batch, 0) for batch in (1, 1 << 16))
    loads = [roofline.target_pass(x.cfg, x.batch, x.context) for x in (alone, crowd)]
    ridge = alone.device.flops / alone.device.bandwidth
    assert loads[0].flops / loads[0].bytes < ridge < loads[1].flops / loads[1].bytes
    assert alone.best()[0] > 1 > crowd.best()[0]
    losing = roofline.losing_batches(alone, roofline.PLANS, 1 << 12)
    assert losing == [1 << i for i in range(losing[0].bit_length() - 1, 13)]


def test_a_round_needs_as_many_tokens_as_plain_passes_take_its_time(setting, roofline):
    here, plan = setting("Qwen3.5-4B", "A100 80G SXM", 8, 4096), roofline.chain(3)
    assert here.break_even(plan) == here.round_seconds(plan) / here.plain_seconds()
    assert here.best([plan])[0] == pytest.approx(plan.tau / here.break_even(plan))
    assert here.break_even(plan) < here.break_even(plan, "copies")


def test_devices_hold_weights_and_caches(roofline, setting):
    assert roofline.devices_needed(setting("Qwen3.5-27B", "H100 SXM", 1, 4096)) == 1
    # Keys of ten layers of the target, and of the draft; 208 million weights of the draft.
    many = setting("Qwen3.5-35B-A3B", "H100 SXM", 128, 262144)
    rows = 128 * (262144 * (20480 + 2048) + roofline.state_bytes(many.cfg))
    weights = 2 * many.cfg.num_parameters() + 416e6
    assert roofline.devices_needed(many) == math.ceil((weights + rows) / 72e9)


def test_ranges_of_batches_are_told_briefly(scale):
    assert scale.batches_text([]) == "-"
    assert scale.batches_text([2, 4, 8, 1024, 2048, 4096]) == "2-8, 1024+"
    assert scale.batches_text([4]) == "4"


def test_the_page_is_what_the_script_makes(scale):
    """Run `python benchmarks/scale.py` if this fails."""
    assert scale.PAGE.read_text(encoding="utf-8") == scale.page()
    assert Path("benchmarks/scale.md").resolve() == scale.PAGE.resolve()
