"""What is imported is declared, and what is declared is there when the package is installed elsewhere."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools
from tiny import save_pair, tiny_chat_pair

ROOT = Path(__file__).parents[1]
PACKAGES = {"markdown_it": "markdown-it-py", "prometheus_client": "prometheus-client"}  # installed as


@pytest.fixture(scope="module")
def setup_names():
    """The names of setup.py; `declared`: the arguments of `setup()`."""
    names = {"__file__": "setup.py"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **options: names.update(declared=options))
        patch.chdir(ROOT)
        exec(compile((ROOT / "setup.py").read_text(), str(ROOT / "setup.py"), "exec"), names)
    return names


@pytest.fixture()
def declared(setup_names):
    return setup_names["declared"]


def names(requirements):
    return {re.split(r"[\[<>=;! ]", requirement)[0].lower() for requirement in requirements} - {"", "#"}


def imports(folder):
    """(package, whether the module cannot be imported without it, file) of what is not ours or Python's."""
    for path in (ROOT / folder).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            found = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                found = [node.module]
            for package in {name.split(".")[0] for name in found} - {folder, "eagle_fsd", "train", "eval"}:
                if package not in sys.stdlib_module_names:
                    yield PACKAGES.get(package, package), node in tree.body, path.relative_to(ROOT)


@pytest.mark.parametrize("folder", ["eagle_fsd", "train", "eval"])
def test_every_import_is_declared(folder, declared):
    required = names(declared["install_requires"])
    extras = {name for requirements in declared["extras_require"].values() for name in names(requirements)}
    for package, always, path in imports(folder):
        # What serves, and what the harness imports, is imported by those that have its extra.
        if always and path.parts[1] != "serve" and path.name != "lm_eval.py":
            assert package in required, f"{path} imports {package}"
        else:
            assert package in required | extras | {"readline", "typing_extensions"}, f"{path} imports {package}"


def test_pinned_versions_hold_what_is_declared(declared):
    pinned = names((ROOT / "requirements.txt").read_text().splitlines())
    wanted = names(declared["install_requires"]) | names(declared["extras_require"]["dev"])
    assert wanted - pinned == {"torch"}  # which the Makefile installs first


def test_the_quickstart_names_every_extra(declared):
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [extra for extra in declared["extras_require"] if f"`{extra}`" not in page] == []


def test_packaged_data_is_there(declared):
    for package, patterns in declared["package_data"].items():
        folder = ROOT / declared["package_dir"].get(package, package.replace(".", "/"))
        assert all(list(folder.glob(pattern)) for pattern in patterns), package
    module, _, name = declared["entry_points"]["lm_eval.models"][0].partition("=")[2].partition(":")
    path = ROOT / (module.replace(".", "/") + ".py")
    assert f"class {name}" in path.read_text(encoding="utf-8")


def test_the_source_distribution_has_every_folder(setup_names):
    named = re.findall(r"^graft (\S+)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    files = subprocess.run(["git", "ls-files", "*/*"], cwd=ROOT, capture_output=True, text=True)
    folders = {name.split("/")[0] for name in files.stdout.splitlines() if not name.startswith(".")}
    if files.returncode or not folders:
        pytest.skip("not a clone")
    assert folders == {*named, "eagle_fsd", *setup_names["MAPPED"].values()}


def test_the_index_page_links_to_files_of_the_version(setup_names):
    """The package index shows README.md without the repository around it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [setup_names["index_page"](readme, url, "1.2") for url in ("https://hub.org/us/it", "")]
    links = [re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", page) for page in (readme, *pages)]
    assert len(links[0]) == len(links[1]) > len(links[2])
    for (_, before), (picture, after) in zip(*links[:2], strict=True):
        kind, path, heading = re.fullmatch(r"https://hub.org/us/it/(raw|blob)/v1.2/([^#]*)(#.*)?|.*", after).groups()
        assert after == before if kind is None else (ROOT / path).is_file() and (kind == "raw") == bool(picture)
        assert (heading or "") in before
    assert all(link.startswith("http") for _, link in links[1] + links[2])
    blocks = [re.findall("```.*?```", page, re.DOTALL) for page in (readme, *pages)]
    assert blocks[0] == blocks[1] == blocks[2]


def test_the_changelog_begins_with_the_version(declared):
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == declared["version"]


@pytest.mark.slow
def test_what_is_installed_generates_outside_the_checkout(tmp_path):
    """What a wheel holds, where nothing of the checkout is found: generating, training, the command line and its
    benchmark, data."""
    build = ["setup.py", "-q", "build", "--build-base", str(tmp_path / "build"), "--build-lib", str(tmp_path / "site")]
    subprocess.run([sys.executable, *build], cwd=ROOT, check=True, capture_output=True)
    save_pair(tmp_path, tiny_chat_pair())
    (tmp_path / "q.jsonl").write_text('{"prompt": "hi"}')
    code = ("import pathlib, eagle_fsd, eagle_fsd.train.train_draft_head; from eagle_fsd.cli import main\n"
            "try: eagle_fsd.train.teacher.read_index(pathlib.Path('nowhere'))\n"
            "except ValueError as error: print(error)\n"
            "assert 'site' in eagle_fsd.__file__; main(['heads']); "
            "print(main('benchmark --target target --draft head --questions q.jsonl --tree 8,3,2 --max-new-tokens 4 "
            "--settings --warm-up 0'.split())); "
            "model = eagle_fsd.load('target', 'head', tree=None); "
            "print(len(eagle_fsd.generate('hello', model, max_new_tokens=8).token_ids))")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "EAGLE_FSD_CACHE": str(tmp_path)})
    assert "nowhere has no features from eagle_fsd.train.features" in done.stdout
    assert "EAGLE" in done.stdout and done.stdout.endswith("\n0\n8\n"), done.stderr
    assert (tmp_path / "benchmark.answers" / "run_1" / "exact.jsonl").is_file()
    assert (tmp_path / "site/eagle_fsd/checkpoints/smollm2-135m-instruct-eagle2/model.safetensors").is_file()
    assert not list((tmp_path / "site").rglob("small-target"))


@pytest.mark.slow
def test_an_editable_installation_is_found_from_the_folder_that_holds_the_clone(tmp_path):
    """Where `import eagle_fsd` would otherwise give the clone, as a package without contents."""
    build = "from setuptools import build_meta; import sys; build_meta.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        paths = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert [wheel.read(name).decode().strip() for name in paths] == [str(ROOT)]
