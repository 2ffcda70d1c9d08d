"""`eagle-fsd chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.checks import is_check
from .arguments import Decoding, Loading, parse_options
from .terminal import DIM, SourceStreamer, coloured, describe_output, legend, use_colour

if TYPE_CHECKING:
    from ..chat import Chat

HELP = """\
/set NAME VALUE   change an option for the next answers, such as /set threshold 0.3, /set temperature 0.7,
                  /set tree 16,5,4; /set alone lists the options
/system TEXT      set the system message; without TEXT remove it
/save FILE        write the conversation to a new file
/load FILE        continue the conversation in FILE
/reset            start a new conversation (also /clear)
/help             show this list (also /?)
/quit             quit (also /bye, /exit, Ctrl-D); Ctrl-C stops an answer, Ctrl-C twice quits"""


@dataclass(frozen=True)
class ChatDecoding(Decoding):
    """How to sample tokens, when to end an answer, and which draft tokens to accept."""

    max_new_tokens: int = 512


@dataclass(frozen=True, kw_only=True)
class ChatCommand:
    """Chat in the terminal. Each turn processes only its new tokens.

    Args:
        system: system message.
    """

    system: str | None = None
    pair: Loading = Loading()
    decoding: ChatDecoding

    def run(self) -> None:
        from ..chat import Chat

        terminal = Terminal(Chat(self.pair.load(), system=self.system), self.decoding)
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and a history)
        print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D quits")
        if use_colour():
            print(legend())
        while terminal.ask():
            pass


@contextmanager
def stopping(chat: Chat) -> Iterator[None]:
    """Within this context the first Ctrl-C stops the answer after its current cycle, the second one exits."""
    def stop(number: int, frame: object) -> None:
        chat.stop()
        signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Terminal:
    """Handles typed lines: messages to the model, and the commands in `HELP`."""

    def __init__(self, chat: Chat, decoding: Decoding) -> None:
        self.chat, self.decoding = chat, decoding
        self.commands = {"/set": self.set, "/system": self.system, "/save": self.save, "/load": self.load,
                         "/reset": self.reset, "/clear": self.reset, "/help": self.help, "/?": self.help}

    def ask(self) -> bool:
        """Read and handle one line. An error is printed and changes nothing. Return False at the end."""
        try:
            line = input("> ").strip()
            name, _, rest = line.partition(" ")
            if name in ("/quit", "/bye", "/exit"):
                return False
            if name in ("/save", "/load") and not rest:
                print(f"{name} needs a file name")
            elif name in self.commands:
                self.commands[name](rest.strip())
            elif line.startswith("/"):
                print(f"unknown command {name}; /help lists the commands")
            elif line:
                self.answer(line)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit quits)")
        except EOFError:
            print()
            return False
        except BrokenPipeError:
            raise
        except OSError as error:
            print(f"{error.filename}: {error.strerror}" if error.filename else error)
        except (ValueError, TypeError) as error:
            if is_check(error):
                print(error)
            else:  # a fault of the program
                traceback.print_exc()
        return True

    def answer(self, text: str) -> None:
        streamer = SourceStreamer(self.chat.model.tokenizer, self.decoding.stop_strings)
        with stopping(self.chat):
            output = self.chat.send(text, options=self.decoding, streamer=streamer)
        if sys.stdout.isatty():
            print(coloured(f"[{describe_output(output)}]", DIM))

    def set(self, rest: str) -> None:
        """Parse an option like the flag of the same name on the command line."""
        try:
            name, *values = shlex.split(rest) or ["help"]
        except ValueError as error:
            raise ValueError(f"/set {rest}: {error}") from error
        with suppress(SystemExit):  # after --help or an error message
            self.decoding = parse_options(Decoding, [f"--{name.replace('_', '-')}", *values], program="/set",
                                          default=self.decoding)

    def system(self, text: str) -> None:
        self.chat.system = text or None
        print(f"system message: {self.chat.system}")

    def save(self, name: str) -> None:
        with Path(os.path.expanduser(name)).open("x", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"messages": self.chat.messages}, file, ensure_ascii=False)
        print(f"written to {name}")

    def load(self, name: str) -> None:
        from ..inputs.prompts import encode_prompt

        saved = None
        with suppress(ValueError):
            saved = json.loads(Path(os.path.expanduser(name)).read_text(encoding="utf-8"))
        messages = saved.get("messages") if isinstance(saved, dict) else None
        if not messages or not isinstance(messages, list):
            raise ValueError(f"{name} is not a conversation written by /save")
        encode_prompt(messages, self.chat.model)  # raises for messages that the model's template refuses
        self.chat.reset()
        self.chat.system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.chat.messages = messages
        print(f"{len(messages)} messages loaded")

    def reset(self, rest: str) -> None:
        self.chat.reset()
        print("new conversation")

    def help(self, rest: str) -> None:
        print(HELP)
