"""The method in one file, `examples/decode.py`: the same tokens and accepted lengths as the library's."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny import PROMPT, save_pair, tiny_chat_pair, tiny_pair
from transformers import AutoModelForCausalLM

import eagle_fsd
from eagle_fsd.drafting.noise import gumbel_noise
from eagle_fsd.heads.checkpoint import save_head
from examples import decode

ORACLE = Path(__file__).parent / "oracle"
NEW, TREE = 28, {"depth": 4, "top_k": 3}
RULES = {"exact": {}, "sampled": {"temperature": 1.0}, "fuzzy": {"threshold": 0.4},
         "fuzzy and sampled": {"threshold": 0.4, "temperature": 0.8}}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def pair(request, tmp_path_factory):
    """A pair of the library, and its head as the example loads it."""
    model, folder = tiny_pair(request.param), tmp_path_factory.mktemp("head")
    save_head(model.draft, folder)
    return model, decode.load_head(folder, model.target.model)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_and_accepted_lengths_are_those_of_the_library(pair, rule, monkeypatch):
    def noise(seed, position, size):
        return gumbel_noise(torch.tensor([seed]), torch.tensor([[position]]), size)[0, 0]

    monkeypatch.setattr(decode, "gumbel", noise)
    (model, head), options = pair, RULES[rule]
    drafted, fuzzy = 0, 0
    for seed in range(4):
        prompt, nodes = PROMPT[seed:], 5 + 4 * seed
        answer, accepted = decode.decode(model.target.model, head, prompt, decode.Options(
            nodes=nodes, max_new_tokens=NEW, seed=seed, **TREE, **options))
        expected = eagle_fsd.generate(
            prompt, model, acceptance="fsd" if "threshold" in options else "exact", text_drafts="off", seed=seed,
            tree=eagle_fsd.TreeConfig(nodes, **TREE), max_new_tokens=NEW, **options)
        assert [token.id for token in answer] == expected.token_ids
        assert [token.fuzzy for token in answer] == [receipt.source == "fuzzy" for receipt in expected.receipts]
        assert accepted == expected.stats.accepted_lengths
        drafted, fuzzy = drafted + sum(accepted), fuzzy + sum(token.fuzzy for token in answer)
    assert drafted > 20 and (fuzzy > 5) == ("threshold" in options)


@pytest.mark.parametrize("setting", [0, 1], ids=["60-7-10", "16-4-4"])
def test_accepted_lengths_are_those_of_the_published_code(setting):
    target = AutoModelForCausalLM.from_pretrained(ORACLE / "target").eval()
    prompt = json.loads((ORACLE / "expected.json").read_text())["prompts"][0]
    run, greedy = prompt["runs"][setting], prompt["greedy_ids"]
    options = decode.Options(run["total_token"], run["depth"] + 1, run["top_k"], max_new_tokens=len(greedy))
    answer, accepted = decode.decode(target, decode.load_head(ORACLE / "head", target), prompt["prompt_ids"], options)
    assert [token.id for token in answer] == greedy
    assert accepted == run["accept_lengths"][: len(accepted)] and len(accepted) > 20


@torch.no_grad()
def test_sampled_tokens_are_those_of_plain_sampling(pair):
    (model, head), tokens = pair, list(PROMPT)
    answer, accepted = decode.decode(model.target.model, head, PROMPT, decode.Options(
        nodes=16, temperature=0.9, max_new_tokens=NEW, seed=3, **TREE))
    for _ in range(NEW):
        logits = model.target.model(torch.tensor([tokens])).logits[0, -1]
        tokens.append((logits / 0.9 + decode.gumbel(3, len(tokens), len(logits))).argmax().item())
    assert [token.id for token in answer] == tokens[len(PROMPT) :] and sum(accepted) > 10


def test_the_command_answers(tmp_path, capsys):
    model = tiny_chat_pair()
    save_pair(tmp_path, model)
    decode.main(["--target", f"{tmp_path}/target", "--draft", f"{tmp_path}/head", "--prompt", "hello", "--depth", "3",
                 "--max-new-tokens", "12", "--top-k", "3"])
    text, figures = capsys.readouterr().out.strip().split("\n")
    assert text == eagle_fsd.generate([{"role": "user", "content": "hello"}], model, max_new_tokens=12).text
    assert re.findall(r"\d+", figures)[:2] == ["12", "0"]  # tokens, and fuzzy ones
