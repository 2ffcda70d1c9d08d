"""What is imported is declared, and what is declared is there when the package is installed elsewhere."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[1]
OWN = {"eagle_fsd", "train", "eval", "docs"}
# Imported by another name than it is installed by.
PACKAGES = {"yaml": "pyyaml", "flash_attn": "flash-attn-4", "sklearn": "scikit-learn",
            "prometheus_client": "prometheus-client"}


@pytest.fixture(scope="module")
def declared():
    """The arguments of `setup()`."""
    given = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **options: given.update(options))
        patch.chdir(ROOT)
        exec(compile((ROOT / "setup.py").read_text(), str(ROOT / "setup.py"), "exec"), {"__file__": "setup.py"})
    return given


def names(requirements):
    return {re.split(r"[\[<>=;! ]", requirement)[0].lower() for requirement in requirements}


def imports(folder):
    """(package, whether every import of the module needs it, file) of what is not ours or Python's."""
    for path in (ROOT / folder).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            found = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                found = [node.module]
            for package in {name.split(".")[0] for name in found} - OWN - set(sys.stdlib_module_names):
                yield PACKAGES.get(package, package), node in tree.body, path.relative_to(ROOT)


def test_every_import_of_the_library_is_declared(declared):
    required = names(declared["install_requires"])
    extras = {name for requirements in declared["extras_require"].values() for name in names(requirements)}
    for package, always, path in imports("eagle_fsd"):
        if path.parts[1] in ("lm_eval", "serve", "web"):  # the harness imports it, or its command says what to install
            assert package in required | extras, f"{path} imports {package}"
        elif always:
            assert package in required, f"{path} imports {package}"
        else:
            assert package in required | extras | {"datasets", "readline", "typing_extensions"}, f"{path}: {package}"


@pytest.mark.parametrize("folder", ["train", "eval"])
def test_every_import_of_the_programs_is_declared(folder, declared):
    needed = names(declared["install_requires"]) | names(declared["extras_require"][folder])
    if folder == "eval":  # it may use the training's parts, and says what is missing of the others
        needed |= {name for extra in ("train", "lm_eval", "ray") for name in names(declared["extras_require"][extra])}
    for package, _, path in imports(folder):
        assert package in needed, f"{path} imports {package}"


def test_python_versions_agree(declared):
    assert declared["python_requires"] == ">=3.10"
    assert 'target-version = "py310"' in (ROOT / "pyproject.toml").read_text()  # by which ruff checks the syntax
    assert [each.rpartition(" ")[2] for each in declared["classifiers"]] == ["3.10", "3.11", "3.12", "3.13"]


def test_pinned_versions_hold_what_is_declared(declared):
    pinned = names((ROOT / "requirements.txt").read_text().splitlines()) - {""}
    wanted = names(declared["install_requires"]) | names(declared["extras_require"]["dev"])
    assert wanted - pinned == {"torch"}  # which the Makefile installs first


@pytest.mark.slow
def test_a_wheel_generates_outside_the_checkout(tmp_path):
    """Unpacked where nothing of the checkout is found: the bundled pair, the command line and its data."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheels", ROOT]
    subprocess.run(list(map(str, build)), check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").glob("eagle_fsd-*.whl")
    install = [*pip, "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel]
    subprocess.run(list(map(str, install)), check=True)
    code = ("import eagle_fsd; assert 'site' in eagle_fsd.__file__; model = eagle_fsd.load(tree=None); "
            "print(len(eagle_fsd.generate('def add(a, b):', model, max_new_tokens=8).token_ids))")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "EAGLE_FSD_CACHE": str(tmp_path)})
    assert done.stdout == "8\n", done.stderr
    listed = subprocess.run([sys.executable, "-m", "eagle_fsd", "heads"], cwd=tmp_path, capture_output=True,
                            text=True, env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""})
    assert "EAGLE" in listed.stdout, listed.stderr
