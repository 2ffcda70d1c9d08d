"""Several ragged prompts at once: every row is what it would be alone."""

import threading

import pytest
import torch
from tiny import PROMPT, VOCAB, readable, tiny_head, tiny_pair, tiny_target, tiny_tokenizer
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

import eagle_fsd
from eagle_fsd.drafting.config import Choice
from eagle_fsd.models.cache import TreeCache

CPU = torch.device("cpu")
TREE = eagle_fsd.TreeConfig(12, 4, 3)
PROMPTS = [PROMPT, [7, 7, 2], [5], [(5 * i + 3) % VOCAB for i in range(21)], PROMPT[:6]]


class NoThreeAfterOne(LogitsProcessor):
    """A user's processor: token 3 may not follow token 1."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[input_ids[:, -1] == 1, 3] = -torch.inf
        return scores


def assert_rows_as_alone(pair, prompts=PROMPTS, seeds=None, **options):
    options = {"max_new_tokens": 24, "tree": TREE, **options}
    seeds = list(range(len(prompts))) if seeds is None else seeds
    together = eagle_fsd.generate(prompts, pair, seed=seeds, **options)
    assert len(together) == len(prompts)
    for prompt, seed, row in zip(prompts, seeds, together, strict=True):
        alone = eagle_fsd.generate(prompt, pair, seed=seed, **options)
        assert row.token_ids == alone.token_ids and row.seed == seed
        assert (row.finish_reason, row.text) == (alone.finish_reason, alone.text)
        assert row.stats.accepted_lengths == alone.stats.accepted_lengths
        assert row.stats.prefill_tokens == alone.stats.prefill_tokens
        assert [each.source for each in row.receipts] == [each.source for each in alone.receipts]
        for name in ("logprob", "regret"):
            ours, theirs = ([getattr(each, name) for each in found.receipts] for found in (row, alone))
            assert ours == pytest.approx(theirs, abs=1e-4)
        if alone.stats.budget_spent is not None:
            assert row.stats.budget_spent == pytest.approx(alone.stats.budget_spent, abs=1e-3)
            assert row.stats.exact_because == alone.stats.exact_because
            assert [each.exact_because for each in row.receipts] == [each.exact_because for each in alone.receipts]
    return together


# Windows of 8, chunks of 8, sinks, latent keys, soft-capping; Llama-4 counts positions and goes row by row.
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "qwen2-window", "gpt_oss", "llama4_text", "deepseek_v3", "granite", "gpt2", "mixtral"]
)
@pytest.mark.parametrize("options", [{"acceptance": "exact"}, {"threshold": 0.3, "temperature": 0.8}], ids=str)
def test_rows_are_what_they_are_alone(family, options):
    assert_rows_as_alone(tiny_pair(family), **options)


def test_with_the_other_kernel():
    assert_rows_as_alone(tiny_pair(attention="sdpa"), acceptance="exact")


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.5},
        {"threshold": 0.3, "budget": 0.4},
        {"threshold": 0.3, "budget": 0.4, "temperature": 1.0},
        {"acceptance": "tilt", "threshold": 0.7, "temperature": 1.0},
        {"acceptance": "exact", "temperature": 1.0, "top_k": 5, "top_p": 0.9},
        {"acceptance": "exact", "repetition_penalty": 1.3, "min_new_tokens": 9},
        {"threshold": 0.2, "temperature": 0.9, "logits_processor": [NoThreeAfterOne()]},
        {"acceptance": lambda verification: verification.warped_logits},
        {"acceptance": "exact", "stop_token_ids": [4, 9, 17]},
        {"acceptance": "exact", "stopping_criteria": [lambda ids, scores: ids.shape[1] > 25]},
        {"acceptance": "exact", "tree": eagle_fsd.TreeConfig(2, 1, 1)},
    ],
    ids=readable,
)
def test_with_options(options):
    assert_rows_as_alone(tiny_pair(), **options)


def test_rows_end_at_different_times():
    outputs = assert_rows_as_alone(tiny_pair(), stop_token_ids=[2, 4, 9, 17], max_new_tokens=40, acceptance="exact")
    assert len({len(output.token_ids) for output in outputs}) > 2
    assert {output.finish_reason for output in outputs} >= {"stop"}


def test_text_and_chats():
    pair = tiny_pair(tokenizer=tiny_tokenizer())
    prompts = ["hello world.", [{"role": "user", "content": "hi"}], torch.tensor([[3, 1, 4]]), "a"]
    outputs = assert_rows_as_alone(pair, prompts, stop=["w", "q"])
    assert any(output.finish_reason == "stop" for output in outputs)
    assert all(isinstance(output.text, str) for output in outputs)


def test_plain_decoding_in_batches():
    pair = tiny_pair()
    pair.draft = None
    for options in ({}, {"temperature": 0.7}):
        outputs = assert_rows_as_alone(pair, acceptance="exact", **options)
        assert all(output.stats.mean_accepted_length == 1 for output in outputs)


def test_rows_near_the_last_position():
    """The target has 128 positions: a long row ends by length while the others go on."""
    prompts = [[(3 * i) % VOCAB for i in range(118)], PROMPT, [(7 * i) % VOCAB for i in range(125)]]
    outputs = assert_rows_as_alone(tiny_pair(), prompts, acceptance="exact", max_new_tokens=30)
    assert [len(output.token_ids) for output in outputs] == [10, 30, 3]


def test_short_and_long_rows_of_a_model_that_tells_them_apart():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": [4.0, 5.0],
            "original_max_position_embeddings": 32}
    target = tiny_target("phi3", rope_parameters=rope, sliding_window=None, original_max_position_embeddings=32)
    pair = eagle_fsd.EagleModel.from_parts(target, tiny_head(target))
    assert pair.target.batches([3, 40, 31, 50]) == [[0, 2], [1, 3]]
    long = [(3 * i) % VOCAB for i in range(40)]
    assert_rows_as_alone(pair, [PROMPT, long, [7, 7]], acceptance="exact", max_new_tokens=12)


def test_one_seed_for_a_batch():
    pair, options = tiny_pair(), {"temperature": 1.0, "max_new_tokens": 8, "acceptance": "exact", "tree": TREE}
    outputs = eagle_fsd.generate([PROMPT, PROMPT], pair, seed=5, **options)
    assert [output.seed for output in outputs] == [5, 6]
    assert outputs[1].token_ids == eagle_fsd.generate(PROMPT, pair, seed=6, **options).token_ids
    drawn = eagle_fsd.generate([PROMPT, PROMPT], pair, **options)
    assert drawn[0].seed != drawn[1].seed


def test_trees_follow_the_size_of_the_batch():
    """And drafting may be off for a large batch and on for what is left of it."""
    pair, asked = tiny_pair(), []

    class Trees:
        def of(self, rule, temperature, rows=1):
            asked.append(rows)
            return Choice([None, TREE, eagle_fsd.TreeConfig(30, 5, 4), eagle_fsd.TreeConfig(4, 2, 2), None, None][rows])

    pair.trees = Trees()
    options = {"acceptance": "exact", "max_new_tokens": 40, "stop_token_ids": [2, 4, 9, 17]}
    for prompts in (PROMPTS[:3], PROMPTS):
        for prompt, output in zip(prompts, eagle_fsd.generate(prompts, pair, **options), strict=True):
            alone = eagle_fsd.generate(prompt, pair, **options)
            assert output.token_ids == alone.token_ids
    assert {1, 2, 3, 5} <= set(asked)


def test_a_batch_that_begins_plainly_drafts_once_rows_have_left():
    class Trees:
        def of(self, rule, temperature, rows=1):
            return Choice(TREE if rows < 3 else None)

    pair, prompts = tiny_pair(), [PROMPT, PROMPT[:3], PROMPT[2:9]]
    expected = [eagle_fsd.generate(prompt, pair, max_new_tokens=count, acceptance="exact").token_ids
                for prompt, count in zip(prompts, (40, 40, 8), strict=True)]
    pair.trees = Trees()
    ends = expected[2][-1]
    found = eagle_fsd.generate(prompts, pair, max_new_tokens=40, acceptance="exact", stop_token_ids=[ends])
    drafted = [output.stats.target_forwards - output.stats.undrafted for output in found]
    for output, ids in zip(found, expected, strict=True):
        assert output.token_ids == ids[: len(output.token_ids)]
    assert any(drafted) and any(sum(output.stats.accepted_lengths) for output in found)
    assert [output.stats.plain_because is None for output in found] == [count > 0 for count in drafted]


@pytest.mark.parametrize("on", [{1}, {1, 2}, {3, 1}, {2}], ids=str)
def test_drafting_goes_on_where_rows_of_any_length_are_left(on):
    """What the draft has not read of long and of short rows fits its cache."""
    class Trees:
        def of(self, rule, temperature, rows=1):
            return Choice(TREE if rows in on else None)

    pair = tiny_pair()
    prompts = [[(step * i + 3) % VOCAB for i in range(count)] for step, count in ((5, 100), (7, 2), (3, 60))]
    options = {"acceptance": "exact", "max_new_tokens": 24, "stop_token_ids": [2, 4, 9, 17]}
    expected = [eagle_fsd.generate(prompt, pair, **options).token_ids for prompt in prompts]
    assert len(set(map(len, expected))) > 1
    pair.trees = Trees()
    found = eagle_fsd.generate(prompts, pair, **options)
    assert [output.token_ids for output in found] == expected


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([PROMPT, []], {}, ValueError, "prompt 1 of 2: the prompt is empty"),
        ([PROMPT, [VOCAB]], {}, ValueError, "prompt 1 of 2: token id 32"),
        ([PROMPT, "text"], {}, ValueError, "prompt 1 of 2: this model has no tokenizer"),
        ([PROMPT, 5], {}, TypeError, "prompt 1 of 2: a prompt must be"),
        ([[PROMPT], PROMPT], {}, TypeError, "prompt 0 of 2"),
        ([PROMPT, [1] * 128], {}, ValueError, "128 tokens"),
        (torch.tensor([PROMPT, PROMPT]), {}, ValueError, "a batch is a list of prompts"),
        ([PROMPT, PROMPT], {"seed": [1]}, ValueError, "one for each prompt: 2, got 1"),
        ([PROMPT, PROMPT], {"seed": [1, -1]}, ValueError, "seed"),
        ([PROMPT, PROMPT], {"session": eagle_fsd.Session()}, ValueError, "a session serves one prompt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_batches(prompts, options, error, message):
    with pytest.raises(error, match=message):
        eagle_fsd.generate(prompts, tiny_pair(), **options)


# custom_generate -------------------------------------------------------------------------------------------------


def padded(prompts, pad):
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "options", [{}, {"min_new_tokens": 6}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}], ids=str)
def test_custom_generate_pads_as_generate_does(options):
    pair = tiny_pair()
    target = pair.target.model
    inputs = padded(PROMPTS, pad=0)
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": [2, 4, 9], "pad_token_id": 0, **options}
    ours = target.generate(**inputs, custom_generate=eagle_fsd.custom_generate, draft=pair.draft, threshold=0.0,
                           **options)
    assert torch.equal(ours, target.generate(**inputs, **options))


def test_custom_generate_without_a_pad_token():
    """`generate` pads with the first end token then; without one there is nothing to pad with."""
    pair, inputs = tiny_pair(), padded(PROMPTS, pad=0)
    options = {"do_sample": False, "max_new_tokens": 20}
    ours = {"custom_generate": eagle_fsd.custom_generate, "draft": pair.draft, "threshold": 0.0}
    target = pair.target.model
    expected = target.generate(**inputs, eos_token_id=[2, 4, 9], **options)
    assert torch.equal(target.generate(**inputs, eos_token_id=[2, 4, 9], **options, **ours), expected)
    with pytest.raises(ValueError, match="pad_token_id"):
        target.generate(**inputs, **options, **ours)

    class Streamer(BaseStreamer):
        def put(self, value):
            pass

        def end(self):
            pass

    with pytest.raises(ValueError, match="a streamer serves one prompt"):
        target.generate(**inputs, **options, **ours, streamer=Streamer())


def test_criteria_that_keep_count_of_their_rows():
    """Such as those of lm-evaluation-harness: one state for each row, met when every row has met it."""
    class AnyOf:
        def __init__(self, tokens, rows):
            self.tokens, self.done = set(tokens), [False] * rows
            self.lock = threading.Lock()  # which cannot be copied

        def __call__(self, input_ids, scores):
            for row, done in enumerate(self.done):
                self.done[row] = done or input_ids[row, -1].item() in self.tokens
            return all(self.done)

    pair, inputs = tiny_pair(), padded(PROMPTS, pad=0)
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    ours = pair.target.model.generate(
        **inputs, custom_generate=eagle_fsd.custom_generate, draft=pair.draft, threshold=0.0,
        stopping_criteria=[AnyOf([2, 4, 9], len(PROMPTS))], **options)
    expected = pair.target.model.generate(**inputs, eos_token_id=[2, 4, 9], **options)
    assert torch.equal(ours, expected)


# The cache -------------------------------------------------------------------------------------------------------


def test_ragged_rows_of_a_cache():
    """Against one list of positions for each row."""
    torch.manual_seed(0)
    cache, rows = TreeCache([CPU] * 2, 40, batch=3), [[], [], []]

    def forward(count):
        states = torch.randn(2, len(rows), 2, count, 4)
        for layer in range(2):
            keys, values = cache.update(states[0] + layer, states[1] - layer, layer)
        return states

    def assert_held():
        assert cache.lengths == [len(row) for row in rows] and cache.length == max(cache.lengths)
        visible = cache.visible(CPU)
        if visible is None:
            assert len(set(cache.lengths)) == 1
        else:
            assert visible.sum(1).tolist() == cache.lengths
        for layer in range(2):
            nothing = torch.zeros(len(rows), 2, 0, 4)
            keys, values = cache.update(nothing, nothing, layer)
            assert keys.isfinite().all() and values.isfinite().all()
            for number, row in enumerate(rows):
                expected = torch.stack(row, 2)  # [2, H, L, D]
                assert torch.equal(keys[number, :, : len(row)], expected[0] + layer)
                assert torch.equal(values[number, :, : len(row)], expected[1] - layer)

    for number, count in enumerate((3, 6, 4)):  # prompts, row by row
        states = torch.randn(2, 1, 2, count, 4)
        with cache.one_row(number):
            for layer in range(2):
                cache.update(states[0] + layer, states[1] - layer, layer)
        rows[number] = [states[:, 0, :, at] for at in range(count)]
    assert_held()
    for kept in ([[0, 2], [0], [0, 3, 4]], [[0, 1, 2], [0, 4], [0]], [[0], [0], [0]]):
        lengths, place = cache.lengths, cache.length
        states = forward(5)
        cache.commit(lengths, [[place + node for node in nodes] for nodes in kept])
        for number, nodes in enumerate(kept):
            rows[number] += [states[:, number, :, node] for node in nodes]
        assert_held()
    cache.keep_rows([0, 2])
    del rows[1]
    assert_held()
    lengths, place = cache.lengths, cache.length
    states = forward(4)
    cache.commit(lengths, [[place], [place, place + 3]])
    rows[0].append(states[:, 0, :, 0])
    rows[1] += [states[:, 1, :, 0], states[:, 1, :, 3]]
    assert_held()
    cache.truncate(7)
    rows[:] = [row[:7] for row in rows]
    assert_held()
