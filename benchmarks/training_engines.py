"""The engines of training.py: this package, torch and speculators, each with a step of its own.

`target()` and `draft()` take a step and return its loss, `features()` runs the frozen target. All
start from what `write_models` of training.py left in a folder.
"""

import json
from pathlib import Path

STEPS, DECAY, CLIP = 4, 0.8, 0.5  # K of the training-time test, and weight of each step


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
