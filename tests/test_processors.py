"""Decoding with processors that depend on the sequence, as `model.generate` does with the same ones."""

import pytest
import torch
from tiny import PROMPT, VOCAB, tiny_pair
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import eagle_fsd
from eagle_fsd import RULES, TreeConfig, make_rule
from eagle_fsd.pair import EagleModel

NEW = 24
TREE = TreeConfig(16, 5, 4)
IDS = torch.tensor([PROMPT])


def follows(last: int, token: int) -> bool:
    """A toy grammar: a token and the one after it differ by an odd number that is no multiple of 3."""
    return (token - last) % 2 == 1 and (token - last) % 3 != 0


def legal(ids) -> bool:
    text = ids.tolist()[len(PROMPT) - 1 :]
    return all(follows(*pair) for pair in zip(text, text[1:], strict=False))


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
    """Greedy decoding is that of the stock model, sampling that of plain decoding."""
    model, config = pair.target.model, pair.target.model.generation_config

    def stock(**options):
        return model.generate(IDS, max_new_tokens=NEW, do_sample=False, **options)[0, len(PROMPT) :].tolist()

    free = stock()
    end = [free[6]] if name == "minimal length" else []
    try:
        config.eos_token_id, config.pad_token_id = end or None, 0
        without, expected = stock(), stock(logits_processor=LogitsProcessorList(PROCESSORS[name](free, end)))
        assert expected != without  # it matters
        options = {"max_new_tokens": NEW, "acceptance": "exact", "tree": TREE}
        output = eagle_fsd.generate(PROMPT, pair, logits_processor=PROCESSORS[name](free, end), **options)
        assert output.token_ids == expected and sum(output.stats.accepted_lengths) > 0
        options |= {"temperature": 0.8, "min_p": 0.05, "seed": 1}
        plain, output = (eagle_fsd.generate(PROMPT, each, logits_processor=PROCESSORS[name](free, end), **options)
                         for each in (EagleModel.from_parts(model, None), pair))
        assert output.token_ids == plain.token_ids
    finally:
        config.eos_token_id = config.pad_token_id = None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_grammar_holds_under_every_rule(rule, temperature, pair):
    """Fuzzy steps are bound by what processors forbid."""
    made = make_rule(rule, None if rule == "exact" else 0.9)
    output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, acceptance=made, temperature=temperature, seed=1,
                                tree=TREE, logits_processor=[Grammar()])
    assert len(output.token_ids) == NEW and legal(torch.tensor(PROMPT + output.token_ids))


def test_min_p(pair):
    """The option and the processor are one, where there is no temperature between them; and it cuts."""
    options = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 3, "acceptance": "exact", "tree": TREE}
    by_name, by_processor, without = (
        eagle_fsd.generate(PROMPT, pair, **options | given).token_ids
        for given in ({"min_p": 0.3}, {"logits_processor": [MinPLogitsWarper(0.3)]}, {}))
    assert by_name == by_processor != without


def test_processors_that_keep_a_state_are_refused(pair):
    watermark = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2], sampling_table_size=16, sampling_table_seed=0, context_history_size=8, device="cpu")
    for processor in (watermark, UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)):
        with pytest.raises(ValueError, match=f"{type(processor).__name__} .*keeps a state from call to call"):
            eagle_fsd.generate(PROMPT, pair, logits_processor=[processor])
