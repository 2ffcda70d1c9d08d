"""The command line `eagle-fsd`: a file per command, and one for the three about draft heads."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Union

import tyro

from .arguments import parse_options
from .calibrate import CalibrateCommand
from .chat import ChatCommand
from .demo import DemoCommand
from .exits import exit_status
from .generate import GenerateCommand
from .heads import ExportCommand, HeadsCommand, InspectCommand
from .serve import ServeCommand
from .tune import TuneCommand
from .vocab import VocabCommand

__all__ = ["COMMANDS", "main", "parse"]

COMMANDS = {
    "generate": GenerateCommand,
    "chat": ChatCommand,
    "demo": DemoCommand,
    "serve": ServeCommand,
    "heads": HeadsCommand,
    "calibrate": CalibrateCommand,
    "tune": TuneCommand,
    "inspect": InspectCommand,
    "export": ExportCommand,
    "vocab": VocabCommand,
}
Command = Union[tuple(COMMANDS.values())]  # noqa: UP007  (made of a list)


def parse(argv: Sequence[str] | None = None) -> Command:
    """The command that a command line asks for, with its options; nothing is run.

    Raises:
        SystemExit: 0 after --help; 2 after a message for a word or a value that cannot be accepted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in COMMANDS:
        return parse_options(COMMANDS[argv[0]], argv[1:], program=f"eagle-fsd {argv[0]}")
    listed = [Annotated[kind, tyro.conf.subcommand(name, description=kind.__doc__.splitlines()[0])]
              for name, kind in COMMANDS.items()]
    return parse_options(Union[tuple(listed)], argv, program="eagle-fsd", description=(  # noqa: UP007  (the same)
        "EAGLE-2 decoding with fuzzy acceptance. `eagle-fsd COMMAND --help` lists a command's options, `eagle-fsd "
        "--version` says the version."))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status is 2 for what a user can get wrong and 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--version"]:
        from .. import __version__

        print(__version__)
        return 0
    command = parse(argv)

    def work() -> None:
        with writing_once(command):
            command.run()

    rank = os.environ.get("RANK", "0")
    program = "eagle-fsd" if rank == "0" else f"eagle-fsd, process {rank}"
    return exit_status(program, work, flags=True)


def writing_once(command: Command) -> AbstractContextManager:
    """Around a command that torchrun has started several times: only the first one writes."""
    if getattr(getattr(command, "pair", None), "tp_plan", None) is None:
        return nullcontext()
    from ..models import parallel

    return parallel.command()
