"""Decoding with processors that depend on the sequence, as `model.generate` does with the same ones."""

import functools

import pytest
import torch
from test_lossless import alone, assert_same, plainly
from tiny import PROMPT, VOCAB, tiny_pair, tiny_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import eagle_fsd
from eagle_fsd import RULES, GenerateOptions, TreeConfig, make_rule
from eagle_fsd.decoding.cycle import VerifiedTrees
from eagle_fsd.decoding.processing import TopP, own_forms
from eagle_fsd.decoding.request import Request
from eagle_fsd.drafting.tree import root_only

NEW = 24
TREE = TreeConfig(16, 5, 4)
IDS = torch.tensor([PROMPT])


def follows(last: int, token: int) -> bool:
    """A toy grammar: a token and the one after it differ by an odd number that is no multiple of 3."""
    return (token - last) % 2 == 1 and (token - last) % 3 != 0


def legal(ids) -> bool:
    text = ids.tolist()[len(PROMPT) - 1 :]
    return all(follows(*pair) for pair in zip(text, text[1:], strict=False))


@pytest.mark.parametrize("top_p", [0.01, 0.6, 0.95, 0.9999])
@pytest.mark.parametrize("size", [50, 1000, 200_000])
def test_top_p_keeps_what_transformers_keeps(top_p, size):
    """Without sorting all tokens, where the best 128 are enough, and with it (flat rows); up to the rounding of the sum
    over all tokens. A row as it is alone."""
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(size)) * torch.tensor([[1.0], [4.0], [0.01]])
    rows[1, :20] += 12
    rows[0, size // 2 :] = -torch.inf  # as after top-k
    ours, theirs = TopP(top_p)(None, rows), TopPLogitsWarper(top_p)(None, rows)
    assert rows.softmax(-1)[ours != theirs].sum() < 1e-4 + 1.1 * (size > 50 and top_p > 0.99) / size
    assert torch.equal(ours[ours > -torch.inf], rows[ours > -torch.inf])
    for row, kept in zip(rows.split(1), ours.split(1), strict=True):
        assert torch.equal(TopP(top_p)(None, row), kept)


def test_top_p_keeps_all_of_equal_tokens():
    kept = TopP(0.7)(None, torch.tensor([[0.0, 2.0, 2.0, 2.0, -1.0], [-torch.inf] * 5]))
    assert kept[0].isfinite().tolist() == [False, True, True, True, False] and kept[1].isinf().all()


def test_top_p_takes_the_place_of_transformers_where_it_does_the_same():
    other = TopPLogitsWarper(0.7, min_tokens_to_keep=2)
    ours, same = own_forms([TopPLogitsWarper(0.7), other])
    assert isinstance(ours, TopP) and ours.top_p == 0.7 and same is other


class Grammar(LogitsProcessor):
    """One row at a time, and an error for a text that it would not have let through."""

    def __call__(self, input_ids, scores):
        if not legal(input_ids[0]):
            raise ValueError(f"illegal text {input_ids}")
        scores[0, ~torch.tensor([follows(input_ids[0, -1].item(), token) for token in range(VOCAB)])] = -torch.inf
        return scores  # changed in place, as user code does


def allowed_by_grammar(batch: int, ids: torch.Tensor) -> list[int]:
    last = ids[-1].item()
    return [token for token in range(VOCAB) if legal(ids) and follows(last, token)]  # none: an error of transformers


# Functions of the greedy answer without processors and of its end token.
PROCESSORS = {
    "repetition penalty": lambda free, end: [RepetitionPenaltyLogitsProcessor(1.5)],
    "no repeated n-gram": lambda free, end: [NoRepeatNGramLogitsProcessor(2)],
    "bad words": lambda free, end: [NoBadWordsLogitsProcessor([free[3:5], [free[8]]])],
    "sequence bias": lambda free, end: [SequenceBiasLogitsProcessor({tuple(free[3:5]): -9.0, (7,): 1.0})],
    "minimal length": lambda free, end: [MinLengthLogitsProcessor(len(PROMPT) + 12, end)],
    "length penalty": lambda free, end: [ExponentialDecayLengthPenalty((2, 1.6), 31, len(PROMPT))],
    "prefix function": lambda free, end: [PrefixConstrainedLogitsProcessor(allowed_by_grammar, 1)],
    "encoder's": lambda free, end: [
        EncoderRepetitionPenaltyLogitsProcessor(0.2, IDS), EncoderNoRepeatNGramLogitsProcessor(3, IDS)],
    "three of them": lambda free, end: [
        RepetitionPenaltyLogitsProcessor(1.3), Grammar(), NoRepeatNGramLogitsProcessor(3)],
}


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.mark.parametrize("name", PROCESSORS)
def test_text_dependent_processors_see_their_own_path(name, pair):
    options = {"max_new_tokens": NEW, "acceptance": "exact", "tree": TREE}
    free = plainly(pair, PROMPT, options)
    end = [free[6]] if name == "minimal length" else []
    if end:
        options["eos_token_id"] = end
    processors = LogitsProcessorList(PROCESSORS[name](free, end))
    greedy = options | {"logits_processor": processors}
    assert plainly(pair, PROMPT, options) != plainly(pair, PROMPT, greedy)  # it matters
    sampled = greedy | {"temperature": 0.8, "min_p": 0.05, "seed": 1}
    assert assert_same(pair, alone, [(PROMPT, greedy), (PROMPT, sampled)])["head"] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_grammar_holds_under_every_rule(rule, temperature, pair):
    """Fuzzy steps are bound by what processors forbid."""
    made = make_rule(rule, None if rule == "exact" else 0.9)
    output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, acceptance=made, temperature=temperature, seed=1,
                                tree=TREE, logits_processor=[Grammar()])
    assert len(output.token_ids) == NEW and legal(torch.tensor(PROMPT + output.token_ids))


def test_processors_that_keep_a_state_are_refused(pair):
    watermark = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2], sampling_table_size=16, sampling_table_seed=0, context_history_size=8, device="cpu")
    for processor in (watermark, UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)):
        with pytest.raises(ValueError, match=f"{type(processor).__name__} .*keeps a state between calls"):
            eagle_fsd.generate(PROMPT, pair, logits_processor=[processor])


# Processed logits, node by node. V = 11.

CONTEXT = [5, 1, 5]  # before the root
PATHS = [[1], [1, 5], [1, 3], [1, 5, 1], [1, 3, 1], [1, 3, 7]]


class OnlyAfterThree(LogitsProcessor):
    """Changes its argument in place, and only where the last token but one is 3."""

    def __call__(self, input_ids, scores):
        scores[input_ids[:, -2] == 3] = scores[input_ids[:, -2] == 3].flip(-1)
        return scores


class LastToken(TemperatureLogitsWarper):
    """Depends on the context although its parent class does not."""

    def __call__(self, input_ids, scores):
        return scores / (1 + input_ids[:, -1:])


def request(processors):
    return Request([*CONTEXT, 1], GenerateOptions(), max_new_tokens=9,
                   processors=LogitsProcessorList(processors))


@pytest.mark.parametrize("processors", [
    [],
    [TemperatureLogitsWarper(0.5), TopKLogitsWarper(4), TopPLogitsWarper(0.8)],
    [RepetitionPenaltyLogitsProcessor(3.0)],
    [NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(2.0), TopKLogitsWarper(6)],
    [MinNewTokensLengthLogitsProcessor(3, 3, [0], device="cpu")],
    [OnlyAfterThree()],
    [LastToken(1.0)],
], ids=lambda processors: "-".join(type(processor).__name__ for processor in processors) or "none")
def test_every_node_is_processed_with_its_own_path(processors):
    logits = torch.randn(len(PATHS), 1, 11, generator=torch.Generator().manual_seed(0))
    raw, root = logits.clone(), root_only(torch.tensor([1]))
    verified = VerifiedTrees.of([request(processors)], [len(CONTEXT)], root, logits[:1])
    for node, path in enumerate(PATHS):
        expected = raw[node].clone()
        for processor in processors:
            expected = processor(torch.tensor([CONTEXT + path]), expected)
        tokens, going = [torch.tensor([token]) for token in path], torch.tensor([True])
        assert torch.equal(verified.warp(logits[node], torch.tensor([0]), tokens, going), expected)
    assert torch.equal(logits, raw) and not verified.errors  # gates still need them


@pytest.mark.parametrize("options", [{}, {"threshold": 0.5}, {"acceptance": "typical", "threshold": 0.5}], ids=str)
def test_no_processor_is_asked_about_a_text_after_its_end(options):
    """Grammars raise once they have ended; plain decoding never asks them then."""
    pair = tiny_pair()
    full = eagle_fsd.generate(PROMPT, pair, tree=TREE, max_new_tokens=NEW, **options).token_ids
    for stop in sorted(set(full)):
        at = len(PROMPT)

        def grammar(input_ids, scores, stop=stop, at=at):
            if stop in input_ids[0, at:].tolist() or input_ids.shape[1] >= at + NEW:
                raise RuntimeError("the grammar has ended")
            return scores

        found = eagle_fsd.generate(PROMPT, pair, tree=TREE, max_new_tokens=NEW, stop_token_ids=[stop],
                                   logits_processor=[grammar], **options)
        assert found.token_ids == full[: full.index(stop) + 1] and found.finish_reason == "stop"


@pytest.mark.parametrize("options", [{}, {"threshold": 0.5}, {"acceptance": "typical", "threshold": 0.5}], ids=str)
@pytest.mark.parametrize("ends", ["criterion", "string"])
def test_a_stopping_criterion_ends_an_answer_for_processors_too(options, ends):
    """Criteria see each token once, in order."""
    pair, options = tiny_pair(tokenizer=tiny_tokenizer()), {"tree": TREE} | options
    full = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, **options).token_ids
    for stop in sorted({token for token in full if token > 3}):
        at, seen, asked = len(PROMPT) + full.index(stop) + 1, [], []

        def criterion(input_ids, scores, seen=seen, stop=stop):
            seen.append(input_ids.shape[1])
            return ends == "criterion" and int(input_ids[0, -1]) == stop

        def grammar(input_ids, scores, at=at, asked=asked):
            asked.append(input_ids.shape[1])
            if input_ids.shape[1] >= at:
                raise RuntimeError("the grammar has ended")
            return scores

        strings = {"stop": [pair.tokenizer.decode([stop])]} if ends == "string" else {}
        found = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, logits_processor=[grammar],
                                   stopping_criteria=[criterion], **strings, **options)
        assert found.token_ids == full[: at - len(PROMPT)] and found.finish_reason == "stop"
        assert seen == list(range(len(PROMPT) + 1, at + (ends == "criterion")))
        assert max(asked) < at


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_rule_that_fails_after_the_end_of_an_answer_does_not_matter(temperature):
    pair, options = tiny_pair(), {"tree": TREE, "temperature": temperature, "seed": 1}
    full = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, **options).token_ids
    later = 0
    for end in sorted({full.index(token) for token in full} - {0}):
        for needed, kept in ((end, True), (end - 1, False)):  # calls; the first token is drawn without the rule
            calls = []

            def rule(nodes, calls=calls, needed=needed):
                calls.append(nodes)
                if len(calls) > needed:
                    raise RuntimeError("no more")
                return nodes.warped[0]

            decode = functools.partial(eagle_fsd.generate, PROMPT, pair, acceptance=rule, max_new_tokens=NEW,
                                       stop_token_ids=[full[end]], **options)
            if kept:
                out = decode()
                assert out.token_ids == full[: end + 1]
                assert [receipt.token for receipt in out.receipts] == out.token_ids
                later += len(calls) > needed
            else:
                with pytest.raises(RuntimeError, match="no more"):
                    decode()
    assert later  # in some cycle the rule was called after the end
