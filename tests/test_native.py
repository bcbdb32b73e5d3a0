"""The native kernels: right on odd sizes, row by row on their own, and never needed."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn.layers import embed, linear
from gdn.ops import native
from gdn.ops.native import compiler
from gdn.ops.packed import pack
from gdn.ops.quantized import quantize, quantized_matmul
from gdn.packing import DTYPES

SIZES = ((1, 1), (16, 4), (17, 5), (100, 33), (333, 129))
needs_kernels = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler"
)


def matrix(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out, inputs", SIZES)
def test_products_are_those_of_the_rounded_weight(dtype, out, inputs):
    weight, packed = matrix(0, out, inputs), pack(matrix(0, out, inputs), dtype)
    for rows in (1, 2, 7, 40):
        x = matrix(rows, rows, inputs)
        y = np.asarray(native.matmul(x, packed))
        if dtype == "int8":
            wanted = np.asarray(quantized_matmul(x, quantize(weight)))
        else:
            wanted = np.asarray(x, np.float64) @ np.asarray(weight.astype(dtype), np.float64).T
        np.testing.assert_allclose(y, wanted, rtol=2e-6, atol=2e-6 * np.abs(wanted).max())


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_whatever_rows_are_beside_it(dtype):
    packed, x = pack(matrix(0, 333, 129), dtype), matrix(1, 40, 129)
    whole = np.asarray(native.matmul(x, packed))
    for rows in (1, 3, 8, 33):
        np.testing.assert_array_equal(np.asarray(native.matmul(x[:rows], packed)), whole[:rows])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_are_looked_up_as_they_were(dtype):
    weight, tokens = matrix(0, 21, 7), jnp.array([[0, 20], [16, 3]])
    wanted = embed(quantize(weight) if dtype == "int8" else weight.astype(dtype), tokens)
    found = embed(pack(weight, dtype), tokens)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted, np.float32))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_stay_in_their_row(dtype):
    x = matrix(1, 6, 33).at[2, 5].set(jnp.nan).at[4, 0].set(jnp.inf)
    y = np.asarray(native.matmul(x, pack(matrix(0, 20, 33), dtype)))
    assert np.isfinite(y[[0, 1, 3, 5]]).all()
    assert not np.isfinite(y[[2, 4]]).any()


def test_int8_rounds_each_row_to_127_steps_and_zero_rows_to_zero():
    weight = matrix(0, 5, 9).at[3].set(0.0)
    kept = quantize(weight)
    error = np.abs(np.asarray(kept.rows(jnp.arange(5)) - weight))
    assert (error <= np.asarray(kept.scales)[:, None] * 0.5001).all()
    assert not np.asarray(kept.values[3]).any()
    product = linear(matrix(1, 1, 9), kept)  # a single row, which is padded to two
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
def test_a_library_that_is_cut_short_is_made_anew(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    whole = compiler.build()
    kept = tmp_path / "eagle3-gdn" / "native" / whole.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(whole.read_bytes()[:100])
    code = "from gdn.ops import native; assert native.problem() is None, native.problem()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert kept.stat().st_size > 100


@needs_kernels
def test_two_processes_that_start_at_once_build_one_library(tmp_path):
    code = "import sys; from gdn.ops.native.compiler import build; print(build())"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = {process.communicate()[0] for process in started}
    assert len(printed) == 1 and not any(process.returncode for process in started)
    library = Path(printed.pop().strip())
    assert [path.name for path in library.parent.iterdir()] == [library.name]


@needs_kernels
@pytest.mark.parametrize("flags", [["-march=native"], ["-DGDN_PORTABLE=1", "-DGDN_OFFSET=128"]])
def test_no_byte_too_many_is_touched(flags, tmp_path):
    """Under the address and undefined-behaviour sanitizers; also the forms for other processors."""
    source, program = Path(__file__).parent / "native_check.cc", tmp_path / "check"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [compiler.find_compiler(), "-std=c++17", "-O1", *flags, *sanitizers]
    command += ["-I", str(compiler.SOURCES), str(source), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in compiled.stderr:
        pytest.skip("this compiler has no sanitizer libraries")
    assert not compiled.returncode, compiled.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert not done.returncode and "0 failures" in done.stdout, done.stdout + done.stderr
