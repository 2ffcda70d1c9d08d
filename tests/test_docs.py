"""The code of the pages runs, on a small pair in place of the one that a page loads, and their commands parse. What a
page prints as output is what the default pair gives."""

import importlib
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from served import here
from tiny import tiny_chat_pair

import eagle_fsd
import eval.command
from eagle_fsd.cli import main, parse
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.heads.catalogue import DISTRIBUTION, PACKAGE

ROOT = Path(__file__).parents[1]
PAIRS = ROOT / "tests" / "pairs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks(page, *languages):
    found = re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [code for language, code in found if language in languages]


def run(page, place=""):
    namespace = {}
    for code in blocks(page, "python"):
        exec(compile(code.replace("http://localhost:8000", place), page.name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", [page for page in PAGES if "eagle_fsd.load(" in "".join(blocks(page, "python"))],
                         ids=lambda page: page.stem)
def test_python_runs(page, monkeypatch):
    pair = eagle_fsd.load(PAIRS / "small-target", PAIRS / "small-draft", dtype="float32", device="cpu", tree=None)
    monkeypatch.setattr(eagle_fsd, "load", lambda *args, **options: pair)
    assert run(page)["model"] is pair


def printed(text):
    """A page's or a program's output without what differs from run to run: line breaks, speed, seed."""
    return re.sub(r"[\d.]+(?= tokens/s)|(?<=seed )\d+", "X", " ".join(text.split()))


def outputs():
    """Code, or a command in the text before, and the block `text` that shows its output."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for code, shown in re.findall(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", text, re.DOTALL):
            yield pytest.param(lambda code=code: exec(code, {}), shown, id=page.stem)
        for words, shown in re.findall(r"`eagle-fsd (generate [^`]*)`[^`]*\n\n```text\n([^`]*)```", text):
            yield pytest.param(lambda words=words: main(shlex.split(words)), shown, id=page.stem)


@pytest.mark.slow
@pytest.mark.skipif(find_spec(PACKAGE) is None or find_spec("gguf") is None, reason=f"needs {DISTRIBUTION} and gguf")
@pytest.mark.parametrize(("run", "shown"), list(outputs()))
def test_outputs_are_as_shown(run, shown, capsys):
    run()
    assert printed(shown) in printed(" ".join(capsys.readouterr()))


def test_the_shown_outputs_are_found():
    assert [each.id for each in outputs()] == ["README", "tau"]


def test_clients_run():
    with here(tiny_chat_pair(max_position_embeddings=512)) as server:
        answer = run(ROOT / "docs" / "serving.md", server.url)["answer"]
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is not None


def test_the_page_of_options_is_that_of_the_declarations():
    page = runpy.run_path(str(ROOT / "docs" / "options.py"))["page"]()
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == page  # written by python docs/options.py


class Parsed(BaseException):
    pass


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_accepted(page, monkeypatch):
    def stop(*args, **options):
        raise Parsed(parse_options(*args, **options))

    monkeypatch.setattr(eval.command, "parse_options", stop)
    for code in blocks(page, "sh", "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["eagle-fsd"] and "--help" not in words:
                parse(words[1:])
            if words[:2] == ["python", "-m"] and words[2].startswith(("eval.", "train.")):
                module = importlib.import_module(words[2])
                monkeypatch.setattr(module, "parse_options", stop, raising=False)
                monkeypatch.setattr(sys, "argv", words[2:])
                with pytest.raises(Parsed):
                    module.main()
