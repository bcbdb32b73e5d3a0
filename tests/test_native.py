"""The native kernels: right on odd sizes, row by row on their own, and never needed."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative_error

from eagle3.decoding import sampling
from gdn.deltanet import l2_normalize
from gdn.layers import embed, linear, linears, rms_norm
from gdn.ops import native
from gdn.ops.attention import attention, masked_attention, merge_attention
from gdn.ops.conv import short_conv_tree
from gdn.ops.native import compiler
from gdn.ops.packed import pack, pack_stack
from gdn.ops.quantized import quantize, quantize_stack, quantized_matmul
from gdn.ops.tree import commit_state, tree_delta_rule, tree_from_parents
from gdn.packing import DTYPES

SANITIZERS = (
    "-O1", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)  # fmt: skip
SIZES = ((1, 1), (16, 4), (17, 5), (100, 33), (333, 129))
needs_kernels = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler"
)


def matrix(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def rounded(x):
    """Round activations as the kernels do: int8 with a scale for every 64."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 64)))
    spans = quantize(padded.reshape(-1, 64))
    return spans.rows(jnp.arange(len(spans.values))).reshape(padded.shape)[:, : x.shape[1]]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out, inputs", SIZES)
def test_products_are_those_of_the_rounded_weight(dtype, out, inputs):
    weight, packed = matrix(0, out, inputs), pack(matrix(0, out, inputs), dtype)
    for rows in (1, 2, 7, 40):
        x = matrix(rows, rows, inputs)
        y = np.asarray(native.matmul(x, packed))
        if dtype == "int8":
            x, weight_kept = rounded(x), quantize(weight).rows(jnp.arange(out))
        else:
            x, weight_kept = x.astype(dtype), weight.astype(dtype)
        wanted = np.asarray(x, np.float64) @ np.asarray(weight_kept, np.float64).T
        np.testing.assert_allclose(y, wanted, rtol=2e-6, atol=2e-6 * np.abs(wanted).max())


@needs_kernels
@pytest.mark.parametrize("rows", [1, 8, 40])  # 40 are many for XLA, which rounds fewer only
def test_an_input_a_hundred_times_as_large_as_others_costs_few_of_them_their_bits(rows):
    x, kept = matrix(0, rows, 576).at[:, 5].set(100.0), quantize(matrix(1, 32, 576))
    weight = np.asarray(kept.rows(jnp.arange(32)), np.float64).T
    wanted = np.asarray(x) @ weight
    whole_rows = relative_error(np.asarray(quantize(x).rows(jnp.arange(rows))) @ weight, wanted)
    packed = pack(matrix(1, 32, 576), "int8")
    assert relative_error(native.matmul(x, packed), wanted) < whole_rows / 2
    assert relative_error(quantized_matmul(x, kept), wanted) < whole_rows / 100


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_whatever_rows_are_beside_it(dtype):
    packed, x = pack(matrix(0, 333, 129), dtype), matrix(1, 40, 129)
    whole = np.asarray(native.matmul(x, packed))
    for rows in (1, 3, 8, 33):
        np.testing.assert_array_equal(np.asarray(native.matmul(x[:rows], packed)), whole[:rows])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_multiplied_together_give_the_bits_of_each_alone(dtype):
    x, sizes = matrix(1, 40, 40), (20, 3, 640)  # enough for all threads
    weights = [pack(matrix(seed, out, 40), dtype) for seed, out in enumerate(sizes, start=2)]
    together = native.matmuls(x, weights)
    for y, weight in zip(together, weights, strict=True):
        assert y.shape == (40, weight.shape[0])
        np.testing.assert_array_equal(y, native.matmul(x, weight))


@needs_kernels
def test_layers_multiply_types_apart_and_kernels_refuse_to_mix_them():
    x, types = matrix(1, 2, 3, 40), ("int8", "bfloat16", "int8")
    weights = [pack(matrix(seed, 20, 40), dtype) for seed, dtype in enumerate(types, start=2)]
    for y, weight in zip(linears(x, *weights), weights, strict=True):
        np.testing.assert_array_equal(y, linear(x, weight))
    with pytest.raises(ValueError, match="different types together"):
        native.matmuls(x[0], weights)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_are_looked_up_as_they_were(dtype):
    weight, tokens = matrix(0, 21, 7), jnp.array([[0, 20], [16, 3]])
    wanted = embed(quantize(weight) if dtype == "int8" else weight.astype(dtype), tokens)
    found = embed(pack(weight, dtype), tokens)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted, np.float32))


@needs_kernels
def test_no_rows_have_no_products():
    assert native.matmul(jnp.zeros((0, 40)), pack(matrix(0, 20, 40), "float32")).shape == (0, 20)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_stay_in_their_row(dtype):
    x = matrix(1, 6, 200).at[2, 70].set(jnp.nan).at[4, 199].set(jnp.inf)
    y = np.asarray(native.matmul(x, pack(matrix(0, 20, 200), dtype)))
    assert np.isfinite(y[[0, 1, 3, 5]]).all()
    assert not np.isfinite(y[[2, 4]]).any()


@needs_kernels
def test_a_peak_is_the_lowest_of_the_likeliest_tokens_and_the_total_that_of_xla():
    logits = matrix(2, 5, 5001).at[0, 7].set(9.0).at[0, 900].set(9.0).at[1, 5000].set(11.0)
    logits = logits.at[2, :4990].set(-jnp.inf)
    place, total = native.peak(logits)
    wanted = sampling.peak(logits)
    assert place.tolist() == wanted.token.tolist() and place.tolist()[:2] == [7, 5000]
    np.testing.assert_allclose(total, wanted.log_total, rtol=1e-6)
    spoilt = native.peak(logits.at[3, 4].set(jnp.nan))[1]
    assert np.isnan(spoilt[3]) and np.isfinite(np.delete(spoilt, 3)).all()


@needs_kernels
@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_best_tokens_are_those_of_xla_in_its_order(count):
    logits = jnp.round(matrix(2, 8, 5001) * 4) / 4  # with many equals
    logits = logits.at[1, :4990].set(-jnp.inf).at[2, 7].set(jnp.nan).at[3].set(jnp.nan)
    logits = logits.at[4, 5000].set(jnp.inf).at[5].set(-jnp.inf)
    rows = logits.reshape(2, 4, -1)
    wanted, found = (sampling.best(rows, count, -1e30, kernels) for kernels in (False, True))
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.logits, wanted.logits)
    plain = np.array([0, 1, 6, 7])  # of the others it is no number, or none that is finite
    np.testing.assert_allclose(
        found.log_total.reshape(8)[plain], wanted.log_total.reshape(8)[plain], rtol=1e-6
    )
    assert np.isnan(found.log_total[0, 2:]).all()


def random_tree(seed, batch, nodes):
    """Return parents [B, M]."""
    rng = np.random.default_rng(seed)
    rows = [[-1, *(int(rng.integers(-1, i)) for i in range(1, nodes))] for _ in range(batch)]
    return jnp.asarray(rows, jnp.int32)


@needs_kernels
@pytest.mark.parametrize(
    "nodes, key_heads, capacity, size, starts",
    [(1, 2, 64, 16, [5, 0]), (7, 3, 128, 64, [0, 31, 100]), (5, 1, 1100, 32, [1022, 1095])],
)
def test_attention_of_a_tree_is_that_of_the_cache_and_the_ancestors(
    nodes, key_heads, capacity, size, starts
):
    batch, heads = len(starts), 3 * key_heads
    q = matrix(0, batch, nodes, heads, size)
    k, v = (matrix(i, batch, key_heads, capacity, size) for i in (1, 2))
    own_k, own_v = (matrix(i, batch, key_heads, nodes, size) for i in (3, 4))
    start, ancestors = jnp.array(starts), tree_from_parents(random_tree(5, batch, nodes)).ancestors
    found = native.tree_attention(q, k, v, start, own_k, own_v, ancestors)
    last = jnp.broadcast_to(start[:, None] - 1, (batch, nodes))
    wanted = merge_attention(attention(q, k, v, last), masked_attention(q, own_k, own_v, ancestors))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


@needs_kernels
@pytest.mark.parametrize("nodes, heads, key_size, size", [(1, 1, 16, 16), (6, 4, 32, 48)])
def test_a_native_delta_net_is_the_closed_form_between_convolution_and_norm(
    nodes, heads, key_size, size
):
    batch, key_heads, width = 2, max(1, heads // 2), 4
    channels = 2 * key_heads * key_size + heads * size
    inputs, window = matrix(0, batch, nodes, channels), matrix(1, batch, width - 1, channels)
    taps, a_log, dt_bias, norm = (
        matrix(2, channels, width), matrix(3, heads), matrix(4, heads), matrix(5, size),
    )  # fmt: skip
    a, b = matrix(6, batch, nodes, heads), matrix(7, batch, nodes, heads)
    z, state = matrix(8, batch, nodes, heads, size), matrix(9, batch, heads, key_size, size)
    tree = tree_from_parents(random_tree(10, batch, nodes))
    weights = native.DeltaNetWeights(taps, a_log, dt_bias, norm)
    found = native.tree_delta_net(
        inputs, window, a, b, z, state, tree.ancestors, weights, key_heads, 1e-6
    )
    mixed = jax.nn.silu(short_conv_tree(inputs, taps, window, tree))
    q, k, v = jnp.split(mixed, (key_heads * key_size, 2 * key_heads * key_size), axis=-1)
    q, k = (l2_normalize(x.reshape(batch, nodes, key_heads, key_size)) for x in (q, k))
    g = -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)
    out, u = tree_delta_rule(
        q * key_size**-0.5, k, v.reshape(z.shape), g, jax.nn.sigmoid(b), state, tree
    )
    out = rms_norm(out, norm, 1e-6, unit_offset=False) * jax.nn.silu(z)
    for actual, wanted in zip(found, (out, k, u, g), strict=True):
        assert relative_error(actual, wanted) < 2e-6
    path = jnp.array([[0, -1], [-1, -1]])
    committed = native.commit_state(state, found.k, found.u, found.g, path)
    assert relative_error(committed, commit_state(state, k, u, g, path)) < 2e-6
    np.testing.assert_array_equal(committed[1], state[1])


def mixture(experts, rows=9, width=33, inner=17):
    """Return rows, logits of a router, and the matrices of some experts."""
    shapes = (rows, width), (rows, experts), (experts, 2 * inner, width), (experts, width, inner)
    return [matrix(seed, *shape) for seed, shape in enumerate(shapes)]


@needs_kernels
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_those_of_the_rounded_weights(dtype, normalise):
    x, logits, up, down = mixture(6)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits), 3)
    if normalise:
        shares = shares / shares.sum(-1, keepdims=True)
    plain: list[Any] = [
        quantize_stack(w) if dtype == "int8" else w.astype(dtype) for w in (up, down)
    ]

    def as_kept(x):
        return rounded(x) if dtype == "int8" else x.astype(dtype).astype(jnp.float32)

    wanted = np.zeros(x.shape)
    for row in range(len(x)):
        for share, expert in zip(shares[row], chosen[row], strict=True):
            up_of, down_of = (
                w[expert] if dtype == "int8" else w[expert].astype(jnp.float32) for w in plain
            )
            gate, value = jnp.split(linear(as_kept(x[row : row + 1]), up_of), 2, axis=-1)
            hidden = as_kept(jax.nn.silu(gate) * value)
            wanted[row] += share * np.asarray(linear(hidden, down_of))[0]
    up, down = pack_stack(up, dtype), pack_stack(down, dtype)
    found = np.asarray(native.experts(x, logits, up, down, 3, normalise))
    # The last bits of a number decide to which step of int8 or bfloat16 it is rounded.
    tolerance = {"float32": 1e-5, "bfloat16": 4e-3, "int8": 2e-2}
    assert relative_error(found, wanted) < tolerance[dtype]
    for rows in ([0], [3, 8], list(range(8, -1, -1))):
        index = np.array(rows)
        some = native.experts(x[index], logits[index], up, down, 3, normalise)
        np.testing.assert_array_equal(np.asarray(some), found[index])


@needs_kernels
def test_experts_of_numbers_that_are_none_spoil_their_row_alone():
    x, logits, up, down = mixture(6)
    up, down = pack_stack(up, "float32"), pack_stack(down, "float32")
    whole = np.asarray(native.experts(x, logits, up, down, 3, True))
    broken = np.asarray(native.experts(x, logits.at[4, 5].set(jnp.nan), up, down, 3, True))
    assert np.isnan(broken[4]).all()
    np.testing.assert_array_equal(np.delete(broken, 4, 0), np.delete(whole, 4, 0))
    none = native.experts(x[:0], logits[:0], up, down, 3, True)
    assert none.shape == (0, 33)


@needs_kernels
def test_experts_that_do_not_fit_are_named():
    x, logits, up, down = mixture(6)
    up, down = pack_stack(up, "float32"), pack_stack(down, "float32")
    with pytest.raises(ValueError, match=r"33 columns, experts are \(34, 33\) and \(34, 33\)"):
        native.experts(x, logits, up, up, 3, True)
    with pytest.raises(ValueError, match="different types"):
        native.experts(x, logits, up, pack_stack(matrix(0, 6, 33, 17), "int8"), 3, True)
    with pytest.raises(Exception, match=r"native experts: .* do not fit 5 experts of \[34, 33\]"):
        jax.block_until_ready(native.experts(x, logits[:, :5], up, down, 3, True))
    with pytest.raises(Exception, match="native experts: shapes"):
        jax.block_until_ready(native.experts(x, logits, up, down, 7, True))


@needs_kernels
def test_attention_says_what_it_cannot_do():
    q, kv = matrix(0, 1, 1, 2, 8), matrix(1, 1, 1, 4, 8)
    own, start, mask = matrix(2, 1, 1, 1, 8), jnp.array([3]), jnp.ones((1, 1, 1), bool)
    with pytest.raises(ValueError, match="heads of a multiple of 16 numbers, got 8"):
        native.tree_attention(q, kv, kv, start, own, own, mask)
    wide = [jnp.concatenate([x, x], axis=-1) for x in (q, kv, own)]
    with pytest.raises(Exception, match="more keys than the cache has room for"):
        native.tree_attention(wide[0], wide[1], wide[1], start + 2, wide[2], wide[2], mask)
    with pytest.raises(Exception, match="nodes must be their own ancestors, and parents before"):
        native.tree_attention(wide[0], wide[1], wide[1], start, wide[2], wide[2], ~mask)


def test_int8_rounds_each_row_to_127_steps_and_zero_rows_to_zero():
    weight = matrix(0, 5, 9).at[3].set(0.0)
    kept = quantize(weight)
    error = np.abs(np.asarray(kept.rows(jnp.arange(5)) - weight))
    assert (error <= np.asarray(kept.scales)[:, None] * 0.5001).all()
    assert not np.asarray(kept.values[3]).any()
    product = linear(matrix(1, 1, 9), kept)
    np.testing.assert_allclose(product, linear(matrix(1, 1, 9), weight), atol=0.1)


@needs_kernels
def test_calls_that_meet_in_one_program_and_in_a_loop_do_not_wait_for_each_other():
    packed = [pack(matrix(i, 256, 256), "float32") for i in range(6)]
    x = matrix(9, 4, 256)

    @jax.jit
    def run(x):
        def step(_, total):
            return total + sum(native.matmul(x * i, w) for i, w in enumerate(packed))

        return jax.lax.fori_loop(0, 20, step, jnp.zeros((4, 256)))

    wanted = 20 * sum(np.asarray(native.matmul(x * i, w)) for i, w in enumerate(packed))
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: np.asarray(run(x)), range(8)):
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-2)


@needs_kernels
def test_shapes_that_do_not_fit_are_named():
    packed = pack(matrix(0, 20, 8), "float32")
    with pytest.raises(ValueError, match="x has 9 columns, the packed weight 8 inputs"):
        native.matmul(matrix(1, 2, 9), packed)
    native.problem()
    call = jax.ffi.ffi_call("gdn_matmul_float32", jax.ShapeDtypeStruct((2, 40), jnp.float32))
    with pytest.raises(
        Exception, match=r"native matmul: packed weights have shape \[2, 8, 16, 1\]"
    ):
        call(matrix(1, 2, 8), packed.data)


def test_without_a_compiler_the_reason_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compiler.BuildError, match="no C\\+\\+ compiler"):
        compiler.build(tmp_path)


@needs_kernels
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(monkeypatch, tmp_path):
    fake = tmp_path / "c++"
    lines = ("#!/bin/sh", "case $* in *-dM*) exit 0;; esac")  # macros can be had
    lines += ("echo 'x.cc:1: error: no such thing' >&2", "exit 1")
    fake.write_text("\n".join(lines) + "\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compiler.BuildError, match="no such thing"):
        compiler.build(tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


@needs_kernels
def test_processes_that_start_at_once_build_one_library_and_one_cut_short_is_made_anew(tmp_path):
    # Not optimised, which takes most of the compiler's time.
    code = "from gdn.ops.native import compiler, problem; compiler.FLAGS += ('-O0',);"
    build, use = code + "print(compiler.build())", code + "assert not problem(), problem()"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", build], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    printed = {process.communicate()[0] for process in started}
    assert len(printed) == 1 and not any(process.returncode for process in started)
    library = Path(printed.pop().strip())
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    library.write_bytes(library.read_bytes()[:100])
    subprocess.run([sys.executable, "-c", use], env=environment, check=True)
    assert library.stat().st_size > 100


@needs_kernels
@pytest.mark.parametrize(
    "flags",
    [
        compiler.FLAGS,  # as it is used
        ("-march=native", *SANITIZERS),
        ("-mavx2", "-mfma", *SANITIZERS),
        ("-DGDN_PORTABLE=1", "-DGDN_OFFSET=128", *SANITIZERS),  # as on other processors
    ],
    ids=["shipped", "native", "avx2", "portable"],
)
def test_kernels_are_right_bit_for_bit_where_they_should_and_touch_no_byte_too_many(
    flags, tmp_path
):
    if "-mavx2" in flags and "__AVX2__" not in compiler.macros():
        pytest.skip("not for this processor")
    source, program = Path(__file__).parent / "native_check.cc", tmp_path / "check"
    command = [compiler.find_compiler(), "-std=c++17", *flags]
    command += ["-I", str(compiler.SOURCES), str(source), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in compiled.stderr:
        pytest.skip("this compiler has no sanitizer libraries")
    assert not compiled.returncode, compiled.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert not done.returncode and "0 failures" in done.stdout, done.stdout + done.stderr
