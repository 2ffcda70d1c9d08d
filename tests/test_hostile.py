"""Hostile prompts, rules, processors and streamers: what each ends in, and that the same model answers as before.

The table is `CASES`; a call gets a `World` and either raises the error named, with the message, or returns True.
V = 32: four special tokens, then letters, a space and a full stop. Then damaged targets, a hub that cannot be reached,
and damaged caches. Bad values of options: test_options.py; damaged heads: test_checkpoint.py.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import PROMPT, VOCAB, save_pair, tiny_pair, tiny_tokenizer

import eagle_fsd
from eagle_fsd import EagleModel, TreeConfig, Weights
from eagle_fsd.drafting.sizing import Latency

TREE = TreeConfig(16, 5, 4)
IDS = torch.tensor([PROMPT])
NAN, INF = math.nan, math.inf


class World:
    """A pair, and short calls to it."""

    def __init__(self):
        self.pair = tiny_pair(tokenizer=tiny_tokenizer())

    def generate(self, prompt=PROMPT, model=None, **options):
        options = {"max_new_tokens": 12, "tree": TREE, "threshold": 0.0} | options
        return eagle_fsd.generate(prompt, model or self.pair, **options)

    def answers(self, *prompt, **options):
        """Whether an input that looks hostile gives the usual answer."""
        return self.generate(*prompt, **options).token_ids == self.generate().token_ids

    def with_template(self, template, messages):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        return self.generate(messages, EagleModel.from_parts(self.pair.target.model, self.pair.draft, tokenizer))

    def rule(self, function, **options):
        return self.generate(acceptance=function, threshold=None, **options)

    def processor(self, change, **options):
        return self.generate(logits_processor=[lambda input_ids, scores: change(scores)], **options)


@pytest.fixture(scope="module")
def world():
    return World()


def answers(world):
    """What must not change: a lossless answer, and a fuzzy one."""
    return world.generate().token_ids, world.generate(temperature=1.0, seed=1, threshold=0.3).token_ids


@pytest.fixture(scope="module")
def reference(world):
    return answers(world)


class Streamer:
    """Raises when the first new tokens come."""

    def put(self, value):
        if value.dim() == 1:
            raise RuntimeError("the streamer broke")

    def end(self):
        pass


def broken(*args, **kwargs):
    raise RuntimeError("the user's function broke")


def chat(role, content="hi"):
    return [{"role": role, "content": content}]


# (what is given, call, error or True, message)
CASES = [
    # prompts
    ("no prompt", lambda w: w.generate(None), TypeError, "got NoneType"),
    ("bytes", lambda w: w.generate(b"hi"), TypeError, "got bytes"),
    ("a dict", lambda w: w.generate(chat("user")[0]), TypeError, "a list of messages"),
    ("an array of numbers", lambda w: w.generate(np.array([0.5])), ValueError, "must be integer"),
    ("numpy ints", lambda w: w.answers([np.int64(token) for token in PROMPT]), True, ""),
    ("an empty list", lambda w: w.generate([]), ValueError, "the prompt is empty"),
    ("an empty encoding", lambda w: w.generate({"input_ids": []}), ValueError, "empty"),
    ("empty text is <s>", lambda w: len(w.generate("").token_ids) == 12, True, ""),
    ("ids with a bool", lambda w: w.generate([3, True]), TypeError, "token ids"),
    ("ids and text", lambda w: w.generate([1, "a"]), TypeError, "only token ids"),
    ("messages and text", lambda w: w.generate([*chat("user"), "hi"]), TypeError, "only token ids"),
    ("a negative id", lambda w: w.generate([3, -1]), ValueError, "token id -1"),
    ("an id past the end", lambda w: w.generate([3, VOCAB]), ValueError, "token id 32 .*0 to 31"),
    ("an over-long prompt", lambda w: w.generate([1] * 128), ValueError, "128 tokens.*at most 127"),
    ("text without end", lambda w: w.generate("a" * 10**7), ValueError,
     "the prompt has 10000000 characters, too many for the target's 128 positions"),
    ("a float tensor", lambda w: w.generate(IDS.float()), ValueError, "integer .*torch.float32"),
    ("a 3-D tensor", lambda w: w.generate(IDS[None]), ValueError, r"\[1, 1, 12\]"),
    ("a tensor without data", lambda w: w.generate(IDS.to("meta")), ValueError, "a prompt tensor"),
    ("a surrogate", lambda w: w.generate("a\ud800b"), ValueError, "lone surrogate .* at character 1"),
    ("a role that is no text", lambda w: w.generate(chat(3)), ValueError, '"role" and "content"'),
    ("a role that is none", lambda w: w.generate(chat("usr", "a")), ValueError, "one of the roles system, "),
    ("a part of a role", lambda w: w.generate(chat("assist", "a")), ValueError, "got 'assist'"),
    ("content in parts", lambda w: w.generate(chat("user", [{"text": "a"}])), ValueError, "both text"),
    ("a chat without end", lambda w: w.generate(chat("user", "a" * 10**7)), ValueError, "for the target"),
    # batches
    ("an empty prompt beside another", lambda w: w.generate([PROMPT, []]), ValueError,
     "prompt 1 of 2: the prompt is empty"),
    ("an id past the end beside another", lambda w: w.generate([PROMPT, [VOCAB]]), ValueError,
     "prompt 1 of 2: token id 32"),
    ("a batch as a tensor", lambda w: w.generate(torch.cat([IDS, IDS])), ValueError, "a batch is a list of prompts"),
    ("too few seeds", lambda w: w.generate([PROMPT] * 2, seed=[1]), ValueError, "one for each prompt: 2, got 1"),
    ("a session of two", lambda w: w.generate([PROMPT] * 2, session=eagle_fsd.Session()), ValueError,
     "a session serves one prompt"),
    # chat templates, which come with a model
    ("a role the template refuses", lambda w: w.with_template("{{ raise_exception('only users') }}", chat("assistant")),
     ValueError, "rejects the chat: only users"),
    ("a template that renders too much", lambda w: w.with_template("{{ messages[0].content * 10**5 }}",
                                                                   chat("user", "abc")), ValueError,
     "the chat has 300000 characters, too many for the target's 128 positions"),
    ("keywords of a template for a text", lambda w: w.generate("abc", chat_template_kwargs={"x": 1}), ValueError,
     "chat_template_kwargs is for chats, and this prompt is a str"),
    ("keywords of a template that are none", lambda w: w.generate(chat("user"), chat_template_kwargs="x"), TypeError,
     "chat_template_kwargs must be keywords of apply_chat_template in a dict"),
    ("a user without content", lambda w: w.generate([{"role": "user"}]), ValueError, '"role" and "content"'),
    ("a template that multiplies a little",
     lambda w: w.with_template("{{ messages[0].content * 3 }}", chat("user", "abc")).token_ids
     == w.generate([4, 5, 6] * 3).token_ids, True, ""),
    ("a template that is none", lambda w: w.with_template("{% for %}", chat("user")), ValueError, "rejects the chat"),
    ("no chat template", lambda w: w.with_template(None, chat("user")), ValueError, "no chat template"),
    # rules
    ("a rule that returns nothing", lambda w: w.rule(lambda nodes: None), TypeError, "Weights or a tensor"),
    ("a rule of another shape", lambda w: w.rule(lambda nodes: nodes.warped[0, 1:]), ValueError, "of shape"),
    ("a rule of NaN", lambda w: w.rule(lambda nodes: nodes.warped * NAN), ValueError, "not NaN"),
    ("a rule without weight", lambda w: w.rule(lambda nodes: nodes.warped - INF), ValueError, "above -inf"),
    ("a rule that raises", lambda w: w.rule(broken), RuntimeError, "the user's function broke"),
    ("a rule that writes into the logits", lambda w: len(w.rule(lambda n: n.warped.zero_()).token_ids) == 12, True, ""),
    ("weights of other children", lambda w: w.rule(lambda nodes: Weights(torch.zeros(1, 3))), ValueError, "children"),
    # processors, criteria, streamers
    ("a processor that gives NaN", lambda w: w.processor(lambda s: s * NAN), ValueError, "no token can be drawn.*nan"),
    ("a processor that bans everything", lambda w: w.processor(lambda s: s - INF, temperature=1.0), ValueError,
     "no token can be drawn.*-inf"),
    ("a processor of another shape", lambda w: w.processor(lambda s: s[:, :1]), ValueError, r"\[1, 32\], got \[1, 1\]"),
    ("a processor that returns nothing", lambda w: w.processor(lambda s: None), ValueError, "got None"),
    ("a processor in half precision", lambda w: w.processor(lambda s: s.half()).token_ids
     == w.generate().token_ids, True, ""),
    ("a processor that raises", lambda w: w.processor(broken), RuntimeError, "the user's function broke"),
    ("a criterion that answers nothing",
     lambda w: w.generate(stopping_criteria=[lambda ids, scores: None]), TypeError, "a bool or a tensor of one"),
    ("a criterion that changes the text",
     lambda w: w.answers(stopping_criteria=[lambda ids, scores: bool(ids.zero_().sum())]), True, ""),
    ("a streamer that raises", lambda w: w.generate(streamer=Streamer()), RuntimeError, "the streamer broke"),
    ("a stop string of special characters", lambda w: w.answers(stop="a.*(\\[$"), True, ""),
]


@pytest.mark.parametrize(("given", "call", "expected", "message"), CASES, ids=[case[0] for case in CASES])
def test_hostile_inputs(world, reference, given, call, expected, message):
    if expected is True:
        assert call(world)
    else:
        with pytest.raises(expected, match=f"(?s){message}"):
            call(world)
    assert answers(world) == reference


@pytest.fixture
def load(tmp_path):
    save_pair(tmp_path)

    def of_pair(**options):
        return eagle_fsd.load(tmp_path / "target", tmp_path / "head", **{"device": "cpu", "tree": None} | options)

    of_pair.folder = tmp_path / "target"
    return of_pair


def without(folder, name="model.safetensors"):
    (folder / name).unlink()


def with_weights(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def sharded(folder, damage):
    """The weights in two files; `damage` gets the second."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    weights = {name: f"model-0000{1 + (name > names[9])}-of-00002.safetensors" for name in names}
    for file in set(weights.values()):
        save_file({name: state[name] for name in names if weights[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    damage(folder / file.replace("00001-", "00002-"))


def cut(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-2])


@pytest.mark.parametrize(("damage", "options", "error", "message"), [
    (lambda folder: without(folder, "config.json"), {}, ValueError, "a directory without config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), {}, OSError, "not a valid JSON"),
    (without, {}, OSError, "no file"),
    (cut, {}, ValueError, "cannot be loaded as a causal LM"),
    (lambda folder: sharded(folder, Path.unlink), {}, OSError, "model-00002-of-00002.safetensors"),
    (lambda folder: sharded(folder, lambda file: file.write_bytes(file.read_bytes()[:-2])), {}, ValueError,
     "cannot be loaded as a causal LM"),
    (lambda folder: sharded(folder, lambda file: save_file({}, file, {"format": "pt"})), {}, ValueError,
     "lacks weights: .*model.norm.weight"),
    (lambda folder: with_weights(folder, lambda state: state.pop("model.layers.0.mlp.up_proj.weight")), {}, ValueError,
     "lacks weights: model.layers.0.mlp.up_proj.weight"),
    (lambda folder: with_weights(folder, lambda state: state["model.norm.weight"].fill_(NAN)), {}, ValueError,
     "is damaged or not supported: its logits are not finite"),
    (None, {"dtype": "float99"}, ValueError, "dtype must be .*'float99'"),
    (None, {"device": "abacus"}, ValueError, "device 'abacus' cannot be used here"),
    (None, {"quantization_config": "int8"}, TypeError, "config of transformers, a dict or None, got 'int8'"),
], ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__)
def test_targets_that_cannot_be_loaded(load, damage, options, error, message):
    if damage is not None:
        damage(load.folder)
    with pytest.raises(error, match=message):
        load(**options)


def test_without_a_tokenizer_that_loads_prompts_are_ids(load):
    (load.folder / "tokenizer.json").write_text("{}")
    assert load().tokenizer is None


def test_a_hub_that_cannot_be_reached_is_said_to_be(load, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for target, head in (("someone/target", "someone/head"), ("someone/target", load.folder.parent / "head")):
        with pytest.raises(OSError, match="couldn't connect to"):
            eagle_fsd.load(target, head)


MEASURED = Latency({1: 1.0, 2: 2.0}, {1: 0.5}, 1.0)


@pytest.mark.parametrize("content", [
    "", "{", "[" * 9**5, "null", "\udcff", {}, 3, {"base": {"1": 1.0}}, *(
        {"base": {"1": 1.0, "2": 2.0}, "level": {"1": 0.5}, "plain": 1.0, "row": 0.0, "plain_row": 0.0} | bad
        for bad in ({"plain": 0}, {"base": {}}, {"base": {"one": 1.0}}, {"level": {"1": NAN}}, {"row": "2 s"}))],
    ids=lambda content: str(content)[:40])
def test_what_a_damaged_cache_held_is_measured_again(load, tmp_path, monkeypatch, content):
    """Files of another version, cut off, or edited by hand."""
    measured = []
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    monkeypatch.setattr("eagle_fsd.loading.timing.share_of", lambda *_: 1.0)
    monkeypatch.setattr("eagle_fsd.loading.timing.measure", lambda *_: measured.append(1) or MEASURED)
    load(tree="auto")
    (file,) = tmp_path.glob("latency/*.json")
    file.write_text(content if isinstance(content, str) else json.dumps(content), errors="surrogateescape")
    for _ in range(2):  # the second time it is there again
        assert load(tree="auto").sizing.latency == MEASURED and len(measured) == 2
