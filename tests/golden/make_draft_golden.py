"""Make the tiny random EAGLE-3 drafts and golden outputs that the tests compare with.

    python tests/golden/make_draft_golden.py [--out DIR] [VARIANT ...]

Needs torch (2.13) and speculators (0.9.0), whose draft model is the independent implementation;
it asks for an older transformers (5.19 here) than `make_golden.py`, so give it an environment of
its own. With `--no-deps`, speculators and hs-connectors run on torch, transformers,
pydantic-settings, loguru, openai, psutil and datasets alone. Knows nothing of `eagle3`.

Writes DIR/draft_VARIANT/{config.json, model.safetensors, golden.npz}, the first two in the layout
of speculators, with weights in bfloat16; everything is computed from them in float32, on a CPU.
The table d2t and the target's embedding are in model.safetensors. Slot t = 0..S-2 pairs the
streams at position t with token x_{t+1}, and step k feeds it x_{t+1+k}. Arrays of golden.npz,
float32 unless said otherwise:

    tokens           int32 [S]            x_0..x_{S-1}
    aux              float16 [S, A, D]    residual streams of a made-up target, low to high
    step_logits      [K, S-1, Vd]         of each step of training-time test; at the last k slots of
                                          step k, which have no token, zeros
    chain_prompt     int32 []             N: a greedy chain is drafted after x_0..x_{N-1}, where x_N
                                          stands for the token just sampled
    chain_logits     [K, Vd]              at slot N-1, then at each drafted token, with a KV cache
    chain_ids        int32 [K]            the drafted tokens, as ids of the draft vocabulary

Norm weights are off one, epsilon is large and the rotary base unusual, so that each of them counts.
Inputs are redrawn until the tokens of the chain are distinct and none is a near-tie, which another
order of summation could turn.
"""

# pyright: reportMissingImports=false
# (torch, transformers and speculators are absent where the types are checked)

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

WIDTH, VOCAB, DRAFT_VOCAB = 16, 80, 32
AUX_LAYERS = [1, 3, 4]  # inputs of these layers of the target
LENGTH, PROMPT, STEPS = 17, 7, 3
MIN_MARGIN = 0.05
ATTENTION: dict = dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=6
)  # 4 * 6 is not WIDTH
VARIANTS = {
    "base": {},
    "eagle31": dict(fc_norm=True, norm_output=True),
    "speculators_default": dict(norm_before_residual=True, norm_before_fc=True, norm_output=True),
    "qk_norm": {},
}


def make_draft(variant: str) -> Eagle3DraftModel:
    """Build a random draft, in float32 with values that bfloat16 holds exactly."""
    config_class = transformers.Qwen3Config if variant == "qk_norm" else transformers.LlamaConfig
    layer = config_class(
        hidden_size=WIDTH,
        intermediate_size=20,
        num_hidden_layers=1,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        rms_norm_eps=0.02,
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
        bos_token_id=None,
        eos_token_id=None,
        **ATTENTION,
    )
    layer._attn_implementation = "sdpa"
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=AUX_LAYERS,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method=proposal.proposal_type,
            verifier=VerifierConfig(name_or_path="tiny-target", architectures=["LlamaForCausalLM"]),
        ),
        **VARIANTS[variant],
    )
    draft = Eagle3DraftModel(config).float().eval().requires_grad_(False)
    randomise(draft, np.random.default_rng(list(VARIANTS).index(variant)))
    return draft


def randomise(draft: Eagle3DraftModel, rng: np.random.Generator) -> None:
    """Move every parameter away from its initial value and draw the draft vocabulary."""
    for name, p in draft.named_parameters():
        noise = torch.from_numpy(rng.standard_normal(tuple(p.shape)))
        if "norm" in name:
            noise = 1 + 0.25 * noise
        elif "embed_tokens" not in name:
            # Sharp logits and attention: near-uniform ones would hide mistakes.
            gain = 3.0 if "lm_head" in name else 1.5 if "q_proj" in name else 1.1
            noise *= gain / p.shape[-1] ** 0.5
        p.copy_(noise.bfloat16())
    ids = np.sort(rng.choice(VOCAB, DRAFT_VOCAB, replace=False))
    draft.d2t.copy_(torch.from_numpy(ids - np.arange(DRAFT_VOCAB)))
    draft.t2d.copy_(torch.from_numpy(np.isin(np.arange(VOCAB), ids)))


def step_logits(draft: Eagle3DraftModel, tokens, aux) -> np.ndarray:
    """Return what the package's own forward pass hands through the head, step by step."""
    slots, seen = len(tokens) - 1, []
    hook = draft.lm_head.register_forward_hook(lambda _module, _args, out: seen.append(out[0]))
    draft(
        hidden_states=aux[None, :-1].flatten(2),
        input_ids=tokens[None, 1:],
        document_ids=torch.zeros(1, slots, dtype=torch.long),
        position_ids=torch.arange(1, slots + 1)[None],
        ttt_steps=STEPS,
    )
    hook.remove()
    logits = torch.stack(seen).numpy().copy()
    for step in range(STEPS):
        logits[step, slots - step :] = 0
    return logits


def fuse(draft: Eagle3DraftModel, aux):
    """Return the features of `aux` [T, A, D]."""
    joined = aux.flatten(1)
    if draft.fc_norm is not None:
        joined = torch.cat([norm(aux[:, i]) for i, norm in enumerate(draft.fc_norm)], dim=-1)
    if draft.input_norm is not None:
        joined = draft.input_norm(joined)
    return draft.fc(joined)


def greedy_chain(draft: Eagle3DraftModel, tokens, aux) -> dict:
    """Draft from a prompt, then one token at a time on top of a KV cache."""
    cache = transformers.DynamicCache()
    token, hidden = tokens[1 : PROMPT + 1], fuse(draft, aux[:PROMPT])
    position = torch.arange(PROMPT)
    mask = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()[None, None]
    logits, ids = [], []
    for _ in range(STEPS):
        pair = torch.cat([draft.embed_tokens(token), hidden], dim=-1)[None]
        z = draft.layers[0](
            pair,
            attention_mask=mask,
            position_ids=position[None],
            past_key_values=cache,
            position_embeddings=draft.rotary_emb(pair, position[None]),
        )[0, -1:]
        normed = draft.norm(z)
        logits.append(draft.lm_head(normed)[0].numpy())
        ids.append(int(logits[-1].argmax()))
        token = torch.tensor([ids[-1] + int(draft.d2t[ids[-1]])])
        hidden = normed if draft.config.norm_output else z
        position, mask = position[-1:] + 1, None
    return dict(chain_logits=np.stack(logits), chain_ids=np.array(ids, np.int32))


def margin(logits: np.ndarray) -> float:
    """Return the smallest lead of a best logit over the second best."""
    top = np.sort(logits, axis=-1)
    return float((top[:, -1] - top[:, -2]).min())


@torch.no_grad()
def golden_arrays(draft: Eagle3DraftModel) -> dict:
    """Return the arrays listed in the docstring of this file."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, VOCAB, LENGTH).astype(np.int32)
        # Streams grow with depth, as in a real model.
        scale = np.array([0.7, 1.5, 3.0])[:, None]
        aux = (scale * rng.standard_normal((LENGTH, len(AUX_LAYERS), WIDTH))).astype(np.float16)
        inputs = torch.from_numpy(tokens).long(), torch.from_numpy(aux).float()
        chain = greedy_chain(draft, *inputs)
        distinct = len(set(chain["chain_ids"].tolist())) == STEPS
        if distinct and margin(chain["chain_logits"]) > MIN_MARGIN:
            arrays = dict(tokens=tokens, aux=aux, step_logits=step_logits(draft, *inputs))
            return arrays | dict(chain_prompt=np.int32(PROMPT)) | chain
    raise RuntimeError("no input gave a chain of distinct tokens without near-ties")


def save_draft(draft: Eagle3DraftModel, directory: Path) -> None:
    """Write config.json and the weights, without the copy of the package's source beside them."""
    draft.bfloat16().save_pretrained(directory)
    (directory / "config.py").unlink()
    config = json.loads((directory / "config.json").read_text())
    del config["auto_map"]
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main():
    """Write the variants named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    args = parser.parse_args()
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; expected any of {', '.join(VARIANTS)}")

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums, hence the last bit, depends on it
    for variant in args.variants or VARIANTS:
        directory = args.out / f"draft_{variant}"
        draft = make_draft(variant)
        arrays = golden_arrays(draft)
        save_draft(draft, directory)
        np.savez_compressed(directory / "golden.npz", **arrays)
        # The first link of the chain is step 0 at its slot: cache and unrolling agree.
        gap = np.abs(arrays["chain_logits"][0] - arrays["step_logits"][0, PROMPT - 1]).max()
        size = sum(file.stat().st_size for file in directory.iterdir()) / 1e3
        print(
            f"{variant}: {size:.1f} kB, logits of deviation {arrays['step_logits'][0].std():.2f},"
            f" margin {margin(arrays['chain_logits']):.3f}, chain {arrays['chain_ids'].tolist()},"
            f" cache against unrolling {gap:.1e}"
        )


if __name__ == "__main__":
    main()
