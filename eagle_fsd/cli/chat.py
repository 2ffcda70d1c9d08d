"""`eagle-fsd chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..acceptance import RULE_CLASSES
from ..data.files import save_atomically
from ..options import AcceptanceOptions, SamplingOptions
from .arguments import Acceptance, Loading, Sampling
from .terminal import DIM, RESET, SourceStreamer, describe_output, describe_rule, use_colour

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..chat import Chat
    from ..engine.receipts import Output
    from ..pair import EagleModel

PROMPT = "> "
ROLES = ("system", "user", "assistant")
HELP = """\
/threshold 0.3    of the acceptance rule: how far from the target's own choice the text may go
/rule tilt        acceptance rule (with its default threshold): {rules}; several as in fsd+fly,
                  with the dials of gates behind: fsd+fly+regret 0.5 2
/temperature 0.7  0 is greedy
/system TEXT      what the target is told first; without text it is shown, - takes it away
/save FILE        write the conversation to a file
/load FILE        go on with the conversation of a file
/stats            the last answer: tokens/s, tokens per step, token sources, prompt tokens processed
/reset            begin a new conversation
/help             this list
/quit             end, as Ctrl-D; Ctrl-C stops an answer, twice ends""".format(rules=", ".join(RULE_CLASSES))


@dataclass(frozen=True)
class ChatCommand:
    """Talk in the terminal; only new tokens are processed.

    Args:
        system: text of a system message.
    """

    system: str | None = None
    pair: Loading = Loading()
    sampling: Sampling = Sampling(max_new_tokens=512)
    acceptance: Acceptance = Acceptance()

    def run(self) -> None:
        self.acceptance.check()
        talk(self.pair.load(), self.system, **vars(self.sampling), **vars(self.acceptance))


class LiveStreamer(SourceStreamer):
    """Shows the speed in the terminal's title while the text is written."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, colour: bool) -> None:
        super().__init__(tokenizer, colour)
        self.live = on_terminal()
        self.started = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if self.live and self.written:
            sys.stdout.write(f"\033]2;{self.written / (time.perf_counter() - self.started):.0f} tokens/s\a")
            sys.stdout.flush()


def on_terminal() -> bool:
    """Whether standard output takes control sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def kept_title() -> Iterator[None]:
    """Puts the terminal's title back afterwards."""
    try:
        sys.stdout.write("\033[22;2t" if on_terminal() else "")
        yield
    finally:
        sys.stdout.write("\033[23;2t" if on_terminal() else "")
        sys.stdout.flush()


@contextmanager
def stopping(chat: Chat) -> Iterator[None]:
    """The first Ctrl-C ends the answer after its current cycle, a second one the program."""
    def leave(number: int, frame: object) -> None:
        sys.exit(130)

    def stop(number: int, frame: object) -> None:
        chat.stop()
        signal.signal(signal.SIGINT, leave)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Terminal:
    """What is typed, and what it does: says something or is one of `HELP`'s commands."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.colour = use_colour()
        self.last: Output | None = None
        self.commands: dict[str, Callable[..., None]] = {
            "/threshold": self.threshold, "/rule": self.rule, "/temperature": self.temperature,
            "/stats": self.stats, "/reset": self.reset, "/help": self.help,
            "/system": self.system, "/save": self.save, "/load": self.load,
        }
        self.change()

    def obey(self, line: str) -> None:
        """Carry out a line; what is wrong with it is said and changes nothing."""
        try:
            if not line.startswith("/"):
                self.answer(line)
                return
            name, *values = line.split()
            if name not in self.commands:
                raise ValueError(f"unknown command {name}; /help lists those that there are")
            if name in ("/system", "/save", "/load"):  # what follows may hold spaces
                self.commands[name](line[len(name) :].strip())
                return
            wanted = name in ("/threshold", "/rule", "/temperature")
            if len(values) != wanted and not (name == "/rule" and values):
                raise ValueError(f"{name} takes {'one value' if wanted else 'no value'}, got {len(values)}")
            self.commands[name](*values)
        except (ValueError, TypeError, OSError) as error:
            print(error if line.startswith("/") else f"{error}; /reset begins a new conversation")

    def answer(self, text: str) -> None:
        # A stop string is not part of the answer, so nothing is shown before the end.
        streamer = None if self.chat.options.get("stop") else LiveStreamer(self.chat.model.tokenizer, self.colour)
        with stopping(self.chat):
            self.last = self.chat.send(text, streamer=streamer)
        if streamer is None:
            print(self.last.text)
        if sys.stdout.isatty():
            stats, why = self.last.stats, self.last.finish_reason
            line = (f"[{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, "
                    f"{stats.mean_accepted_length:.2f} tokens per step{'' if why == 'eos' else f', ended by {why}'}]")
            print(f"{DIM}{line}{RESET}" if self.colour else line)

    def change(self, **changed: object) -> str:
        """Take on options if they are right together; returns the rule that they give."""
        from ..settings import resolve_rule

        options = {**self.chat.options, **changed}
        sampling, given = SamplingOptions.of(options), AcceptanceOptions.of(options)
        rule = resolve_rule(given, self.chat.model, sampling.temperature, shaped=sampling.shapes_distribution)
        self.chat.options = options
        return f"{describe_rule(rule, sampling.temperature)}, temperature {sampling.temperature:g}"

    def threshold(self, value: str) -> None:
        print(self.change(threshold=as_number("/threshold", value), quality=None))

    def rule(self, name: str, *gates: str) -> None:
        dials = [as_number("/rule", gate) for gate in gates] or None
        print(self.change(acceptance=name, threshold=None, divergence=None, gate_threshold=dials, quality=None))

    def temperature(self, value: str) -> None:
        print(self.change(temperature=as_number("/temperature", value)))

    def stats(self) -> None:
        if self.last is None:
            raise ValueError("nothing has been answered yet")
        print(describe_output(self.last))
        decoder, limit = self.chat.session.decoder, self.chat.model.target.max_positions
        print(f"prompt tokens processed: {self.last.stats.prefill_tokens}, "
              f"positions in the caches: {decoder.forwards.cache.length if decoder else 0}"
              + (f" of at most {limit}" if limit else ""))

    def reset(self) -> None:
        self.chat.reset()
        self.last = None
        print("a new conversation")

    def system(self, text: str) -> None:
        if text:
            system = None if text == "-" else text
            self.check_chat(([{"role": "system", "content": text}] if system else []) + self.said)
            self.chat.system = system
        print("no system message" if self.chat.system is None else f"system message: {self.chat.system}")

    def save(self, name: str) -> None:
        path = file_of("/save", name)
        if not self.said:
            raise ValueError("nothing has been said yet")
        if path.exists():
            read_chat(path)  # nothing but a conversation is replaced
        text = json.dumps({"messages": self.chat.messages}, ensure_ascii=False) + "\n"
        save_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
        print(f"{len(self.said)} messages written to {path}")

    def load(self, name: str) -> None:
        path = file_of("/load", name)
        messages = read_chat(path)
        self.check_chat(messages)
        system = next((message["content"] for message in messages[:1] if message["role"] == "system"), None)
        self.chat.reset()
        self.chat.system, self.chat.messages, self.last = system, messages, None
        print(f"{len(self.said)} messages read from {path}")

    def help(self) -> None:
        print(HELP)

    @property
    def said(self) -> list[dict[str, str]]:
        """The conversation without its system message."""
        return [message for message in self.chat.messages if message["role"] != "system"]

    def check_chat(self, messages: list[dict[str, str]]) -> None:
        """Raise ValueError for a conversation that the target cannot go on with."""
        from ..prompts import check_length, encode_prompt

        ids = encode_prompt([*messages, {"role": "user", "content": "."}], self.chat.model)
        check_length(len(ids), 1, self.chat.model)


def file_of(command: str, name: str) -> Path:
    if not name:
        raise ValueError(f"{command} takes the name of a file")
    return Path(name).expanduser()


def read_chat(path: Path) -> list[dict[str, str]]:
    """The messages of a file that /save has written, or of another list of them or object {"messages": [...]}.

    Raises:
        ValueError: not such a file, or no conversation that ends with an answer.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        held = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no conversation: {error}") from error
    messages = held.get("messages") if isinstance(held, dict) else held
    if not isinstance(messages, list) or not all(
            isinstance(each, dict) and isinstance(each.get("content"), str) and each.get("role") in ROLES
            for each in messages):
        raise ValueError(f"{path} is no conversation: it needs messages with a role ({', '.join(ROLES)}) and content")
    turns = [each["role"] for each in messages if each["role"] != "system"]
    if not turns or turns[-1] != "assistant":
        raise ValueError(f"{path} is no conversation that can be gone on with: its last message must be an answer")
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def as_number(command: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{command} takes a number, got {value!r}") from None


def talk(model: EagleModel, system: str | None = None, **options: object) -> None:
    """Read lines and answer them until Ctrl-D or /quit.

    Raises:
        ValueError, TypeError: a wrong option, or a model without a chat template.
    """
    from ..chat import Chat

    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and a history)
    terminal = Terminal(Chat(model, system=system, **options))
    print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
    with kept_title():
        while True:
            try:
                line = input(PROMPT).strip()
                if line == "/quit":
                    return
                if line:
                    terminal.obey(line)
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit ends)")
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                print(f"that is no text: {error}")
