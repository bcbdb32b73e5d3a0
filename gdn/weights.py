"""Hugging Face safetensors directories <-> `HybridLM`: one table of names, every error at once.

Reads single files and sharded indices, `model.*` and `model.language_model.*` names. Names and
shapes are checked from the file headers before any data is read; then tensors pass one by one, so
peak memory is the model plus one tensor, or one parameter where files split it. Layouts as in the
released Qwen3-Next, Qwen3.5, Llama files.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn.config import TargetConfig
from gdn.model import HybridLM
from gdn.sharding import load
from gdn.tensor_files import (
    INDEX,
    SINGLE,
    open_tensors,
    publish,
    some,
    write_json,
    write_tensors,
)

log = logging.getLogger(__name__)

SKIPPED = re.compile(r"mtp\.|(model\.)?visual\.|.*\.rotary_emb\.inv_freq$")
_LAYER = r"layers\.(\d+)\."
_MLP = _LAYER + r"mlp\."
_PROJ = r"((?:gate|up|down)_proj)\.weight"
# Name in the file, after the prefix -> parameter path. Tensors that hold parts of a parameter, or
# several parameters, are in `_expert_piece` and `_fused_pieces`.
TABLE = tuple(
    (re.compile(pattern + "$"), path)
    for pattern, path in (
        (r"embed_tokens\.weight", "embed_tokens"),
        (r"norm\.weight", "norm.weight"),
        (r"lm_head\.weight", "lm_head"),
        (_LAYER + r"(\w+_layernorm)\.weight", r"layers.\1.\2.weight"),
        (_LAYER + r"self_attn\.([qkvo]_proj)\.weight", r"layers.\1.self_attn.\2"),
        (_LAYER + r"self_attn\.([qk]_norm)\.weight", r"layers.\1.self_attn.\2.weight"),
        (_LAYER + r"linear_attn\.(in_proj_\w+|out_proj)\.weight", r"layers.\1.linear_attn.\2"),
        (_LAYER + r"linear_attn\.(conv1d|norm)\.weight", r"layers.\1.linear_attn.\2"),
        (_LAYER + r"linear_attn\.(A_log|dt_bias)", r"layers.\1.linear_attn.\2"),
        (_MLP + _PROJ, r"layers.\1.mlp.\2"),
        (_MLP + r"(gate|shared_expert_gate)\.weight", r"layers.\1.mlp.\2"),
        (_MLP + r"shared_expert\." + _PROJ, r"layers.\1.mlp.shared_expert.\2"),
        (_MLP + r"experts\.((?:gate_up|down)_proj)", r"layers.\1.mlp.experts.\2"),
    )
)
_EXPERT = re.compile(_MLP + r"experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_FUSED_PROJECTION = re.compile(_LAYER + r"linear_attn\.in_proj_(qkvz|ba)\.weight$")


class Piece(NamedTuple):
    """Which rows of a tensor go where."""

    path: str  # parameter, dotted
    where: tuple  # index into the parameter; () for all of it
    rows: np.ndarray | None  # of the file's tensor; None for all
    shape: tuple[int, ...]  # that the file's tensor must have


def load_pretrained(
    directory: str | Path,
    dtype=jnp.float32,
    convert: Callable[[str, jax.Array], Any] | None = None,
) -> HybridLM:
    """Load a target from a Hugging Face directory.

    Args:
      dtype: of the weights; `A_log`, `dt_bias` and the DeltaNet norm stay float32.
      convert: gets each parameter's path and array as it is read, returns what the model keeps.

    Raises:
      ValueError: the config is not supported, a file is missing or broken, or tensors are missing,
        unexpected or misshapen (all of them in one message).
    """
    directory = Path(directory)
    cfg = TargetConfig.from_hf(directory)
    abstract = nnx.eval_shape(lambda: HybridLM(cfg, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    tensors = open_tensors(directory)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    plan = _plan(cfg, tensors, shapes, directory)
    values = _read(plan, tensors, leaves, convert or (lambda _, value: value))
    filled = [
        (path, leaf.replace(values[".".join(map(str, path))]))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _plan(cfg, tensors, shapes: dict[str, tuple], directory: Path) -> dict[str, list[Piece]]:
    """Decide where every tensor goes; raise once with everything that does not fit."""
    plan, skipped, unexpected, misshapen = {}, [], [], []
    covered, placed, doubled = dict.fromkeys(shapes, 0), set(), []
    for name, file in tensors.items():
        if SKIPPED.match(name) or (name == "lm_head.weight" and cfg.tie_word_embeddings):
            skipped.append(name)
            continue
        pieces = _pieces(cfg, name, shapes)
        if not pieces:
            unexpected.append(name)
            continue
        header = file.get_slice(name)
        found, kind = tuple(header.get_shape()), str(header.get_dtype())
        if found != pieces[0].shape or kind not in ("F32", "BF16", "F16"):
            misshapen.append(f"{name} is {kind} {found}, not floating-point {pieces[0].shape}")
        plan[name] = pieces
        for piece in pieces:
            place = (piece.path, str(piece.where))
            if place in placed:
                doubled.append(name)
            else:
                placed.add(place)
                covered[piece.path] += _size(shapes[piece.path], piece.where)
    # One parameter in two layouts: whole, and expert by expert.
    doubled += [path for path, count in covered.items() if count > math.prod(shapes[path])]
    missing = [path for path, count in covered.items() if count < math.prod(shapes[path])]
    problems = [
        f"{kind} ({len(names)}): {some(names)}"
        for kind, names in (
            ("missing parameters", missing),
            ("unexpected tensors", unexpected),
            ("misshapen tensors", misshapen),
            ("tensors that are there under two names", doubled),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"the weights in {directory} do not fit its config.json ({cfg.model_type}):\n  "
            + "\n  ".join(problems)
        )
    if skipped:
        log.info(
            "skipped %d tensors that a text model has no use for: %s", len(skipped), some(skipped)
        )
    return plan


def _size(shape: tuple[int, ...], where: tuple) -> int:
    return np.broadcast_to(np.int8(0), shape)[where].size  # a view: nothing is allocated


def _pieces(cfg: TargetConfig, name: str, shapes: dict[str, tuple]) -> list[Piece]:
    """Return where a tensor goes; nothing for a name that the model does not have."""
    short = re.sub(r"^model\.(language_model\.)?", "", name)
    if match := _EXPERT.match(short):
        layer, expert, kind = match.groups()
        known = int(expert) < cfg.num_experts
        pieces = [_expert_piece(cfg, layer, int(expert), kind)] if known else []
    elif match := _FUSED_PROJECTION.match(short):
        pieces = _fused_pieces(cfg, *match.groups())
    else:
        paths = [match.expand(path) for pattern, path in TABLE if (match := pattern.match(short))]
        pieces = [Piece(path, (), None, shapes.get(path, ())) for path in paths]
        if short.endswith("conv1d.weight"):  # [E, 1, W] in files
            pieces = [
                piece._replace(shape=(*piece.shape[:1], 1, *piece.shape[1:])) for piece in pieces
            ]
    return [piece for piece in pieces if piece.path in shapes]


def _expert_piece(cfg: TargetConfig, layer: str, expert: int, kind: str) -> Piece:
    """Place one expert's matrix inside the fused parameter: gate rows first, then up rows."""
    width, dim = cfg.moe_intermediate_size, cfg.hidden_size
    path = f"layers.{layer}.mlp.experts."
    if kind == "down":
        return Piece(path + "down_proj", (expert,), None, (dim, width))
    rows = slice(0, width) if kind == "gate" else slice(width, 2 * width)
    return Piece(path + "gate_up_proj", (expert, rows), None, (width, dim))


def _fused_pieces(cfg: TargetConfig, layer: str, kind: str) -> list[Piece]:
    """Split Qwen3-Next's projections, whose rows are grouped by key head, into the plain layout."""
    parts = fused_rows(cfg)[kind]
    shape = (sum(map(len, parts.values())), cfg.hidden_size)
    return [Piece(f"layers.{layer}.linear_attn.{n}", (), rows, shape) for n, rows in parts.items()]


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


def _read(plan: dict[str, list[Piece]], tensors: dict, leaves: dict, convert) -> dict[str, Any]:
    """Read tensor by tensor; parameters made of several tensors are gathered on the host."""
    values: dict[str, Any] = {}

    def converted(path: str, value: np.ndarray) -> Any:
        # Waited for, or JAX would hold what is read faster than it is converted.
        return jax.block_until_ready(convert(path, load(path, value, leaves[path].dtype)))

    gathering: dict[str, tuple[np.ndarray, int]] = {}
    # In parameter order, so that at most one parameter is being gathered at a time.
    for name in sorted(plan, key=lambda name: plan[name][0].path):
        tensor = tensors[name].get_tensor(name)
        for path, where, rows, _ in plan[name]:
            leaf = leaves[path]
            if where == ():
                part = tensor if rows is None else tensor[rows]
                values[path] = converted(path, part.reshape(leaf.shape))
                continue
            buffer, done = gathering.pop(path, (None, 0))
            if buffer is None:
                buffer = np.empty(leaf.shape, leaf.dtype)
            buffer[where] = tensor
            if done + tensor.size < buffer.size:
                gathering[path] = (buffer, done + tensor.size)
            else:
                values[path] = converted(path, buffer)
    return values


def save_pretrained(model: HybridLM, directory: str | Path, max_shard_bytes: int = 5 << 30) -> None:
    """Write config and weights as transformers reads them.

    Old and new data never mix in silence: all files are written aside first, and while they take
    their names the folder has no `config.json`, without which nobody reads it.

    Args:
      max_shard_bytes: larger models are split into numbered files with an index.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list] = [[]]
    size = total = 0
    for name, num_bytes, make in _file_tensors(model):
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, make))
        size, total = size + num_bytes, total + num_bytes
    files, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: np.ascontiguousarray(make()) for name, make in shard}
        write_tensors(tensors, directory / (file + ".tmp"))
        files.append(file)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        files.append(
            write_json(
                directory, INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
            )
        )
    publish(directory, files, model.cfg.to_hf())


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
        yield (
            name,
            value.nbytes,
            lambda v=value, e=expand: np.asarray(v)[:, None] if e else np.asarray(v),
        )


def _fused_tensors(cfg, model, path, value):
    """Yield `in_proj_qkvz` at `in_proj_qkv`, `in_proj_ba` at `in_proj_b`; they hold the others."""
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
