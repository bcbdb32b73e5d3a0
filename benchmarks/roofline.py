"""Rooflines of decoding: what a pass moves and computes, and the time that takes at the least.

Plain arithmetic on shapes, in bytes, operations and seconds; nothing is run. What is counted and
what is not stands in benchmarks/scale.md, the page that benchmarks/scale.py makes of it.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from eagle3.draft_config import DraftConfig
from eagle3.training.config import DraftShape
from eagle3.training.flops import draft_flops, target_flops
from gdn.config import TargetConfig
from gdn.published import published_shape

BF16, F32 = 2, 4  # bytes of a number
# A float32 operation takes as long as so many in bfloat16: six on TPUs, 15 on an H100's CUDA cores.
F32_COST = 8
USABLE = 0.9  # share of a device's memory that weights and caches may take
# Chance that a node's first, second, ... child is the target's token, if the node itself was right.
ACCEPTED = (0.70, 0.15, 0.06, 0.03)
MAX_DEPTH = 8  # most levels drafted
FORMS = ("closed", "chain copies", "copies")  # how a recurrent state is verified


class Device(NamedTuple):
    """What a device can do."""

    name: str
    flops: float  # a second, dense, bfloat16
    bandwidth: float  # bytes a second
    memory: float  # bytes
    source: str


DEVICES = (
    Device("H100 SXM", 989e12, 3350e9, 80e9, "NVIDIA H100 data sheet"),
    Device("H200", 989e12, 4800e9, 141e9, "NVIDIA H200 data sheet"),
    Device("A100 80G SXM", 312e12, 2039e9, 80e9, "NVIDIA A100 data sheet"),
    Device("L4", 121e12, 300e9, 24e9, "NVIDIA L4 data sheet; half of the figure with sparsity"),
    Device("TPU v5e", 197e12, 819e9, 16e9, "Google Cloud TPU documentation"),
    Device("TPU v5p", 459e12, 2765e9, 95e9, "Google Cloud TPU documentation"),
    Device("2 CPU cores", 0.87e12, 45e9, 32e9, "measured on an EPYC (Zen 5); memory assumed"),
)


class Plan(NamedTuple):
    """What is drafted and verified in a round."""

    nodes: int  # verified, the root included
    depth: int  # levels below the root, each a pass of the draft
    width: int  # most nodes of a level
    tau: float  # expected tokens a round, the bonus token included


class Load(NamedTuple):
    """What a pass moves and computes."""

    bytes: float
    flops: float  # in bfloat16

    def seconds(self, device: Device) -> float:
        """Return the least time: moving and computing overlap fully."""
        return max(self.bytes / device.bandwidth, self.flops / device.flops)


def chain(depth: int, accepted: float = ACCEPTED[0]) -> Plan:
    """Draft `depth` tokens in a row."""
    return Plan(depth + 1, depth, 1, sum(accepted**k for k in range(depth + 1)))


@cache
def best_tree(nodes: int) -> Plan:
    """Take the nodes that are likeliest to be reached, by `ACCEPTED`, whatever the text."""
    waiting, levels, tau = [(-1.0, 0)], Counter(), 0.0
    for _ in range(nodes):
        chance, depth = heapq.heappop(waiting)
        levels[depth] += 1
        tau -= chance
        if depth < MAX_DEPTH:
            for share in ACCEPTED:
                heapq.heappush(waiting, (chance * share, depth + 1))
    return Plan(nodes, max(levels), max(levels.values()), tau)


PLAIN = Plan(1, 0, 1, 1.0)
PLANS = (*map(chain, range(1, MAX_DEPTH)), *map(best_tree, (8, 16, 32, 64)))


@cache
def shape(name: str) -> TargetConfig:
    """Return a published target."""
    cfg = published_shape(name)
    assert cfg is not None, name
    return cfg


@cache
def draft_of(cfg: TargetConfig) -> DraftConfig:
    """Return its draft as published ones are: one layer of its sizes, 32,000 entries."""
    inner = cfg.intermediate_size if not any(cfg.moe_layers) else 16384
    return DraftShape(vocab_size=32000, intermediate_size=inner).for_target(cfg)


def distinct_experts(cfg: TargetConfig, rows: int) -> float:
    """Return how many experts of a layer `rows` tokens visit, if all are as likely."""
    return cfg.num_experts * (1 - (1 - cfg.num_experts_per_tok / cfg.num_experts) ** rows)


def weight_bytes(cfg: TargetConfig, rows: int) -> float:
    """Return what `rows` tokens together read of the weights; of an untied embedding, nothing."""
    weights = cfg.num_parameters()
    if not cfg.tie_word_embeddings:
        weights -= cfg.vocab_size * cfg.hidden_size
    if any(cfg.moe_layers):
        idle = cfg.num_experts - distinct_experts(cfg, rows)
        weights -= sum(cfg.moe_layers) * idle * 3 * cfg.hidden_size * cfg.moe_intermediate_size
    return BF16 * weights


def kv_bytes(cfg: TargetConfig) -> int:
    """Return the keys and values of a token."""
    layers = cfg.layer_types.count("full_attention")
    return layers * 2 * cfg.num_key_value_heads * cfg.head_dim * BF16


def state_bytes(cfg: TargetConfig) -> int:
    """Return the recurrent states and convolution windows of a row."""
    state = cfg.linear_num_value_heads * cfg.linear_key_head_dim * cfg.linear_value_head_dim * F32
    window = (cfg.linear_conv_kernel_dim - 1) * cfg.conv_channels * BF16
    return cfg.layer_types.count("linear_attention") * (state + window)


def update_bytes(cfg: TargetConfig) -> int:
    """Return what the closed form keeps of a node, to commit it: k, u, g, input of the window."""
    keys = cfg.linear_num_key_heads * cfg.linear_key_head_dim
    values = cfg.linear_num_value_heads * (cfg.linear_value_head_dim + 1)
    node = (keys + values) * F32 + cfg.conv_channels * BF16
    return cfg.layer_types.count("linear_attention") * node


def state_traffic(cfg: TargetConfig, nodes: int, form: str) -> int:
    """Return what is read and written of a row's states in one round; one node: plain decoding."""
    state = state_bytes(cfg)
    if nodes == 1:
        return 2 * state
    if form == "closed":  # read by verify; read and written by commit
        return 3 * state + 2 * nodes * update_bytes(cfg)
    return {"chain copies": nodes + 1, "copies": 2 * nodes}[form] * state


def state_flops(cfg: TargetConfig, plan: Plan, form: str) -> float:
    """Return the operations of the delta rule for one row, in float32."""
    n, d_k, d_v = plan.nodes, cfg.linear_key_head_dim, cfg.linear_value_head_dim
    if form == "closed" and n > 1:
        pairs = 2 * d_k + (plan.depth + 1) * d_v  # K K^T, Q K^T; the solve, and its use
        products = (2 * n + plan.depth + 1) * d_k * d_v + n * n * pairs
    else:
        products = 3 * n * d_k * d_v
    heads = cfg.layer_types.count("linear_attention") * cfg.linear_num_value_heads
    return 2.0 * heads * products


def target_pass(
    cfg: TargetConfig, batch: int, context: int, plan: Plan = PLAIN, form: str = "closed"
) -> Load:
    """Return what verifying and committing `plan` takes, for `batch` rows of `context` tokens."""
    rows = batch * plan.nodes
    moved = weight_bytes(cfg, rows) + 2 * rows * cfg.vocab_size * F32  # logits, there and back
    moved += batch * (context + plan.nodes) * kv_bytes(cfg)
    moved += batch * state_traffic(cfg, plan.nodes, form)
    # Every node looks back at the whole context; in training, at half of a row on average.
    flops = rows * target_flops(cfg, 2 * context)
    return Load(moved, flops + batch * F32_COST * state_flops(cfg, plan, form))


def draft_pass(cfg: DraftConfig, batch: int, context: int, nodes: int, fused: bool) -> Load:
    """Return what one pass over `nodes` nodes of each row takes; `fused`: after the target's."""
    rows = batch * nodes
    keys = 2 * cfg.num_key_value_heads * cfg.head_dim * BF16
    # A weight is two bytes, and two operations a row.
    weights = draft_flops(cfg, 0, 1) - (0 if fused else draft_flops(cfg, 0, 0))
    moved = weights + batch * (context + nodes) * keys + 2 * rows * cfg.draft_vocab_size * F32
    attention = draft_flops(cfg, 2 * context, 1) - draft_flops(cfg, 0, 1)
    return Load(moved, rows * (weights + attention))


def draft_seconds(
    cfg: DraftConfig, batch: int, context: int, plan: Plan, device: Device, window: int | None
) -> float:
    """Return the time of a round's drafting: what was committed, then a pass a further level.

    Args:
      window: tokens that the draft looks back; None: all.
    """
    seen = context if window is None else min(window, context)
    first = draft_pass(cfg, batch, seen, plan.depth + 1, fused=True)
    later = draft_pass(cfg, batch, seen, plan.width, fused=False)
    return first.seconds(device) + (plan.depth - 1) * later.seconds(device)


class Setting(NamedTuple):
    """Where a target is decoded."""

    cfg: TargetConfig
    device: Device
    batch: int
    context: int  # tokens of each row

    def plain_seconds(self) -> float:
        """Return the time of one token of every row."""
        return target_pass(self.cfg, self.batch, self.context).seconds(self.device)

    def round_seconds(self, plan: Plan, form: str = "closed", window: int | None = None) -> float:
        """Return the time of a round."""
        verify = target_pass(self.cfg, self.batch, self.context, plan, form).seconds(self.device)
        draft = draft_of(self.cfg)
        where = (self.batch, self.context, plan, self.device, window)
        return verify + draft_seconds(draft, *where)

    def break_even(self, plan: Plan, form: str = "closed") -> float:
        """Return the tokens a round has to bring to be worth its time."""
        return self.round_seconds(plan, form) / self.plain_seconds()

    def best(
        self, plans: Iterable[Plan] = PLANS, form: str = "closed", window: int | None = None
    ) -> tuple[float, Plan]:
        """Return the largest speed-up over plain decoding, and how it is had."""
        plain = self.plain_seconds()
        ratios = [(x.tau * plain / self.round_seconds(x, form, window), x) for x in plans]
        return max(ratios, key=lambda found: found[0])


def devices_needed(setting: Setting) -> int:
    """Return how many devices hold weights, draft and caches."""
    cfg, draft = setting.cfg, draft_of(setting.cfg)
    keys = kv_bytes(cfg) + 2 * draft.num_key_value_heads * draft.head_dim * BF16
    weights = BF16 * cfg.num_parameters() + draft_flops(draft, 0, 1)
    total = weights + setting.batch * (setting.context * keys + state_bytes(cfg))
    return math.ceil(total / (USABLE * setting.device.memory))


def losing_batches(
    setting: Setting, plans: Iterable[Plan], most: int, form: str = "closed"
) -> list[int]:
    """Return the powers of two up to `most` at which none of the plans is worth its time.

    Args:
      setting: its batch is not looked at.
    """
    plans = tuple(plans)
    batches = [1 << i for i in range(most.bit_length())]
    return [b for b in batches if setting._replace(batch=b).best(plans, form)[0] <= 1]
