"""Measure the target model beside transformers: decode, verification, prefill, training.

    python benchmarks/target.py                      # about 15 minutes on two cores
    python benchmarks/target.py --tasks decode verify --dtypes float32 int8 --rounds 3
    python benchmarks/target.py --experts 32 --tasks decode verify prefill    # a mixture

Writes one model of about 100M parameters with random weights, loads it in worker processes (this
package with XLA's products and with the native kernels, and transformers on torch), and runs every
task in all of them in turn: the machine's mood then touches all alike. Prints medians, the ratio of
medians, and how much of the measured memory bandwidth a decoded token uses. Needs the `parity`
extra; with `--no-peer` only jax. transformers has no int8 for CPUs, and training no packed weights.
The nodes that are verified are different tokens, which a mixture sends to different experts.
"""

import argparse
import dataclasses
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from engines import peak_memory

NODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT, NEW_TOKENS, PROMPT = 64, 24, 1024
BATCH, LENGTH = 4, 256
VERIFY_REPEATS = 4


def benchmark_config(experts: int = 0):
    """Return the architecture that all benchmarks use: 99.7M parameters, shaped like Qwen3.5.

    Args:
      experts: of a mixture in place of each MLP, of which a token takes eight and a shared one.
    """
    from gdn import TargetConfig

    if experts:
        mixture = dict(
            model_type="qwen3_5_moe_text", num_experts=experts, num_experts_per_tok=8,
            moe_intermediate_size=448, shared_expert_intermediate_size=448, norm_topk_prob=True,
            moe_layers=(True,) * 12,
        )  # fmt: skip
        return dataclasses.replace(benchmark_config(), **mixture)
    kinds = (("linear_attention",) * 3 + ("full_attention",)) * 3
    return TargetConfig(
        model_type="qwen3_5_text", vocab_size=16384, hidden_size=640, num_hidden_layers=12,
        intermediate_size=2240, num_attention_heads=4, num_key_value_heads=2, head_dim=256,
        layer_types=kinds, rope_theta=1e7, partial_rotary_factor=0.25, rms_norm_eps=1e-6,
        max_position_embeddings=32768, tie_word_embeddings=True, norm_unit_offset=True,
        qk_norm=True, attn_output_gate=True, linear_num_key_heads=8, linear_num_value_heads=8,
        linear_key_head_dim=128, linear_value_head_dim=128, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def write_model(directory: Path, dtype: str, experts: int = 0) -> tuple[int, int]:
    """Save it with random weights; returns its parameters, and how many a token's pass reads."""
    import jax.numpy as jnp
    from flax import nnx
    from roofline import BF16, weight_bytes

    from gdn import HybridLM, save_pretrained

    cfg = benchmark_config(experts)
    save_pretrained(HybridLM(cfg, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)), directory)
    return cfg.num_parameters(), round(weight_bytes(cfg, rows=1) / BF16)


class Ours:
    """The tasks in this package; the token loop runs on the device."""

    native = False

    def __init__(self, directory: Path, dtype: str):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from gdn import chain_tree, commit, init_cache, load_pretrained
        from gdn.packing import Packer, finish

        packer = Packer(dtype, self.native)
        model = load_pretrained(directory, packer.load_dtype, packer)
        finish((model, packer))
        graphdef, params = nnx.split(model)
        self.params, self.jax, self.jnp = nnx.to_pure_dict(params), jax, jnp
        kept = model.embed_tokens[...].dtype
        self.cache = lambda capacity: init_cache(model.cfg, 1, capacity, kept)
        self.vocab = model.cfg.vocab_size

        def loop(params, cache, tokens, steps):
            model = nnx.merge(graphdef, params)
            tree = chain_tree(1, tokens.shape[1])

            def step(_, carry):
                cache, tokens = carry
                out = model.verify(tokens, tree, cache)
                # The maximum, then where it is: XLA's argmax is slow over a vocabulary.
                best = out.logits.max(-1, keepdims=True)
                token = jnp.argmax(out.logits[:, :1] == best[:, :1], axis=-1).astype(jnp.int32)
                # One node is accepted. Made from the token, as in real decoding, so that the cache
                # is updated after its last reading and therefore in place.
                path = jnp.where((jnp.arange(tokens.shape[1]) == 0) & (token >= 0), 0, -1)
                cache = commit(cache, out.updates, path)
                return cache, (token + jnp.arange(tokens.shape[1])) % model.cfg.vocab_size

            return jax.lax.fori_loop(0, steps, step, (cache, tokens))

        def prefill(params, tokens, lengths, cache):
            return nnx.merge(graphdef, params).prefill(tokens, lengths, cache)

        def loss(params, tokens):
            model = nnx.merge(graphdef, params)
            logits = model.logits(model(tokens[:, :-1]).hidden)
            picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

        self.loop = jax.jit(loop, donate_argnums=1)
        self.prefill_ = jax.jit(prefill, donate_argnums=3)
        self.gradient = jax.jit(jax.value_and_grad(loss))

    def _start(self, capacity):
        tokens = self.jnp.arange(CONTEXT, dtype=self.jnp.int32)[None]
        lengths = self.jnp.array([CONTEXT], self.jnp.int32)
        return self.prefill_(self.params, tokens, lengths, self.cache(capacity)).cache

    def _timed(self, function, *args):
        self.jax.block_until_ready(args)
        start = time.perf_counter()
        self.jax.block_until_ready(function(*args))
        return time.perf_counter() - start

    def decode(self):
        tokens = self.jnp.zeros((1, 1), self.jnp.int32)
        return (
            self._timed(self.loop, self.params, self._start(512), tokens, NEW_TOKENS) / NEW_TOKENS
        )

    def verify(self, nodes):
        tokens = self.jnp.arange(nodes, dtype=self.jnp.int32)[None]
        seconds = self._timed(self.loop, self.params, self._start(512), tokens, VERIFY_REPEATS)
        return seconds / VERIFY_REPEATS

    def prefill(self):
        tokens = self.jnp.arange(PROMPT, dtype=self.jnp.int32)[None] % self.vocab
        lengths = self.jnp.array([PROMPT], self.jnp.int32)
        return self._timed(self.prefill_, self.params, tokens, lengths, self.cache(2048))

    def train(self):
        tokens = self.jnp.arange(BATCH * (LENGTH + 1), dtype=self.jnp.int32) % self.vocab
        return self._timed(self.gradient, self.params, tokens.reshape(BATCH, LENGTH + 1))

    def bandwidth(self):
        """Read 400 MB as a sum and as a product, take the faster, in bytes per second."""
        jnp = self.jnp
        big, x = jnp.ones((16384, 6144)), jnp.ones((6144,))
        total, product = self.jax.jit(jnp.sum), self.jax.jit(lambda a, x: a @ x)
        best = min(
            min(self._timed(total, big) for _ in range(4)),
            min(self._timed(product, big, x) for _ in range(4)),
        )
        return big.nbytes / best


class Native(Ours):
    """The same with packed weights and the native kernels."""

    native = True


class Transformers:
    """The same tasks with transformers; torch runs on all cores."""

    def __init__(self, directory: Path, dtype: str):
        import torch
        import transformers

        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.vocab = self.model.config.vocab_size

    def _start(self):
        with self.torch.no_grad():
            tokens = self.torch.arange(CONTEXT)[None]
            return self.model(tokens, use_cache=True, logits_to_keep=1)

    def _cache(self, output):
        # The field was renamed in the course of transformers 5.
        cache = getattr(output, "cache", None)
        return (
            {"cache": cache} if cache is not None else {"past_key_values": output.past_key_values}
        )

    def decode(self):
        out = self._start()
        with self.torch.no_grad():
            start = time.perf_counter()
            for _ in range(NEW_TOKENS):
                token = out.logits[:, -1:].argmax(-1)
                out = self.model(token, use_cache=True, **self._cache(out))
            return (time.perf_counter() - start) / NEW_TOKENS

    def verify(self, nodes):
        out = self._start()
        tokens = self.torch.arange(nodes)[None]
        with self.torch.no_grad():
            start = time.perf_counter()
            for _ in range(VERIFY_REPEATS):
                out = self.model(tokens, use_cache=True, **self._cache(out))
            return (time.perf_counter() - start) / VERIFY_REPEATS

    def prefill(self):
        tokens = (self.torch.arange(PROMPT) % self.vocab)[None]
        with self.torch.no_grad():
            start = time.perf_counter()
            self.model(tokens, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - start

    def train(self):
        tokens = (self.torch.arange(BATCH * LENGTH) % self.vocab).reshape(BATCH, LENGTH)
        self.model.zero_grad()
        start = time.perf_counter()
        self.model(tokens, labels=tokens, use_cache=False).loss.backward()
        return time.perf_counter() - start

    def bandwidth(self):
        """Read 400 MB with torch's sum, in bytes per second."""
        big, times = self.torch.ones(100_000_000), []
        for _ in range(4):
            start = time.perf_counter()
            big.sum()
            times.append(time.perf_counter() - start)
        return big.nbytes / min(times)


def work(connection, engine, directory, dtype):
    """Serve tasks until told to stop; the last answer is the peak resident memory in bytes."""
    try:
        worker = engine(directory, dtype)
        connection.send("ready")
        while (task := connection.recv()) is not None:
            name, *args = task
            connection.send(getattr(worker, name)(*args))
        connection.send(peak_memory())
    except Exception as error:
        connection.send(error)
        raise


class Worker:
    """A process with one engine in it."""

    def __init__(self, engine, directory, dtype):
        self.connection, theirs = mp.Pipe()
        context = mp.get_context("spawn")
        self.process = context.Process(target=work, args=(theirs, engine, directory, dtype))
        self.process.start()
        self._receive()

    def _receive(self):
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, *task):
        self.connection.send(task)
        return self._receive()

    def stop(self):
        self.connection.send(None)
        memory = self._receive()
        self.process.join()
        return memory


def measure(directory: Path, dtype: str, tasks: list[tuple], rounds: int, peer: bool) -> dict:
    """Run all tasks in turn on all engines; returns medians in seconds, bandwidth, peak memory."""
    engines: dict = {"ours": Ours, "native": Native}
    if peer and dtype != "int8":
        engines["transformers"] = Transformers
    workers = {name: Worker(engine, directory, dtype) for name, engine in engines.items()}
    times = {name: {task: [] for task in tasks} for name in workers}
    bandwidth = []
    for round_ in range(rounds + 1):  # the first compiles and warms up
        for task in tasks:
            for name, worker in workers.items():
                if task == ("train",) and name == "native":
                    continue
                seconds = worker.ask(*task)
                if round_:
                    times[name][task].append(seconds)
        if round_:
            bandwidth.append(max(worker.ask("bandwidth") for worker in workers.values()))
    return {
        "dtype": dtype,
        "bandwidth": statistics.median(bandwidth),
        "bandwidth_spread": (min(bandwidth), max(bandwidth)),
        "memory": {name: worker.stop() for name, worker in workers.items()},
        "seconds": {
            name: {
                " ".join(map(str, task)): statistics.median(values)
                for task, values in by.items()
                if values
            }
            for name, by in times.items()
        },
    }


def report(result: dict, parameters: int, read: int) -> None:
    """Print one dtype's table in markdown; of the parameters, a token's pass reads some."""
    seconds = result["seconds"]
    width = {"float32": 4, "bfloat16": 2, "int8": 1}[result["dtype"]]
    others = [name for name in seconds if name != "ours"]
    print(f"\n### {result['dtype']}, {parameters / 1e6:.1f}M parameters\n")
    print("| task | XLA |" + "".join(f" {name} | times XLA |" for name in others))
    print("| --- |" + " --- |" * (1 + 2 * len(others)))
    for task, ours in seconds["ours"].items():
        cells = f"| {task} | {ours * 1e3:.1f} ms |"
        for name in others:
            other = seconds[name].get(task)
            cells += f" {other * 1e3:.1f} ms | {ours / other:.2f} |" if other else " - | - |"
        print(cells)
    print()
    for name, times in result["seconds"].items():
        curve = [(n, times.get(f"verify {n}")) for n in NODES]
        if curve[0][1] and len(times) > 1:
            shown = ", ".join(f"c({n}) {t / curve[0][1]:.2f}" for n, t in curve if t)
            print(f"- cost of verification, {name}: {shown}")
    low, high = (x / 1e9 for x in result["bandwidth_spread"])
    print(
        f"- read bandwidth {result['bandwidth'] / 1e9:.1f} GB/s (rounds: {low:.1f} to {high:.1f})"
    )
    for name, times in result["seconds"].items():
        if "decode" in times:
            share = read * width / times["decode"] / result["bandwidth"]
            print(
                f"- {name}: {1 / times['decode']:.1f} tokens/s, {share:.0%} of the bandwidth limit"
            )
        print(f"- {name}: peak memory {result['memory'][name] / 1e9:.2f} GB")


def draw(results: list[dict], nodes: list[int], path: Path) -> None:
    """Write the figure of what verification cost, in passes over one node."""
    from eagle3 import plots

    costs = {}
    for result in results:
        for name, times in result["seconds"].items():
            seconds = [times[f"verify {n}"] for n in nodes]
            costs[f"{name}, {result['dtype']}"] = [t / times["verify 1"] for t in seconds]
    path.write_bytes(plots.png(plots.cost_curve(nodes, costs), dpi=160))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the target model.")
    parser.add_argument("--tasks", nargs="+", default=["decode", "verify", "prefill", "train"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--nodes", nargs="+", type=int, default=NODES, help="to verify")
    parser.add_argument("--experts", type=int, default=0, help="8 or more: a mixture of so many")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one warm-up")
    parser.add_argument("--no-peer", action="store_true", help="measure this package only")
    parser.add_argument("--json", type=Path, help="also write the raw medians here")
    parser.add_argument("--figure", type=Path, help="draw the costs of verification to this PNG")
    args = parser.parse_args()
    if args.experts and args.experts < 8:
        parser.error("--experts: a token takes eight, give at least as many")
    if args.figure and ("verify" not in args.tasks or 1 not in args.nodes):
        parser.error("--figure draws the task verify, in passes over 1 of the nodes")
    if args.figure and find_spec("matplotlib") is None:  # before minutes of measuring
        parser.error("--figure needs matplotlib: pip install -e '.[plots]'")
    results = []
    for dtype in args.dtypes:
        tasks = []
        for name in args.tasks:
            tasks += [("verify", n) for n in args.nodes] if name == "verify" else [(name,)]
        if dtype != "float32":  # gradients in bfloat16 are not what training uses
            tasks = [task for task in tasks if task[0] != "train"]
        with tempfile.TemporaryDirectory() as directory:
            kept = "float32" if dtype == "int8" else dtype
            parameters, read = write_model(Path(directory), kept, args.experts)
            result = measure(Path(directory), dtype, tasks, args.rounds, not args.no_peer)
        report(result, parameters, read)
        results.append(result)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if args.figure:
        draw(results, args.nodes, args.figure)


if __name__ == "__main__":
    main()
