"""The `lit-rl` command: one module of `lit_rl.commands` per subcommand, whose heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# Subcommand -> (module with `add_arguments(parser)` and `run(arguments) -> int`, one line of help).
COMMANDS = {
    "plan": ("lit_rl.commands.plan", "estimate rates, GPU-hours, memory and waste before renting"),
    "budget": ("lit_rl.commands.budget", "measure memory on this device and recommend a token budget"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        Exit status: 0, or 2 for an input that cannot work.
    """
    parser = argparse.ArgumentParser(prog="lit-rl", description="Reinforcement learning of language models.")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = import_module(module)
        subparser = subcommands.add_parser(name, help=text)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"lit-rl {arguments.command}: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
