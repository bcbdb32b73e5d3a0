"""Make the tiny random checkpoints and golden outputs that the tests compare with.

    python tests/golden/make_golden.py [--out DIR] [NAME ...]

Needs torch and transformers (written against 5.24); the tests that read the result need neither.
Knows nothing of the `gdn` package: transformers in float32 with eager attention, on a CPU, is the
independent implementation. Writes DIR/NAME/{config.json, model.safetensors, golden.npz}, where the
first two are in the layout that the released models of that family use on disk.

Every parameter is moved away from its initial value, so that each term of the model counts. Arrays
of golden.npz, float32 unless said otherwise, N a prompt length:

    lengths                int32 [6]       1, 5, 63, 64, 65, 200
    ids_N                  int32 [N]       prompt
    logits_N               [N or 4, V]     N in (1, 5, 65): every position; else the last four
    greedy_N               int32 [24]      greedy continuation, full recomputation, no cache
    margin_N               [24]            top-1 minus top-2 logit at those steps, at least 0.02
    hidden_65              [L + 1, 65, D]  residual stream after k layers (0: embeddings);
                                           the final norm is not applied to any of them
    state_65_i             [HV, DK, DV]    linear layer i: recurrent state after the prompt
    conv_65_i              [3, channels]   linear layer i: last three inputs of the short
                                           convolution, oldest first, channels q, k, v
    key_65_i, value_65_i   [65, KV, H]     attention layer i: keys after norm and RoPE, values

Prompts are redrawn until neither the greedy tokens nor the choice of experts has a near-tie, which
another order of summation could turn.
"""

# pyright: reportMissingImports=false
# (torch and transformers are absent where the types are checked)

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

LENGTHS = (1, 5, 63, 64, 65, 200)
ALL_POSITIONS = (1, 5, 65)
PROBE = 65
NEW_TOKENS = 24
MIN_MARGIN = 0.02
MIN_ROUTER_GAP = 5e-4
# Projections made large, so that the layers outweigh the embedding in the residual stream: else
# greedy decoding only repeats the last token, most of all with tied embeddings.
STRONG = ("o_proj.weight", "out_proj.weight", "gate_up_proj", "down_proj") + tuple(
    f"{kind}_proj.weight" for kind in ("gate", "up", "down")
)

COMMON = dict(
    vocab_size=256,
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=None,
)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=16,
)
EXPERTS = dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=16,
)
MROPE = dict(
    rope_type="default",
    rope_theta=1e6,
    partial_rotary_factor=0.5,
    mrope_section=[2, 1, 1],
    mrope_interleaved=True,
)
NEXT_ROPE = dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.25)
FULL_ROPE = dict(rope_type="default", rope_theta=5e5)

# name -> (configuration class, arguments)
MODELS = {
    "qwen3_5": (
        transformers.Qwen3_5TextConfig,
        dict(COMMON, **LINEAR, intermediate_size=64, rope_parameters=MROPE),
    ),
    "qwen3_5_wrapped": (
        transformers.Qwen3_5TextConfig,
        dict(
            COMMON, **LINEAR, intermediate_size=64, rope_parameters=MROPE, tie_word_embeddings=True
        ),
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        dict(
            COMMON,
            **dict(LINEAR, linear_key_head_dim=16, linear_value_head_dim=12),
            **EXPERTS,
            intermediate_size=64,
            mlp_only_layers=[1],
            rope_parameters=NEXT_ROPE,
        ),
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeTextConfig,
        dict(COMMON, **LINEAR, **EXPERTS, rope_parameters=MROPE),
    ),
    "llama": (
        transformers.LlamaConfig,
        dict(COMMON, intermediate_size=64, rms_norm_eps=1e-5, rope_parameters=FULL_ROPE),
    ),
    "qwen3": (
        transformers.Qwen3Config,
        dict(COMMON, intermediate_size=64, tie_word_embeddings=True, rope_parameters=FULL_ROPE),
    ),
}


def make_model(name, seed=0, strength=None, **changes):
    """Build a random model.

    Args:
        name: a key of `MODELS`.
        seed: the parameters are a function of (name, seed, strength, changes).
        strength: of the projections in `STRONG`, 1 for N(0, 1 / width). Those of Qwen3-Next are
            0.8 by default, the others' 1.3: more would amplify rounding in the golden streams.
        changes: configuration fields that replace those of `MODELS`.

    Returns:
        The transformers model (float32, eager, eval mode) and its text configuration.
    """
    config_class, fields = MODELS[name]
    config = config_class(**{**fields, **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, **eager(config)
    ).eval()
    randomise(model, seed, strength or (0.8 if name == "qwen3_next" else 1.3))
    return model, model.config


def eager(config):
    """Return the arguments that select the plain implementations."""
    arguments = {"attn_implementation": "eager"}
    if getattr(config, "num_experts", None):
        arguments["experts_implementation"] = "eager"
    return arguments


@torch.no_grad()
def randomise(model, seed, strength):
    """Move every parameter away from its initial value; logits get a standard deviation near 3."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    head_std = 3.0 / model.config.hidden_size**0.5
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("A_log"):  # decay rates from slow to fast over the heads
            p.copy_(torch.linspace(math.log(0.02), math.log(12.0), len(p)) + 0.1 * noise)
        elif name.endswith("dt_bias"):
            p.copy_(noise * 1.5 - 1.5)
        elif "norm" in name:  # keeps the convention: around one, or around zero
            p.add_(0.3 * noise)
        elif "embed_tokens" in name:
            p.copy_(noise * (head_std if tied else 1.0))
        elif "lm_head" in name:
            p.copy_(noise * head_std)
        elif name.endswith(("conv1d.weight", "mlp.gate.weight")):
            p.copy_(noise * 0.5)
        elif name.endswith(STRONG):
            p.copy_(noise * strength / p.shape[-1] ** 0.5)
        else:
            p.copy_(noise * 0.8 / p.shape[-1] ** 0.5)


@torch.no_grad()
def greedy(model, ids, steps=NEW_TOKENS):
    """Continue `ids` [1, N] greedily without a cache; return tokens and top-1 to top-2 margins."""
    tokens, margins = [], []
    for _ in range(steps):
        top = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].topk(2)
        tokens.append(top.indices[0].item())
        margins.append((top.values[0] - top.values[1]).item())
        ids = torch.cat([ids, top.indices[None, :1]], dim=1)
    return np.array(tokens, np.int32), np.array(margins, np.float32)


@torch.no_grad()
def router_gap(model, ids):
    """Return the smallest distance in router logits between a chosen and a refused expert."""
    top_k = getattr(model.config, "num_experts_per_tok", None)
    if top_k is None:
        return math.inf
    logits = torch.cat(model(ids, use_cache=False, output_router_logits=True).router_logits)
    top = logits.topk(top_k + 1).values
    return (top[:, -2] - top[:, -1]).min().item()


def draw_prompt(model, config, length):
    """Draw prompts until one has no near-tie; return it with its continuation and margins."""
    rng = np.random.default_rng(length)
    for _ in range(200):
        prompt = rng.integers(0, config.vocab_size, size=length).astype(np.int32)
        tokens, margins = greedy(model, torch.from_numpy(prompt).long()[None])
        text = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
        if margins.min() >= MIN_MARGIN and router_gap(model, text) >= MIN_ROUTER_GAP:
            return prompt, tokens, margins
    raise RuntimeError(f"no prompt of length {length} is free of near-ties")


@torch.no_grad()
def probe(model, config, ids):
    """Return the residual stream and the caches after the prompt `ids` [1, N]."""
    n = ids.shape[1]
    stream = []
    # The input of layer k is the stream after k layers, and the final norm sees the last one.
    hooks = [
        module.register_forward_pre_hook(lambda _, args: stream.append(args[0][0].numpy().copy()))
        for module in (*model.model.layers, model.model.norm)
    ]
    cache = model(ids, use_cache=True).cache
    for hook in hooks:
        hook.remove()

    arrays = {f"hidden_{n}": np.stack(stream)}
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    for i, (kind, entry) in enumerate(zip(layer_types, cache.layers, strict=True)):
        if kind == "linear_attention":
            arrays[f"state_{n}_{i}"] = entry.recurrent_states[0][0].numpy()
            # transformers keeps one column more than the convolution needs.
            arrays[f"conv_{n}_{i}"] = entry.conv_states[0][0, :, 1:].T.numpy()
        else:
            arrays[f"key_{n}_{i}"] = entry.keys[0].transpose(0, 1).numpy()
            arrays[f"value_{n}_{i}"] = entry.values[0].transpose(0, 1).numpy()
    return arrays


@torch.no_grad()
def golden_arrays(model, config) -> dict:
    """Return the arrays listed in the docstring of this file."""
    arrays: dict = {"lengths": np.array(LENGTHS, np.int32)}
    for n in LENGTHS:
        prompt, tokens, margins = draw_prompt(model, config, n)
        ids = torch.from_numpy(prompt).long()[None]
        logits = model(ids, use_cache=False).logits[0].numpy()
        arrays[f"ids_{n}"] = prompt
        arrays[f"logits_{n}"] = logits if n in ALL_POSITIONS else logits[-4:]
        arrays[f"greedy_{n}"] = tokens
        arrays[f"margin_{n}"] = margins
        if n == PROBE:
            arrays.update(probe(model, config, ids))
    return {key: np.ascontiguousarray(value) for key, value in arrays.items()}


def save_checkpoint(name, model, directory):
    """Write config.json and the weights in the on-disk layout of the released models."""
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    config: dict = json.loads((directory / "config.json").read_text())
    if name == "qwen3_5_wrapped":
        config = wrap_config(config)
        save_in_two_files(wrap_tensors(load_file(directory / "model.safetensors")), directory)
        (directory / "model.safetensors").unlink()
    elif name == "qwen3_5_moe":
        # save_pretrained splits the experts, the released files hold them as 3-D tensors.
        save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    elif name in ("qwen3_next", "llama"):
        flatten_rope(config)
    if name == "qwen3_next":
        del config["layer_types"]
        config["full_attention_interval"] = 4
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def flatten_rope(config):
    """Move the RoPE fields to the top level, where files from transformers 4 have them."""
    rope = config.pop("rope_parameters")
    del rope["rope_type"]
    config.update(rope, rope_scaling=None)


def wrap_config(text) -> dict:
    """Nest a text configuration as the vision-language files do, with their extra fields."""
    text = {k: v for k, v in text.items() if k not in ("architectures", "transformers_version")}
    text.update(
        attn_output_gate=True,
        full_attention_interval=4,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
    )
    vision = dict(
        model_type="qwen3_5",
        depth=1,
        hidden_size=8,
        num_heads=1,
        intermediate_size=8,
        out_hidden_size=text["hidden_size"],
    )
    return dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        tie_word_embeddings=text["tie_word_embeddings"],
        text_config=text,
        vision_config=vision,
    )


def wrap_tensors(tensors):
    """Rename text tensors as the vision-language files do, and add tensors a text model skips."""
    tensors = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    size = tensors["model.language_model.norm.weight"].shape[0]
    shapes = {
        "model.visual.patch_embed.proj.weight": (8, 3, 2, 2, 2),
        "model.visual.patch_embed.proj.bias": (8,),
        "mtp.fc.weight": (size, 2 * size),
        "mtp.norm.weight": (size,),
        "mtp.pre_fc_norm_embedding.weight": (size,),
        "mtp.pre_fc_norm_hidden.weight": (size,),
    }
    attention_layer = "model.language_model.layers.3."
    for key, value in tensors.items():
        if key.startswith(attention_layer):
            shapes[key.replace(attention_layer, "mtp.layers.0.")] = tuple(value.shape)
    generator = torch.Generator().manual_seed(1)
    extra = {k: torch.randn(shape, generator=generator) * 0.1 for k, shape in shapes.items()}
    return {**tensors, **extra}


def save_in_two_files(tensors, directory):
    """Write two safetensors files and the index that says which tensor is where."""
    names = sorted(tensors)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {}
    for i, part in enumerate(parts, start=1):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        save_file({k: tensors[k] for k in part}, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(v.numel() * v.element_size() for v in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text)


def load_checkpoint(directory):
    """Load a checkpoint with transformers, refusing one that it reads only in part.

    Returns:
        The model (float32, eager, eval mode) and its text configuration.
    """
    config = transformers.AutoConfig.from_pretrained(directory)
    auto_class = transformers.AutoModelForCausalLM
    model, report = auto_class.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        directory, dtype=torch.float32, output_loading_info=True, **eager(config)
    )
    problems = {k: report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(problems.values()):
        raise ValueError(f"{directory}: expected every tensor to be used once, found {problems}")
    return model.eval(), model.config


def main():
    """Write the models named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; expected any of {', '.join(MODELS)}")

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums, hence the last bit, depends on it
    for name in args.names or MODELS:
        directory = args.out / name
        directory.mkdir(parents=True, exist_ok=True)
        save_checkpoint(name, make_model(name)[0], directory)
        # Computed after loading, so that the arrays belong to what is on disk.
        arrays = golden_arrays(*load_checkpoint(directory))
        np.savez_compressed(directory / "golden.npz", **arrays)
        margin = min(arrays[f"margin_{n}"].min() for n in LENGTHS)
        size = sum(file.stat().st_size for file in directory.iterdir()) / 1e3
        print(f"{name}: {size:.0f} kB, smallest margin {margin:.4f}")


if __name__ == "__main__":
    main()
