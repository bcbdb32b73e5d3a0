"""Continue a prompt: `python decode.py --config configs/tiny.yaml prompt="def f(n):"`.

Parses, builds, prints. With `target=DIR` it loads a Hugging Face directory and its tokenizer
(a target over the 256 bytes needs none); without, it makes a byte-level model with random weights,
whose text means nothing.
"""

import logging
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from eagle3.config import ConfigError, DecodeConfig, load_config
from eagle3.decoding.generate import generate_greedy
from eagle3.generated import generated_target
from gdn import load_pretrained


class ByteTokenizer:
    """One token a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileTokenizer:
    """The `tokenizer.json` of a checkpoint."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        if not path.exists():
            raise ConfigError(f"{path} does not exist; copy the tokenizer next to the weights")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


def run(config: DecodeConfig) -> None:
    """Decode and print the text, then how fast it came."""
    dtype = jnp.dtype(config.dtype)
    if config.target is None:
        model, tokenizer = generated_target(config.generated, dtype), ByteTokenizer()
        print("random weights: this text means nothing", file=sys.stderr)
    else:
        model = load_pretrained(config.target, dtype)
        path = Path(config.target) / "tokenizer.json"
        is_bytes = model.cfg.vocab_size == 256 and not path.exists()
        tokenizer = ByteTokenizer() if is_bytes else FileTokenizer(path)
    ids = tokenizer.encode(config.prompt)
    longest = model.cfg.max_position_embeddings
    if not ids or len(ids) + config.max_new_tokens > longest:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens; it needs at least one, and with max_new_tokens"
            f" ({config.max_new_tokens}) at most the {longest} positions of the target"
        )
    prompt, lengths = jnp.array([ids], jnp.int32), jnp.array([len(ids)], jnp.int32)
    eos = model.cfg.eos_token_ids
    start = time.perf_counter()
    tokens, counts = generate_greedy(model, prompt, lengths, config.max_new_tokens, eos)
    new = np.asarray(tokens)[0, : int(counts[0])].tolist()
    seconds = time.perf_counter() - start
    print(config.prompt + tokenizer.decode(new))
    print(f"{len(new)} tokens in {seconds:.1f} s, compilation included", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run; bad input is one message on stderr and exit status 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("gdn").setLevel(logging.INFO)  # what a checkpoint holds that was skipped
    try:
        run(load_config(DecodeConfig, argv))
    except ValueError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
