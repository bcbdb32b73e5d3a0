"""Measure decoding beside transformers and llama.cpp: the same weights and prompts, in one run.

    python benchmarks/peers.py                       # a small random hybrid, about two minutes
    python benchmarks/peers.py --large               # a random one of 100M parameters
    python benchmarks/peers.py --target DIR --draft DIR --prompts code.jsonl prose.jsonl

Engines: this package plainly and with `--draft`, transformers, llama.cpp plainly and with its
prompt lookup (two tokens, which its authors advise on CPUs). Each is a process of its own that
waits for commands, so that its peak memory is its own; one works at a time, all in turn, several
rounds after one for warming up; what takes a peer more than a minute is not done again, and counts
as it was then. transformers has no fast code for DeltaNet layers on CPUs and runs its torch form.
Before that, the logits of all are compared with this package's in float32: the run ends if others
in float32 differ. Per precision (q8_0 of llama.cpp stands beside int8) it prints

- tokens/s of greedy decoding, reading the prompt not counted, and tokens a pass of the target;
- seconds to the first token of prompts of random tokens;
- what a pass over n tokens costs after 64 others, with the best next token of each;
- the share of the read bandwidth, measured in the same rounds, that the weights take.

All run as they come: so attention in llama.cpp has 16 bits, but for that comparison. The extra
`bench` brings the peers; what is not there is passed over. llama.cpp is built for the processor by

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python -e '.[bench]'

which takes a C++ compiler and some minutes. `key=value` arguments are those of `decode.py`. Run it
on an idle machine: the threads of torch and llama.cpp spin while they wait for each other, and
other load was seen to slow llama.cpp a hundred times, this package hardly.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from engines import (
    CONTEXT,
    DRAFTED,
    ENGINES,
    LLAMA,
    LOOKUP,
    NODES,
    OURS,
    REPEATS,
    TORCH,
    EngineError,
    Settings,
    Worker,
    threads,
)
from peers_report import report, summary

LENGTHS = (512, 4096)  # of prompts to the first token
NOT_SET = ("dtype", "sampling", "stop", "ignore_eos", "max_new_tokens")  # by key=value
SLOW = 60.0  # seconds: what takes longer is not done a second time
AGREEMENT = 1e-4  # largest difference of float32 logits, over the largest logit
GGUF_KINDS = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}
WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}  # bytes a weight
Q8_WIDTH = 34 / 32
INSTALL = "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python -e '.[bench]'"
NEEDS = {TORCH: ("torch", "transformers"), LLAMA: ("llama_cpp", "gguf")}


def read_bandwidth() -> float:
    """Return bytes per second of all cores reading 512 MB of memory, the best of three times."""
    big, count = np.ones(1 << 27, np.float32), threads()
    with ThreadPoolExecutor(count) as pool:
        parts, times = np.array_split(big, count), []
        for _ in range(3):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - begin)
    return big.nbytes / min(times)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference of logits, over the largest of ours."""
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())


class Group:
    """All engines of one precision, and what was measured of them."""

    def __init__(self, settings: Settings, names: Sequence[str]):
        self.workers: dict[str, Worker] = {}
        self.found: dict[str, dict[tuple, list]] = {}
        self.errors: dict[str, float] = {}
        self.bandwidths: list[float] = []
        for name in names:
            own = settings._replace(draft=settings.draft if name == DRAFTED else None)
            if (worker := self._try(name, lambda n=name, s=own: Worker(ENGINES[n], s))) is not None:
                self.workers[name], self.found[name] = worker, {}

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        """Return what an engine answers; a peer that fails is given up, and None returned."""
        try:
            return action()
        except EngineError as error:
            if name in (OURS, DRAFTED):
                raise SystemExit(f"{name}: {error}") from error
            print(f"- {name}: given up, {error}", flush=True)
            self.workers.pop(name, None)
            self.found.pop(name, None)

    def _ask(self, name: str, *command: Any) -> Any:
        return self._try(name, lambda: self.workers[name].ask(*command))

    def compare(self, ids: Sequence[int], exact: np.ndarray | None, strict: bool) -> np.ndarray:
        """Compare logits with `exact` or, if None, this package's, which are returned.

        Raises:
          SystemExit: if `strict`, where they differ.
        """
        ours = self._ask(OURS, "score", ids)
        for name in list(self.workers):
            if name == OURS and exact is None:
                continue
            if (found := ours if name == OURS else self._ask(name, "score", ids)) is None:
                continue
            self.errors[name] = difference(ours if exact is None else exact, found)
            if strict and not self.errors[name] < AGREEMENT:
                raise SystemExit(
                    f"{name} computes another model: its logits differ by"
                    f" {self.errors[name]:.1e} of the largest, {AGREEMENT} is allowed"
                )
        return ours

    def measure(self, tasks: dict[tuple, tuple], rounds: int) -> None:
        """Run all tasks, names -> commands, in turn on all engines."""
        slow = set()
        for number in range(rounds + 1):  # the first compiles and warms up
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            names = list(self.workers)
            first = number % len(names)  # so that nobody always comes first
            for task, command in tasks.items():
                for name in (*names[first:], *names[:first]):
                    is_gone = name not in self.workers  # it failed a moment ago
                    has_no_curve = task[0] == "verify" and name in (DRAFTED, LOOKUP)
                    if is_gone or has_no_curve or (name, task) in slow:
                        continue
                    begin = time.perf_counter()
                    answer = self._ask(name, *command)
                    if answer is None:
                        continue
                    took = time.perf_counter() - begin
                    if took > SLOW and name not in (OURS, DRAFTED):  # which may have compiled
                        slow.add((name, task))
                    if number or (name, task) in slow:
                        self.found[name].setdefault(task, []).append(answer)
            if number:
                self.bandwidths.append(read_bandwidth())

    def summaries(self, bytes_read: dict[str, float | None]) -> dict[str, dict]:
        """Stop all engines and return what is to be told of each."""
        stops = [(name, worker.stop) for name, worker in self.workers.items()]
        memory = {name: self._try(name, stop) for name, stop in stops}
        bandwidth = statistics.median(self.bandwidths)
        return {
            name: summary(found, bytes_read.get(name), bandwidth) | {"memory": memory[name]}
            for name, found in self.found.items()
        }


def missing(cfg) -> dict[str, str]:
    """Return which peers cannot take part, and why."""
    from gguf_export import problem_with

    reasons = {}
    for name, modules in NEEDS.items():
        lacking = [module for module in modules if importlib.util.find_spec(module) is None]
        if lacking:
            reasons[name] = f"not measured, {' and '.join(lacking)} not installed; {INSTALL}"
    if LLAMA not in reasons and (problem := problem_with(cfg)) is not None:
        reasons[LLAMA] = problem
    return reasons


def read_prompts(paths: Sequence[str], target: str, vocab: int, limit: int, most: int):
    """Return (file, token ids) of the first rows of each file, cut to their last `most` tokens.

    Raises:
      SystemExit: a row cannot be read.
    """
    from eagle3.chat_template import ChatTemplate
    from eagle3.cli.rows import row_problem
    from eagle3.text import load_tokenizer

    tokenizer, prompts = load_tokenizer(target, vocab), []
    for path in paths:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
        for line in [line for line in lines if line.strip()][:limit]:
            try:
                row = json.loads(line)
                problem = row_problem(row)
            except ValueError as error:
                problem = f"not JSON: {error}"
            if problem is not None:
                raise SystemExit(f"{path}: {problem}")
            if "messages" in row:
                text = ChatTemplate.load(target).render(row["messages"])
                ids = tokenizer.encode(text, special=False)
            else:
                ids = tokenizer.encode(row["prompt"])
            prompts.append((path, ids[-most:]))
    return prompts


def write_random(directory: str, is_large: bool) -> None:
    """Save a hybrid with random weights: of 100M parameters, or small."""
    from target import benchmark_config, write_model
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from eagle3.config import GeneratedTarget
    from eagle3.generated import generated_target
    from gdn import save_pretrained

    shape = GeneratedTarget(vocab_size=4096, hidden_size=256, num_hidden_layers=4)
    if is_large:
        write_model(Path(directory), "float32")
    else:
        save_pretrained(generated_target(shape, np.float32), directory)
    # Loaded with the model, and never used.
    size = benchmark_config().vocab_size if is_large else shape.vocab_size
    words = WordLevel({str(token): token for token in range(size)}, unk_token="0")
    Tokenizer(words).save(f"{directory}/tokenizer.json")


def weight_bytes(cfg, dtype: str) -> dict[str, float | None]:
    """Return how many bytes of weights a pass of each engine reads; experts are not counted."""
    read = cfg.num_parameters() - (not cfg.tie_word_embeddings) * cfg.vocab_size * cfg.hidden_size
    ours = None if any(cfg.moe_layers) else read * WIDTHS[dtype]
    theirs = ours and (read * Q8_WIDTH if dtype == "int8" else ours)
    return {OURS: ours, TORCH: ours, LLAMA: theirs}


def make_tasks(prompts, lengths: Sequence[int], nodes: Sequence[int], new: int, vocab: int):
    """Return the tasks, names -> commands of an engine."""
    rng = np.random.default_rng(0)
    tasks: dict[tuple, tuple] = {("verify", n): ("verify", n) for n in nodes}
    for n in lengths:
        tasks["first", n] = ("generate", rng.integers(0, vocab, n).tolist(), 1)
    for number, (file, ids) in enumerate(prompts):
        tasks["generate", file, number] = ("generate", ids, new)
    return tasks


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--target", help="Hugging Face directory; none: a small random hybrid")
    parser.add_argument("--large", action="store_true", help="a random hybrid of 100M parameters")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", nargs="+", default=[], help="JSON lines, as for decode.py")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, help="a prompt; 128, of the small model 32")
    parser.add_argument("--rounds", type=int, help="counted, after one; 5, of the small model 2")
    parser.add_argument("--dtypes", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--lengths", nargs="*", type=int, help=f"of prompts; {LENGTHS}")
    parser.add_argument("--nodes", nargs="*", type=int, choices=NODES, default=list(NODES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    fixed = [x for x in args.overrides if x.split("=")[0].split(".")[0] in NOT_SET]
    if fixed:
        parser.error(f"{fixed[0]}: precision is set by --dtypes, and all decode greedily")
    if (args.draft or args.prompts) and not args.target:
        parser.error("--draft and --prompts need --target")
    is_small = not (args.target or args.large)
    for name, small, usual in (
        ("new_tokens", 32, 128), ("rounds", 2, 5), ("lengths", LENGTHS[:1], LENGTHS)
    ):  # fmt: skip
        if getattr(args, name) is None:
            setattr(args, name, small if is_small else usual)
    return args


def open_group(settings: Settings, folder: str, reasons: dict[str, str]) -> Group:
    """Start all engines that can take part in one precision."""
    print(f"\n### {settings.dtype}\n", flush=True)
    names = [OURS, *([DRAFTED] if settings.draft else [])]
    names += [TORCH] if TORCH not in reasons and settings.dtype != "int8" else []
    if LLAMA not in reasons:
        from gguf_export import export

        kind = GGUF_KINDS[settings.dtype]
        settings = settings._replace(gguf=f"{folder}/{kind}.gguf")
        export(settings.target, settings.gguf, kind)
        names += [LLAMA, LOOKUP]
    return Group(settings, names)


def main() -> None:
    """Run and print."""
    args = parse_arguments()
    from gdn import TargetConfig

    with tempfile.TemporaryDirectory() as folder:
        target = args.target or f"{folder}/target"
        if not args.target:
            write_random(target, args.large)
        cfg = TargetConfig.from_hf(target)
        room = cfg.max_position_embeddings - args.new_tokens
        prompts = read_prompts(args.prompts, target, cfg.vocab_size, args.limit, room)
        if not prompts:
            rng = np.random.default_rng(1)
            prompts = [("random", rng.integers(0, cfg.vocab_size, 32).tolist()) for _ in range(2)]
        lengths = sorted({min(n, cfg.max_position_embeddings - 1) for n in args.lengths})
        tasks = make_tasks(prompts, lengths, args.nodes, args.new_tokens, cfg.vocab_size)
        longest = [CONTEXT + max(NODES) * REPEATS, *(n + 1 for n in lengths)]
        longest += [len(ids) + args.new_tokens for _, ids in prompts]
        overrides = tuple(args.overrides)
        reasons, results, exact = missing(cfg), {}, None
        millions = cfg.num_parameters() / 1e6
        busy = os.getloadavg()[0]
        print(f"{cfg.model_type}, {millions:.1f}M parameters, {threads()} threads; {busy:.1f} other"
              " processes ran in the last minute")  # fmt: skip
        for name, reason in reasons.items():
            print(f"{name}: {reason}")
        for dtype in args.dtypes:
            settings = Settings(target, dtype, max(longest), args.draft, overrides=overrides)
            group = open_group(settings, folder, reasons)
            text = (prompts[0][1] * CONTEXT)[: CONTEXT + max(NODES)]
            ours = group.compare(text, exact, strict=dtype == "float32")
            exact = ours if dtype == "float32" else exact
            group.measure(tasks, args.rounds)
            found = group.summaries(weight_bytes(cfg, dtype))
            report(found, group.errors, group.bandwidths)
            results[dtype] = {"engines": found, "logits": group.errors}
            results[dtype]["bandwidths"] = group.bandwidths
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
