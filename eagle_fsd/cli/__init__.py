"""The command line `eagle-fsd`: one file per command; the commands for draft heads share one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Union

import tyro

from ..options.generate import GenerateOptions
from ..options.load import LoadOptions
from ..options.option import REPLACEMENTS
from ..utils.threads import choose_wait_policy
from .arguments import parse_options
from .benchmark import BenchmarkCommand
from .cache import CacheCommand
from .calibrate import CalibrateCommand
from .chat import ChatCommand
from .demo import DemoCommand
from .exits import exit_status
from .generate import GenerateCommand
from .heads import CheckCommand, ExportCommand, HeadsCommand, InspectCommand, VocabCommand
from .serve import ServeCommand
from .tune import TuneCommand

COMMANDS = {
    "generate": GenerateCommand,
    "chat": ChatCommand,
    "demo": DemoCommand,
    "serve": ServeCommand,
    "heads": HeadsCommand,
    "heads check": CheckCommand,
    "benchmark": BenchmarkCommand,
    "calibrate": CalibrateCommand,
    "tune": TuneCommand,
    "inspect": InspectCommand,
    "export": ExportCommand,
    "vocab": VocabCommand,
    "cache": CacheCommand,
}
DECODING = ("generate", "chat", "demo", "serve", "benchmark", "calibrate", "tune")
Command = Union[tuple(COMMANDS.values())]  # noqa: UP007  (built from a list)


def parse(argv: Sequence[str]) -> Command:
    """Parse a command line into a command with its options, without running it.

    Raises:
        SystemExit: 0 after --help; 2 after a message about an unknown word or an invalid value.
    """
    command = next((name for name in (" ".join(argv[:2]), *argv[:1]) if name in COMMANDS), None)
    if command is not None:
        try:
            return parse_options(COMMANDS[command], argv[len(command.split()) :], program=f"eagle-fsd {command}")
        except SystemExit as end:
            for flag in dict.fromkeys(word.partition("=")[0] for word in (argv if end.code else ())):
                instead = as_flags(REPLACEMENTS.get(flag.lstrip("-").replace("-", "_"), "")) if flag[:1] == "-" else ""
                if "-" in instead:  # suggest only what a command line offers: a flag or a command
                    print(f"{flag}: use {instead}", file=sys.stderr)
            raise
    listed = [Annotated[kind, tyro.conf.subcommand(name, description=kind.__doc__.splitlines()[0])]
              for name, kind in COMMANDS.items()]
    return parse_options(Union[tuple(listed)], argv, program="eagle-fsd", description=(  # noqa: UP007  (the same)
        "EAGLE-2 decoding with fuzzy acceptance. `eagle-fsd COMMAND --help` lists the options of a command, `eagle-fsd "
        "--version` prints the version."))


def as_flags(text: str) -> str:
    """Replace options in Python form, such as max_new_tokens=, by their flags."""
    names = "|".join((*GenerateOptions.declared, *LoadOptions.declared))
    return re.sub(rf"\b({names})=(?=[\s,;]|$)", lambda match: f"--{match[1].replace('_', '-')}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 2 after an error by the user, 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else list(argv)
    os.environ.setdefault("TQDM_DELAY", "2")  # seconds: no progress bars, such as those of transformers, for less

    def work() -> None:
        if words == ["--version"]:
            from .. import __version__

            print(__version__)
        else:
            if words[:1] and words[0] in DECODING and "--help" not in words:
                choose_wait_policy()  # parsing may import torch
            parse(words).run()

    return exit_status("eagle-fsd", work)
