"""What peers.py makes of its measurements: medians of an engine, and the tables of a precision."""

import statistics
from collections.abc import Sequence

from engines import LLAMA, OURS, TORCH


def same_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens are the same before the first that is not."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((n for n, (a, b) in pairs if a != b), len(ours))


def speeds(found: dict[tuple, list], file: str | None = None) -> list[float]:
    """Return tokens/s of each round over all prompts, or those of a file."""
    runs = [x for task, x in found.items() if task[0] == "generate" and file in (None, task[1])]
    return [
        sum(len(answer.tokens) for answer in round_) / sum(answer.seconds for answer in round_)
        for round_ in zip(*runs, strict=False)  # a slow prompt was answered once
    ]


def summary(found: dict[tuple, list], bytes_read: float | None, bandwidth: float) -> dict:
    """Return medians of an engine.

    Args:
      found: by task, the answers of all rounds.
      bytes_read: by a pass; None if it is not known.
    """
    answers = [x[-1] for task, x in found.items() if task[0] == "generate"]
    passes = sum(answer.passes for answer in answers) / sum(len(x.tokens) for x in answers)
    speed = speeds(found)
    files = dict.fromkeys(task[1] for task in found if task[0] == "generate")
    return {
        "tokens_per_second": statistics.median(speed),
        "spread": (min(speed), max(speed)),
        "by_file": {file: statistics.median(speeds(found, file)) for file in files},
        "tokens_a_pass": 1 / passes,
        "share": bytes_read and bytes_read * passes * statistics.median(speed) / bandwidth,
        "first": {
            task[1]: statistics.median(answer.total for answer in x)
            for task, x in found.items()
            if task[0] == "first"
        },
        "verify": {
            task[1]: statistics.median(x) for task, x in found.items() if task[0] == "verify"
        },
        "tokens": [answer.tokens for answer in answers],
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(found: dict[str, dict], errors: dict[str, float], bandwidths: list[float]) -> None:
    """Print one precision."""
    base = next((name for name in (LLAMA, TORCH) if name in found), OURS)
    files, lengths = (list(found[OURS][key]) for key in ("by_file", "first"))
    rows = []
    for name, x in found.items():
        speed, (low, high) = x["tokens_per_second"], x["spread"]
        row = [name, f"{speed:.1f}", f"{low:.1f} to {high:.1f}"]
        row += [f"{speed / found[base]['tokens_per_second']:.2f}", f"{x['tokens_a_pass']:.2f}"]
        row.append(f"{x['share']:.0%}" if x["share"] else "-")
        row += [f"{x['first'][n]:.2f} s" if n in x["first"] else "-" for n in lengths]
        rows.append([*row, f"{x['memory'] / 1e6:.0f} MB"])
    head = ["engine", "tokens/s", "spread", f"times {base}", "tokens a pass", "of the bandwidth"]
    head += [f"first token after {n}" for n in lengths]
    print(table([*head, "peak memory"], rows) + "\n")
    if len(files) > 1:
        rows = [[n, *(f"{x['by_file'][f]:.1f}" for f in files)] for n, x in found.items()]
        print(table(["tokens/s", *files], rows) + "\n")
    curves = {name: x["verify"] for name, x in found.items() if 1 in x["verify"]}
    if curves:
        nodes = [n for n in curves[OURS] if n > 1]
        rows = [
            [name, f"{x[1] * 1e3:.2f} ms", *(f"{x[n] / x[1]:.2f}" for n in nodes)]
            for name, x in curves.items()
        ]
        print(table(["a pass", "1 token", *(f"c({n})" for n in nodes)], rows) + "\n")
    for name in [name for name in found if name in errors]:
        pairs = list(zip(found[OURS]["tokens"], found[name]["tokens"], strict=True))
        same, total = sum(same_tokens(*p) for p in pairs), sum(len(ours) for ours, _ in pairs)
        tokens = f"; {same} of {total} tokens come before one that {OURS} has otherwise"
        print(f"- {name}: logits differ by {errors[name]:.1e} of the largest", end="")
        print("" if name == OURS else tokens)
    low, middle, high = (f(bandwidths) / 1e9 for f in (min, statistics.median, max))
    print(f"- read bandwidth {middle:.1f} GB/s (rounds: {low:.1f} to {high:.1f})", flush=True)
