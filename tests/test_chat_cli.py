"""`eagle-fsd chat`, driven through a pseudo-terminal as a user would."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import save_pair, tiny_chat_pair

import eagle_fsd
from eagle_fsd import EagleModel, TreeConfig
from eagle_fsd.chat import Chat
from eagle_fsd.cli import chat as chat_cli
from eagle_fsd.cli.chat import HELP, LiveStreamer, Terminal, talk
from eagle_fsd.data.conversations import read_records
from eagle_fsd.prompts import encode_prompt

TREE = TreeConfig(16, 5, 4)
OPTIONS = {"max_new_tokens": 12, "temperature": 0.0, "acceptance": "fsd", "threshold": None, "divergence": "js",
           "tree": TREE}
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}a"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\a]*\a|\r")
# The terminal's Ctrl-C reaches a process whose controlling terminal it is.
PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from eagle_fsd.cli import main
sys.exit(main(sys.argv[1:]))
"""


class InTerminal:
    """A program in a pseudo-terminal."""

    def __init__(self, folder, *arguments):
        pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
        self.terminal, side = pty.openpty()
        modes = termios.tcgetattr(side)
        modes[3] |= termios.NOFLSH  # Ctrl-C would throw away what has not been read yet
        termios.tcsetattr(side, termios.TCSANOW, modes)
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdin=side, stdout=side, stderr=self.errors,
            start_new_session=True, cwd=Path(__file__).parents[1],
            env={**os.environ, "TERM": "xterm", "FORCE_COLOR": "1", "OMP_NUM_THREADS": "1"},
        )
        os.close(side)

    def read(self, until):
        """Wait until something written since the last call matches."""
        end = time.monotonic() + 120
        self.written = ""
        while not re.search(until, CONTROL.sub("", self.written)):
            ready = select.select([self.terminal], [], [], max(0, end - time.monotonic()))[0]
            try:
                piece = os.read(self.terminal, 4096) if ready else b""
            except OSError:  # how Linux says that the other side is closed
                piece = b""
            if not piece:
                self.errors.seek(0)
                raise AssertionError(f"no {until!r} in {self.written!r}; {self.errors.read()}")
            self.written += piece.decode()

    def type(self, keys):
        os.write(self.terminal, keys.encode())

    def say(self, line):
        """The lines that answer one, without control sequences, and all that was written."""
        self.type(line + "\n")
        self.read(r"\n> $")
        echo, *lines, prompt = CONTROL.sub("", self.written).split("\n")
        assert (echo, prompt) == (line, "> ")
        return lines, self.written

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)
        self.errors.close()


@pytest.fixture(scope="module")
def model():
    """Sampled answers end with a full stop; greedy ones find no end."""
    model = tiny_chat_pair(max_position_embeddings=4096)
    model.target.model.generation_config.eos_token_id = model.tokenizer.convert_tokens_to_ids(".")
    return model


def test_a_conversation_in_a_terminal(model, tmp_path):
    save_pair(tmp_path, model)
    options = {"max_new_tokens": 3000, "tree": TREE, "seed": 3, "temperature": 0.9}
    terminal = InTerminal(
        tmp_path, "chat", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu",
        "--attn-implementation", "eager", "--max-new-tokens", "3000", "--tree", "16,5,4", "--temperature", "0.9",
        "--seed", "3")
    messages, said = [], 0  # said: tokens of prompt and answer of the last turn

    def turn(text, **changed):
        """A turn is what the conversation so far gives from scratch, and its statistics follow."""
        nonlocal said
        messages.append({"role": "user", "content": text})
        expected = eagle_fsd.generate(messages, model, **options | changed)
        assert expected.finish_reason == "eos"
        (*lines, status), written = terminal.say(text)
        assert "\n".join(lines) == expected.text
        assert re.fullmatch(rf"\[{len(expected.token_ids)} tokens, [0-9.]+ tokens/s, [0-9.]+ tokens per step\]", status)
        assert re.search(r"\x1b\]2;[0-9]+ tokens/s\a", written)
        (counts, processed), _ = terminal.say("/stats")
        sources = [receipt.source for receipt in expected.receipts]
        assert f"{expected.stats.mean_accepted_length:.2f} tokens per step" in counts
        assert ", ".join(f"{sources.count(source)} {source}" for source in ("target", "exact", "fuzzy")) in counts
        for source, colour in (("exact", "\x1b[32m"), ("fuzzy", "\x1b[33m")):
            assert (colour in written) == (source in sources)
        # The last token of an answer is in the cache only if it was drafted.
        prompt = len(encode_prompt(messages, model))
        count = int(re.search("processed: ([0-9]+),", processed)[1])
        new = prompt - said if said else prompt
        assert count == new or said and count == new + 1
        said = prompt + len(expected.token_ids)
        messages.append({"role": "assistant", "content": expected.text})
        return sources

    try:
        terminal.read(r"/help .*\n> $")
        turn("hello there.")
        turn("and now.")
        assert "fsd, threshold 0.3, temperature" in terminal.say("/threshold 0.3")[0][0]
        assert "fuzzy" in turn("what else", threshold=0.3)

        assert "temperature 0" in terminal.say("/temperature 0")[0][0]
        terminal.type("on and on\n")
        terminal.read(r"on and on\n[a-z ]{20}")
        begun = terminal.written
        terminal.type("\x03")
        terminal.read(r"ended by stop\]\n> $")
        _, partial, status, _ = CONTROL.sub("", begun + terminal.written).replace("^C", "").split("\n")
        messages += [{"role": "user", "content": "on and on"}, {"role": "assistant", "content": partial}]
        assert 20 < len(partial) < 3000 and status.startswith(f"[{len(partial)} tokens")
        said += len("<user>on and on<bot>") - 9 + len(partial)

        terminal.say("/temperature 0.9")
        turn("well then", threshold=0.3)
        assert terminal.say("/reset")[0] == ["a new conversation"]
        messages.clear()
        said = 0
        turn("hello there.", threshold=0.3)

        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


class Script:
    """`input` that gives the lines of a test, or raises those that are errors, then the end of the file."""

    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self, prompt):
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def write(model, monkeypatch, capsys):
    """What the program writes when these lines are typed."""

    def run(*lines, **options):
        monkeypatch.setattr("builtins.input", Script(*lines))
        talk(model, **OPTIONS | options)
        return capsys.readouterr().out.split("\n")[1:]

    return run


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/speed 3", "unknown command /speed; /help"),
        ("/", "unknown command /;"),
        ("/threshold", "/threshold takes one value, got 0"),
        ("/threshold 1 2", "/threshold takes one value, got 2"),
        ("/threshold high", "/threshold takes a number, got 'high'"),
        ("/threshold nan", "threshold .*nan"),
        ("/threshold -1", "threshold .*-1"),
        ("/rule greedy", "unknown rule 'greedy'; accepted: exact, fsd"),
        ("/rule fsd 0.3", "gate_threshold is the dial of a gate behind a [+], and 'fsd' has none"),
        ("/rule fsd+fly much", "/rule takes a number, got 'much'"), ("/rule", "/rule takes one value"),
        ("/temperature -1", "temperature must be .*-1"),
        ("/temperature nan", "temperature must be .*nan"),
        ("/temperature 1e-9", "temperature must be 0 .* or a number >= 1e-06, got 1e-09"),
        ("/save", "/save takes the name of a file"),
        ("/save file", "nothing has been said yet"),
        ("/load", "/load takes the name of a file"),
        ("/load /no/such file", "there is no file /no/such file"),
        ("/load /dev/zero", "there is no file /dev/zero"),
        ("/temperature inf", "temperature must be .*inf"),
        ("/temperature warm", "/temperature takes a number, got 'warm'"),
        ("/stats", "nothing has been answered yet"),
        ("/stats now", "/stats takes no value, got 1"),
        ("/reset all", "/reset takes no value"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(model, capsys, line, said):
    terminal = Terminal(Chat(model, **OPTIONS))
    terminal.obey(line)
    (written,) = capsys.readouterr().out.splitlines()
    assert re.match(said, written)
    assert terminal.chat.options == OPTIONS and not terminal.chat.messages


def test_commands(model, write):
    assert write("/help", "  ", "/rule tilt", "/threshold 0.5", "/rule exact", "/threshold 1", "/quit", "lost") == [
        *HELP.split("\n"), "tilt, threshold 0 (the text stays the model's own), temperature 0",
        "tilt, threshold 0.5, temperature 0", "exact (the text stays the model's own), temperature 0",
        "threshold of rule 'exact' must lie in [0, 0], got 1.0", ""]


def test_a_conversation_is_saved_and_gone_on_with(model, tmp_path, capsys):
    """With its system message, by another program run."""
    file = tmp_path / "my chat.json"
    first = Terminal(Chat(model, **OPTIONS))
    for line in ("/system", "/system be nice", "hello", "and now", f"/save {file}"):
        first.obey(line)
    assert capsys.readouterr().out.splitlines()[:2] == ["no system message", "system message: be nice"]
    (record,) = read_records(str(tmp_path / "my chat.json"))  # prepare_data learns from it
    assert record.messages == first.chat.messages and first.chat.messages[0]["content"] == "be nice"
    second = Terminal(Chat(model, **OPTIONS))
    second.obey("something else")
    second.obey(f"/load {file}")
    assert capsys.readouterr().out.splitlines()[-1] == f"4 messages read from {file}"
    assert second.chat.messages == first.chat.messages and second.last is None
    for terminal in (first, second):
        terminal.obey("what else")
    assert second.chat.messages == first.chat.messages and len(first.chat.messages) == 7
    second.obey(f"/save {file}")  # over the earlier one
    assert json.loads(file.read_text())["messages"] == second.chat.messages
    second.obey("/reset")
    assert second.chat.messages == [{"role": "system", "content": "be nice"}]
    second.obey("/system -")
    assert second.chat.messages == [] and second.chat.system is None


@pytest.mark.parametrize("content", [
    "", "{", "[" * 10**5, "3", "{}", "[]", '{"messages": "hi"}', '[{"role": "user"}]', '[{"role": [], "content": "a"}]',
    '[{"role": "wizard", "content": "a"}]', '[{"role": "user", "content": "a"}]', '["a"]',
    '[{"role": "assistant", "content": 3}]', "\udcff",
], ids=lambda content: content[:30])
def test_what_is_no_conversation_is_neither_read_nor_written_over(model, tmp_path, capsys, content):
    file = tmp_path / "file.json"
    file.write_text(content, errors="surrogateescape")
    before = file.read_bytes()
    terminal = Terminal(Chat(model, **OPTIONS))
    terminal.obey("hello")
    messages = list(terminal.chat.messages)
    capsys.readouterr()
    for command in ("/load", "/save"):
        terminal.obey(f"{command} {file}")
        assert f"{file} is no conversation" in capsys.readouterr().out
    assert terminal.chat.messages == messages and file.read_bytes() == before
    terminal.obey(f"/save {tmp_path / 'no folder' / 'file'}")
    assert "No such file" in capsys.readouterr().out


def test_a_conversation_that_the_target_cannot_take_is_not_loaded(model, tmp_path, capsys, monkeypatch):
    terminal = Terminal(Chat(model, **OPTIONS))
    file = tmp_path / "file.json"
    turns = [{"role": "user", "content": "a" * 5000}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps(turns))
    terminal.obey(f"/load {file}")
    assert "the target takes at most" in capsys.readouterr().out and not terminal.chat.messages
    monkeypatch.setattr(model.tokenizer, "chat_template", STRICT)
    terminal.obey("/system be nice")
    assert "refuses the chat: no system" in capsys.readouterr().out and not terminal.chat.messages


def test_keys_at_the_prompt(model, write):
    """Ctrl-C, and bytes that are no UTF-8."""
    expected = Chat(model, **OPTIONS).send("hello").text
    _, hint, error, *rest = write(KeyboardInterrupt(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), "hello")
    assert hint == "(Ctrl-D or /quit ends)" and error.startswith("that is no text: ")
    assert rest == [expected, "", ""]


def test_what_is_no_terminal_gets_the_text_alone(model, write):
    expected = [Chat(model, **OPTIONS).send("hello").text]
    chat = Chat(model, **OPTIONS, system="be nice")
    assert write("hello") == [*expected, "", ""]
    assert write("hello", "and now", system="be nice") == [chat.send("hello").text, chat.send("and now").text, "", ""]


def test_a_stop_string_is_not_shown(model, write):
    expected = Chat(model, **OPTIONS).send("hello").text
    assert write("hello", stop=(expected[4:7],))[0] == expected[:expected.index(expected[4:7])]


def test_a_promise_gives_the_rule_until_one_is_typed(model, monkeypatch, capsys):
    monkeypatch.setattr(EagleModel, "calibrated", lambda self, *asked: found.append(asked) or Kept)
    found = []

    class Kept:
        holds_anywhere = staticmethod(lambda greedy: False)
        options = {"rule": "tilt", "threshold": 0.5}

    terminal = Terminal(Chat(model, **OPTIONS | {"divergence": None, "quality": "kl<=0.02"}))
    terminal.obey("/temperature 0.5")
    terminal.obey("/threshold 0.2")
    assert found == [("kl<=0.02", 0.0, TREE), ("kl<=0.02", 0.5, TREE)]
    assert capsys.readouterr().out.splitlines() == [
        "tilt, threshold 0.5, temperature 0.5", "fsd, threshold 0.2, temperature 0.5"]
    assert terminal.chat.options["quality"] is None


def test_a_full_conversation_is_said_and_can_be_begun_anew(monkeypatch, capsys):
    model = tiny_chat_pair(max_position_embeddings=40)
    monkeypatch.setattr("builtins.input", Script("abcdefgh", "abcdefghi", "again", "/reset", "abcdefgh"))
    talk(model, **OPTIONS)
    _, first, second, full, reset, anew, *_ = capsys.readouterr().out.split("\n")
    assert len(first) == 12 and len(second) < 12
    assert re.fullmatch("the prompt has .*, the target takes at most 39 .*; /reset begins a new conversation", full)
    assert (reset, anew) == ("a new conversation", first)


def test_a_second_interrupt_ends_the_program(model, monkeypatch, capsys):
    """And the handler of before is back."""
    class Impatient(LiveStreamer):
        def put(self, value):
            super().put(value)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    terminal = Terminal(Chat(model, **OPTIONS))
    monkeypatch.setattr(chat_cli, "LiveStreamer", Impatient)
    with pytest.raises(SystemExit, match="130"):
        terminal.obey("hello")
    assert signal.getsignal(signal.SIGINT) is before
    assert terminal.chat.messages == [] and terminal.last is None


def test_wrong_options_end_the_program_before_anything_is_said(model, write, monkeypatch):
    with pytest.raises(ValueError, match="temperature"):
        write("hello", temperature=-1.0)
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="chat template"):
        write("hello")
