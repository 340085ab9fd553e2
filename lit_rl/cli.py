"""The `lit-rl` command: one module of `lit_rl.commands` per subcommand, whose heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

# Subcommand -> (module with `add_arguments(parser)` and `run(arguments) -> int`, one line of help).
COMMANDS = {
    "plan": ("lit_rl.commands.plan", "estimate rates, GPU-hours, memory and waste before renting"),
    "doctor": ("lit_rl.commands.doctor", "run every check on your own model and data"),
    "budget": ("lit_rl.commands.budget", "measure memory on this device and recommend a token budget"),
}
# These are LightningCLI's, which reads the rest of the command line by itself.
TRAINING = ("fit", "validate", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        Exit status: 0, or 2 for an input that cannot work.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in TRAINING:
        return _guarded(given[0], lambda: import_module("lit_rl.commands.training").run(given))
    parser = argparse.ArgumentParser(
        prog="lit-rl",
        description="Reinforcement learning of language models.",
        epilog="lit-rl fit | validate | predict: train, validate or sample from the command line and YAML files. "
        "Start from examples/fit.yaml of the repository: lit-rl fit --config examples/fit.yaml",
    )
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = import_module(module)
        subparser = subcommands.add_parser(name, help=text)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(given)
    return _guarded(arguments.command, lambda: arguments.run(arguments))


def _guarded(command: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"lit-rl {command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
