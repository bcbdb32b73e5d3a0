"""Train: `python train.py --config configs/quickstart.yaml steps=100`.

Parses, builds, loops. A configuration may have several stages, such as a target and its draft; they
run in order, and those that are done are passed over. The same command goes on with a run that was
stopped. Exit status: 0, also after Ctrl-C or SIGTERM, which save; 2 for input that cannot be used.
"""

import logging
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from jax.errors import JaxRuntimeError

from eagle3.config import ConfigError
from eagle3.config_reader import OneLineParser, read_stages
from eagle3.dry_run import pretend_devices, tell
from eagle3.machine import is_out_of_memory
from eagle3.processes import end, is_first, join
from eagle3.training.config import TrainConfig
from eagle3.training.dry_run import plan_stages
from eagle3.training.trainer import train


def run(argv: Sequence[str]) -> None:
    """Read the command line and train what it says."""
    parser = OneLineParser(description=__doc__)
    parser.add_dry_run()
    parser.add_argument("--only", metavar="STAGE", help="run one stage of a file that has several")
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="of several processes: where the first is; auto")
    add("--processes", metavar="N", type=int, help="how many there are")
    add("--process-id", metavar="I", type=int, help="which one this is, from 0 on")
    args = parser.parse_intermixed_args(argv)
    if args.config is None:
        raise ConfigError("give a configuration: --config FILE")
    stages = read_stages(TrainConfig, args.config, args.overrides, args.only)
    if args.device_memory is not None and not args.dry_run:
        raise ConfigError("--device-memory is for --dry-run: add it, or leave both away")
    if args.dry_run:
        pretend_devices(max(config.mesh.size for config in stages.values()))
        tell(plan_stages(stages), args.device_memory)
        return
    places = [config.out for config in stages.values()]
    if len(set(places)) < len(places):
        raise ConfigError(
            f"two stages have the out {places[0]}: write stages.NAME.out=DIR to change one"
        )
    command = shlex.join(["python", "train.py", *argv])
    join(args.coordinator, args.processes, args.process_id)
    for name, config in stages.items():
        if name:
            _say(f"{name}: {config.task} in {config.out}")
        if not train(config, _say):
            _say(f"stopped; to go on: {command}")
            return
        _say(f"done: {config.out}")


def _say(text: str) -> None:
    """Print, if this is the process that talks."""
    if is_first():
        print(text, flush=True)


def _terminate(*_) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run; bad input is one message on stderr and exit status 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # orbax warns of what it does not need to know
    argv = sys.argv[1:] if argv is None else list(argv)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        run(argv)
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return end(2)
    except JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        advice = "lower data.batch_size and raise accumulate, lower data.length, or take bfloat16"
        print(f"train.py: the device has too little memory: {advice}", file=sys.stderr)
        return end(2)
    except OSError as error:
        print(f"train.py: {error}; checkpoints that were there are whole", file=sys.stderr)
        return end(2)
    except KeyboardInterrupt:
        command = shlex.join(["python", "train.py", *argv])
        _say(f"stopped at once, steps since the last save are lost; to go on: {command}")
        return end(0)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
