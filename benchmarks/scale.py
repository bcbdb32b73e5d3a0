"""Write benchmarks/scale.md: on paper, what speculation gains for the published sizes.

    python benchmarks/scale.py            # seconds; nothing of a model is made or run
    python benchmarks/scale.py --out -    # print it

The arithmetic is in benchmarks/roofline.py. The page is what this script makes of it, and a test
holds the two together.
"""

import argparse
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from roofline import (
    ACCEPTED,
    DEVICES,
    F32_COST,
    PLANS,
    USABLE,
    Device,
    Plan,
    Setting,
    best_tree,
    chain,
    devices_needed,
    draft_of,
    draft_pass,
    kv_bytes,
    losing_batches,
    shape,
    state_bytes,
    state_traffic,
    target_pass,
    update_bytes,
    weight_bytes,
)

from eagle3.files import write_whole
from eagle3.training.flops import draft_flops, target_flops
from gdn.published import NAMES

PAGE = Path(__file__).with_name("scale.md")
BATCHES, CONTEXTS = (1, 8, 32, 128), (4096, 32768, 262144)
MIB = 1 << 20
FIRST = DEVICES[0]  # whose figures the tables by batch have
SHORT = 512  # tokens of context, where least is read beside the weights
MOST = 1 << 12  # largest batch that is looked at

TEXT = """\
# Speculation at scale, on paper

Made by `python benchmarks/scale.py`; do not edit. No model was run for it: it is the roofline of
plain and speculative decoding for published sizes of Gated DeltaNet hybrids, the least time that
memory and arithmetic allow. Real engines stay above it. It shows what limits, and where speculation
stops paying.

## What is counted

With b rows of S tokens of context, and n nodes verified in each row (plain decoding: one):

- Time of a pass: max(bytes / bandwidth, operations / peak). Time of a round: the target's pass over
  n nodes, then the draft's passes. Speed-up: tau times that of a plain token over that of a round.
- Weights: two bytes a parameter (bfloat16), of all that `b*n` tokens visit. Of E experts with k a
  token `E*(1-(1-k/E)^(b*n))` are read in a layer, as if all were as likely and every token chose on
  its own. Of an untied embedding nothing is counted.
- Keys and values: `b*(S+n)` times what a token keeps in bfloat16, once a pass for all nodes of a
  row.
- Recurrent states, s bytes a row (float32, and the windows of the convolutions in bfloat16): plain
  decoding reads and writes them, `2*s`. The closed form reads them to verify, reads and writes them
  to commit, and writes and reads k, u, g and the window's input of each node, r bytes:
  `3*s+2*n*r`. A copy for each node costs `(n+1)*s` in a chain, whose running state stays on the
  chip, and `2*n*s` in a tree, whose nodes read their parents'; choosing one is free.
- Logits: float32, written and read. Other activations are not counted.
- Operations: two a visited weight and token; `4*N*H*S` a node and attention layer; the delta rule's
  own multiply-adds, a value head: `3*n*DK*DV` one by one, in closed form for a tree of d levels
  `(2*n+d+1)*DK*DV+n^2*(2*DK+(d+1)*DV)`. These are in float32 and count {f32} times.
- The draft: EAGLE-3, one layer of the target's sizes (an MLP of 16,384 for mixtures), 32,000
  entries, bfloat16. A round has one pass over the `d+1` nodes that may have been committed, with
  the fusing layer, and `d-1` each as wide as the tree's widest level. It attends to the whole
  context.
- Acceptance, an assumption: if a node is right, its first child is with a = {first:.2f}, the
  second, third and fourth with {rest}. A chain of d tokens has tau = `1+a+...+a^d`: {chains}.
  SpecForge published 2.58, 2.92 and 3.05 for Qwen3-Next-80B-A3B on MT-Bench. The later children are
  a guess. A tree of n nodes takes the n likeliest paths to depth {deep}, whatever the text: {trees}
  (SpecForge: 3.42 with 8 nodes that follow the text). In use, long contexts lower acceptance; that
  is not modelled.
- Several devices: times are divided by their number, nothing for what they tell each other. Ratios
  do not depend on it.

## Sizes

GB are 10^9 bytes. Weights read: by 1, 32 and 1,024 tokens together. Node: what the closed form
keeps of one, r.

{sizes}

## Accelerators

Ridge: operations a byte at which neither waits for the other. So many tokens of a dense model
together read weights for free.

{devices}

## One row, {first_context:,} tokens of context

Tokens a second, plain / speculative with the best plan; in brackets the devices, if weights and
caches need several ({usable:.0f} % of memory).

{single}

## By batch and context, {name}

Speed-up of the best plan over plain decoding, and its nodes (c: a chain). Below 1 it does not pay.
The last column: one row, with a draft that looks back 2,048 tokens only.

{ratios}

## Copies of the state, or the closed form

Copies / closed form, of a row with 32 nodes: what is kept, and what is moved in a round. Then the
tokens a round that make up for its time, at batch 32 and {first_context:,} tokens on {name}.

{states}

## Where it stops paying

Batches (powers of two up to {most:,}) at which no chain of 1 to 7 tokens is worth its time, if each
token is accepted with a = 0.7, 0.5 or 0.3; {short} tokens of context, where speculation has least
to gain.

{losing}

## What follows

{follows}
"""


def wrapped(text: str) -> str:
    """Break the lines of prose anew; headings stay, and tables, which come later."""

    def fill(item: str) -> str:
        indent = "  " if item.startswith("- ") else ""
        words = " ".join(item.split())
        return textwrap.fill(
            words, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )

    blocks = (map(fill, re.split(r"\n(?=- )", block)) for block in text.split("\n\n"))
    return "\n\n".join("\n".join(lines) for lines in blocks)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tokens_text(tokens: float) -> str:
    """Return tokens a second with three digits."""
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.3g}"


def plan_text(plan: Plan) -> str:
    """Name a plan by its nodes."""
    return f"{plan.nodes}{'c' if plan.width == 1 else ''}"


def batches_text(batches: Sequence[int]) -> str:
    """Return powers of two as ranges: 2-16, 256+ if it goes on to the largest; or a dash."""
    runs: list[list[int]] = []
    for batch in batches:
        if runs and runs[-1][-1] * 2 == batch:
            runs[-1].append(batch)
        else:
            runs.append([batch])

    def one(run: list[int]) -> str:
        if run[-1] == MOST:
            return f"{run[0]}+"
        return f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])

    return ", ".join(map(one, runs)) or "-"


def sizes_table() -> str:
    """Return what each size keeps and reads."""
    heads = "model|parameters|weights read, GB|K/V a token, KiB|K/V at 262,144, GB"
    heads += "|state, MiB|node, MiB|draft, parameters"

    def row(name: str) -> list[str]:
        cfg = shape(name)
        read = " / ".join(f"{weight_bytes(cfg, rows) / 1e9:.1f}" for rows in (1, 32, 1024))
        return [
            name, f"{cfg.num_parameters() / 1e9:.2f} B", read, f"{kv_bytes(cfg) / 1024:.0f}",
            f"{CONTEXTS[-1] * kv_bytes(cfg) / 1e9:.1f}", f"{state_bytes(cfg) / MIB:.1f}",
            f"{update_bytes(cfg) / MIB:.2f}",
            f"{draft_flops(draft_of(cfg), 0, 1) / 2e6:.0f} M",
        ]  # fmt: skip

    return table(heads.split("|"), map(row, NAMES))


def devices_table() -> str:
    """Return what each device can do, and who says so."""
    heads = ["device", "bfloat16, TFLOP/s", "GB/s", "memory, GB", "ridge", "source"]

    def row(x: Device) -> list[str]:
        numbers = f"{x.flops / 1e12:g}|{x.bandwidth / 1e9:,.0f}|{x.memory / 1e9:g}"
        return [x.name, *numbers.split("|"), f"{x.flops / x.bandwidth:.0f}", x.source]

    return table(heads, map(row, DEVICES))


def single_table() -> str:
    """Return tokens a second of one row, on each device."""

    def cell(name: str, device: Device) -> str:
        setting = Setting(shape(name), device, 1, CONTEXTS[0])
        count = devices_needed(setting)
        plain = count / setting.plain_seconds()
        text = f"{tokens_text(plain)} / {tokens_text(plain * setting.best()[0])}"
        return text if count == 1 else f"{text} ({count})"

    rows = ([name, *(cell(name, device) for device in DEVICES)] for name in NAMES)
    return table(["model", *(x.name for x in DEVICES)], rows)


def ratios_table() -> str:
    """Return speed-ups by batch and context, contexts side by side."""
    heads = ["model", "context", *(f"batch {b}" for b in BATCHES), "draft of 2,048"]
    rows = []
    for name in NAMES:
        for context in CONTEXTS:
            cells = []
            for batch in BATCHES:
                ratio, plan = Setting(shape(name), FIRST, batch, context).best()
                cells.append(f"{ratio:.2f} ({plan_text(plan)})")
            last = context == CONTEXTS[-1]
            near = Setting(shape(name), FIRST, 1, context).best(window=2048)[0]
            rows.append([name, f"{context:,}", *cells, f"{near:.2f}" if last else ""])
    return table(heads, rows)


def states_table() -> str:
    """Compare copies of the state with the closed form."""
    plans = {"chain of 4 nodes": chain(3), "tree of 8": best_tree(8), "tree of 32": best_tree(32)}
    brings = (f"{name} (brings {plan.tau:.2f})" for name, plan in plans.items())
    nodes = 32

    def row(name: str) -> list[str]:
        cfg = shape(name)
        setting = Setting(cfg, FIRST, 32, CONTEXTS[0])
        kept = [nodes * size for size in (state_bytes(cfg), update_bytes(cfg))]
        moved = [state_traffic(cfg, nodes, form) for form in ("copies", "closed")]
        cells = [f"{x / MIB:,.0f} / {y / MIB:,.0f}" for x, y in (kept, moved)]
        for plan in plans.values():
            copied = "chain copies" if plan.width == 1 else "copies"
            needed = [setting.break_even(plan, form) for form in (copied, "closed")]
            cells.append(f"{needed[0]:.2f} / {needed[1]:.2f}")
        return [name, *cells]

    return table(["model", "kept, MiB", "moved, MiB", *brings], map(row, NAMES))


def losing_table() -> str:
    """Return the batches at which chains do not pay."""
    devices = [x for x in DEVICES if x.name in ("H100 SXM", "A100 80G SXM", "2 CPU cores")]
    shares = (0.7, 0.5, 0.3)
    heads = ["model", *(f"{x.name}, a = {a}" for x in devices for a in shares)]

    def cell(name: str, device: Device, share: float) -> str:
        plans = [chain(depth, share) for depth in range(1, 8)]
        return batches_text(losing_batches(Setting(shape(name), device, 1, SHORT), plans, MOST))

    rows = ([name, *(cell(name, x, a) for x in devices for a in shares)] for name in NAMES)
    return table(heads, rows)


FOLLOWS = """\
- One row of a dense model at {first_context:,} tokens: passes of 64 nodes are still bound by memory
  on accelerators, which so differ in speed and not in the gain. Small targets gain less: a draft
  has {draft_most:.0f} % of the weights of {small_name} and {draft_least:.0f} % of those of
  {large_name}, and is read up to {deep} times a round.
- Batches hardly make a hybrid bound by arithmetic: a token of {large_name} moves {state_mb:.0f} MB
  of states, {state_us:.0f} us on {device}, beside {flops_us:.0f} us of arithmetic, and its keys on
  top. Verifying moves them once for all nodes, so with a good draft speculation still pays at
  batch 128, by less and with smaller trees. A poor one (a = 0.3) stops paying early.
- Copies are what makes trees expensive: at batch 32 one of 32 nodes has to bring {copied:.1f}
  tokens a round for {large_name}, in closed form {closed:.1f}, and {tau:.1f} is what it brings. A
  chain of 4 nodes loses little by copies: the closed form is for trees, and for memory.
- Mixtures gain least at small batches: nodes visit experts that one token would not.
  {next_name} at batch 8 needs {apart:.2f} tokens a round for a chain of 3 if every token chooses
  its experts on its own, {shared:.2f} if the nodes of a row share theirs. SpecForge published
  1.36 times as fast with 2.58 tokens a round (SGLang, FP8): {published:.2f}, in between.
- Long contexts are the draft's weakness: at {long:,} tokens one of its passes for {small_name}
  reads {draft_gb:.2f} GB, plain decoding {target_gb:.2f}; its one attention layer is read up to
  {deep} times a round, the target's {layers} once. One that looked back 2,048 tokens would gain
  most (last column above), if it is right as often; this package has none.
- Two CPU cores reach arithmetic at {ridge:.0f} tokens: trees of 8 to 16 nodes for one row of a
  dense model, nothing from a batch of 32 on at short contexts."""


def follows() -> str:
    """Return what the tables say, with the figures that it rests on."""
    small, large, next_ = shape(NAMES[0]), shape("Qwen3.5-27B"), shape(NAMES[-1])
    # Operations of one row are bytes of its weights.
    shares = [100 * draft_flops(draft_of(x), 0, 1) / weight_bytes(x, 1) for x in (small, large)]
    states, tree = state_traffic(large, 1, "closed"), best_tree(32)
    many, eight = (Setting(x, FIRST, b, CONTEXTS[0]) for x, b in ((large, 32), (next_, 8)))
    plan, long = chain(3), CONTEXTS[-1]
    verify = target_pass(next_, 8, CONTEXTS[0], plan)
    spared = weight_bytes(next_, 8 * plan.nodes) - weight_bytes(next_, 8)
    shared = eight.round_seconds(plan) - verify.seconds(FIRST)
    shared += verify._replace(bytes=verify.bytes - spared).seconds(FIRST)
    return FOLLOWS.format(
        first_context=CONTEXTS[0], small_name=NAMES[0], large_name="Qwen3.5-27B",
        next_name=NAMES[-1], device=FIRST.name,
        draft_most=shares[0], draft_least=shares[1], deep=PLANS[-1].depth, state_mb=states / 1e6,
        state_us=states / FIRST.bandwidth * 1e6,
        flops_us=target_flops(large, 0) / FIRST.flops * 1e6,
        copied=many.break_even(tree, "copies"), closed=many.break_even(tree), tau=tree.tau,
        apart=eight.break_even(plan), shared=shared / eight.plain_seconds(), published=2.58 / 1.36,
        long=long, draft_gb=draft_pass(draft_of(small), 1, long, 1, False).bytes / 1e9,
        target_gb=target_pass(small, 1, long).bytes / 1e9,
        layers=small.layer_types.count("full_attention"),
        ridge=DEVICES[-1].flops / DEVICES[-1].bandwidth,
    )  # fmt: skip


def page() -> str:
    """Return the whole page."""
    chains = ", ".join(f"{chain(d).tau:.2f} for {d}" for d in (3, 5, 7))
    trees = ", ".join(f"{best_tree(n).tau:.2f} for {n}" for n in (8, 16, 32, 64))
    words = dict(
        f32=F32_COST, first=ACCEPTED[0], rest=", ".join(f"{x:.2f}" for x in ACCEPTED[1:]),
        chains=chains, deep=PLANS[-1].depth, trees=trees, first_context=CONTEXTS[0],
        usable=100 * USABLE, name=FIRST.name, most=MOST, short=SHORT,
    )  # fmt: skip
    tables = dict(
        sizes=sizes_table(), devices=devices_table(), single=single_table(),
        ratios=ratios_table(), states=states_table(), losing=losing_table(),
    )  # fmt: skip
    places = {name: f"{{{name}}}" for name in tables}
    text = wrapped(TEXT.format(**words, **places, follows=follows()))
    return text.format(**tables) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", default=str(PAGE), help="file; - prints it")
    args = parser.parse_args()
    if args.out == "-":
        print(page(), end="")
    else:
        write_whole(Path(args.out), page())


if __name__ == "__main__":
    main()
