"""Measure what bfloat16 and int8 weights cost in quality: perplexity of held-out text.

    python benchmarks/precision.py --target DIR    # held-out modules of the standard library, which
                                                   # public models have been trained on
    python benchmarks/precision.py --target DIR --files 'texts/*.txt'
    python benchmarks/precision.py                               # random weights: does it run

Every precision reads the same windows of text with its own weights, as `decode.py dtype=...` keeps
them: for the native kernels where there are any, else for XLA. Beside the perplexity and its ratio
to float32: how often the likeliest token is that of float32, and how long a window took (one pass
after another, so only roughly comparable).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3.config import GeneratedTarget
from eagle3.decoding.sampling import most_likely
from eagle3.generated import generated_target
from eagle3.training.data.batches import Batch, Batches
from eagle3.training.data.config import DataConfig, SourceConfig
from eagle3.training.data.dataset import open_datasets
from eagle3.training.data.masking import Masker
from gdn import load_pretrained
from gdn.ops import native
from gdn.packing import DTYPES, Packer, finish


class Read(NamedTuple):
    """What a model says of the windows."""

    loss: float  # natural log, a token
    best: np.ndarray  # its likeliest token at every place
    seconds: float  # a window, median


@partial(jax.jit, static_argnames="graph")
def score(graph, params, window: Batch):
    """Return the loss, what of it counts, and the likeliest token at each place of [1, T + 1]."""
    model = nnx.merge(graph, params)
    tokens, mask, documents = window
    logits = model.logits(model(tokens[:, :-1], documents[:, :-1]).hidden)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    counts = mask[:, 1:] & (documents[:, 1:] == documents[:, :-1])
    return jax.nn.logsumexp(logits, axis=-1) - chosen, counts, most_likely(logits)


def read(model: nnx.Module, windows: Sequence[Batch]) -> Read:
    """Read all windows."""
    graph, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    losses, best, seconds = [], [], []
    jax.block_until_ready(score(graph, params, windows[0]))
    for window in windows:
        start = time.perf_counter()
        loss, counts, token = jax.device_get(score(graph, params, window))
        seconds.append(time.perf_counter() - start)
        losses.append(loss[counts])
        best.append(token[counts])
    loss = float(np.concatenate(losses).mean())
    return Read(loss, np.concatenate(best), statistics.median(seconds))


def held_out(directory: str, vocab: int, args: argparse.Namespace) -> list[Batch]:
    """Return windows [1, T + 1] of text that the target was not trained on here."""
    source = SourceConfig(files=args.files) if args.files else SourceConfig(split="heldout")
    with tempfile.TemporaryDirectory() as cache:
        data = DataConfig(
            sources={"heldout": source}, batch_size=1, length=args.length + 1, cache=cache
        )
        batches = Batches(data, open_datasets(data, Masker.load(directory, vocab), lambda _: None))
        count = min(args.windows, batches.num_rows)
        return [batches.batch_at(number) for number in range(count)]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--target", help="Hugging Face directory")
    parser.add_argument("--files", help="path or glob of .txt or .jsonl")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    args = parser.parse_args()
    why = native.problem()
    if why is not None:
        print(f"without native kernels: {why}")
    windows, found = None, {}
    for dtype in DTYPES:
        packer = Packer(dtype, native=why is None)
        if args.target is None:
            model = generated_target(GeneratedTarget(), packer.load_dtype)
            if windows is None:
                sizes = (4, 1, min(args.length, 64) + 1)
                tokens = np.random.default_rng(0).integers(0, model.cfg.vocab_size, sizes)
                windows = [
                    Batch(x.astype(np.int32), np.ones(x.shape, bool), np.zeros(x.shape, np.int32))
                    for x in tokens
                ]
        else:
            model = load_pretrained(Path(args.target), packer.load_dtype, packer)
            if windows is None:
                windows = held_out(args.target, model.cfg.vocab_size, args)
        finish((model, packer))
        found[dtype] = read(model, windows)
        del model
    first = found["float32"]
    print("| weights | loss | perplexity | times float32 | same likeliest token | ms a window |")
    print("| --- | --- | --- | --- | --- | --- |")
    for dtype, (loss, best, seconds) in found.items():
        print(
            f"| {dtype} | {loss:.4f} | {np.exp(loss):.3f} | {np.exp(loss - first.loss):.4f} |"
            f" {np.mean(best == first.best):.2%} | {seconds * 1e3:.1f} |"
        )
    assert windows is not None
    print(f"\n{len(windows)} windows of up to {windows[0].tokens.shape[1] - 1} tokens")


if __name__ == "__main__":
    main()
