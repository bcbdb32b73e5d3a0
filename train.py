"""Train a small target: `python train.py --config configs/tiny.yaml steps=600`.

Parses, builds, loops. Writes a Hugging Face directory that `decode.py target=DIR` continues prompts
with. Only byte-level targets on the standard library's source so far; drafts come later.
"""

import logging
import math
import sys
import time

import jax.numpy as jnp
from flax import nnx

from eagle3.config import TrainConfig, load_config
from eagle3.generated import generated_target
from eagle3.training.pretrain import batch_at, make_optimizer, standard_library, train_step
from gdn import save_pretrained


def run(config: TrainConfig) -> None:
    """Train and save; a loss that is not finite stops the run before anything is written."""
    model = generated_target(config.generated, jnp.dtype("float32"))
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    corpus = standard_library()
    optimizer = make_optimizer(config.learning_rate, config.steps)
    state = optimizer.init(params)
    print(f"{model.cfg.num_parameters():,} parameters, {len(corpus):,} bytes of source")
    start = time.perf_counter()
    for step in range(config.steps):
        tokens = batch_at(corpus, config.seed, step, config.batch_size, config.length)
        params, state, loss = train_step(graphdef, optimizer, params, state, tokens)
        if step % config.log_every == 0 or step == config.steps - 1:
            value = float(loss)
            print(f"step {step}: loss {value:.3f} nats a byte, {time.perf_counter() - start:.0f} s")
            if not math.isfinite(value):
                raise ValueError(f"the loss is {value} at step {step}: lower learning_rate")
    save_pretrained(nnx.merge(graphdef, params), config.out)
    print(f"saved {config.out}")


def main(argv: list[str] | None = None) -> int:
    """Run; bad input is one message on stderr and exit status 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        run(load_config(TrainConfig, argv))
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
