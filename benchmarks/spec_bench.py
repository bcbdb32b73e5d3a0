"""Plain and speculative decoding on the field's questions: the papers' table, made here.

    python benchmarks/spec_bench.py --target DIR --draft DIR --temperature 0 1 \\
        --questions spec_bench/question.jsonl humaneval.jsonl --out FILE.jsonl --markdown FILE.md
    python benchmarks/spec_bench.py     # generated models and four questions: does it run?

`eagle3/questions.py` says which files it reads. Each question goes through the target's chat
template and is decoded alone, plainly and with the draft, one after the other, every second time
the draft first; a second turn follows the model's own first answer, with the caches kept. What
compiled anything is decoded again, so no time contains compilation; times contain reading the
prompt.

Speeds of a task are all its tokens over all its seconds. Tau is tokens a round, the bonus token
included. The mean is that of the tasks, as in the papers. With `--out`, each question is a line as
soon as it is done, and the same command goes on after a stop. `key=value` arguments are those of
`decode.py`, such as tree.kind=chain or dtype=int8.
"""

import argparse
import dataclasses
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from auto_tree import small_engine as random_engine

from eagle3.chat_template import ChatTemplate
from eagle3.cli.answers import Interrupt
from eagle3.cli.batch import appending, fingerprint, finished_rows
from eagle3.cli.compare import first_difference
from eagle3.cli.console import note
from eagle3.cli.conversation import Conversation, Turn
from eagle3.cli.engine import Engine, build
from eagle3.cli.figures import SIDES, Figures, Line, report
from eagle3.config import ConfigError, DecodeConfig
from eagle3.config_reader import OneLineParser, read_config
from eagle3.decoding.request import request_problem
from eagle3.decoding.session import Session
from eagle3.digest import digest
from eagle3.files import write_whole
from eagle3.machine import keep_compiled_programs, processor
from eagle3.questions import Question, read_questions
from eagle3.training.data.rows import MALFORMED, REFUSED, TOO_LONG, Dropped, Tally

_MOST_RUNS = 4  # of a question, until nothing is compiled
_SMALL_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
_SMALL_QUESTIONS = [
    Question("chat", ("Which is longer, a mile or a league?", "And in steps?"), "1"),
    Question("chat", ("Name a bird that cannot fly.",), "2"),
    Question("code", ("def add(a, b):\n",), "1"),
    Question("maths", ("What is a quarter of 64?",), "1"),
]


class Job(NamedTuple):
    """A question at a temperature."""

    engine: Engine
    question: Question
    key: str  # of all that decides the answers


def at_temperature(engine: Engine, temperature: float) -> Engine:
    """Return the engine with another temperature."""
    sampling = dataclasses.replace(engine.config.sampling, temperature=temperature)
    return engine._replace(config=dataclasses.replace(engine.config, sampling=sampling))


def check(engine: Engine, conversation: Conversation, text: str) -> None:
    """See that the target can answer this.

    Raises:
      Dropped: it cannot.
    """
    try:
        request = conversation.request(text)
    except ConfigError as error:
        raise Dropped(REFUSED, str(error)) from error
    cfg = engine.target.cfg
    if problem := request_problem(cfg, request):
        needed = len(request.prompt) + request.max_new_tokens
        raise Dropped(TOO_LONG if needed > cfg.max_position_embeddings else MALFORMED, problem)


def converse(
    engine: Engine,
    template: ChatTemplate,
    session: Session,
    question: Question,
    interrupt: Interrupt,
) -> tuple[list[Turn], Dropped | None]:
    """Ask turn by turn, from the beginning again if anything was compiled.

    Returns:
      The turns, and why there are no more if one could not be answered.
    """
    turns, ended = [], None
    for _ in range(_MOST_RUNS):
        conversation, turns = Conversation(engine, session, template), []
        for text in question.turns:
            try:
                check(engine, conversation, text)
            except Dropped as why:
                ended = why
                break
            turns.append(conversation.ask(text, interrupt))
            if interrupt.is_set:
                return turns, ended
        if not any(turn.result.is_compiled for turn in turns):
            break
    return turns, ended


def measure(
    job: Job,
    template: ChatTemplate,
    sessions: tuple[Session, Session],
    is_swapped: bool,
    interrupt: Interrupt,
) -> Line | None:
    """Decode a question both ways; returns its line, or None if interrupted."""
    engine, question = job.engine, job.question
    found: list[list[Turn]] = [[], []]
    ended = None
    for side in (1, 0) if is_swapped else (0, 1):
        found[side], why = converse(engine, template, sessions[side], question, interrupt)
        if interrupt.is_set:
            return None
        if why is not None:
            ended = {"turn": len(found[side]), "reason": why.reason, "detail": why.detail}
    difference = None
    for number, (plain, drafted) in enumerate(zip(*found, strict=False)):
        tokens = plain.result.answer.tokens, drafted.result.answer.tokens
        part = first_difference(engine.target, plain.request, *tokens)
        if part is not None:  # what follows answers another conversation
            difference = {"turn": number, **part._asdict(), "text": part.describe()}
            break
    return {
        "task": question.task,
        "question": question.name,
        "temperature": engine.config.sampling.temperature,
        "ended_before": ended,
        "identical": difference is None,
        "difference": difference,
        **{name: [_side(turn) for turn in side] for name, side in zip(SIDES, found, strict=True)},
    }


def _side(turn: Turn) -> Line:
    fields = turn.result.to_json()
    del fields["logprobs"]
    return fields | {"is_drafted": [int(x) for x in turn.result.answer.is_drafted]}


def describe(config: DecodeConfig) -> list[str]:
    """Say what is measured."""
    plan = config.tree.plan()
    return [
        f"target {config.target or 'generated'}, draft {config.draft or 'generated'}, weights in"
        f" {config.dtype}, the draft's in {config.draft_dtype}",
        f"trees: {config.tree.kind}, {plan.size} nodes, {plan.depth} levels; at most"
        f" {config.max_new_tokens} new tokens a turn, one question at a time",
        f"{processor()}, {jax.devices()[0].device_kind}, jax {jax.__version__}",
    ]


def remarks(lines: Sequence[Line]) -> list[str]:
    """Say what the tables leave out."""
    ended = Counter(line["ended_before"]["reason"] for line in lines if line["ended_before"])
    compiled = sum(turn["includes_compilation"] for x in lines for y in SIDES for turn in x[y])
    found = [f"{n} conversations end before a turn: {reason}" for reason, n in ended.items()]
    return found + ([f"{compiled} answers include compilation"] if compiled else [])


def fitting(
    engine: Engine, template: ChatTemplate, questions: Sequence[Question]
) -> tuple[list[Question], Tally]:
    """Return the questions whose first turn the target can answer, and count the others.

    Raises:
      ConfigError: there are none.
    """
    found, tally = [], Tally()
    conversation = Conversation(engine, engine.session(None), template)
    for question in questions:
        try:
            check(engine, conversation, question.turns[0])
            found.append(question)
        except Dropped as why:
            tally.drop(f"{question.task} {question.name}", why)
    tally.kept = len(found)
    if not found:
        raise ConfigError(f"the target can answer no question: {tally}")
    return found, tally


def decode_jobs(
    jobs: Sequence[Job], template: ChatTemplate, out: str | None
) -> tuple[list[Line], bool]:
    """Decode what the file does not have yet; returns all lines, and False if interrupted."""
    done = set() if out is None else finished_rows(Path(out), [job.key for job in jobs])
    lines: list[Line] = []
    if out is not None and done:
        note(f"{len(done)} of {len(jobs)} are in {out} already")
        lines = [json.loads(x) for x in Path(out).read_text(encoding="utf-8").split("\n")[:-1]]
    engine = jobs[0].engine
    sessions = engine.session(None), engine.session(engine.drafter)
    with appending(out) as write, Interrupt() as interrupt:
        for number, job in enumerate(jobs):
            if number in done:
                continue
            name = f"{job.question.task} {job.question.name}"
            line = measure(job, template, sessions, number % 2 == 1, interrupt)
            if line is None:
                break
            line = {"row": number, "key": job.key, **line}
            lines.append(line)
            if write is not None:
                write(line)
            figures = Figures.of([line])
            agrees = "identical" if line["identical"] else line["difference"]["text"]
            note(
                f"{len(lines)} of {len(jobs)}: {name}, temperature {line['temperature']:g}:"
                f" {figures.ratio:.2f}x, tau {figures.tau:.2f}, {agrees}"
            )
        return sorted(lines, key=lambda line: line["row"]), not interrupt.is_set


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[float], list[str]]:
    """Read the command line; returns flags, temperatures and `key=value` settings.

    Raises:
      ConfigError: one line that says what to change.
    """
    parser = OneLineParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--target", metavar="DIR", help="Hugging Face directory of a chat model")
    add("--draft", metavar="DIR", help="directory of an EAGLE-3 draft for it, in any layout")
    add("--questions", metavar="FILE", nargs="+", default=[], help="files, or globs in quotes")
    add("--temperature", metavar="T", nargs="+", default=[], help="default: the settings', 0")
    add("--limit", metavar="N", type=int, default=0, help="questions of each task of a file")
    add("--max-new-tokens", metavar="N", help="of a turn; default: 256")
    add("--out", metavar="FILE", help="JSON lines to write; run again to go on after a stop")
    add("--markdown", metavar="FILE", help="the tables")
    args = parser.parse_intermixed_args(argv)
    # Settings that follow a flag with several values are not among them.
    texts = [text for text in args.questions if "=" not in text or Path(text).exists()]
    settings = [*args.overrides, *(x for x in args.questions if x not in texts)]
    settings += [x for x in args.temperature if "=" in x]
    try:
        temperatures = [float(x) for x in args.temperature if "=" not in x]
    except ValueError as error:
        raise ConfigError(f"--temperature takes numbers: {error}") from error
    args.questions = texts
    if args.limit < 0:
        raise ConfigError(f"--limit is {args.limit}, it must be at least 0 (all)")
    if args.max_new_tokens is not None:
        settings.append(f"max_new_tokens={args.max_new_tokens}")
    return args, list(dict.fromkeys(temperatures)), settings


def small_engine(settings: Sequence[str]) -> tuple[Engine, ChatTemplate, list[Question]]:
    """Make what `make bench` measures: random weights, a draft as wrong as can be."""
    few = ["generated.num_hidden_layers=4", "max_new_tokens=24", *settings]
    return random_engine(few)[0], ChatTemplate(_SMALL_TEMPLATE), _SMALL_QUESTIONS


def run(argv: Sequence[str] | None) -> int:
    """Measure and print; returns the exit status."""
    args, temperatures, settings = parse(argv)
    keep_compiled_programs()
    about: list[str] = []
    if not (args.target or args.draft or args.questions):
        engine, template, questions = small_engine(settings)
    elif args.target and args.draft and args.questions:
        texts = {"target": args.target, "draft": args.draft}
        config = read_config(DecodeConfig, args.config, settings, **texts)
        questions, tallies = read_questions(args.questions, args.limit)
        about = [f"{path}: {tally}" for path, tally in tallies.items() if tally.dropped]
        engine = build(config)
        template = engine.chat_template()
    else:
        raise ConfigError("give --target DIR, --draft DIR and --questions FILE together, or none")
    questions, tally = fitting(engine, template, questions)
    about += [f"questions that the target can answer: {tally}"] if tally.dropped else []
    temperatures = temperatures or [engine.config.sampling.temperature]
    engines = [at_temperature(engine, temperature) for temperature in temperatures]
    jobs = [
        Job(each, question, f"{settings_key}-{question.digest}")
        # A draft's precision decides times, if no text.
        for each, settings_key in (
            (x, digest([fingerprint(x.config), x.config.draft_dtype])) for x in engines
        )
        for question in questions
    ]
    lines, is_whole = decode_jobs(jobs, template, args.out)
    if lines:
        about = [*describe(engine.config), *about, *remarks(lines)]
        about += [] if is_whole else [f"interrupted: {len(lines)} of {len(jobs)} are done"]
        text = report(lines, about)
        print(text, end="", flush=True)
        if args.markdown is not None:
            write_whole(Path(args.markdown), text)
    return 0 if is_whole else 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run; bad input, or a file that fails, is one message on stderr and exit status 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        return run(argv)
    except (ValueError, OSError) as error:
        print(f"spec_bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what --out has is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
