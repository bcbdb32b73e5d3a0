"""From logits to the next token: penalties, bias, temperature, top-k, top-p, min-p, a seed.

In this order, each on what the one before left: repetition, presence and frequency penalty, bias,
temperature, top-k, top-p, min-p. Repetition and the last four are defined as in transformers,
presence and frequency penalty as in OpenAI's interface. Ties at a border are all kept.

A request draws the token at place n of its answer with the n-th noise of its own stream. So the
text depends on prompt, parameters and seed alone: not on the rest of the batch, nor on which draft
or tree came before. A draft may look at the noise beforehand, see `Foresight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from gdn.ops import native


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request picks its tokens. The defaults are greedy decoding."""

    temperature: float = 0.0  # divides the logits; 0 takes the most likely token
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest most likely tokens that have this probability together
    min_p: float = 0.0  # keep tokens of at least this share of the highest probability
    repetition_penalty: float = 1.0  # logits of tokens in prompt or answer: / this, * if negative
    presence_penalty: float = 0.0  # taken off the logits of tokens in the answer
    frequency_penalty: float = 0.0  # the same, times how often the token is there
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what to add to its logit)
    seed: int = 0  # of the request's random numbers, 0..2^32-1

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ValueError: naming the field, its value and what it may be.
        """
        # Within these, float32 neither overflows nor turns a small number into 0.
        for name, ok, expected in (
            ("temperature", _is_in(self.temperature, 1e-6, 1e6, 0), "0 (greedy) or in 1e-6..1e6"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", _is_in(self.top_p, 1e-9, 1), "above 0 (from 1e-9 on), at most 1 (off)"),
            ("min_p", _is_in(self.min_p, 0, 1), "in 0 (off)..1"),
            ("repetition_penalty", _is_in(self.repetition_penalty, 1e-6, 1e6), "above 0; 1 is off"),
            ("presence_penalty", _is_in(self.presence_penalty, -1e9, 1e9), "in -1e9..1e9"),
            ("frequency_penalty", _is_in(self.frequency_penalty, -1e9, 1e9), "in -1e9..1e9"),
            ("seed", 0 <= self.seed < 2**32, "in 0..4294967295"),
            (
                "logit_bias",
                all(token >= 0 and _is_in(bias, -1e9, 1e9) for token, bias in self.logit_bias),
                "token ids with numbers in -1e9..1e9",
            ),
        ):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be {expected}")


def _is_in(value, low, high, *others) -> bool:
    return low <= value <= high or value in others


class Sampling(NamedTuple):
    """The parameters of a batch. A field is None, and costs nothing, when no row uses it."""

    temperature: Float[Array, " B"] | None
    keys: Key[Array, " B"] | None
    top_k: Int[Array, " B"] | None
    top_p: Float[Array, " B"] | None
    min_p: Float[Array, " B"] | None
    repetition: Float[Array, " B"] | None
    presence: Float[Array, " B"] | None
    frequency: Float[Array, " B"] | None
    bias: Float[Array, "B V"] | None
    prompt: Bool[Array, "B V"] | None  # which tokens the prompt has, for the repetition penalty

    def foresight(self, place: Int[Array, " B"], vocab_size: int) -> Foresight | None:
        """Return what a draft may know of the draws from `place` on; None if no row draws."""
        if self.temperature is None or self.keys is None:
            return None
        return Foresight(self.temperature, self.keys, place, vocab_size)

    @property
    def counts_tokens(self) -> bool:
        """Tell whether `choose` wants to know how often each token is in the answer."""
        return any(x is not None for x in (self.repetition, self.presence, self.frequency))


def batch_sampling(
    params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], vocab_size: int
) -> Sampling:
    """Gather the parameters of each row.

    Raises:
      ValueError: a bias names a token outside the vocabulary.
    """

    def column(name, off, dtype: type = np.float32):
        values = [getattr(p, name) for p in params]
        return None if all(v == off for v in values) else jnp.array(values, dtype)

    # No more tokens than there are; also what fits an int32.
    params = [replace(p, top_k=min(p.top_k, vocab_size)) for p in params]

    bias = prompt = None
    if any(p.logit_bias for p in params):
        bias = np.zeros((len(params), vocab_size), np.float32)
        for row, p in zip(bias, params, strict=True):
            for token, value in p.logit_bias:
                if token >= vocab_size:
                    raise ValueError(
                        f"logit_bias names token {token}, the vocabulary ends at {vocab_size - 1}"
                    )
                row[token] += value
    repetition = column("repetition_penalty", 1.0)
    if repetition is not None:
        prompt = np.zeros((len(params), vocab_size), bool)
        for row, tokens in zip(prompt, prompts, strict=True):
            row[np.asarray(tokens)] = True
    temperature = column("temperature", 0.0)
    sampled = temperature is not None
    return Sampling(
        temperature,
        jax.vmap(jax.random.key)(np.array([p.seed for p in params], np.uint32))
        if sampled
        else None,
        column("top_k", 0, np.int32) if sampled else None,
        column("top_p", 1.0) if sampled else None,
        column("min_p", 0.0) if sampled else None,
        repetition,
        column("presence_penalty", 0.0),
        column("frequency_penalty", 0.0),
        None if bias is None else jnp.asarray(bias),
        None if prompt is None else jnp.asarray(prompt),
    )


def choose(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    counts: Int[Array, "B V"] | None,
    place: Int[Array, " B"],
    kernels: bool = False,
) -> Int[Array, " B"]:
    """Pick each row's next token.

    Args:
      kernels: as in `peak`.
      counts: how often each token is in the answer so far; needed if `sampling.counts_tokens`.
      place: of the token in the answer, from 0: which number of the row's stream decides.
    """
    logits = _adjusted(logits, sampling, counts)
    likeliest = peak(logits, kernels).token
    if sampling.temperature is None or sampling.keys is None:
        return likeliest
    noise = gumbel_noise(sampling.keys, place, logits.shape[-1])
    drawn = draw(token_weights(logits, sampling), noise)
    return jnp.where(sampling.temperature > 0, drawn, likeliest)


class Peak(NamedTuple):
    """Of rows of logits."""

    token: Int[Array, " B"]  # the lowest id of the maximum
    log_total: Float[Array, " B"]  # of the exponentials: what a logit is above its log-probability


def peak(logits: Float[Array, "B V"], kernels: bool = False) -> Peak:
    """Return the likeliest tokens, and what makes log-probabilities of the logits.

    Args:
      kernels: by the native kernels, which take a twentieth of the time.
    """
    if kernels:
        return Peak(*native.peak(logits))
    return Peak(most_likely(logits), jax.nn.logsumexp(logits, axis=-1))


class Best(NamedTuple):
    """The k likeliest of rows of logits, falling, the lowest of equals first."""

    logits: Float[Array, "*batch k"]
    tokens: Int[Array, "*batch k"]
    log_total: Float[Array, "*batch"]  # as in `Peak`


def best(logits: Float[Array, "*batch V"], count: int, worst: float, kernels: bool = False) -> Best:
    """Return the likeliest tokens; NaN counts as `worst`.

    Args:
      kernels: as in `peak`.
    """
    if kernels:
        return Best(*native.best(logits, count, worst))
    found = jax.lax.top_k(jnp.where(jnp.isnan(logits), worst, logits), count)
    return Best(*found, jax.nn.logsumexp(logits, axis=-1))


def most_likely(logits: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """Return the lowest index of the maximum along the last axis.

    The maximum first, then where it is: XLA's CPU `argmax` over floats is ten times slower.
    """
    best = logits.max(axis=-1, keepdims=True)
    return jnp.argmax(logits == best, axis=-1).astype(jnp.int32)


def _adjusted(logits, sampling: Sampling, counts):
    """Apply penalties and bias."""
    if sampling.repetition is not None:
        assert counts is not None and sampling.prompt is not None
        rate = sampling.repetition[:, None]
        lower = jnp.where(logits > 0, logits / rate, logits * rate)
        logits = jnp.where(sampling.prompt | (counts > 0), lower, logits)
    if sampling.presence is not None:
        assert counts is not None
        logits = logits - jnp.where(counts > 0, sampling.presence[:, None], 0.0)
    if sampling.frequency is not None:
        assert counts is not None
        logits = logits - sampling.frequency[:, None] * counts.astype(jnp.float32)
    return logits if sampling.bias is None else logits + sampling.bias


def token_weights(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Return what the tokens' probabilities are proportional to, 0 for those filtered out."""
    assert sampling.temperature is not None
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    # Divided after the maximum is taken off: a tiny temperature must not overflow.
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature
    weights = jnp.exp(scaled)
    if sampling.top_k is not None:
        ordered = _ordered_bits(scaled)
        wanted = jnp.where(sampling.top_k > 0, sampling.top_k, scaled.shape[-1])
        border = _highest_border(ordered, jnp.ones_like(weights), wanted.astype(jnp.float32))
        weights = jnp.where(ordered >= border[:, None], weights, 0.0)
    if sampling.top_p is not None:
        probabilities = weights / weights.sum(-1, keepdims=True)
        ordered = _ordered_bits(weights)
        border = _highest_border(ordered, probabilities, sampling.top_p)
        kept = (ordered >= border[:, None]) | (sampling.top_p >= 1)[:, None]
        weights = jnp.where(kept, weights, 0.0)
    if sampling.min_p is not None:  # the highest weight is exp(0) = 1
        weights = jnp.where(weights >= sampling.min_p[:, None], weights, 0.0)
    return weights


def _ordered_bits(x: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Map floats to integers of the same order."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0: one zero, not two
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _highest_border(
    ordered: UInt[Array, "B V"], mass: Float[Array, "B V"], wanted: Float[Array, " B"]
) -> UInt[Array, " B"]:
    """Return the highest border such that the entries on or above it have the `wanted` mass.

    Bit by bit, 32 sums instead of a sort, which is many times slower in XLA on a CPU.
    """

    def settle(i, border):
        higher = border | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        above = jnp.sum(jnp.where(ordered >= higher[:, None], mass, 0.0), axis=-1)
        return jnp.where(above >= wanted, higher, border)

    return jax.lax.fori_loop(0, 32, settle, jnp.zeros(ordered.shape[0], jnp.uint32))


def gumbel_noise(
    keys: Key[Array, " B"], place: Int[Array, " B"], vocab_size: int
) -> Float[Array, "B V"]:
    """Return what decides the draw at a place of each row's answer, of all tokens.

    -log(-log1p(-v)) with v from 32 bits: fine where it decides, at the greatest noises, so tokens
    down to one in 10^9 come as often as they should.
    """

    def of_row(key, n):
        bits = jax.random.bits(jax.random.fold_in(key, n), (vocab_size,), jnp.uint32)
        v = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
        return -jnp.log(-jnp.log1p(-jnp.minimum(v, 1 - 2.0**-24)))

    return jax.vmap(of_row)(keys, place)


def draw(weights: Float[Array, "B V"], noise: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Return the token of the greatest log weight + Gumbel noise: each as often as its weight."""
    return most_likely(jnp.log(weights) + noise)


class Foresight(NamedTuple):
    """The noise that the target will draw with, for a draft to draw with as well.

    Whatever a draft makes of it, the target draws what it would have drawn. But where the two
    agree about the probabilities, the greatest sum is often the same token (arXiv 2408.07978): at
    temperature 1 that is accepted far more often than the draft's likeliest token.
    """

    temperature: Float[Array, " B"]
    keys: Key[Array, " B"]
    place: Int[Array, " B"]  # in the answer, of what comes after the root
    vocab_size: int

    def on(
        self, logits: Float[Array, "B w Vd"], depth: Int[Array, ""] | int, ids: Int[Array, " Vd"]
    ) -> Float[Array, "B w Vd"]:
        """Return what to rank a draft's tokens by, in place of the logits `depth` below the root.

        Args:
          ids: of the draft's tokens in the target's vocabulary.
        """
        noise = gumbel_noise(self.keys, self.place + depth, self.vocab_size)[:, None, ids]
        temperature = self.temperature[:, None, None]
        return jnp.where(
            temperature > 0, logits / jnp.where(temperature > 0, temperature, 1.0) + noise, logits
        )
