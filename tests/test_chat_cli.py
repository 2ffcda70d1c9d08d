"""`eagle-fsd chat`, line by line."""

import json
import re
import signal

import pytest
from tiny import save_pair, tiny_chat_pair

import eagle_fsd
from eagle_fsd import TreeConfig
from eagle_fsd.chat import Chat
from eagle_fsd.cli import chat as chat_cli
from eagle_fsd.cli import main
from eagle_fsd.cli.chat import HELP, ChatDecoding, Terminal

TREE = TreeConfig(16, 5, 4)
DECODING = ChatDecoding(max_new_tokens=12, tree=TREE)
CONTROL = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def model():
    """Sampled answers end with a full stop; greedy ones find no end."""
    model = tiny_chat_pair(max_position_embeddings=4096)
    model.target.model.generation_config.eos_token_id = model.tokenizer.convert_tokens_to_ids(".")
    return model


@pytest.fixture
def type_lines(monkeypatch):
    """Makes `input` give lines, or raise those that are errors, and then the end of the file."""

    def prepare(*lines):
        def typed(prompt):
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        left = iter(lines)
        monkeypatch.setattr("builtins.input", typed)

    return prepare


@pytest.fixture
def write(model, type_lines, capsys):
    """What is written when these lines are typed, in one line, and the terminal then."""

    def run(*lines, model=model):
        type_lines(*lines)
        terminal = Terminal(Chat(model), DECODING)
        while terminal.ask():
            pass
        shown = capsys.readouterr()
        return " ".join((shown.out + shown.err).replace("│", " ").split()), terminal

    return run


def test_a_conversation(model, tmp_path, type_lines, monkeypatch, capsys):
    """Each turn is what the conversation so far gives from scratch, with its sources in colours and its figures."""
    save_pair(tmp_path, model)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    type_lines("hello there.", "/set head-guard none", "/set threshold 0.3", "what else", "/set temperature 0",
               "and on")
    assert main(["chat", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu",
                 "--attn-implementation", "eager", "--max-new-tokens", "60", "--tree", "16,5,4", "--temperature", "0.9",
                 "--seed", "3"]) == 0
    greeting, legend, *written = capsys.readouterr().out.splitlines()
    messages = []
    for text, options in (("hello there.", {}), ("what else", {"head_guard": None, "threshold": 0.3}),
                          ("and on", {"head_guard": None, "threshold": 0.3, "temperature": 0.0})):
        messages.append({"role": "user", "content": text})
        given = {"max_new_tokens": 60, "tree": TREE, "seed": 3, "temperature": 0.9} | options
        expected = eagle_fsd.generate(messages, model, options=ChatDecoding(**given))
        messages.append({"role": "assistant", "content": expected.text})
        answer, figures, *written = written
        sources = [receipt.source for receipt in expected.receipts]
        assert CONTROL.sub("", answer) == expected.text
        assert ("\x1b[32m" in answer, "\x1b[33m" in answer) == ("exact" in sources, "fuzzy" in sources)
        assert f"[{len(sources)} tokens, " in figures and f"ended by {expected.finish_reason}" in figures
    assert "fuzzy" in sources


@pytest.mark.parametrize(("line", "said"), [
    ("/speed 3", "unknown command /speed; /help"),
    ("/set threshold high", "could not convert string to float: 'high'"),
    ("/set threshold=-1", "threshold of rule 'fsd' must lie in [0, inf], got -1.0"),
    ("/set loudness 3", "--loudness"),
    ("/set stop \"", "No closing quotation"),
    ("/set", "--repetition-penalty"),
    ("/save", "/save needs a file name"),
    ("/load /no/such file", "No such file"),
    ("/load pyproject.toml", "pyproject.toml is not a conversation"),
])
def test_what_is_wrong_is_said_and_changes_nothing(write, line, said):
    written, terminal = write(line)
    assert said in written and terminal.chat.messages == [] and terminal.decoding == DECODING


def test_commands(model, write):
    expected = eagle_fsd.generate([{"role": "user", "content": "hello"}], model, max_new_tokens=5, tree=TREE).text
    written, terminal = write("/help", "/set max_new_tokens 5", "/system be nice", "/system", "hello", "/quit", "lost")
    assert written.startswith(" ".join(HELP.split())) and written.endswith(expected)
    assert [each["role"] for each in terminal.chat.messages] == ["user", "assistant"]
    assert write("hello", "/clear", "/bye")[1].chat.messages == []


def test_a_conversation_is_saved_and_gone_on_with(write, tmp_path):
    file = tmp_path / "my chat.json"
    _, first = write("/system be nice", "hello", "and now", f"/save {file}", "what else")
    assert json.loads(file.read_text())["messages"] == first.chat.messages[:5]
    written, second = write("something else", f"/load {file}", f"/save {file}", "what else")
    assert second.chat.messages == first.chat.messages and second.chat.system == "be nice"
    assert "File exists" in written


def test_errors_at_the_prompt_end_nothing(write):
    """Ctrl-C, bytes that are no UTF-8, and a full conversation, which can be begun anew."""
    written, terminal = write(KeyboardInterrupt(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), "abcdefgh",
                              "abcd", "again", "/reset", "abcdefgh", model=tiny_chat_pair(max_position_embeddings=40))
    assert written.index("/quit") < written.index("codec can't decode")
    assert "the target takes at most 39" in written and len(terminal.chat.messages) == 2


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_an_answer_and_twice_the_program(model, monkeypatch, times):
    class Impatient(chat_cli.SourceStreamer):
        def put(self, value):
            super().put(value)
            while self.sources and pressed:
                signal.raise_signal(pressed.pop())

    pressed = [signal.SIGINT] * times
    before = signal.getsignal(signal.SIGINT)
    terminal = Terminal(Chat(model), DECODING)
    monkeypatch.setattr(chat_cli, "SourceStreamer", Impatient)
    if times == 1:
        terminal.answer("hello")
        assert 1 <= len(terminal.chat.messages[1]["content"]) < 12  # what is there stays
    else:
        with pytest.raises(SystemExit, match="130"):
            terminal.answer("hello")
        assert terminal.chat.messages == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_fault_shows_its_traceback_and_the_conversation_goes_on(write, model, monkeypatch):
    monkeypatch.setattr(Terminal, "answer", lambda self, text: len(5))
    shown, terminal = write("hello", "/set temperature 0.5", "/set 'x", "/load " + __file__)
    assert "Traceback" in shown and "has no len()" in shown and shown.count("Traceback") == 1
    assert "/set 'x: No closing quotation" in shown and "is not a conversation written by /save" in shown
    assert terminal.decoding.temperature == 0.5
