"""The command line of `decode.py`: flags for what to do, `key=value` for how to decode."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.config import ConfigError, DecodeConfig
from eagle3.config_reader import OneLineParser, read_config
from eagle3.files import why_not_writable


@dataclass(frozen=True)
class Options:
    """The flags that are no settings of decoding."""

    prompts: str | None = None  # JSON lines to answer
    out: str | None = None  # file for the answers to them
    chat: bool = False
    compare: bool = False
    json: bool = False
    trace: str | None = None  # page to write that replays the rounds
    show_acceptance: bool = False
    color: str = "auto"  # always, never, or auto: on a terminal
    dry_run: bool = False
    device_memory: str | None = None  # of a dry run, such as 80GiB

    def __post_init__(self) -> None:
        """Reject flags that do not go together.

        Raises:
          ConfigError: naming both.
        """
        if self.chat and (self.prompts is not None or self.compare):
            other = "--compare" if self.compare else "--prompts"
            raise ConfigError(f"--chat and {other} exclude each other: leave one away")
        if self.out is not None and (self.prompts is None or self.compare):
            raise ConfigError("--out is for the answers to --prompts FILE.jsonl, without --compare")
        if self.prompts is not None and not Path(self.prompts).is_file():
            raise ConfigError(f"--prompts {self.prompts}: there is no such file")
        if self.out is not None and not Path(self.out).parent.is_dir():
            raise ConfigError(f"--out {self.out}: its directory does not exist; make it first")
        if self.out is not None and Path(self.out).exists() and not Path(self.out).is_file():
            raise ConfigError(f"--out {self.out} is no regular file: give one to write answers to")
        if self.trace is not None:
            if self.chat or self.prompts is not None or self.compare or self.dry_run:
                raise ConfigError("--trace replays one --prompt: leave the other mode away")
            if why := why_not_writable(Path(self.trace)):
                raise ConfigError(f"--trace {self.trace} {why}: give a file to write the page to")
        if self.device_memory is not None and not self.dry_run:
            raise ConfigError("--device-memory is for --dry-run: add it, or leave both away")
        if self.show_acceptance and (self.json or self.prompts is not None or self.compare):
            raise ConfigError(
                "--show-acceptance marks text as it is made: for --prompt or --chat, not --json"
            )


def parse(argv: Sequence[str] | None = None) -> tuple[Options, DecodeConfig]:
    """Read the command line.

    Raises:
      ConfigError: one line that says what to change.
    """
    parser = OneLineParser(
        description="Continue a prompt, answer a file of prompts, or chat; with a draft,"
        " speculatively, with the same text. Settings are key=value, such as tree.depth=6 or"
        " sampling.temperature=0.7; docs/configuration.md lists them.",
    )
    parser.add_dry_run()
    add = parser.add_argument
    add("--target", metavar="DIR", help="Hugging Face directory of the model")
    add("--draft", metavar="DIR", help="directory of an EAGLE-3 draft for it, in any layout")
    add("--prompt", metavar="TEXT", help="continue this text")
    add("--prompts", metavar="FILE", help="JSON lines with `prompt` or `messages`")
    add("--out", metavar="FILE", help="JSON lines to write; run again to go on after a stop")
    add("--chat", action="store_true", help="talk, with the model's own chat template")
    add("--compare", action="store_true", help="time plain against speculative decoding")
    add("--json", action="store_true", help="print JSON, one object per answer")
    add("--trace", metavar="FILE", help="HTML page to write, which replays a prompt's rounds")
    add("--recalibrate", action="store_true", help="measure anew what tree.kind=auto goes by")
    add("--show-acceptance", action="store_true", help="mark the text that the draft proposed")
    add("--color", choices=("auto", "always", "never"), default="auto")
    args = vars(parser.parse_intermixed_args(argv))
    if args["prompt"] is not None and (args["chat"] or args["prompts"] is not None):
        other = "--chat" if args["chat"] else "--prompts"
        raise ConfigError(f"--prompt and {other} exclude each other: leave one away")
    options = Options(**{field.name: args[field.name] for field in dataclasses.fields(Options)})
    texts = {k: args[k] for k in ("target", "draft", "prompt") if args[k] is not None}
    has_target = "target" in texts or any(x.startswith("target=") for x in args["overrides"])
    if args["config"] is None and not has_target:
        raise ConfigError("nothing to decode with: give --config FILE or --target DIR")
    overrides = args["overrides"] + ["recalibrate=true"] * args["recalibrate"]
    config = read_config(DecodeConfig, args["config"], overrides, **texts)
    if not (config.prompt or options.chat or options.prompts is not None or options.dry_run):
        raise ConfigError("the prompt is empty: give --prompt TEXT, --prompts FILE.jsonl or --chat")
    if options.compare and (config.draft is None or config.method == "autoregressive"):
        raise ConfigError("--compare needs a draft to compare with: give --draft DIR")
    if options.trace is not None and (config.draft is None or config.method == "autoregressive"):
        raise ConfigError("--trace has nothing to draw without a draft: give --draft DIR")
    return options, config
