"""With the native kernels, verifying a tree is plain decoding of its paths, bit for bit."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import HYBRID, LLAMA, QWEN3_NEXT, random_model

from eagle3.cli.engine import build
from eagle3.config import ConfigError, DecodeConfig
from gdn import commit, init_cache, save_pretrained, tree_from_parents
from gdn.ops import native
from gdn.packing import Packer, finish

# Heads as the kernels take them, and a head size that fills no vector of any processor alone.
WIDE = dataclasses.replace(HYBRID, linear_key_head_dim=16, linear_value_head_dim=48)
WIDE_MIXTURE = dataclasses.replace(
    QWEN3_NEXT, linear_key_head_dim=16, linear_value_head_dim=48, moe_layers=(True, True),
    moe_intermediate_size=48,
)  # fmt: skip
WIDE_LLAMA = dataclasses.replace(LLAMA, head_dim=48)
PARENTS = [[-1, 0, 0, 1, 1, 3, 2, 0], [-1, 0, 1, 2, 3, 4, 5, 6]]  # of two rows
LENGTHS = (37, 30)  # of what is committed: the first tree crosses no block of keys, the second does


@pytest.fixture(autouse=True)
def kernels():
    if why := native.problem():
        pytest.skip(why)


@partial(jax.jit, static_argnames="graph")
def step(graph, params, cache, tokens, parents, path):
    """Verify trees and commit paths."""
    model = nnx.merge(graph, params)
    out = model.verify(tokens, tree_from_parents(parents), cache)
    return out.logits, commit(cache, out.updates, path)


def plainly(run, cache, tokens, counts):
    """Decode the first `counts` tokens of each row one at a time; logits, cache."""
    found = []
    for place in range(tokens.shape[1]):
        path = np.where(place < np.asarray(counts), 0, -1).astype(np.int32)[:, None]
        token = jnp.asarray(tokens[:, place : place + 1])
        logits, cache = run(cache, token, jnp.full((len(counts), 1), -1), jnp.asarray(path))
        found.append(np.asarray(logits)[:, 0])
    return np.stack(found, axis=1), cache


@pytest.mark.parametrize(
    "cfg, dtype",
    [(WIDE, "float32"), (WIDE, "int8"), (WIDE_LLAMA, "bfloat16")]
    + [(WIDE_MIXTURE, dtype) for dtype in ("float32", "int8")],
    ids=["hybrid-float32", "hybrid-int8", "llama-bfloat16", "mixture-float32", "mixture-int8"],
)
def test_every_node_has_the_bits_of_plain_decoding_and_so_has_the_cache(cfg, dtype):
    packer, model = Packer(dtype, native=True), random_model(cfg)
    finish((model, packer))
    assert packer.bitwise_problem(cfg) is None
    graph, params = nnx.split(model)
    run = partial(step, graph, nnx.to_pure_dict(params))
    rng = np.random.default_rng(0)
    text = rng.integers(0, cfg.vocab_size, (2, max(LENGTHS))).astype(np.int32)
    _, cache = plainly(run, init_cache(cfg, 2, 64), text, LENGTHS)

    nodes = rng.integers(0, cfg.vocab_size, (2, 8)).astype(np.int32)
    parents = jnp.asarray(PARENTS, jnp.int32)
    ancestors = np.asarray(tree_from_parents(parents).ancestors)
    for leaves in ((5, 6), (6, 4), (4, 3), (2, 2)):
        paths = [np.flatnonzero(ancestors[row, leaf]) for row, leaf in enumerate(leaves)]
        longest = max(map(len, paths))
        path = np.full((2, 8), -1, np.int32)
        tokens = np.zeros((2, longest), np.int32)
        for row, found in enumerate(paths):
            path[row, : len(found)] = found
            tokens[row, : len(found)] = nodes[row, found]
        verified, after = run(cache, jnp.asarray(nodes), parents, jnp.asarray(path))
        wanted, plain = plainly(run, cache, tokens, [len(found) for found in paths])
        for row, found in enumerate(paths):
            np.testing.assert_array_equal(
                np.asarray(verified)[row, found], wanted[row, : len(found)]
            )
        for actual, expected in zip(jax.tree.leaves(after), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_deterministic_is_refused_where_it_cannot_be_kept(tmp_path):
    save_pretrained(random_model(HYBRID), tmp_path)
    why = r"heads of \[8, 12, 16\] numbers are not all of a multiple of 16"
    with pytest.raises(ConfigError, match=why):
        build(DecodeConfig(target=str(tmp_path), deterministic=True))
    with pytest.raises(ConfigError, match="the native kernels are off"):
        build(DecodeConfig(target=str(tmp_path), deterministic=True, native="off"))
