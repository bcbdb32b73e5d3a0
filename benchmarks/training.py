"""Measure training beside torch: a step of a target, and a step of a draft with its features.

    python benchmarks/training.py                    # about five minutes on two cores
    python benchmarks/training.py --no-torch --rounds 3
    python benchmarks/training.py --peer PYTHON      # an interpreter that has speculators as well

A hybrid of 12M parameters with random weights, batch 8 x 256, vocabulary 4,096, float32. A step is
forward, backward, clipping and AdamW. All run in turn, several times; medians. Peers:

- torch: the target by transformers; for the draft no package can be installed beside it, so its
  training-time test is written here in plain torch: rows in a batch, scores of the causal square
  in full, later steps' keys one product each. It counts no hits, which this package does.
- speculators, with `--peer`: its own model, loss and AdamW on features that lie ready, row by row,
  as it takes one row at a time and would else score all pairs of a packed one.

All start from the same weights, and their first losses have to agree. torch runs as it comes,
without `torch.compile`. Run it on an idle machine: torch's threads wait for each other, so that
other load slows it several times as much. Needs the `parity` extra; with `--no-torch` only jax.
Memory is measured by benchmarks/memory.py.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, DECAY, CLIP = 4, 0.8, 0.5  # K of the training-time test, and weight of each step
FULL = {"width": 320, "inner": 1024, "layers": 8, "vocab": 4096, "batch": 8, "length": 256}
SMALL = {"width": 64, "inner": 96, "layers": 4, "vocab": 256, "batch": 2, "length": 64}
SCALE = 0.06  # of random weights: at the usual 0.02 all distributions are flat, all losses alike
TOLERANCE = 1e-3  # nats, between the losses of the engines


def target_config(width: int, inner: int, layers: int, vocab: int):
    """Return the architecture, shaped like Qwen3.5."""
    from gdn import TargetConfig

    return TargetConfig(
        model_type="qwen3_5_text", vocab_size=vocab, hidden_size=width, num_hidden_layers=layers,
        intermediate_size=inner, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        layer_types=(("linear_attention",) * 3 + ("full_attention",)) * (layers // 4),
        rope_theta=1e7, partial_rotary_factor=0.25, rms_norm_eps=1e-6,
        max_position_embeddings=32768, tie_word_embeddings=True, norm_unit_offset=True,
        qk_norm=True, attn_output_gate=True, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=64, linear_value_head_dim=64, bos_token_id=None, pad_token_id=None,
        initializer_range=SCALE,
    )  # fmt: skip


def write_models(directory: Path, sizes: dict, peer: bool) -> tuple[int, int]:
    """Save a target, a draft, tokens and features; returns both numbers of parameters."""
    import jax
    import numpy as np
    from flax import nnx

    from eagle3.draft import draft_for
    from eagle3.interop import save_draft
    from eagle3.training.config import DraftShape
    from gdn import HybridLM, save_pretrained

    cfg = target_config(*(sizes[key] for key in ("width", "inner", "layers", "vocab")))
    target = HybridLM(cfg, rngs=nnx.Rngs(0))
    draft_cfg = DraftShape(vocab_size=cfg.vocab_size // 2, initializer_range=SCALE).for_target(cfg)
    draft = draft_for(target, draft_cfg, np.arange(0, cfg.vocab_size, 2), rngs=nnx.Rngs(1))
    save_pretrained(target, directory / "target")
    save_draft(draft, directory / "draft")
    shape = (sizes["batch"], sizes["length"])
    tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=shape)
    np.save(directory / "tokens.npy", tokens)
    (directory / "aux_layers.json").write_text(json.dumps(draft_cfg.aux_layers))
    if peer:
        where = str(directory / "target")
        save_draft(draft, directory / "speculators", "speculators", target_name=where)
        out = jax.jit(lambda model, tokens: model(tokens, None, draft_cfg.aux_layers))(
            target, tokens
        )
        np.savez(directory / "features.npz", aux=out.aux_hidden, hidden=out.hidden)
    params = jax.tree.leaves(nnx.state(draft, nnx.Param))
    return cfg.num_parameters(), sum(x.size for x in params)


class Ours:
    """This package: `train_step` for both tasks."""

    def __init__(self, directory: Path):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from flax import nnx

        from eagle3.interop import load_draft
        from eagle3.training.data.batches import Batch
        from eagle3.training.features import FeaturedBatch, head_rows, target_features
        from eagle3.training.optim import OptimConfig, make_optimizer
        from eagle3.training.step import DraftTask, TargetTask, TrainState, train_step
        from gdn import load_pretrained

        target = load_pretrained(directory / "target", jnp.float32)
        draft = load_draft(directory / "draft", target)
        tokens = jnp.asarray(np.load(directory / "tokens.npy")[None], jnp.int32)
        batch = Batch(tokens, jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32))
        graph, params = nnx.split(target)
        frozen = nnx.to_pure_dict(params)
        optimizer = make_optimizer(OptimConfig(lr=1e-4, schedule="constant", clip=CLIP), 1000)

        def start(params):
            params = jax.tree.map(jnp.copy, params)
            return TrainState(jnp.int32(0), params, optimizer.init(params), None)

        def dtypes(params):
            return tuple(x.dtype for x in jax.tree.leaves(params))

        draft_graph, params, tables = nnx.split(draft, nnx.Param, ...)
        params, tables = nnx.to_pure_dict(params), nnx.to_pure_dict(tables)
        tables = (tables, head_rows(target, draft.target_ids[...]))
        kl = DraftTask(draft_graph, dtypes(params), STEPS, DECAY, "kl", keep_unknown=True)
        tasks = {"target": (TargetTask(graph, dtypes(frozen)), ()), "draft": (kl, tables)}
        self.states = {"target": start(frozen), "draft": start(params)}
        self.batches: dict = {"target": batch}

        def step(name):
            task, frozen = tasks[name]
            state, metrics = train_step(
                task, optimizer, self.states[name], frozen, self.batches[name]
            )
            self.states[name] = jax.block_until_ready(state)
            return float(metrics.loss)

        def features():
            found = target_features(graph, frozen, draft.cfg.aux_layers, batch)
            self.batches["draft"] = FeaturedBatch(batch, jax.block_until_ready(found))

        self.step, self.look = step, features

    def target(self):
        return self.step("target")

    def features(self):
        return self.look()

    def draft(self):
        return self.step("draft")


class Torch:
    """transformers for the target, plain torch for the draft; on all cores."""

    def __init__(self, directory: Path):
        import numpy as np
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        self.trained, self.frozen = (
            transformers.AutoModelForCausalLM.from_pretrained(
                directory / "target", dtype=torch.float32, attn_implementation="sdpa"
            )
            for _ in range(2)
        )
        self.tokens = torch.from_numpy(np.load(directory / "tokens.npy"))
        self.aux_layers = json.loads((directory / "aux_layers.json").read_text())
        self.loss = TorchDraft(directory / "draft", self.frozen.get_input_embeddings().weight)
        self.optimizers = {
            "target": torch_optimizer(self.trained.parameters()),
            "draft": torch_optimizer(self.loss.weights.values()),
        }

    def target(self):
        out = self.trained(self.tokens, labels=self.tokens, use_cache=False)
        return torch_step(self.optimizers["target"], out.loss)

    def features(self):
        with self.torch.no_grad():
            out = self.frozen.model(self.tokens, output_hidden_states=True, use_cache=False)
            aux = [out.hidden_states[k] for k in self.aux_layers]
            hidden = out.last_hidden_state
            self.found = self.torch.cat(aux, -1), hidden, self.frozen.lm_head(hidden).argmax(-1)

    def draft(self):
        aux, hidden, _ = self.found
        return torch_step(self.optimizers["draft"], self.loss(self.tokens, aux, hidden))


class TorchDraft:
    """The training-time-test loss of EAGLE-3 (arXiv 2503.01840) in plain torch."""

    def __init__(self, directory: Path, embedding):
        import torch
        from safetensors.torch import load_file

        self.torch, self.embedding = torch, embedding.detach()
        self.cfg = json.loads((directory / "config.json").read_text())
        files = [load_file(path) for path in directory.glob("*.safetensors")]
        tensors = {name.removeprefix("midlayer."): x for file in files for name, x in file.items()}
        tensors.pop("t2d", None)
        d2t = tensors.pop("d2t")
        self.head_rows = self.embedding[d2t + torch.arange(len(d2t))]
        self.weights = {name: x.float().requires_grad_() for name, x in tensors.items()}

    def _linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x, name):
        weight = self.weights[f"{name}.weight"]
        return self.torch.nn.functional.rms_norm(x, weight.shape, weight, self.cfg["rms_norm_eps"])

    def _heads(self, x, name, angle=None):
        """Project, split into heads [B, N, T, H], rotate; key heads are repeated."""
        x = self._linear(x, f"self_attn.{name}")
        x = x.unflatten(-1, (-1, self.cfg["head_dim"])).transpose(1, 2)
        if angle is not None:
            first, second = x.chunk(2, -1)
            cos, sin = angle.cos(), angle.sin()
            x = self.torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return x.repeat_interleave(self.cfg["num_attention_heads"] // x.shape[1], 1)

    def _attend(self, a, position, keys):
        """Attend to true features up to the slot, and to what the slot made in later steps."""
        torch, size = self.torch, self.cfg["head_dim"]
        pairs = torch.arange(0, size, 2) / size
        angle = position[:, None] * self.cfg["rope_theta"] ** -pairs
        q, k = self._heads(a, "q_proj", angle), self._heads(a, "k_proj", angle)
        keys.append((k, self._heads(a, "v_proj")))
        (first_k, first_v), *own = keys
        length = a.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [(q @ first_k.mT).masked_fill(hidden, float("-inf"))]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
        weights = (torch.cat(scores, -1) * size**-0.5).softmax(-1)
        out = weights[..., :length] @ first_v
        for i, (_, v) in enumerate(own):
            out = out + weights[..., length + i, None] * v
        return out.transpose(1, 2).flatten(2)

    def __call__(self, tokens, aux, hidden):
        """Return the mean KL divergence of all steps, weighted with DECAY^k."""
        torch, length = self.torch, tokens.shape[1]
        functional = torch.nn.functional
        teacher = (hidden @ self.head_rows.T).log_softmax(-1)
        z, keys, total = self._linear(aux, "fc"), [], 0.0
        for k in range(STEPS):
            shifted = functional.pad(tokens, (0, k + 1))[:, k + 1 :]
            e = self._norm(self.embedding[shifted], "input_layernorm")
            a = torch.cat([e, self._norm(z, "hidden_norm")], -1)
            out = self._attend(a, torch.arange(length) + k, keys)
            y = z + self._linear(out, "self_attn.o_proj")
            x = self._norm(y, "post_attention_layernorm")
            gate = functional.silu(self._linear(x, "mlp.gate_proj"))
            z = y + self._linear(gate * self._linear(x, "mlp.up_proj"), "mlp.down_proj")
            # Slots whose token, and the one it is followed by, are in the row.
            logits = self._linear(self._norm(z[:, : length - 2 - k], "norm"), "lm_head")
            p, log_q = teacher[:, k + 1 : length - 1], logits.log_softmax(-1)
            loss = functional.kl_div(log_q, p, reduction="none", log_target=True).sum(-1).mean()
            total = total + DECAY**k * loss
        return total / sum(DECAY**k for k in range(STEPS))


class Speculators:
    """The draft by the speculators package, on features from a file."""

    def __init__(self, directory: Path):
        import numpy as np
        import torch
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

        config = Eagle3SpeculatorConfig.from_pretrained(directory / "speculators")
        config.transformer_layer_config._attn_implementation = "sdpa"
        self.model = Eagle3DraftModel.from_pretrained(
            directory / "speculators", config=config, dtype=torch.float32
        )
        self.model.verifier_norm = torch.nn.Identity()  # the features are normed
        self.kl = resolve_loss_config("kl_div", "eager")
        tokens = torch.from_numpy(np.load(directory / "tokens.npy"))
        features = np.load(directory / "features.npz")
        # Slot t is given the streams at t, the token at t + 1 and what the target says there.
        self.aux = torch.from_numpy(features["aux"])[:, :-1].flatten(2)
        self.hidden = torch.from_numpy(features["hidden"])[:, 1:]
        self.tokens = tokens[:, 1:]
        self.mask = torch.ones(1, self.tokens.shape[1], dtype=torch.bool)
        self.mask[:, -1] = False  # what follows the last token is not known
        self.documents = torch.zeros(1, self.tokens.shape[1], dtype=torch.long)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch_optimizer(trained)

    def draft(self):
        scale = len(self.tokens) * sum(DECAY**k for k in range(STEPS))
        total = 0.0
        for row in range(len(self.tokens)):
            one = slice(row, row + 1)
            _, loss, _ = self.model(
                hidden_states=self.aux[one], input_ids=self.tokens[one],
                document_ids=self.documents, loss_mask=self.mask,
                verifier_last_hidden_states=self.hidden[one], ttt_steps=STEPS,
                ttt_step_loss_decay=DECAY, loss_config=self.kl,
            )  # fmt: skip
            (loss / scale).backward()
            total += float(loss.detach()) / scale
        torch_step(self.optimizer)
        return total


def torch_optimizer(parameters):
    """Return torch's fastest AdamW, with the settings of this package."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def torch_step(optimizer, loss=None):
    """Go back from the loss, if there is one, clip, and move; returns the loss."""
    import torch

    if loss is not None:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return None if loss is None else float(loss.detach())


ENGINES = {"this package": Ours, "torch": Torch, "speculators": Speculators}


def serve(name: str, directory: Path) -> None:
    """Answer calls, one JSON line each, with seconds and the result; what is printed is moved."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[name](directory)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        start = time.perf_counter()
        result = getattr(engine, method)(*arguments)
        print(json.dumps([time.perf_counter() - start, result]), file=channel, flush=True)


class Worker:
    """A process with one engine in it."""

    def __init__(self, name: str, directory: str, python: str = sys.executable):
        command = [python, __file__, "--serve", name, directory]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *call):
        """Return seconds and the result of a call."""
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(call), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise SystemExit(f"{self.name} stopped at {call[0]}: its error is above") from None

    def stop(self):
        """Let the process end."""
        self.process.communicate()


def measure(workers: dict[str, Worker], rounds: int) -> dict[tuple[str, str], float]:
    """Run all tasks in turn on all engines; returns medians in seconds, by task and engine."""
    tasks = {name: ENGINES[name].__dict__ for name in workers}
    pairs = [(t, n) for t in ("target", "features", "draft") for n in workers if t in tasks[n]]
    times: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for round_ in range(rounds + 1):  # the first compiles and warms up
        losses: dict[str, dict[str, float]] = {}
        for task, name in pairs:
            seconds, loss = workers[name].ask(task)
            losses.setdefault(task, {})[name] = loss
            if round_:
                times[task, name].append(seconds)
        if not round_:
            check(losses)
    return {pair: statistics.median(values) for pair, values in times.items()}


def check(losses: dict[str, dict[str, float]]) -> None:
    """Compare the losses of the first step."""
    for task in ("target", "draft"):
        values = losses[task]
        print(f"- first loss, {task}:", ", ".join(f"{n} {x:.5f}" for n, x in values.items()))
        if max(values.values()) - min(values.values()) > TOLERANCE:
            raise SystemExit(f"the engines compute different things: {task} losses {values}")


def report(seconds: dict[tuple[str, str], float], names: list[str], tokens: int) -> None:
    """Print a table of tokens per second in markdown, and how many times the peers' they are."""
    rows = {
        "target step": ("target",),
        "features for the draft": ("features",),
        f"draft step, K = {STEPS}": ("draft",),
        "features and draft step": ("features", "draft"),
    }
    peers = names[1:]
    print("\n| tokens/s | this package |" + "".join(f" {name} | ratio |" for name in peers))
    print("| --- | --- |" + " --- | --- |" * len(peers))
    for title, tasks in rows.items():
        took = {n: sum(seconds.get((t, n), float("nan")) for t in tasks) for n in names}
        ours = took[names[0]]
        cells = "".join(
            f" {tokens / took[n]:,.0f} | {took[n] / ours:.2f} |"
            if took[n] == took[n]
            else " - |" * 2
            for n in peers
        )
        print(f"| {title} | {tokens / ours:,.0f} |{cells}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one warm-up")
    parser.add_argument("--no-torch", action="store_true", help="measure this package only")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with torch and speculators")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], Path(args.serve[1]))
    missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if missing and not args.no_torch:
        raise SystemExit(
            f"no {' and no '.join(missing)}: pip install -e '.[parity]', or --no-torch"
        )
    sizes = SMALL if args.small else FULL
    pythons = {"this package": sys.executable}
    pythons |= {} if args.no_torch else {"torch": sys.executable}
    pythons |= {"speculators": args.peer} if args.peer else {}
    print(f"- processes that wanted a core before: {os.getloadavg()[0]:.1f} (0 is an idle machine)")
    with tempfile.TemporaryDirectory() as directory:
        target, draft = write_models(Path(directory), sizes, bool(args.peer))
        print(f"- target {target / 1e6:.1f}M, draft {draft / 1e6:.1f}M trained parameters")
        workers = {name: Worker(name, directory, python) for name, python in pythons.items()}
        seconds = measure(workers, args.rounds)
        for worker in workers.values():
            worker.stop()
        report(seconds, list(workers), sizes["batch"] * sizes["length"])


if __name__ == "__main__":
    main()
