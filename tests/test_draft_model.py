"""A small causal LM as the drafter, from files to the endpoint. Lossless decoding: test_lossless.py; the levels of its
trees: test_drafting.py. V = 32 vocabulary."""

import logging
import math

import openai
import pytest
import torch
from served import here
from tiny import CHAT_TEMPLATE, PROMPT, PROMPTS, prefill, small_model, tiny_head, tiny_target, tiny_tokenizer
from transformers import T5Config, T5ForConditionalGeneration

import eagle_fsd
from eagle_fsd import Chat, TreeConfig
from eagle_fsd.acceptance.divergence import DIVERGENCES, get_divergence
from eagle_fsd.acceptance.nodes import Nodes
from eagle_fsd.batching import memory
from eagle_fsd.cli import main
from eagle_fsd.decoding import batch as batches
from eagle_fsd.decoding import cycle
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.request import Request
from eagle_fsd.drafting.copies import TextDrafts, TextSource
from eagle_fsd.drafting.language_model import DraftModel
from eagle_fsd.drafting.sizing import Drafting, Latency, Plan, Sizing
from eagle_fsd.drafting.tree import catch_up_in_parts
from eagle_fsd.loading import timing
from eagle_fsd.loading.curves import default_curves
from eagle_fsd.loading.pair import EagleModel

TREE, CHAIN = TreeConfig(12, 4, 3), TreeConfig(16, 15, 1)
ALONE = {"acceptance": "exact", "text_drafts": "off"}
CHAT = [{"role": "user", "content": "what is it"}]


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def pair():
    target = tiny_target(max_position_embeddings=2048)
    with torch.no_grad():
        target.lm_head.weight[:4] = 0  # no special tokens
    return EagleModel.from_parts(target, small_model(target, "mistral-window", num_hidden_layers=1), chat_tokenizer())


@pytest.fixture(scope="module")
def places(pair, tmp_path_factory):
    """The pair in two folders."""
    folder = tmp_path_factory.mktemp("pair")
    for name, model in (("target", pair.target.model), ("small", pair.draft.model)):
        model.save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)
    return folder / "target", folder / "small"


def plainly(pair, prompt, count):
    return pair.target.model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False,
                                      pad_token_id=0)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("options", [
    {}, {"draft_dtype": "bfloat16", "prepack": False}, {"attn_implementation": "sdpa"},
    pytest.param({"draft_quantization": "int8"},
                 marks=pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")),
], ids=str)
def test_load_tells_a_causal_lm_from_a_head(pair, places, options):
    """The text is the target's whatever form the drafter has."""
    loaded = eagle_fsd.load(*places, device="cpu", dtype="float32", tree=TREE, **options)
    output = eagle_fsd.generate(PROMPT, loaded, max_new_tokens=24, **ALONE)
    assert output.token_ids == plainly(pair, PROMPT, 24) and output.stats.accepted["head"] > 5
    assert loaded.described()[1] == "small (causal LM, 2.99 k parameters)"
    assert loaded.target.dtype == torch.float32
    assert loaded.draft.dtype == (torch.bfloat16 if "draft_dtype" in options else torch.float32)


def test_commands_take_one(pair, places, capsys):
    target, small = map(str, places)
    assert main(["generate", "hello", "--target", target, "--draft", small, "--device", "cpu", "--tree", "12,4,3",
                 "--attn-implementation", "eager", "--max-new-tokens", "9", "--stats"]) == 0
    assert capsys.readouterr().out == eagle_fsd.generate("hello", pair, max_new_tokens=9).text + "\n"
    assert main(["inspect", small, "--target", target]) == 0
    shown = capsys.readouterr().out
    assert "causal LM (MistralForCausalLM, 1 layers; " in shown and f"it fits ({target})" in shown


def test_custom_generate_takes_one(pair, places):
    model, ids = pair.target.model, torch.tensor([PROMPT])
    for draft in (pair.draft.model, pair.draft, str(places[1])):
        found = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, draft=draft, tree=TREE,
                               custom_generate=eagle_fsd.custom_generate)
        assert found[0, len(PROMPT) :].tolist() == plainly(pair, PROMPT, 12)


def test_other_tokens_are_refused(pair, places, tmp_path):
    small, target = pair.draft.model, pair.target.model
    swapped = tiny_tokenizer("bacdefghijklmnopqrstuvwxyz .")
    with pytest.raises(ValueError, match="its token 4 is 'b', the target's is 'a'; accepted: a causal LM with the"):
        EagleModel.from_parts(target, DraftModel(small, swapped), pair.tokenizer)
    small.save_pretrained(tmp_path)
    swapped.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its token 4 is 'b'"):
        eagle_fsd.load(places[0], tmp_path, device="cpu", tree=None)
    assert main(["inspect", str(tmp_path), "--target", str(places[0])]) == 2
    EagleModel.from_parts(target, DraftModel(small, tiny_tokenizer("abcdefghijklmnopqrstuvwxyz .!")), pair.tokenizer)
    with pytest.raises(ValueError, match="its vocabulary size is 161, the target's is 32"):
        EagleModel.from_parts(target, tiny_target(vocab_size=161))


def test_what_cannot_draft_is_refused(pair, places, tmp_path):
    target = pair.target.model
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is not supported"):
        EagleModel.from_parts(target, t5)
    with pytest.raises(TypeError, match="draft must be a Drafter, PreTrainedModel, got str"):
        EagleModel.from_parts(target, "small")
    eagle_fsd.save_head(tiny_head(target), tmp_path / "head")
    for options, message in (({"draft_dtype": "bfloat16"}, "are for a causal LM as the drafter"),
                             ({"draft_quantization": "int4"}, 'must be one of int8, int8-fast, or None'),
                             ({"draft_quantization": "int8", "prepack": False}, "needs packed weights")):
        with pytest.raises(ValueError, match=message):
            eagle_fsd.load(places[0], tmp_path / "head", device="cpu", tree=None, **options)


@torch.inference_mode()
def test_a_long_chain_of_the_target_itself_is_accepted_whole(pair):
    itself = EagleModel.from_parts(pair.target.model, pair.target.model)
    output = eagle_fsd.generate(PROMPT, itself, max_new_tokens=49, tree=CHAIN, **ALONE)
    assert output.stats.accepted_lengths == [15] * 3 and output.token_ids == plainly(pair, PROMPT, 49)


@torch.inference_mode()
def test_keys_of_accepted_nodes_are_kept():
    """After each cycle the drafter's cache is that of the text. It lacks the root, and nodes that were not expanded:
    those of the last level, and copies."""
    target = tiny_target()
    pair = EagleModel.from_parts(target, target)
    requests = [Request(prompt, eagle_fsd.GenerateOptions(), max_new_tokens=40,
                        text_source=TextSource(prompt, TextDrafts()))
                for prompt in (PROMPT, PROMPT[1:] * 2, PROMPT[2:])]
    batch = Batch(pair.target, pair.draft, requests, Drafting(lambda _: Plan(TreeConfig(9, 4, 2))))
    prefill(batch)
    unread = []
    for _ in range(6):
        cycle.step(batch)
        held = batch.draft_cache
        for row, (request, length) in enumerate(zip(requests, held.lengths, strict=True)):
            unread.append(len(request.tokens) - length)
            fresh = pair.draft.new_cache(length)
            catch_up_in_parts(pair.draft, None, torch.tensor(request.tokens[:length]), fresh)
            assert torch.allclose(held.allocated[0][..., row, :, :length, :], fresh.allocated[0][..., 0, :, :, :],
                                  atol=1e-5)
    assert unread.count(1) > 9 and max(unread) > 3


@pytest.mark.parametrize("drafts", ["off", "auto"])
def test_where_its_positions_end_plain_decoding_goes_on(drafts, caplog):
    """Row by row: the learned positions of GPT-2 have no others. Beside it copies from the text are still verified."""
    batches.log_limit.cache_clear()
    target = tiny_target(max_position_embeddings=256)
    pair = EagleModel.from_parts(target, small_model(target, "gpt2", max_position_embeddings=31))
    prompts = [PROMPT * 3, PROMPT, [5]]  # the first is too long from the start
    options = {"max_new_tokens": 40, "tree": TREE, "acceptance": "exact", "text_drafts": drafts}
    outputs = eagle_fsd.generate(prompts, pair, **options)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == plainly(pair, prompt, 40)
        drafted = [len(prompt) + at for at, receipt in enumerate(output.receipts) if receipt.drafter == "head"]
        assert max(drafted, default=0) <= 31
    proposed = [output.stats.proposed["head"] for output in outputs]
    assert proposed[0] == 0 < min(proposed[1:]) and outputs[2].stats.accepted["head"] > 5
    assert [record.levelno for record in caplog.records if "31 positions of the drafter" in record.message] == [
        logging.WARNING]


@pytest.mark.parametrize("name", [*DIVERGENCES, "js_top1", "js_top2", "kl_top6", "tv_top9"])
def test_divergences_are_of_the_whole_distributions(name):
    """Of six tokens the drafter has the first four, the target's best one is another: no mass of either is left out."""
    raw, drafted = torch.tensor([[0.5, 2.0, 1.0, -1.0, 9.0, 0.1]]), torch.tensor([[[0.0, 1.0, 2.0, -1.0]]])
    node, one = torch.zeros(1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    nodes = Nodes(raw, raw, None, raw.argmax(-1), torch.tensor([[2]]), one, one, torch.zeros(1, 1), drafted, node, None,
                  torch.zeros(1), None, one[0], {})
    whole = torch.nn.functional.pad(drafted[0], (0, 2), value=-math.inf)
    assert nodes.divergence(name).item() == pytest.approx(get_divergence(name)(raw, whole).item(), rel=1e-5)
    if name == "js":
        assert nodes.divergence(name).item() == pytest.approx(0.69, abs=0.005)


def test_a_smaller_vocabulary_never_makes_distributions_equal(caplog):
    """A target that nearly always draws a token that its drafter lacks: nothing passes without a guard either."""
    target = tiny_target()
    with torch.no_grad():
        target.lm_head.weight[30] += 100 * target.lm_head.weight.abs().max() * torch.sign(target.lm_head.weight[30])
    pair = EagleModel.from_parts(target, small_model(target, vocab_size=30))
    for divergence in ("js", "kl"):
        options = {"threshold": 0.2, "divergence": divergence, "head_guard": None, "text_drafts": "off"}
        output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=30, tree=TREE, **options)
        assert not [receipt for receipt in output.receipts if receipt.source == "fuzzy" and receipt.regret > 10]
    assert "kl is infinite for a drafter with 30 of 32 tokens" in caplog.text


def test_a_conversation_processes_only_its_new_tokens(pair, monkeypatch):
    chat, read, predict = Chat(pair, max_new_tokens=12, tree=TREE), [], pair.draft.predict
    monkeypatch.setattr(pair.draft, "predict", lambda states, tokens, *rest: read.append(tokens.shape[1])
                        or predict(states, tokens, *rest))
    for said in ("hello there.", "and now.", "what else"):
        expected = eagle_fsd.generate([*chat.messages, {"role": "user", "content": said}], pair, **chat.options)
        read.clear()
        output = chat.send(said)
        assert output.token_ids == expected.token_ids
        assert output.stats.accepted_lengths == expected.stats.accepted_lengths
        assert max(read) <= len(said) + 16  # the last path of the answer before and the template's tokens included


def test_the_official_client_sees_the_same_text(pair):
    options = {"max_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    ours = {"max_new_tokens": 30} | {name: options[name] for name in ("temperature", "top_p", "seed")}
    expected = eagle_fsd.generate(CHAT, pair, speculative=False, **ours)
    with here(pair, tree=TREE) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(model="tiny", messages=CHAT, **options)
        pieces = client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **options)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert answer.choices[0].message.content == streamed == expected.text
    assert answer.usage.model_extra["accepted_by"]["head"] > 0


def test_memory_counts_the_caches_of_both(pair, monkeypatch):
    """Of each position 2 x (2 heads of 4 numbers) x 4 bytes for two layers of the target and one of the drafter."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4 * 64 * 6000)
    assert memory.positions_in_memory(pair, 64, 16) == 2000
    alone = EagleModel.from_parts(pair.target.model, None)
    assert memory.positions_in_memory(alone, 64, 16) == 3000


def test_levels_are_measured(pair, monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    latency = timing.measure(pair.target, pair.draft)
    assert latency.level.keys() == {1, 2, 3, 4} and max(latency.level.values()) > 0
    others = {str(timing.circumstances(pair.target, draft)) for draft in (None, pair.draft)}
    monkeypatch.setattr(pair.draft.computation, "stock_reason", "another way to compute it")
    assert len({str(timing.circumstances(pair.target, pair.draft)), *others}) == 3
    sized = EagleModel(pair.target, pair.draft)
    sized.sizing = Sizing(latency, None, 32)
    monkeypatch.setattr("eagle_fsd.loading.pair.known_latency", lambda *parts: latency)
    sized.size_cycles()
    assert sized.sizing.curves == default_curves(reads_features=False) != default_curves()
    for prompt in PROMPTS[:2]:
        assert eagle_fsd.generate(prompt, sized, max_new_tokens=20).token_ids == plainly(pair, prompt, 20)


def test_rows_that_join_while_drafting_pauses_catch_up():
    """Sized cycles pause; rows of all lengths come and go in tight caches, past the drafter's positions."""
    target = tiny_target()
    pair = EagleModel.from_parts(target, small_model(target, "gpt2", max_position_embeddings=60))
    pair.sizing = Sizing(Latency({1: 1.2, 64: 1.6}, dict.fromkeys(range(1, 5), 0.2), 1.0), default_curves(), 32)
    asked = [((PROMPT * 5)[: 1 + 11 * number % 50], {"max_new_tokens": 5 + 23 * number % 40, "seed": number,
                                                     "temperature": 0.9 * (number % 2)}) for number in range(14)]
    with eagle_fsd.Engine(pair, max_rows=3, max_tokens=3 * 160, prefill_chunk=7, prefixes=2) as engine:
        tickets = [engine.submit(prompt, text_drafts="off", **options) for prompt, options in asked]
        for ticket, (prompt, options) in zip(tickets, asked, strict=True):
            plain = eagle_fsd.generate(prompt, pair, speculative=False, **options)
            assert ticket.result().token_ids == plain.token_ids
        assert engine.stats.undrafted > 0 < engine.stats.accepted["head"]
