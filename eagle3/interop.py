"""Draft checkpoints of other systems <-> `Eagle3Draft`: SafeAILab / SGLang, vLLM and speculators.

The layouts differ in the prefix of the decoder layer's tensors (`midlayer.`, `layers.0.`) and in
config.json, see `eagle3.draft_hf_config`. Their readers skip tensors that they do not know and fill
in those that are missing, which costs acceptance and raises nothing; here both are errors, and all
come at once. `d2t` holds differences: the target id of draft id i is i + d2t[i].
"""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3.draft import Eagle3Draft, Table, vocabulary_problems
from eagle3.draft_config import DraftConfig
from eagle3.draft_hf_config import LAYER_IDS, LAYOUTS, layout_problems, read_fields, write_config
from gdn import HybridLM, TargetConfig
from gdn.config import raise_problems, unknown_name
from gdn.hf_config import read_json
from gdn.tensor_files import CONFIG, INDEX, SINGLE, open_tensors, publish, some, write_tensors

log = logging.getLogger(__name__)

# Name in the file, less prefixes -> parameter path, outside and inside the decoder layer.
_OUTER = {f"{name}.weight": name for name in ("fc", "lm_head", "embed_tokens")}
_OUTER |= {f"{name}.weight": f"{name}.weight" for name in ("norm", "input_norm")}
_OUTER |= {"fc.bias": "fc_bias", "d2t": "d2t", "t2d": "t2d"}
_LAYER = {f"self_attn.{name}_proj.weight": f"{name}_proj" for name in "qkvo"}
_LAYER |= {f"self_attn.{name}_norm.weight": f"{name}_norm.weight" for name in "qk"}
_LAYER |= {f"mlp.{name}_proj.weight": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_LAYER |= {
    f"{name}.weight": f"{name}.weight"
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
}
_LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
# Rotary tables, and copies of the target's head and norm: nothing of these is the draft's.
_SKIPPED = re.compile(r".*\brotary_emb\.inv_freq$|verifier_(lm_head|norm)\.weight$")
_FLOATS = ("F32", "BF16", "F16")


def load_draft(directory: str | Path, target: HybridLM, dtype=None) -> Eagle3Draft:
    """Load a draft for `target` from a folder in any of the layouts.

    An embedding that is absent, or that equals the target's in the target's precision, is the
    target's own array. Without `draft_vocab_size` and `lm_head`, the head is made of the target's
    rows, as in SGLang. Layer ids that are not stated are `TargetConfig.default_aux_layers`. A
    `norm_output` written by SpecForge means something else, see `draft_hf_config.read_fields`.

    Args:
      dtype: of the weights; that of the target's embedding by default.

    Raises:
      ValueError: a file is missing or broken; or else one list of everything that the config asks
        for and the draft cannot compute, of tensors that are missing, unknown, doubled, misshapen
        or of a wrong type, and of what does not fit the target.
    """
    directory = Path(directory)
    values, problems = read_fields(read_json(directory / CONFIG))
    _refuse_pickle(directory)
    tensors = _match(open_tensors(directory), problems)
    shares_head = values.get("draft_vocab_size") is None and "lm_head" not in tensors
    notes = _settle(values, tensors, target.cfg)
    cfg = _build(values, problems, str(directory))
    problems += cfg.problems_with(target.cfg)
    dtype = dtype or target.embed_tokens[...].dtype
    abstract = nnx.eval_shape(lambda: _blank(cfg, dtype))
    problems += _tensor_problems(cfg, _shapes(abstract), tensors, shares_head, notes)
    target_ids = _target_ids(cfg, tensors, problems)
    raise_problems(str(directory), problems)
    arrays = {
        path: jnp.asarray(tensor.read(), dtype)
        for path, tensor in tensors.items()
        if path not in ("d2t", "t2d")
    }
    return _fill(abstract, arrays, target_ids, target, dtype)


def draft_shape(directory: str | Path, target: TargetConfig) -> DraftConfig:
    """Read what a draft is from its config.json alone; sizes left to its weights are the target's.

    Raises:
      ValueError: one list of everything that cannot be used.
    """
    values, problems = read_fields(read_json(Path(directory) / CONFIG))
    _settle(values, {}, target)
    cfg = _build(values, problems, str(directory))
    raise_problems(str(directory), problems + cfg.problems_with(target))
    return cfg


class _Tensor:
    """A tensor in an open file: its header at once, its data when asked for."""

    def __init__(self, name: str, file):
        header = file.get_slice(name)
        self.name, self.file = name, file
        self.shape, self.kind = tuple(header.get_shape()), str(header.get_dtype())

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


def _refuse_pickle(directory: Path) -> None:
    """Say how to convert weights in pickle form, which can run code when it is read."""
    pickles = sorted(directory.glob("pytorch_model*.bin"))
    if pickles and not (directory / SINGLE).exists() and not (directory / INDEX).exists():
        raise ValueError(
            f"{directory} holds {pickles[0].name} and no safetensors; convert it once, with"
            " safetensors.torch.save_file(torch.load('pytorch_model.bin', weights_only=True),"
            f" '{SINGLE}')"
        )


def _match(files: dict, problems: list[str]) -> dict[str, _Tensor]:
    """Find the parameter of every tensor; note names that are unknown or say the same."""
    tensors, unknown, doubled, skipped = {}, [], [], []
    for name, file in sorted(files.items()):
        path = _parameter(name)
        if _SKIPPED.match(name):
            skipped.append(name)
        elif path is None:
            unknown.append(name)
        elif path in tensors:
            doubled.append(f"{tensors[path].name} and {name}")
        else:
            tensors[path] = _Tensor(name, file)
    if skipped:
        log.info("skipped %d tensors that a draft has no use for: %s", len(skipped), some(skipped))
    if unknown:
        listed = f"{some(unknown)}; a draft has no such parameters, remove them"
        problems.append(f"unknown tensors ({len(unknown)}): {listed}")
    if doubled:
        problems.append(
            f"tensors under two names ({len(doubled)}): {some(doubled)}; remove one of each"
        )
    return tensors


def _parameter(name: str) -> str | None:
    """Return the parameter path of a name in a file, with `d2t` and `t2d` for the tables."""
    short = name.removeprefix("model.")
    for prefix in ("midlayer.", "layers.0."):
        if short.startswith(prefix):
            return _LAYER.get(short.removeprefix(prefix))
    stem, dot, kind = short.rpartition(".")
    short = _LEGACY.get(stem, stem) + dot + kind
    return short if re.fullmatch(r"fc_norm\.\d+\.weight", short) else _OUTER.get(short)


def _settle(values: dict[str, Any], tensors: dict[str, _Tensor], target: TargetConfig) -> list[str]:
    """Fill in what the config leaves open from the weights and the target; returns notes on it."""
    notes = []
    values.setdefault("qk_norm", "q_norm.weight" in tensors or "k_norm.weight" in tensors)
    values.setdefault("fc_bias", "fc_bias" in tensors)
    if "aux_layers" not in values:
        values["aux_layers"] = target.default_aux_layers
        notes.append(f"{LAYER_IDS} is missing; if these are not the default layers, state them")
        log.info("no %s, taking the default %s", LAYER_IDS, values["aux_layers"])
    if "target_hidden_size" not in values and "hidden_size" in values:
        # Files of drafts with another width than the target's state it, or fc does.
        fused = len(values["aux_layers"]) * target.hidden_size
        is_targets = "fc" in tensors and tensors["fc"].shape[1:] == (fused,)
        values["target_hidden_size"] = target.hidden_size if is_targets else values["hidden_size"]
    for path in ("lm_head", "d2t"):
        if "draft_vocab_size" not in values and path in tensors and tensors[path].shape:
            values["draft_vocab_size"] = tensors[path].shape[0]
    if "vocab_size" in values:
        values.setdefault("draft_vocab_size", values["vocab_size"])
    return notes


def _build(values: dict[str, Any], problems: list[str], origin: str) -> DraftConfig:
    """Make the config; without one there is no telling what tensors to expect, so raise at once."""
    required = {f.name for f in dataclasses.fields(DraftConfig) if f.default is dataclasses.MISSING}
    if required - values.keys():  # each noted as missing or malformed already
        raise_problems(origin, problems)
    try:
        return DraftConfig(**values)
    except ValueError as error:
        problems += str(error).split("\n  - ")[1:]
        raise_problems(origin, problems)
        raise


def _blank(cfg: DraftConfig, dtype) -> Eagle3Draft:
    embed_tokens = jnp.zeros((cfg.vocab_size, cfg.hidden_size), dtype)
    target_ids = np.arange(cfg.draft_vocab_size)
    return Eagle3Draft(cfg, embed_tokens, target_ids, dtype=dtype, rngs=nnx.Rngs(0))


def _flat(draft: Eagle3Draft) -> dict[str, nnx.Variable]:
    state = nnx.to_flat_state(nnx.state(draft))
    return {".".join(map(str, path)): leaf for path, leaf in state}


def _shapes(draft: Eagle3Draft) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in _flat(draft).items() if path != "target_ids"}


def _tensor_problems(
    cfg: DraftConfig, shapes: dict, tensors: dict[str, _Tensor], shares_head: bool, notes: list[str]
) -> list[str]:
    """List tensors that are missing, that the config rules out, misshapen, or of a wrong type."""
    is_targets_width = cfg.hidden_size == cfg.target_hidden_size
    optional = {"embed_tokens"} if is_targets_width else set()
    if shares_head and is_targets_width:
        optional.add("lm_head")
    missing = [
        _file_name(path, "midlayer.") for path in shapes if path not in {*tensors, *optional}
    ]
    problems, extra, wrong = [], [], []
    wanted: dict[str, tuple] = {path: (shape, _FLOATS) for path, shape in shapes.items()}
    wanted["d2t"] = (cfg.draft_vocab_size,), ("I64", "I32")
    wanted["t2d"] = (cfg.vocab_size,), ("BOOL",)
    for path, tensor in tensors.items():
        if path not in wanted:
            extra.append(tensor.name)
            continue
        shape, kinds = wanted[path]
        if tensor.shape != shape or tensor.kind not in kinds:
            found, expected = f"{tensor.kind} {tensor.shape}", f"{'/'.join(kinds)} {shape}"
            wrong.append(f"{tensor.name} is {found}, expected {expected}")
            if path == "fc":
                wrong[-1] += (
                    f" (target_hidden_size {cfg.target_hidden_size} for each of the layers"
                    f" {cfg.aux_layers}{''.join('; ' + note for note in notes)})"
                )
    if missing:
        problems.append(f"missing tensors ({len(missing)}): {some(missing)}; export them too")
    if extra:
        hint = "set in config.json what they belong to (fc_norm, norm_before_fc, bias, model_type)"
        problems.append(f"tensors that the config rules out ({len(extra)}): {some(extra)}; {hint}")
    if wrong:
        problems.append(f"misshapen or mistyped tensors ({len(wrong)}): {'; '.join(wrong)}")
    if not is_targets_width and {"embed_tokens", "lm_head"} - set(tensors):
        problems.append(
            f"hidden_size is {cfg.hidden_size}, target_hidden_size {cfg.target_hidden_size}: this"
            " draft can share neither the target's embedding nor its head"
        )
    return problems


def _target_ids(
    cfg: DraftConfig, tensors: dict[str, _Tensor], problems: list[str]
) -> np.ndarray | None:
    """Return the target id of each draft id; None, with a problem noted, if there is no telling."""
    identity = np.arange(cfg.draft_vocab_size)
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and cfg.draft_vocab_size < cfg.vocab_size:
        problems.append(
            f"d2t is missing: {cfg.draft_vocab_size} draft ids of a vocabulary of {cfg.vocab_size}"
            " mean nothing without it; export it too"
        )
        return None
    if d2t is not None and (d2t.shape != identity.shape or d2t.kind not in ("I64", "I32")):
        return None  # noted with the other misshapen tensors
    target_ids = identity if d2t is None else identity + d2t.read()
    if found := vocabulary_problems(cfg, target_ids):
        problems.append(
            f"{' and '.join(found)}; d2t holds differences, target id = draft id + d2t[draft id]"
        )
    elif t2d is not None and t2d.kind == "BOOL" and t2d.shape == (cfg.vocab_size,):
        marked = np.flatnonzero(t2d.read())
        if not np.array_equal(marked, target_ids):
            problems.append(
                f"t2d marks {len(marked)} target ids, other ones than the {len(target_ids)} of d2t;"
                " one of the two is wrong"
            )
    return target_ids


def _fill(
    abstract: Eagle3Draft, arrays: dict[str, jax.Array], target_ids, target: HybridLM, dtype
) -> Eagle3Draft:
    """Put arrays into a draft that has only shapes, and what is shared from the target."""
    table = target.embed_tokens[...]
    own = arrays.pop("embed_tokens", table)
    is_own = own.shape != table.shape or not bool((own.astype(table.dtype) == table).all())
    if "lm_head" not in arrays:
        head = target.embed_tokens if target.cfg.tie_word_embeddings else target.lm_head
        arrays["lm_head"] = head[...][target_ids].astype(dtype)
    arrays["embed_tokens"] = own if is_own else table
    arrays["target_ids"] = jnp.asarray(target_ids, jnp.int32)
    graphdef, state = nnx.split(abstract)
    filled = [
        (path, leaf.replace(arrays[".".join(map(str, path))]))
        for path, leaf in nnx.to_flat_state(state)
    ]
    draft = nnx.merge(graphdef, nnx.from_flat_state(filled))
    # Remembered for `save_draft`: an embedding of the draft's own must not get lost.
    draft.embed_tokens = Table(arrays["embed_tokens"], is_own=is_own)
    return draft


def save_draft(
    draft: Eagle3Draft,
    directory: str | Path,
    layout: str = "sglang",
    *,
    target_name: str | None = None,
    embedding: bool = False,
) -> None:
    """Write a draft as SGLang, vLLM or the speculators package reads it.

    The first two layouts are one, `midlayer.*` names and layer ids in both numberings, which
    SafeAILab's code reads as well; they differ in what their readers compute. As in
    `gdn.save_pretrained`, an interrupted save leaves no folder that can be read.

    Args:
      target_name: path or repository of the target; the speculators layout cannot do without.
      embedding: write `embed_tokens` in the first two layouts too. It always is where it is known
        not to be the target's: loaded from a file with another one, or of another width.

    Raises:
      ValueError: the layout is unknown, or its readers would compute something else.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {unknown_name(layout, LAYOUTS)}")
    if problems := layout_problems(draft.cfg, layout, target_name):
        raise_problems(f"layout {layout!r}", problems)
    cfg, prefix = draft.cfg, "layers.0." if layout == "speculators" else "midlayer."
    is_own = getattr(draft.embed_tokens, "is_own", False)
    # The speculators package leaves a missing embedding uninitialised.
    embedding |= is_own or layout == "speculators" or cfg.hidden_size != cfg.target_hidden_size
    arrays = {path: np.asarray(leaf[...]) for path, leaf in _flat(draft).items()}
    target_ids = arrays.pop("target_ids").astype(np.int64)
    if not embedding:
        del arrays["embed_tokens"]
    tensors = {_file_name(path, prefix): array for path, array in arrays.items()}
    tensors["d2t"] = target_ids - np.arange(len(target_ids))
    tensors["t2d"] = np.isin(np.arange(cfg.vocab_size), target_ids)
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, directory / (SINGLE + ".tmp"))
    config = write_config(cfg, layout, arrays["lm_head"].dtype.name, target_name)
    publish(directory, [SINGLE], config)


def _file_name(path: str, prefix: str) -> str:
    """Return the name in a file of a parameter."""
    layer, outer = ({known: name for name, known in names.items()} for names in (_LAYER, _OUTER))
    return prefix + layer[path] if path in layer else outer.get(path, path)  # fc_norm: the same
