"""The command line: every flag as it is typed, made from the dataclasses of options, and read without torch."""

import io
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tiny import save_pair, tiny_chat_pair

import eagle_fsd
from eagle_fsd import TreeConfig
from eagle_fsd.cli import COMMANDS, main, parse
from eagle_fsd.cli.arguments import parse_tree, tree_text
from eagle_fsd.cli.heads import HeadsCommand
from eagle_fsd.data.bundled import bundled_directory
from eagle_fsd.options import AcceptanceOptions, LoadOptions, Options, SamplingOptions
from eagle_fsd.serve.limits import ServeOptions

PACKAGE = Path(eagle_fsd.__file__).parent
OPTIONS = {"pair": LoadOptions, "sampling": SamplingOptions, "acceptance": AcceptanceOptions}


def given(argv):
    """The values that differ from those of `eagle_fsd.options`, and the command's own, by name."""
    command, found = parse(argv), {}
    for name, value in vars(command).items():
        if name in OPTIONS and isinstance(value, Options):
            plain = vars(OPTIONS[name]())
            found |= {each: got for each, got in vars(value).items() if got != plain[each]}
        elif name in ("measuring", "serving"):
            found |= vars(value)
        else:
            found[name] = value
    return found


LOADING = (["--target", "T", "--draft", "D", "--dtype", "bfloat16", "--attn-implementation", "grouped",
            "--trust-remote-code", "--compile", "--calibration", "C"],
           {"target": "T", "draft": "D", "dtype": "bfloat16", "attn_implementation": "grouped",
            "trust_remote_code": True, "compile": True, "calibration": "C"})
DECODING = (["--max-new-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1",
             "--repetition-penalty", "1.1", "--min-new-tokens", "2", "--ignore-eos", "--seed", "3", "--stop", "a",
             "--stop", "b c", "--stop-token-ids", "1", "2", "--acceptance", "tilt", "--threshold", "1e-1",
             "--divergence", "js_top32", "--gate-threshold", "0.5", "--budget", "inf", "--tree", "16,5,4"],
            {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
             "min_new_tokens": 2, "ignore_eos": True, "seed": 3, "stop": ("a", "b c"), "stop_token_ids": [1, 2],
             "acceptance": "tilt", "threshold": 0.1, "divergence": "js_top32", "gate_threshold": (0.5,),
             "budget": float("inf"), "tree": TreeConfig(16, 5, 4)})
MEASURING = (["--prompts", "P", "--divergence", "tv", "--gate-threshold", "0.5", "--temperature", "0.7",
              "--max-new-tokens", "9", "--seed", "4", "--out", "O"],
             {"prompts": Path("P"), "divergence": "tv", "gate_threshold": (0.5,), "temperature": 0.7,
              "max_new_tokens": 9, "seed": 4, "out": Path("O")})
UNSAID = {"stop": ()}  # None in `eagle_fsd.options`


@pytest.mark.parametrize(("argv", "expected"), [
    (["generate", "hi"], {"prompt": "hi", "chat": False, "stats": False, **UNSAID}),
    (["generate", "-"], {"prompt": "-", "chat": False, "stats": False, **UNSAID}),
    (["generate", "- an item"], {"prompt": "- an item", "chat": False, "stats": False, **UNSAID}),
    (["generate", "--", "--text"], {"prompt": "--text", "chat": False, "stats": False, **UNSAID}),
    (["generate", "--chat", "--device", "cpu", *DECODING[0], "hi", "--stats"],
     {"prompt": "hi", "chat": True, "stats": True, "device": "cpu", **DECODING[1]}),
    (["generate", "hi", *LOADING[0], "--device-map", "auto", "--quality", "kl<=0.02"],
     {"prompt": "hi", "chat": False, "stats": False, **UNSAID, "device_map": "auto", "quality": "kl<=0.02",
      **LOADING[1]}),
    (["generate", "hi", "--tp-plan", "auto", "--tree", "16,5,4,0.5"],
     {"prompt": "hi", "chat": False, "stats": False, **UNSAID, "tp_plan": "auto", "tree": TreeConfig(16, 5, 4, 0.5)}),
    (["chat"], {"system": None, "max_new_tokens": 512, **UNSAID}),
    (["chat", "--system", "be nice", *LOADING[0], *DECODING[0]], {"system": "be nice", **LOADING[1], **DECODING[1]}),
    (["serve"], {**vars(ServeOptions()), **UNSAID}),
    (["serve", *LOADING[0], *DECODING[0], "--host", "0.0.0.0", "--port", "9", "--name", "N", "--max-rows", "3",
      "--max-tokens", "4096", "--max-waiting", "5", "--queue-seconds", "2.5", "--max-body", "1000", "--page"],
     {**vars(ServeOptions()), **LOADING[1], **DECODING[1], "host": "0.0.0.0", "port": 9, "name": "N", "max_rows": 3,
      "max_tokens": 4096, "max_waiting": 5, "queue_seconds": 2.5, "max_body": 1000, "page": True}),
    (["demo"], {"threshold": 0.3, "max_new_tokens": 96, "timed_tokens": 64, "repeats": 2}),
    (["demo", *LOADING[0], "--threshold", "0.2", "--max-new-tokens", "5", "--timed-tokens", "4", "--repeats",
      "1"], {"threshold": 0.2, "max_new_tokens": 5, "timed_tokens": 4, "repeats": 1, **LOADING[1]}),
    (["heads"], {"target": None}),
    (["heads", "--target", "llama"], {"target": "llama"}),
    (["calibrate", "--prompts", "P", "--budget", "kl<=0.02"],
     {"prompts": Path("P"), "divergence": None, "gate_threshold": None, "temperature": 0.0, "max_new_tokens": 256,
      "seed": 0, "out": None, "budget": "kl<=0.02", "acceptance": ("fsd",), "thresholds": None, "tree": None,
      "limit": None, "timed": 24, "run_code": False, "log": None}),
    (["calibrate", *LOADING[0], *MEASURING[0], "--budget", "kl<=0.02", "--acceptance", "fsd", "tilt", "--thresholds",
      "0.1", "0.2", "--tree", "16,5,4", "--limit", "3", "--timed", "2", "--run-code", "--log", "L"],
     {**LOADING[1], **MEASURING[1], "budget": "kl<=0.02", "acceptance": ("fsd", "tilt"), "thresholds": (0.1, 0.2),
      "tree": TreeConfig(16, 5, 4), "limit": 3, "timed": 2, "run_code": True, "log": Path("L")}),
    (["tune", "--prompts", "P"],
     {"prompts": Path("P"), "divergence": None, "gate_threshold": None, "temperature": 0.0, "max_new_tokens": 256,
      "seed": 0, "out": None, "acceptance": "exact", "threshold": None, "limit": 48}),
    (["tune", *LOADING[0], *MEASURING[0], "--acceptance", "fsd", "--threshold", "0.2", "--limit", "5"],
     {**LOADING[1], **MEASURING[1], "acceptance": "fsd", "threshold": 0.2, "limit": 5}),
    (["inspect", "H", "--target", "T", "--trust-remote-code"],
     {"head": "H", "target": "T", "trust_remote_code": True}),
    (["export", "H", "--to", "vllm", "--out", "O", "--target", "T"],
     {"head": "H", "to": "vllm", "out": "O", "target": "T", "trust_remote_code": False}),
    (["vocab", "H", "--data", "a", "b", "--size", "8", "--out", "O"],
     {"head": "H", "data": ("a", "b"), "target": None, "size": 8, "coverage": None, "out": Path("O"),
      "trust_remote_code": False}),
    (["vocab", "--data", "a", "--target", "T", "--coverage", "0.9", "H"],
     {"head": "H", "data": ("a",), "target": "T", "size": None, "coverage": 0.9, "out": None,
      "trust_remote_code": False}),
], ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "")
def test_every_flag_is_read_as_it_was_typed(argv, expected):
    assert given(argv) == expected


@pytest.mark.parametrize(("name", "left_out"), [
    ("generate", {"quantization_config"}), ("chat", {"quantization_config", "tp_plan"})])
def test_every_option_is_a_flag_or_left_out_by_name(name, left_out, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse([name, "--help"])
    shown = re.findall(r"^. --(?:no-)?([a-z][a-z-]*)", capsys.readouterr().out, re.MULTILINE)
    names = {field.name.replace("_", "-") for kind in OPTIONS.values() for field in fields(kind)}
    own = {"generate": {"chat", "stats"}, "chat": {"system"}}[name]
    assert set(shown) == names - {each.replace("_", "-") for each in left_out} | own
    assert shown.count("tree") == 1  # the request's; that of `load` is left out


def run(program, folder):
    """What a program in a process of its own writes."""
    return subprocess.run([sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, text=True,
                          check=True).stdout


def test_a_new_option_is_a_flag_with_no_further_line(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "eagle_fsd", ignore=shutil.ignore_patterns("__pycache__"))
    options = tmp_path / "eagle_fsd" / "options.py"
    text = options.read_text(encoding="utf-8")
    for line, more in (("        stop: strings", "        loudness: of the words, in decibels.\n"),
                       ("    seed: int | Sequence", "    loudness: float = 60.0\n")):
        assert text.count(line) == 1
        text = text.replace(line, more + line)
    options.write_text(text, encoding="utf-8")
    program = ("from eagle_fsd.cli import parse\n"
               "for argv in (['generate', 'hi'], ['chat']):\n"
               "    print(parse(argv).sampling.loudness, parse([*argv, '--loudness', '3']).sampling.loudness)\n"
               "parse(['generate', '--help'])")
    out = run(program, tmp_path)
    assert out.startswith("60.0 3.0\n60.0 3.0\n")
    assert "--loudness FLOAT" in out and "of the words, in decibels. (default: 60.0)" in out


def test_help_imports_no_torch():
    program = f"""
import sys
from eagle_fsd.cli import main
for argv in ([], *([name] for name in {list(COMMANDS)})):
    try:
        main([*argv, "--help"])
    except SystemExit as end:
        assert end.code == 0
assert main(["--version"]) == 0 and main(["heads", "--target", "llama-3.1"]) == 0
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "transformers", "numpy"}}))
"""
    shown = run(program, PACKAGE.parent)
    assert shown.endswith("[]\n") and f"\n{eagle_fsd.__version__}\n" in shown
    for name in COMMANDS:
        assert f"usage: eagle-fsd {name} [-h]" in shown
    for rule in eagle_fsd.RULES:
        assert rule in shown


@pytest.mark.parametrize("text", ["16,5,4,1", "2,1,1,0.5"])
def test_trees_are_written_as_they_are_read(text):
    assert tree_text(parse_tree(text)) == text


@pytest.mark.parametrize(("error", "status", "said"), [
    (ValueError("two\nlines"), 2, "eagle-fsd: two lines\n"),
    (FileNotFoundError("no file"), 2, "eagle-fsd: no file\n"),
    (KeyboardInterrupt(), 130, ""),
    (BrokenPipeError(), 0, ""),
    (None, 0, ""),
])
def test_exit_statuses(monkeypatch, capsys, error, status, said):
    def run(command):
        if error is not None:
            raise error

    monkeypatch.setattr(HeadsCommand, "run", run)
    assert main(["heads"]) == status and capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "1")
    assert main(["heads"]) == status
    assert capsys.readouterr().err == said.replace("eagle-fsd", "eagle-fsd, process 1")


def test_what_is_no_users_error_is_shown_in_full(monkeypatch):
    monkeypatch.setattr(HeadsCommand, "run", lambda command: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["heads"])


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
    assert main([*command, "-", "--stop", stop]) == 0
    assert capsys.readouterr().out == expected.text[: expected.text.index(stop)] + "\n"
    chat = eagle_fsd.generate([{"role": "user", "content": "hello"}], model, **options)
    assert main([*command, "hello", "--chat"]) == 0
    assert capsys.readouterr().out == chat.text + "\n"


def test_a_missing_package_ends_in_one_line(tmp_path, monkeypatch, capsys):
    """What is needed for GGUF files, for one."""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("eagle_fsd.data.gguf.find_spec", lambda name: None)
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    assert main(["inspect", bundled_directory("small-draft"), "--target", str(tmp_path / "tiny.gguf")]) == 2
    assert "pip install eagle_fsd[gguf]" in capsys.readouterr().err
