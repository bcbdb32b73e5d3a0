"""The few figures that notebooks, benchmarks and TensorBoard share; the only file with matplotlib.

They can be read in grey and by the colour-blind: hues are those of Okabe and Ito, and what differs
in hue also differs in marker, stroke or hatching. Each takes plain numbers and, to be a part of a
larger figure, the axes to draw on; it knows neither models nor files.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from io import BytesIO
from typing import NamedTuple

import numpy as np

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"figures need matplotlib ({error}): pip install -e '.[plots]'", name=error.name
    ) from error

BLACK, ORANGE, SKY, GREEN, BLUE, RED = (
    "black", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00",
)  # fmt: skip
GREY, PALE = "0.45", "0.88"
# Of the first, second, ... thing compared: hue, stroke, marker and, of bars, hatching.
STYLES = (
    (BLUE, "-", "o", ""),
    (RED, "--", "s", "///"),
    (GREEN, "-.", "^", "..."),
    (BLACK, ":", "D", "xx"),
)
_BOXES = {
    "root": dict(facecolor=PALE, edgecolor=GREY, linewidth=1.0),
    "accepted": dict(facecolor="#D6E9F5", edgecolor=BLUE, linewidth=2.2),
    "rejected": dict(facecolor="white", edgecolor=GREY, linewidth=0.9, linestyle=(0, (3, 2))),
    "own": dict(facecolor="#FBE3D3", edgecolor=RED, linewidth=2.2, boxstyle="round4,pad=0.35"),
}


def new_axes(width: float = 6.0, height: float = 3.6) -> Axes:
    """Make a figure with one pair of axes; sizes are inches."""
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def png(ax: Axes, dpi: int = 100) -> bytes:
    """Return the figure that the axes are in as a PNG file."""
    buffer, figure = BytesIO(), ax.get_figure(root=True)
    assert figure is not None
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def draft_tree(
    parents: Sequence[int],
    labels: Sequence[str],
    path: Iterable[int] = (),
    own: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a tree of candidates from left to right, one column a depth.

    Args:
      parents: of each node, before the node itself; -1 for the root, node 0.
      labels: what is written into each node.
      path: nodes that were accepted, the root among them or not.
      own: what the target said after the path: a correction, or one more token.
    """
    accepted, parents, labels = {0, *path}, list(parents), list(labels)
    kinds = ["accepted" if node in accepted else "rejected" for node in range(len(parents))]
    kinds[0] = "root"
    if own is not None:
        parents.append(max(accepted))  # parents come first, so this is the end of the path
        labels.append(own)
        kinds.append("own")
        accepted.add(len(kinds) - 1)
    places = _tree_places(parents, accepted)
    depth, low = int(max(x for x, _ in places)), min(y for _, y in places)
    ax = ax or new_axes(1.5 * depth + 1.5, 1.6 - 0.5 * low)
    for node, (place, kind) in enumerate(zip(places, kinds, strict=True)):
        if node:
            _edge(ax, places[parents[node]], place, kind)
        _box(ax, place, labels[node], kind)
    ax.set(xlim=(-0.55, depth + 0.55), ylim=(low - 0.7, 0.7), xticks=range(depth + 1))
    ax.set_xlabel("depth: tokens after the last committed one")
    ax.set_yticks([])
    ax.spines[["top", "left", "right"]].set_visible(False)
    names = {"accepted": "drafted, accepted", "rejected": "drafted, not taken",
             "own": "the target's own token"}  # fmt: skip
    ax.legend(
        handles=[Patch(label=name, **_frame(kind)) for kind, name in names.items()],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize="small",
    )  # fmt: skip
    return ax


def _tree_places(parents: Sequence[int], accepted: set[int]) -> list[tuple[float, float]]:
    """Return column and height of each node: leaves a row each, a parent beside its first child."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    places, row = [(0.0, 0.0)] * len(parents), 0

    def put(node: int, depth: int) -> float:
        nonlocal row
        # The accepted child first, so that the accepted path is a straight line.
        below = sorted(children[node], key=lambda child: child not in accepted)
        heights = [put(child, depth + 1) for child in below]
        if not heights:
            row += 1
        places[node] = (float(depth), heights[0] if heights else 1.0 - row)
        return places[node][1]

    put(0, 0)
    return places


def _frame(kind: str) -> dict:
    return {key: value for key, value in _BOXES[kind].items() if key != "boxstyle"}


def _box(ax: Axes, place: tuple[float, float], text: str, kind: str) -> None:
    frame = dict(boxstyle="square,pad=0.35") | _BOXES[kind]
    weight = "bold" if kind in ("accepted", "own") else "normal"
    shown = text.replace("$", r"\$")  # no formula
    ax.text(*place, shown, ha="center", va="center", fontsize="small", weight=weight, bbox=frame)


def _edge(ax: Axes, a: tuple[float, float], b: tuple[float, float], kind: str) -> None:
    style = {name: _BOXES[kind][name] for name in ("linewidth", "edgecolor")}
    style["color"] = style.pop("edgecolor")
    ax.plot([a[0], a[0] + 0.5, b[0]], [a[1], b[1], b[1]], zorder=0, **style)


def visible_keys(steps: int, slots: int) -> np.ndarray:
    """Return which of the keys of all training-time-test steps each query sees, [K T, K T].

    At step k, slot t sees the step-0 keys of slots 0 to t, and its own keys of steps 1 to k
    (arXiv 2503.01840, section 3.2; `eagle3/training/ttt.py`).
    """
    step, slot = np.divmod(np.arange(steps * slots), slots)
    from_target = (step[None] == 0) & (slot[None] <= slot[:, None])
    own = (step[None] > 0) & (step[None] <= step[:, None]) & (slot[None] == slot[:, None])
    return from_target | own


def ttt_mask(steps: int, slots: int, ax: Axes | None = None) -> Axes:
    """Draw `visible_keys`: filled squares for features of the target, crosses for the draft's."""
    ax = ax or new_axes(5.2, 5.4)
    size = steps * slots
    seen = visible_keys(steps, slots)
    own = np.nonzero(seen & (np.arange(size) >= slots))  # queries, keys
    squares = np.where(seen & (np.arange(size) < slots), 1.0, np.nan)
    ax.imshow(squares, cmap=ListedColormap([BLUE]))
    across = np.array([-0.3, 0.3, np.nan, -0.3, 0.3, np.nan])  # two strokes of a cross
    down = across * [1, 1, 1, -1, -1, -1]
    ax.plot(*(np.ravel(x[:, None] + d) for x, d in ((own[1], across), (own[0], down))), color=RED)
    for border in range(size + 1):
        color, above = (BLACK, 2) if border % slots == 0 else ("white", 1)
        ax.axhline(border - 0.5, color=color, linewidth=0.9, zorder=above)
        ax.axvline(border - 0.5, color=color, linewidth=0.9, zorder=above)
    middles = [k * slots + (slots - 1) / 2 for k in range(steps)]
    names = [f"step {k}" for k in range(steps)]
    ax.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")
    ax.set_xticks(middles, names)
    ax.set_yticks(middles, names, rotation=90, va="center")
    ax.tick_params(length=0)
    ax.set(xlabel=f"keys, slots 0 to {slots - 1} of each step", ylabel="queries, likewise")
    ax.legend(
        handles=[
            Patch(color=BLUE, label="made from the target's features"),
            Line2D([], [], color=RED, marker="x", linestyle="", label="made from its own outputs"),
        ],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize="small",
    )  # fmt: skip
    return ax


def acceptance_by_depth(
    rates: Mapping[str, Sequence[float]],
    ax: Axes | None = None,
    xlabel: str = "depth of the drafted token",
    ylabel: str = "accepted, of those reached (%)",
) -> Axes:
    """Draw shares in 0..1 by depth 1, 2, ..., a group of bars each, by what they are of."""
    ax = ax or new_axes()
    deepest = max(map(len, rates.values()))
    width = 0.8 / len(rates)
    for i, ((name, values), (color, _, _, hatch)) in enumerate(
        zip(rates.items(), STYLES, strict=False)
    ):
        at = np.arange(1, len(values) + 1) + (i - (len(rates) - 1) / 2) * width
        face = color if not hatch else "white"
        bars = ax.bar(at, 100 * np.asarray(values, float), width, label=name, facecolor=face,
                      edgecolor=color, hatch=hatch)  # fmt: skip
        if deepest * len(rates) <= 12:
            ax.bar_label(bars, fmt="%.0f", fontsize="small", padding=1)
    ax.set(xticks=range(1, deepest + 1), yticks=range(0, 101, 20), xlabel=xlabel, ylabel=ylabel)
    ax.set_ylim(0, 108 if len(rates) == 1 else 124)  # with room for the legend
    ax.spines[["top", "right"]].set_visible(False)
    if len(rates) > 1:
        ax.legend(loc="upper center", ncols=len(rates), frameon=False, fontsize="small")
    return ax


def lines(
    ax: Axes, x: Sequence[float | int], series: Mapping[str, Sequence[float]], base: int | None = 2
) -> Axes:
    """Draw lines of different strokes and markers, by name, over a common x.

    Args:
      base: of the logarithm that x is drawn by, with a tick at each point; None: linear.
    """
    for (name, values), (color, stroke, marker, _) in zip(series.items(), STYLES, strict=False):
        ax.plot(x, values, stroke, marker=marker, markersize=5, color=color, label=name)
    if base is not None:
        ax.set_xscale("log", base=base)
        ax.set_xticks(x, [_short(n) for n in x])
        ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return ax


def _short(n: float | int) -> str:
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


def cost_curve(
    nodes: Sequence[int], costs: Mapping[str, Sequence[float]], ax: Axes | None = None
) -> Axes:
    """Draw what verifying n nodes costs, in passes over one token, beside n such passes."""
    ax = lines(ax or new_axes(5.0), nodes, costs)
    highest = max(max(values) for values in costs.values())
    ax.plot(nodes, nodes, ":", color=GREY, label="n tokens, one by one")
    ax.set(ylim=(0, 1.25 * highest), xlabel="nodes verified together",
           ylabel="cost (passes over one token)")  # fmt: skip
    ax.legend(frameon=False, fontsize="small")
    return ax


def data_scaling(
    shares: Sequence[float],
    taus: Mapping[str, Sequence[float]],
    ax: Axes | None = None,
    of: str = "training data",
) -> Axes:
    """Draw tokens a round against the share of the data, or of the steps, that a draft had."""
    ax = lines(ax or new_axes(5.0), shares, taus)
    ax.set_xticks(shares, [str(Fraction(share).limit_denominator(64)) for share in shares])
    for values in taus.values():
        for share, tau in zip(shares, values, strict=True):
            ax.annotate(f"{tau:.2f}", (share, tau), (0, 7), textcoords="offset points",
                        ha="center", fontsize="small")  # fmt: skip
    ax.margins(x=0.1, y=0.2)
    ax.set(xlabel=f"share of the {of}", ylabel="tau (tokens a round)")
    if len(taus) > 1:
        ax.legend(frameon=False, fontsize="small")
    return ax


class Scaling(NamedTuple):
    """What one model takes at each length of the context."""

    milliseconds: Sequence[float]  # a token
    megabytes: Sequence[float]  # 10^6 bytes of cache


def context_scaling(
    lengths: Sequence[int], found: Mapping[str, Scaling], axes: Sequence[Axes] | None = None
) -> Sequence[Axes]:
    """Draw time and memory against the length of the context, by model, on two pairs of axes."""
    if axes is None:
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = [figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)]
    for ax, field, what in zip(
        axes, Scaling._fields, ("time (ms a token)", "cache (MB)"), strict=True
    ):
        lines(ax, lengths, {name: getattr(scaling, field) for name, scaling in found.items()})
        ax.set_ylim(bottom=0)
        ax.set(xlabel="context (tokens)", ylabel=what)
    axes[0].legend(frameon=False, fontsize="small")
    return axes
