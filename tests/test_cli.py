"""The command line: flags made of the dataclasses of options, how commands end, and `generate`."""

import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tiny import save_pair, tiny_chat_pair

import eagle_fsd
from eagle_fsd import TreeConfig
from eagle_fsd.cli import COMMANDS, main, parse
from eagle_fsd.cli.heads import HeadsCommand
from eagle_fsd.heads import catalogue
from eagle_fsd.options.generate import GenerateOptions
from eagle_fsd.options.load import LoadOptions

ROOT = Path(__file__).parents[1]


def changed(options, plain):
    """The fields that differ from the defaults of `eagle_fsd.options`."""
    return {field.name: getattr(options, field.name) for field in fields(plain)
            if getattr(options, field.name) != getattr(plain, field.name)}


def test_flags_are_the_fields_of_the_options():
    command = parse([
        "generate", "hi", "--chat", "--target", "T", "--draft", "D", "--dtype", "bfloat16", "--device", "cpu",
        "--attn-implementation", "grouped", "--trust-remote-code", "--no-prepack", "--max-new-tokens", "7",
        "--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--repetition-penalty", "1.1",
        "--min-new-tokens", "2", "--ignore-eos", "--seed", "3", "--stop", "a", "--stop", "b c", "--stop-token-ids", "1",
        "2", "--acceptance", "fsd", "--threshold", "1e-1", "--divergence", "js_top32", "--head-guard", "none",
        "--budget", "inf", "--tree", "16,5,4", "--reference", "a b", "--no-cuda-graphs"])
    assert (command.prompt, command.chat, command.stats) == ("hi", True, False)
    assert isinstance(command.decoding, GenerateOptions) and isinstance(command.pair, LoadOptions)
    assert changed(command.pair, LoadOptions()) == {
        "target": "T", "draft": "D", "dtype": "bfloat16", "device": "cpu", "attn_implementation": "grouped",
        "trust_remote_code": True, "prepack": False, "cuda_graphs": False}
    assert changed(command.decoding, GenerateOptions()) == {
        "max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "min_new_tokens": 2, "ignore_eos": True, "seed": 3, "stop": ("a", "b c"), "stop_token_ids": [1, 2],
        "threshold": 0.1, "divergence": "js_top32", "head_guard": None, "budget": float("inf"),
        "tree": TreeConfig(16, 5, 4), "reference": ("a b",)}


@pytest.mark.parametrize(("argv", "own"), [
    (["generate", "--", "--text"], {"prompt": "--text"}),
    (["generate", "- an item"], {"prompt": "- an item"}),
    (["chat", "--system", "be nice"], {"system": "be nice"}),
    (["demo", "--threshold", "0.2"], {"threshold": 0.2, "max_new_tokens": 64}),
    (["heads", "--target", "llama"], {"target": "llama"}),
    (["heads", "check", "--questions", "q.jsonl"], {"questions": Path("q.jsonl"), "data": None, "documents": 32}),
    (["inspect", "H", "--target", "T"], {"head": "H", "target": "T", "trust_remote_code": False}),
    (["export", "H", "--to", "vllm", "--out", "O"], {"head": "H", "to": "vllm", "out": "O", "target": None}),
    (["vocab", "H", "--data", "a", "b", "--size", "8"], {"head": "H", "data": ("a", "b"), "size": 8, "out": None}),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_commands(argv, own):
    command = parse(argv)
    kind = COMMANDS.get(" ".join(argv[:2]), COMMANDS[argv[0]])
    assert type(command) is kind and own.items() <= vars(command).items()


def test_defaults_are_those_of_the_options():
    for name in ("generate hi", "chat"):
        command = parse(name.split())
        assert changed(command.pair, LoadOptions()) == {}
        own = {"stop": (), "reference": ()} | ({"max_new_tokens": 512} if name == "chat" else {})
        assert changed(command.decoding, GenerateOptions()) == own


@pytest.mark.parametrize(("argv", "said"), [
    (["generate", "hi", "--loudness", "3"], "--loudness"),
    (["genrate", "hi"], "genrate"),
    (["generate", "hi", "--temperature", "warm"], "could not convert string to float: 'warm'"),
    (["generate", "hi", "--temperature=-1"], "temperature must be 0 (greedy) or a number >= 1e-06, got -1.0"),
    (["generate", "hi", "--threshold=-1"], "threshold of rule 'fsd' must lie in [0, inf], got -1.0"),
    (["generate", "hi", "--acceptance", "judge-me"], "judge-me"),
    (["generate", "hi", "--head-guard", "2"], "head_guard must lie in [0, 1], got 2.0"),
    (["generate", "hi", "--tree", "16,x"], "a tree must be total_tokens,depth,top_k"),
    (["generate", "hi", "--tree", "60"], "a tree must be total_tokens,depth,top_k"),
    (["generate", "hi", "--max-tokens=5"], "--max-tokens: use --max-new-tokens"),
    (["generate", "hi", "--model", "M"], "--model: use --target"),
    (["serve", "--remember", "1000"], "--remember: use --reference"),
    (["generate"], "PROMPT"),
])
def test_what_is_wrong_ends_with_status_2_and_says_what(argv, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    shown = capsys.readouterr()
    assert said in " ".join((shown.err + shown.out).replace("│", " ").split())


def test_help_says_no_default_of_a_flag_that_takes_something_away(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--no-prepack" in shown and "--no-speculative" in shown and "(default: True)" not in shown


def test_known_heads_are_a_table(capsys):
    assert main(["heads"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    kind = heading.index("KIND")
    rows = [line for line in lines if line.startswith("  ")]
    assert len(rows) > 50 and all(row[kind - 1] == " " and row[kind:].startswith("EAGLE-") for row in rows)
    assert not any("checkpoints/" in line or "README.md" in line for line in rows)
    bundled = next(row for row in rows if "smollm2" in row)
    assert bundled.split() == ["smollm2-135m-instruct-eagle2", "EAGLE-1/2", "apache-2.0", "bundled", "*"]
    assert {word for row in rows for word in row.split() if word[0] == "["} == {
        line.split()[0] for line in lines if line.startswith("[")}


@pytest.mark.parametrize(("error", "status", "said"), [
    (FileNotFoundError("no\nfile"), 2, "eagle-fsd: no file\n"), (KeyboardInterrupt(), 130, ""),
    (BrokenPipeError(), 0, ""), (None, 0, ""),
])
def test_exit_statuses(monkeypatch, capsys, error, status, said):
    def run(command):
        if error is not None:
            raise error

    monkeypatch.setattr(HeadsCommand, "run", run)
    assert main(["heads"]) == status and capsys.readouterr().err == said


def test_a_fault_of_the_program_shows_its_traceback(monkeypatch, capsys):
    """Unlike what a check says, which is one line."""
    assert main(["heads", "--target", "nobody's"]) == 2
    assert capsys.readouterr().err == 'eagle-fsd: no head is known for a target whose id contains "nobody\'s"\n'
    for fault in (lambda self: len(5), lambda self: int("x"), lambda self: json.loads("{")):
        monkeypatch.setattr(HeadsCommand, "run", fault)
        with pytest.raises((ValueError, TypeError)):
            main(["heads"])
    monkeypatch.setattr(catalogue, "known_heads", lambda: None)
    monkeypatch.setattr(HeadsCommand, "run", lambda self: catalogue.find_head("x"))
    with pytest.raises(TypeError, match="not iterable"):
        main(["heads"])


@pytest.mark.parametrize("argv", [["eagle_fsd", "--help"], ["eagle_fsd", "heads"],
                                  ["eagle_fsd", "heads", "--target", "llama"], ["train.train_draft_head", "--help"]],
                         ids=" ".join)
def test_a_reader_that_goes_is_no_error(argv):
    """As `head` does, while much is written or before a few lines are."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE,
                          env={**os.environ, "PYTHONUNBUFFERED": ""})
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("encoding", "errors"), [
    ("ascii", "strict"), ("cp1252", "strict"), ("cp932", "strict"), ("ascii", "surrogateescape"),
])
def test_what_an_encoding_lacks_is_escaped(encoding, errors, monkeypatch):
    """In output, --help and messages; nothing is lost, and it is no error."""
    def written(*argv, expected=0):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors) for _ in range(2)]
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        try:
            assert main(argv) == expected
        except SystemExit as end:
            assert end.code == expected
        for stream in streams:
            stream.flush()
        return [stream.buffer.getvalue().decode(encoding) for stream in streams]

    text = "a\u00e9\u65e5\U0001f600"
    monkeypatch.setattr(HeadsCommand, "run", lambda self: print(text))
    assert written("heads")[0] == f"{text}\n".encode(encoding, "backslashreplace").decode(encoding)
    for name in COMMANDS:
        assert f"usage: eagle-fsd {name}" in written(*name.split(), "--help")[0]
    assert "Answer one prompt" in written("--help")[0]
    assert "Unrecognized options" in written("generate", "hi", "--loud\u65e5", expected=2)[1]


def test_generate(tmp_path, monkeypatch, capsys):
    model = tiny_chat_pair()
    save_pair(tmp_path, model)
    command = ["generate", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu",
               "--attn-implementation", "eager", "--max-new-tokens", "12", "--tree", "16,5,4"]
    options = {"max_new_tokens": 12, "tree": TreeConfig(16, 5, 4)}
    expected = eagle_fsd.generate("hello", model, **options)
    assert main([*command, "hello", "--stats"]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected.text + "\n" and "12 tokens, " in shown.err and "ended by length" in shown.err
    stop = expected.text[4:6]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main([*command, "-", "--stop", stop]) == 0  # is not shown, though the text comes as it is written
    assert capsys.readouterr().out == expected.text[: expected.text.index(stop)] + "\n"
    chat = eagle_fsd.generate([{"role": "user", "content": "hello"}], model, **options)
    assert main([*command, "hello", "--chat"]) == 0
    assert capsys.readouterr().out == chat.text + "\n"
