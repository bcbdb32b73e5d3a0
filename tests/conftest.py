"""Two tiny models that the test files share, and compiled programs that are kept between runs."""

import functools
import os
from pathlib import Path

import jax
import pytest
from helpers import HYBRID, LLAMA, fitted_draft, plain_text, random_model

# Inside pytest's own cache folder, which git ignores and `make clean` removes.
COMPILED = Path(__file__).parent.parent / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_platforms", "cpu")  # whose rounding the tolerances are made for


def pytest_configure(config):
    """Compile quickly, not well: the suite compiles more than it computes.

    `make parity` runs what users run, fully optimised.
    """
    is_parity = config.getoption("-m") == "parity"
    jax.config.update("jax_disable_most_optimizations", not is_parity)
    if not is_parity and jax.__version_info__ < (0, 11):  # where XLA is known to have the flag
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"


@pytest.fixture(scope="session")
def hybrid():
    """Random weights for both mixers: HV = 2 HK, DK != DV, gated attention, partial rotation."""
    return random_model(HYBRID)


@pytest.fixture(scope="session")
def llama():
    """Random weights for plain attention."""
    return random_model(LLAMA)


@pytest.fixture(scope="session", params=["hybrid", "llama"])
def model(request):
    """Each of the two models in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def text_of():
    """Return what plain decoding says after the shared prompts, by model: `PlainText`."""
    return functools.cache(plain_text)


@pytest.fixture(scope="session")
def fitted_for(text_of):
    """Return a draft that was trained on the model's own text, by model."""
    return functools.cache(lambda model: fitted_draft(text_of(model)))
