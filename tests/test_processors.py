"""Decoding with processors that depend on the sequence, as `model.generate` does with the same ones."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny import PROMPT, VOCAB, judged, tiny_pair
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
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
from eagle_fsd import RULES, TreeConfig, custom_generate, make_rule
from eagle_fsd.pair import EagleModel

NEW = 24
TREES = [TreeConfig(16, 5, 4), TreeConfig(6, 5, 1)]
IDS = torch.tensor([PROMPT])
PAGE = Path(__file__).parents[1] / "docs" / "processors.md"


def follows(last: int, token: int) -> bool:
    """A toy grammar: a token and the one after it differ by an odd number that is no multiple of 3."""
    return (token - last) % 2 == 1 and (token - last) % 3 != 0


class Grammar(LogitsProcessor):
    """One row at a time, and an error for a text that it would not have let through."""

    def __call__(self, input_ids, scores):
        text = input_ids[0].tolist()[len(PROMPT) - 1 :]
        if not all(follows(*pair) for pair in zip(text, text[1:], strict=False)):
            raise ValueError(f"illegal text {text}")
        allowed = torch.tensor([follows(text[-1], token) for token in range(VOCAB)])
        scores[0, ~allowed] = -torch.inf  # in place, as user code does
        return scores


def allowed_by_grammar(batch: int, ids: torch.Tensor) -> list[int]:
    assert batch == 0
    text = ids.tolist()[len(PROMPT) - 1 :]
    legal = all(follows(*pair) for pair in zip(text, text[1:], strict=False))
    return [token for token in range(VOCAB) if legal and follows(text[-1], token)]  # none: an error of transformers


# Functions of the greedy answer without processors and of its end token.
PROCESSORS = {
    "repetition penalty": lambda free, end: [RepetitionPenaltyLogitsProcessor(1.5)],
    "no repeated n-gram": lambda free, end: [NoRepeatNGramLogitsProcessor(2)],
    "bad words": lambda free, end: [NoBadWordsLogitsProcessor([free[3:5], [free[8]]])],
    "sequence bias": lambda free, end: [SequenceBiasLogitsProcessor({tuple(free[3:5]): -9.0, (7,): 1.0})],
    "minimal length": lambda free, end: [MinLengthLogitsProcessor(len(PROMPT) + 12, end)],
    "minimal new tokens": lambda free, end: [MinNewTokensLengthLogitsProcessor(len(PROMPT), 12, end)],
    "length penalty": lambda free, end: [ExponentialDecayLengthPenalty((2, 1.6), 31, len(PROMPT))],
    "prefix function": lambda free, end: [PrefixConstrainedLogitsProcessor(allowed_by_grammar, 1)],
    "user's grammar": lambda free, end: [Grammar()],
    "encoder's repetition penalty": lambda free, end: [EncoderRepetitionPenaltyLogitsProcessor(0.2, IDS)],
    "encoder's n-grams": lambda free, end: [EncoderNoRepeatNGramLogitsProcessor(1, IDS)],
    "three of them": lambda free, end: [
        RepetitionPenaltyLogitsProcessor(1.3), Grammar(), NoRepeatNGramLogitsProcessor(3)
    ],
}


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture(scope="module")
def free(pair):
    return pair.target.model.generate(IDS, max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()


@pytest.fixture
def ends(pair, free):
    """An end token that the greedy answer meets early."""
    config = pair.target.model.generation_config
    config.eos_token_id, config.pad_token_id = free[6], 0
    yield [free[6]]
    config.eos_token_id = config.pad_token_id = None


def needs_end(name):
    return name.startswith("minimal")


@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_decoding_is_that_of_the_stock_model(name, pair, free, request):
    end = request.getfixturevalue("ends") if needs_end(name) else []
    model = pair.target.model

    def processors():
        return LogitsProcessorList(PROCESSORS[name](free, end))

    def stock(**options):
        return model.generate(IDS, max_new_tokens=NEW, do_sample=False, **options)[0, len(PROMPT) :].tolist()

    expected = stock(logits_processor=processors())
    assert expected != stock()  # it matters
    for tree in TREES:
        output = eagle_fsd.generate(
            PROMPT, pair, max_new_tokens=NEW, acceptance="exact", tree=tree, logits_processor=processors()
        )
        assert output.token_ids == expected
        assert sum(output.stats.accepted_lengths) > 0
    assert stock(
        logits_processor=processors(), custom_generate=custom_generate, draft=pair.draft, threshold=0.0, tree=TREES[0]
    ) == expected


@pytest.mark.parametrize("name", PROCESSORS)
def test_sampled_tokens_are_those_of_plain_decoding(name, pair, free, request):
    end = request.getfixturevalue("ends") if needs_end(name) else []
    plain, accepted = EagleModel.from_parts(pair.target.model, None), 0
    for seed in range(2):
        options = {"max_new_tokens": NEW, "temperature": 0.8, "min_p": 0.05, "seed": seed, "acceptance": "exact"}
        expected, output = (
            eagle_fsd.generate(PROMPT, model, tree=TREES[0], logits_processor=PROCESSORS[name](free, end), **options)
            for model in (plain, pair)
        )
        assert output.token_ids == expected.token_ids
        accepted += sum(output.stats.accepted_lengths)
    assert accepted > 0


def test_min_p(pair):
    """The option, the processor and that of `model.generate` are one; and it cuts."""
    options = {"max_new_tokens": NEW, "temperature": 1.5, "seed": 3, "acceptance": "exact", "tree": TREES[0]}
    output = eagle_fsd.generate(PROMPT, pair, min_p=0.3, **options).token_ids
    inside = pair.target.model.generate(
        IDS, max_new_tokens=NEW, do_sample=True, temperature=1.5, top_k=0, min_p=0.3, seed=3, threshold=0.0,
        tree=TREES[0], custom_generate=custom_generate, draft=pair.draft,
    )
    assert inside[0, len(PROMPT) :].tolist() == output
    assert eagle_fsd.generate(PROMPT, pair, **options).token_ids != output
    # Without a temperature the place of the processor makes no difference.
    same = [eagle_fsd.generate(PROMPT, pair, **options | {"temperature": 1.0} | given).token_ids
            for given in ({"min_p": 0.3}, {"logits_processor": [MinPLogitsWarper(0.3)]})]
    assert same[0] == same[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_grammar_holds_under_every_rule(rule, temperature, pair):
    made = make_rule(rule, None if rule == "exact" else 0.9, **judged(rule))
    output = eagle_fsd.generate(
        PROMPT, pair, max_new_tokens=NEW, acceptance=made, temperature=temperature, seed=1, tree=TREES[0],
        logits_processor=[Grammar()],
    )
    text = [PROMPT[-1], *output.token_ids]
    assert len(text) == NEW + 1 and all(follows(*pair) for pair in zip(text, text[1:], strict=False))


WATERMARK = SynthIDTextWatermarkLogitsProcessor(
    ngram_len=3, keys=[1, 2], sampling_table_size=16, sampling_table_seed=0, context_history_size=8, device="cpu"
)


@pytest.mark.parametrize(
    ("processors", "error", "message"),
    [
        ([WATERMARK], ValueError, "SynthIDText.* keeps a state from call to call"),
        ([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)], ValueError, "Unbatched.* keeps a state"),
        ([5], TypeError, "must hold functions or objects that can be called, got 5"),
        (Grammar(), TypeError, "logits_processor must be a list, got .*Grammar"),
    ],
    ids=["watermark", "guidance", "number", "alone"],
)
def test_bad_processors_are_refused(processors, error, message, pair):
    with pytest.raises(error, match=message):
        eagle_fsd.generate(PROMPT, pair, logits_processor=processors)


def test_guidance_inside_generate_is_refused(pair):
    with pytest.raises(ValueError, match="Unbatched.* keeps a state"):
        pair.target.model.generate(
            IDS, max_new_tokens=4, guidance_scale=1.5, custom_generate=custom_generate, draft=pair.draft
        )


@pytest.mark.parametrize("min_p", [-0.1, 1.5, "x"])
def test_bad_min_p_is_refused(min_p, pair):
    with pytest.raises(ValueError, match="min_p must be a number in"):
        eagle_fsd.generate(PROMPT, pair, temperature=1.0, min_p=min_p)


def test_the_example_of_the_page_runs(capsys):
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    answer = json.loads(names["out"].text)
    assert list(answer) == ["answer"] and 0 <= answer["answer"] < 10**6
    assert names["out"].finish_reason == "eos" and capsys.readouterr().out == f"{answer}\n"
    stock = names["model"].target.model.generate(
        torch.tensor([names["ids"]]), max_new_tokens=40, do_sample=False,
        logits_processor=LogitsProcessorList([names["Answer"](names["model"].tokenizer, len(names["ids"]))]),
    )
    exact = eagle_fsd.generate(
        names["ids"], names["model"], acceptance="exact",
        logits_processor=[names["Answer"](names["model"].tokenizer, len(names["ids"]))],
    )
    assert exact.token_ids == stock[0, len(names["ids"]) :].tolist()
