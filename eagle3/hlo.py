"""What devices tell each other, read from a compiled program.

The text of the program is XLA's; a loop's body counts as often as the compiler knows it to run, or
once where only the data decides (rounds of decoding, blocks of attention).
"""

import re
from collections import Counter
from typing import NamedTuple

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8}
_BYTES |= {"f64": 8}  # all others have 4
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Traffic(NamedTuple):
    """Collectives of a program, on each device."""

    count: Counter[str]  # by kind
    bytes: Counter[str]  # of the results

    def __str__(self) -> str:
        """Return one line."""
        parts = [f"{n:,} {kind} ({self.bytes[kind] / 2**20:,.1f} MiB)"
                 for kind, n in sorted(self.count.items())]  # fmt: skip
        return ", ".join(parts) or "none"


def collectives(text: str) -> Traffic:
    """Count the collectives of a compiled program, `compiled.as_text()`."""
    found: dict[str, list[tuple[str, int]]] = {}  # computation: kind and bytes of each
    calls: dict[str, list[tuple[str, int]]] = {}  # computation: what it runs, and how often
    name = entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            entry = name if match[1] else entry
            found[name], calls[name] = [], []
        elif match := _OPERATION.match(line):
            kind = match[2].removesuffix("-start")
            if kind in _KINDS:
                found[name].append((kind, _size(match[1])))
            trips = _TRIPS.search(line)
            often = int(trips[1]) if kind == "while" and trips else 1
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += [x.strip().removeprefix("%") for x in branches.split(",")]
            calls[name] += [(x, often) for x in called]
    traffic = Traffic(Counter(), Counter())

    def add(name: str, often: int) -> None:
        for kind, size in found[name]:
            traffic.count[kind] += often
            traffic.bytes[kind] += often * size
        for called, times in calls[name]:
            add(called, often * times)

    add(entry, 1)
    return traffic


def _size(shape: str) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    total = 0
    for kind, dimensions in _SHAPE.findall(shape):
        size = _BYTES.get(kind, 4)
        for number in filter(None, dimensions.split(",")):
            size *= int(number)
        total += size
    return total
