"""The list of published heads, and what is loaded where no draft is given."""

import dataclasses
import logging
import re

import pytest

import eagle_fsd
from eagle_fsd import cli
from eagle_fsd import pair as pairs
from eagle_fsd.heads import catalogue as heads
from eagle_fsd.heads.catalogue import KINDS, PublishedHead, find_head, known_heads

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def test_the_list_is_well_formed():
    known = known_heads()
    for head in known:
        for hub_id in (head.target, head.head):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id)
        assert head.kind in KINDS and head.licence
        assert head.source.startswith("https://") or head.bundled and head.source == f"{head.head}/README.md"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", head.looked_up)
    assert len({head.head.casefold() for head in known}) == len(known)  # a head has one target
    assert [head.target for head in known] == sorted((head.target for head in known), key=str.casefold)
    for target in {head.target for head in known}:
        of_target = [head for head in known if head.target == target]
        assert sum(head.preferred for head in of_target) <= (len(of_target) > 1)


def test_one_head_or_the_preferred_one_is_taken():
    assert find_head("lmsys/vicuna-7b-v1.3").head == "yuhuili/EAGLE-Vicuna-7B-v1.3"
    assert find_head(LLAMA).head == find_head(LLAMA.lower()).head == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"


def test_unknown_and_ambiguous_targets(tmp_path):
    with pytest.raises(ValueError, match=f"no head is known for 'gpt2'; known targets: .*{LLAMA}"):
        find_head("gpt2")
    with pytest.raises(ValueError, match="several heads are known for Qwen/Qwen3-8B: .*Tengyunw/qwen3_8b_eagle3 .*mit"):
        find_head("Qwen/Qwen3-8B")
    with pytest.raises(ValueError, match="hub id, and .* is a directory"):
        find_head(tmp_path)


def test_load_takes_the_known_head_and_says_so(pair, tokenizer, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(pairs, "load_head", lambda draft: asked.append(draft) or pair.draft)
    parts = (pair.target.model, tokenizer)
    monkeypatch.setattr(pairs, "load_target", lambda target, **_: asked.append(target) or parts)
    monkeypatch.setattr(pairs, "read_calibrations", lambda head: asked.append(head) or [])
    monkeypatch.setattr(pairs, "read_judge", lambda head: None)
    with caplog.at_level(logging.WARNING):
        loaded = eagle_fsd.load(LLAMA, tree=None)
    head = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    assert loaded.draft is pair.draft
    assert list(map(str, asked)) == [head, head, LLAMA]  # what is beside the head is read before the long work
    assert f"no draft given: taking {head}, the head known for {LLAMA} (eagle3, licence unknown)" in caplog.text


def test_nothing_is_loaded_for_an_unknown_target(monkeypatch):
    monkeypatch.setattr(pairs, "load_head", lambda draft: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="no head is known for 'gpt2'"):
        eagle_fsd.load("gpt2")


def test_the_command_line_lists_them(monkeypatch, capsys):
    one = PublishedHead("them/Big-Model", "us/head", "eagle", "mit", "https://example.org", "2026-01-01")
    other = dataclasses.replace(one, head="us/head-3", kind="eagle3", preferred=True)
    monkeypatch.setattr(cli.heads, "known_heads", lambda: (one, other))
    assert cli.main(["heads", "--target", "big-MODEL"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "them/Big-Model",
        "  us/head: eagle, licence mit; https://example.org (2026-01-01)",
        "  us/head-3: eagle3, licence mit, preferred; https://example.org (2026-01-01)",
    ]
    assert cli.main(["heads", "--target", "small"]) == 2
    assert "no head is known for a target whose id contains 'small'" in capsys.readouterr().err


def test_commands_that_store_beside_the_head_ask_for_a_folder(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n' * 300)
    assert cli.main(["calibrate", "--prompts", str(prompts), "--target", LLAMA, "--budget", "diverging<=1%"]) == 2
    wanted = f"{find_head(LLAMA).head} is no directory to store calibration.json in: give --out"
    assert wanted in capsys.readouterr().err


def test_the_data_file_is_packaged():
    setup = (heads.KNOWN.parents[2] / "setup.py").read_text()
    assert '"eagle_fsd.heads": ["catalogue.json"]' in setup and heads.KNOWN.is_file()
