"""The subcommands of `lit-rl`: one module each, with `add_arguments(parser)` and `run(arguments) -> int`."""
