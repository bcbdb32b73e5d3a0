"""Hugging Face safetensors directories <-> `HybridLM`: one table of names, every error at once.

Reads single files and sharded indices, `model.*` and `model.language_model.*` names. Names and shapes
are checked from the file headers before any data is read; then tensors pass one by one, so peak
memory is the model plus one tensor. Layouts as in the released Qwen3-Next, Qwen3.5, Llama files.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gdn.config import TargetConfig
from gdn.model import HybridLM

log = logging.getLogger(__name__)

SKIPPED = re.compile(r"mtp\.|(model\.)?visual\.|.*\.rotary_emb\.inv_freq$")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LAYER = r"layers\.(\d+)\."
# File name after the prefix -> parameter path; "=" keeps the name. Fused tensors are in `_fused`.
TABLE = tuple(
    (re.compile(pattern + "$"), path)
    for pattern, path in (
        (r"embed_tokens\.weight", "embed_tokens"),
        (r"norm\.weight", "norm.weight"),
        (r"lm_head\.weight", "lm_head"),
        (_LAYER + r"(input|post_attention)_layernorm\.weight", r"layers.\1.\2_layernorm.weight"),
        (_LAYER + r"self_attn\.([qkvo]_proj)\.weight", r"layers.\1.self_attn.\2"),
        (_LAYER + r"self_attn\.([qk]_norm)\.weight", r"layers.\1.self_attn.\2.weight"),
        (_LAYER + r"linear_attn\.(in_proj_(?:qkv|z|b|a)|out_proj)\.weight", r"layers.\1.linear_attn.\2"),
        (_LAYER + r"linear_attn\.(conv1d|norm)\.weight", r"layers.\1.linear_attn.\2"),
        (_LAYER + r"linear_attn\.(A_log|dt_bias)", r"layers.\1.linear_attn.\2"),
        (_LAYER + r"mlp\.((?:gate|up|down)_proj)\.weight", r"layers.\1.mlp.\2"),
        (_LAYER + r"mlp\.(gate|shared_expert_gate)\.weight", r"layers.\1.mlp.\2"),
        (_LAYER + r"mlp\.shared_expert\.((?:gate|up|down)_proj)\.weight", r"layers.\1.mlp.shared_expert.\2"),
        (_LAYER + r"mlp\.experts\.((?:gate_up|down)_proj)", r"layers.\1.mlp.experts.\2"),
    )
)  # fmt: skip
_EXPERT = re.compile(_LAYER + r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_FUSED_PROJECTION = re.compile(_LAYER + r"linear_attn\.in_proj_(qkvz|ba)\.weight$")


class Piece(NamedTuple):
    """Where (a part of) a tensor of a file goes."""

    path: str  # parameter, dotted
    where: tuple  # index into the parameter
    take: Callable[[np.ndarray], np.ndarray]  # from the file's tensor


def load_pretrained(directory: str | Path, dtype=jnp.float32) -> HybridLM:
    """Load a target from a Hugging Face directory.

    Args:
      dtype: of the weights; `A_log`, `dt_bias` and the DeltaNet norm stay float32.

    Raises:
      ValueError: the config is not supported, a file is missing or broken, or tensors are missing,
        unexpected or misshapen (all of them in one message).
    """
    directory = Path(directory)
    cfg = TargetConfig.from_hf(directory)
    abstract = nnx.eval_shape(lambda: HybridLM(cfg, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(directory, stack)
        plan = _plan(cfg, tensors, {path: leaf.shape for path, leaf in flat.items()}, directory)
        values = _read(plan, tensors, flat)
    leaves = [leaf.replace(values[".".join(map(str, path))]) for path, leaf in nnx.to_flat_state(state)]
    paths = [path for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(zip(paths, leaves, strict=True)))


def _open_tensors(directory: Path, stack: contextlib.ExitStack) -> dict:
    """Map each tensor name to the open file that holds it."""
    index = directory / INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    else:
        names = [SINGLE]
    tensors = {}
    for name in names:
        path = directory / name
        if not path.exists():
            raise ValueError(f"{path} does not exist; {directory} needs {SINGLE} or {INDEX} and its files")
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from error
        tensors |= {key: file for key in file.keys()}  # noqa: SIM118 (not a dict)
    if index.exists() and (lost := sorted(set(weight_map) - set(tensors))):
        raise ValueError(f"{index} lists tensors that no file holds: {_some(lost)}")
    return tensors


def _plan(cfg, tensors, shapes: dict[str, tuple], directory: Path) -> dict[str, list[Piece]]:
    """Decide where every tensor goes; raise once with everything that does not fit."""
    plan, skipped, unexpected, misshapen = {}, [], [], []
    covered = dict.fromkeys(shapes, 0)
    for name, file in tensors.items():
        tied_head = name == "lm_head.weight" and cfg.tie_word_embeddings
        if SKIPPED.match(name) or tied_head:
            skipped.append(name)
            continue
        pieces = [p for p in _pieces(cfg, name) if p.path in shapes]
        if not pieces:
            unexpected.append(name)
            continue
        found = tuple(file.get_slice(name).get_shape())
        try:  # an array without data goes through the same slicing as the real one
            parts = [piece.take(_empty(found)).shape for piece in pieces]
        except (ValueError, IndexError):
            parts = [None] * len(pieces)
        wanted = [_empty(shapes[piece.path])[piece.where].shape for piece in pieces]
        if parts != wanted or str(file.get_slice(name).get_dtype()) not in ("F32", "BF16", "F16"):
            kind = file.get_slice(name).get_dtype()
            misshapen.append(f"{name}: found {kind} {list(found)} for {pieces[0].path} {list(shapes[pieces[0].path])}")
            continue
        plan[name] = pieces
        for piece, shape in zip(pieces, wanted, strict=True):
            covered[piece.path] += int(np.prod(shape))
    bad = {text.split(":")[0] for text in misshapen}
    touched = {piece.path for name in bad for piece in _pieces(cfg, name)}
    missing = [p for p, count in covered.items() if count < np.prod(shapes[p]) and p not in touched]
    doubled = [p for p, count in covered.items() if count > np.prod(shapes[p])]
    problems = [
        f"{kind} ({len(names)}): {_some(names)}"
        for kind, names in (
            ("missing parameters", missing), ("unexpected tensors", unexpected),
            ("misshapen tensors", misshapen), ("parameters stored twice", doubled),
        )
        if names
    ]  # fmt: skip
    if problems:
        raise ValueError(
            f"the weights in {directory} do not fit its config ({cfg.model_type}):\n  " + "\n  ".join(problems)
        )
    if skipped:
        log.info("skipped %d tensors this text model has no use for: %s", len(skipped), _some(skipped))
    return plan


def _empty(shape) -> np.ndarray:
    return np.broadcast_to(np.zeros((), np.int8), shape)


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _pieces(cfg: TargetConfig, name: str) -> list[Piece]:
    """Return where a tensor goes; nothing for a name that is not in the table."""
    short = re.sub(r"^model\.(language_model\.)?", "", name)
    if match := _EXPERT.match(short):
        return [_expert_piece(cfg, *match.groups())]
    if match := _FUSED_PROJECTION.match(short):
        return _fused_pieces(cfg, *match.groups())
    for pattern, path in TABLE:
        if match := pattern.match(short):
            take = _drop_middle_axis if path.endswith("conv1d") or r"conv1d" in short else _whole
            return [Piece(match.expand(path), (), take)]
    return []


def _whole(x: np.ndarray) -> np.ndarray:
    return x


def _drop_middle_axis(x: np.ndarray) -> np.ndarray:
    return x[:, 0] if x.ndim == 3 and x.shape[1] == 1 else x[:, :, :]  # [E, 1, W] in files


def _expert_piece(cfg: TargetConfig, layer: str, expert: str, kind: str) -> Piece:
    path = f"layers.{layer}.mlp.experts." + ("down_proj" if kind == "down" else "gate_up_proj")
    width = cfg.moe_intermediate_size
    rows = {"down": slice(None), "gate": slice(0, width), "up": slice(width, 2 * width)}[kind]
    return Piece(path, (int(expert), rows), _whole)


def _fused_pieces(cfg: TargetConfig, layer: str, kind: str) -> list[Piece]:
    """Split Qwen3-Next's projections, whose rows are grouped by key head, into the plain layout."""

    def rows(index):
        return lambda x: x[index] if len(x) == total else x[:, :, :]

    total = sum(map(len, fused_rows(cfg)[kind].values()))
    return [
        Piece(f"layers.{layer}.linear_attn.{name}", (), rows(index))
        for name, index in fused_rows(cfg)[kind].items()
    ]


def fused_rows(cfg: TargetConfig) -> dict[str, dict[str, np.ndarray]]:
    """Say which rows of Qwen3-Next's `in_proj_qkvz` and `in_proj_ba` make up our projections.

    Per key head the file holds [q, k, v of its value heads, z of its value heads], and [b, a].
    """
    groups = cfg.num_value_groups

    def split(*widths):
        rows = np.arange(cfg.linear_num_key_heads * sum(widths))
        grouped = rows.reshape(cfg.linear_num_key_heads, sum(widths))
        return [part.reshape(-1) for part in np.split(grouped, np.cumsum(widths)[:-1], axis=1)]

    dk, dv = cfg.linear_key_head_dim, groups * cfg.linear_value_head_dim
    q, k, v, z = split(dk, dk, dv, dv)
    b, a = split(groups, groups)
    return {
        "qkvz": {"in_proj_qkv": np.concatenate([q, k, v]), "in_proj_z": z},
        "ba": {"in_proj_b": b, "in_proj_a": a},
    }


def _read(plan: dict[str, list[Piece]], tensors: dict, flat: dict) -> dict[str, jax.Array]:
    """Read tensor by tensor; parameters made of several tensors are gathered on the host."""
    values: dict[str, jax.Array] = {}
    partial: dict[str, tuple[np.ndarray, int]] = {}
    # In parameter order, so that at most one gathered parameter is open at a time.
    for name in sorted(plan, key=lambda n: plan[n][0].path):
        tensor = tensors[name].get_tensor(name)
        for path, where, take in plan[name]:
            leaf = flat[path]
            if where == ():
                values[path] = jnp.asarray(take(tensor), leaf.dtype)
                continue
            buffer, done = partial.pop(path, (None, 0))
            if buffer is None:
                buffer = np.empty(leaf.shape, leaf.dtype)
            buffer[where] = tensor
            done += tensor.size
            if done == buffer.size:
                values[path] = jnp.asarray(buffer)
            else:
                partial[path] = (buffer, done)
    return values


def save_pretrained(model: HybridLM, directory: str | Path, max_shard_bytes: int = 5 << 30) -> None:
    """Write config and weights as transformers reads them; each file appears whole or not at all.

    Args:
      max_shard_bytes: larger models are split into numbered files with an index.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list[tuple[str, Callable[[], np.ndarray]]]] = [[]]
    size = 0
    sizes = {}
    for name, bytes_, make in _file_tensors(model):
        if shards[-1] and size + bytes_ > max_shard_bytes:
            shards.append([])
            size = 0
        size += bytes_
        sizes[name] = bytes_
        shards[-1].append((name, make))
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: np.ascontiguousarray(make()) for name, make in shard}
        temporary = directory / (file + ".tmp")
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(directory / INDEX, index)
    _write_json(directory / "config.json", model.cfg.to_hf())
    _remove_stale(directory, set(weight_map.values()))


def _remove_stale(directory: Path, current: set[str]) -> None:
    """Remove weight files of an earlier save, which a reader might take for ours."""
    if len(current) == 1:
        (directory / INDEX).unlink(missing_ok=True)
    for path in directory.glob("model*.safetensors"):
        if path.name not in current and re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", path.name):
            path.unlink()


def _write_json(path: Path, data: dict) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(temporary, path)


def _file_tensors(model: HybridLM) -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
    """Yield name, bytes and a maker for each tensor of the family's own file layout."""
    cfg = model.cfg
    for keys, leaf in nnx.to_flat_state(nnx.state(model)):
        path, value = ".".join(map(str, keys)), leaf[...]
        if cfg.model_type == "qwen3_next":
            if ".in_proj_" in path:
                yield from _fused_tensors(cfg, model, path, value)
                continue
            if ".mlp.experts." in path:
                yield from _expert_tensors(cfg, path, value)
                continue
        name = path if path == "lm_head" else "model." + path
        if not re.search(r"(weight|A_log|dt_bias|experts\.(gate_up|down)_proj)$", name):
            name += ".weight"
        expand = path.endswith("conv1d")
        yield name, value.nbytes, lambda v=value, e=expand: np.asarray(v)[:, None] if e else np.asarray(v)


def _fused_tensors(cfg, model, path, value):
    """Yield `in_proj_qkvz` for `in_proj_qkv` and `in_proj_ba` for `in_proj_b`; the rest is inside."""
    prefix, _, kind = path.rpartition(".")
    fused = {"in_proj_qkv": "qkvz", "in_proj_b": "ba"}.get(kind)
    if fused is None:
        return
    layer = model.layers[int(path.split(".")[1])].linear_attn
    rows = fused_rows(cfg)[fused]
    total = sum(map(len, rows.values()))

    def make():
        out = np.empty((total, value.shape[1]), value.dtype)
        for name, index in rows.items():
            out[index] = np.asarray(getattr(layer, name)[...])
        return out

    yield f"model.{prefix}.in_proj_{fused}.weight", value.nbytes * total // len(value), make


def _expert_tensors(cfg, path, value):
    prefix, _, kind = path.rpartition(".")
    width = cfg.moe_intermediate_size
    parts = {"down": slice(None)}
    if kind == "gate_up_proj":
        parts = {"gate": slice(0, width), "up": slice(width, 2 * width)}
    for expert in range(cfg.num_experts):
        for name, rows in parts.items():
            yield (
                f"model.{prefix}.{expert}.{name}_proj.weight",
                value.nbytes // cfg.num_experts // len(parts),
                lambda e=expert, r=rows: np.asarray(value[e, r]),
            )
