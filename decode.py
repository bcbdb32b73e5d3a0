"""Decode: `python decode.py --config configs/decode.yaml --prompt "def fibonacci(n):"`.

Parses, builds, calls. `--prompts FILE.jsonl` answers a file, `--chat` talks, `--compare` times a
draft against plain decoding; `--target DIR --draft DIR` take any Hugging Face directory. Exit
status: 0, or 2 for input or files that cannot be used, 130 after Ctrl-C, 141 if nobody reads the
output.
"""

import logging
import os
import sys
from collections.abc import Sequence

from jax.errors import JaxRuntimeError

from eagle3.cli.arguments import parse
from eagle3.cli.batch import run_batch
from eagle3.cli.chat import run_chat
from eagle3.cli.compare import run_compare
from eagle3.cli.dry_run import plan_decoding
from eagle3.cli.engine import build
from eagle3.cli.single import run_single
from eagle3.cli.trace import run_trace
from eagle3.dry_run import pretend_devices, tell
from eagle3.machine import is_out_of_memory, keep_compiled_programs
from eagle3.sharding import on_mesh


def run(argv: Sequence[str] | None) -> int:
    """Read the command line and do what it says; returns the exit status."""
    options, config = parse(argv)
    if options.dry_run:
        pretend_devices(config.mesh.size)
        tell([plan_decoding(config)], options.device_memory)
        return 0
    keep_compiled_programs()
    if options.compare:
        mode = run_compare
    elif options.prompts is not None:
        mode = run_batch
    elif options.trace is not None:
        mode = run_trace
    else:
        mode = run_chat if options.chat else run_single
    with on_mesh(config.mesh):
        is_whole = mode(build(config), options)
    sys.stdout.flush()  # here an error is still told
    return 0 if is_whole else 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run; bad input, or a file that fails, is one message on stderr and exit status 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("gdn").setLevel(logging.INFO)  # what a checkpoint holds that was skipped
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without UTF-8 gets escapes, not an error
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if hasattr(sys.stdin, "reconfigure"):  # so that chat can refuse one line and go on
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    try:
        return run(argv)
    except ValueError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 2
    except JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        advice = "lower batch_size, max_new_tokens or prefill_chunk, or take dtype=bfloat16"
        print(f"decode.py: the device has too little memory: {advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _give_up_stdout()
        return 141
    except OSError as error:
        print(f"decode.py: {error}; what was written before is kept", file=sys.stderr)
        _give_up_stdout()
        return 2


def _give_up_stdout() -> None:
    """See that the flush at exit does not fail, if this one does."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
