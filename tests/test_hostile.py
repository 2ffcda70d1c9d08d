"""Hostile inputs: what each ends in, and that the same model answers as before after it.

The table is `CASES`; a call gets a `World` and either raises the error named, with the message, or returns True.
V = 32: four special tokens, then letters, a space and a full stop.
"""

import faulthandler
import json
import math
import pickle
import re
import shutil
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import PROMPT, SIZES, VOCAB, save_pair, tiny_head, tiny_pair, tiny_target, tiny_tokenizer
from transformers import LlamaConfig

import eagle_fsd
from eagle_fsd import (
    RULES,
    AcceptanceOptions,
    Chat,
    Decision,
    DraftHead,
    EagleModel,
    Engine,
    EngineClosed,
    LoadOptions,
    Output,
    Piece,
    QueueFull,
    Receipt,
    SamplingOptions,
    Session,
    Stats,
    Ticket,
    TreeConfig,
    Verification,
    custom_generate,
    load,
    load_head,
    make_rule,
    save_head,
)
from eagle_fsd.cli import main
from eagle_fsd.data.conversations import read_records
from eagle_fsd.data.files import read_lines
from eagle_fsd.data.questions import read_questions
from eagle_fsd.drafting.latency import Latency

SECONDS = 60  # after which a test that hangs is ended with all stacks shown
TREE = TreeConfig(16, 5, 4)
IDS = torch.tensor([PROMPT])
NAN, INF = math.nan, math.inf


class World:
    """A pair in memory and on disk, and ways to damage copies of its files."""

    def __init__(self, folder):
        self.folder, self.copies = folder, 0
        self.pair = tiny_pair(tokenizer=tiny_tokenizer())
        save_pair(folder)

    def generate(self, prompt=PROMPT, model=None, **options):
        options = {"max_new_tokens": 12, "tree": TREE, "threshold": 0.0} | options
        return eagle_fsd.generate(prompt, model or self.pair, **options)

    def answers(self, *prompt, **options):
        """Whether an input that looks hostile gives the usual answer."""
        return self.generate(*prompt, **options).token_ids == self.generate().token_ids

    def with_template(self, template):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        return EagleModel.from_parts(self.pair.target.model, self.pair.draft, tokenizer)

    def answers_text(self, text, model):
        """Whether a chat of "abc" is this text, put together by the model's template."""
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.generate(chat("user", "abc"), model).token_ids == self.generate(ids).token_ids

    def sampled(self, **options):
        return self.generate(**{"temperature": 1.0, "seed": 1} | options)

    def rule(self, function, **options):
        return self.generate(acceptance=function, threshold=None, **options)

    def inside(self, **options):
        """`custom_generate` in the target's own `generate`."""
        options = {"input_ids": IDS, "draft": self.pair.draft, "tree": TREE, "max_new_tokens": 12} | options
        return self.pair.target.model.generate(custom_generate=custom_generate, do_sample=False, **options)

    def copy(self, which, change):
        """The folder of a copy of the target or the head after `change(folder)`."""
        self.copies += 1
        copied = self.folder / f"copy{self.copies}"
        shutil.copytree(self.folder / which, copied)
        change(copied)
        return copied

    def load(self, target=None, head=None, **options):
        return load(target or self.folder / "target", head or self.folder / "head", **{"device": "cpu"} | options)

    def chat(self, **options):
        return Chat(self.pair, **{"max_new_tokens": 4} | options)

    def ask_engine(self, *prompt, requests=1, closed=False, **options):
        """Requests to an engine that is busy with another one, with one place in its queue."""
        go, busy = threading.Event(), threading.Event()
        with Engine(self.pair, max_rows=1, max_waiting=1) as engine:
            try:
                first = engine.submit(PROMPT, stopping_criteria=[lambda *_: busy.set() or go.wait(SECONDS)])
                assert busy.wait(SECONDS)
                if closed:
                    go.set()
                    engine.close()
                tickets = [engine.submit(*(prompt or [PROMPT]), **options) for _ in range(requests)]
            finally:
                go.set()
            return [ticket.result() for ticket in (first, *tickets)]

    def other_session(self):
        session = Session()
        self.generate(model=tiny_pair(), session=session)
        return self.generate(session=session)

    def head(self, change):
        return load_head(self.copy("head", change))

    def damaged_target(self, change, **options):
        return self.load(self.copy("target", change), **options)

    def beside_head(self, file, text):
        return self.load(head=self.copy("head", write(file, text)))

    def command(self, capsys, *arguments):
        """Exit status and standard error of the command line; "tiny" generates with the tiny pair."""
        if arguments[:1] == ("tiny",):
            arguments = ("generate", *arguments[1:], "--target", str(self.folder / "target"),
                         "--draft", str(self.folder / "head"), "--device", "cpu")
        try:
            status = main(arguments)
        except SystemExit as error:  # tyro
            status = error.code
        return status, capsys.readouterr().err


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("hostile"))


def answers(world):
    """What must not change: a lossless answer, and a fuzzy one."""
    return world.generate().token_ids, world.sampled(threshold=0.3, max_new_tokens=6).token_ids


@pytest.fixture(scope="module")
def reference(world):
    return answers(world)


@pytest.fixture(autouse=True)
def no_hang():
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


# Damage


def write(file, text):
    return lambda folder: (folder / file).write_text(text)


def remove(file):
    return lambda folder: (folder / file).unlink()


def cut(length, file="model.safetensors"):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:length])


def flip(at, file="model.safetensors"):
    def change(folder):
        data = bytearray((folder / file).read_bytes())
        data[at] ^= 0x40
        (folder / file).write_bytes(data)

    return change


def numbers(change):
    """Apply `change(state)` to the tensors of the weights' file."""
    def rewrite(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def spoil(name):
    return numbers(lambda state: state[name].view(-1)[3].fill_(NAN))


def fields(**changes):
    """Change what config.json says."""
    def rewrite(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return rewrite


def pickled(change):
    """The weights as `pytorch_model.bin` after `change(state)`."""
    def rewrite(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "pytorch_model.bin")

    return rewrite


def cast(dtype, name="fc.weight"):
    return numbers(lambda state: state.update({name: state[name].to(dtype)}))


def exploit(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(), 2))


class Exploit:
    def __reduce__(self):
        return pytest.fail, ("code in a pickle ran",)


class Streamer:
    """Raises when the first new tokens come."""

    def put(self, value):
        if value.dim() == 1:
            raise RuntimeError("the streamer broke")

    def end(self):
        pass


def broken(*args, **kwargs):
    raise RuntimeError("the user's function broke")


def processor(change):
    return lambda input_ids, scores: change(scores)


def chat(role, content="hi"):
    return [{"role": role, "content": content}]


CALIBRATION = {"promise": "accuracy_drop<=1%", "options": {"rule": "fsd", "threshold": 0.1}, "temperature": 0.0,
               "target": "t", "head": "h", "dtype": "d", "tree": "t", "prompts": "p", "answers": 300, "measured": {},
               "curve": []}


def calibrations(**changes):
    return json.dumps({"calibrations": [CALIBRATION | changes]})


def logs(*cycles):
    return json.dumps({"logs": [{"rule": "Exact(threshold=0.0)", "temperature": 0.0, "cycles": cycles}]})


# (what is called, what is given, call, error or True, message)
CASES = [
    # generate: prompts
    ("generate", "no prompt", lambda w: w.generate(None), TypeError, "got NoneType"),
    ("generate", "bytes", lambda w: w.generate(b"hi"), TypeError, "got bytes"),
    ("generate", "a dict", lambda w: w.generate(chat("user")[0]), TypeError, "got dict"),
    ("generate", "a numpy array", lambda w: w.generate(np.array(PROMPT)), TypeError, "got ndarray"),
    ("generate", "numpy ints", lambda w: w.answers([np.int64(token) for token in PROMPT]), True, ""),
    ("generate", "an empty list", lambda w: w.generate([]), ValueError, "the prompt is empty"),
    ("generate", "empty text is <s>", lambda w: len(w.generate("").token_ids) == 12, True, ""),
    ("generate", "an over-long prompt", lambda w: w.generate([1] * 500), ValueError, "500 tokens.*at most 127"),
    ("generate", "over-long text", lambda w: w.generate("a" * 5000), ValueError, "5001 tokens"),
    ("generate", "a float tensor", lambda w: w.generate(IDS.float()), ValueError, "integer .*torch.float32"),
    ("generate", "a complex tensor", lambda w: w.generate(torch.tensor([1j])), ValueError, "torch.complex64"),
    ("generate", "a 0-D tensor", lambda w: w.generate(torch.tensor(3)), ValueError, r"\[L\] or \[1, L\]"),
    ("generate", "a 3-D tensor", lambda w: w.generate(IDS[None]), ValueError, r"\[1, 1, 12\]"),
    ("generate", "a tensor without data", lambda w: w.generate(IDS.to("meta")), ValueError, "a prompt tensor"),
    ("generate", "nested lists", lambda w: w.generate([[PROMPT]]), TypeError, "prompt 0 of 1"),
    ("generate", "an empty prompt in a batch", lambda w: w.generate([PROMPT, []]), ValueError, "prompt 1 of 2.* empty"),
    ("generate", "a padded batch", lambda w: w.generate(IDS.repeat(2, 1)), ValueError, "a batch is a list of prompts"),
    ("generate", "too few seeds", lambda w: w.generate([PROMPT] * 2, seed=[1]), ValueError, "one for each prompt"),
    ("generate", "ids with a bool", lambda w: w.generate([3, True]), TypeError, "token ids"),
    ("generate", "a negative id", lambda w: w.generate([3, -1]), ValueError, "token id -1"),
    ("generate", "an id past the end", lambda w: w.generate([3, VOCAB]), ValueError, "token id 32 .*0 to 31"),
    ("generate", "a surrogate", lambda w: w.generate("a\ud800b"), ValueError, "lone surrogate .* at 1"),
    ("generate", "a zero byte", lambda w: len(w.generate("a\0b").token_ids) == 12, True, ""),
    ("generate", "a role that is no text", lambda w: w.generate(chat(3)), ValueError, '"role" and "content"'),
    ("generate", "no role", lambda w: w.generate([{"content": "hi"}]), ValueError, '"role" and "content"'),
    ("generate", "content in parts", lambda w: w.generate(chat("user", [{"text": "a"}])), ValueError, "both text"),
    ("generate", "a surrogate in a chat", lambda w: w.generate(chat("user", "\udfff")), ValueError, "surrogate"),
    ("generate", "a role the template refuses",
     lambda w: w.generate(chat("wizard"), EagleModel.from_parts(w.pair.target.model, w.pair.draft, strict_tokenizer())),
     ValueError, "refuses the chat: only users"),
    ("generate", "text without end", lambda w: w.generate("a" * 10**7), ValueError,
     "the prompt has 10000000 characters, more than the target's 128 positions can hold"),
    ("generate", "a chat without end", lambda w: w.generate(chat("user", "a" * 10**7)), ValueError, "than the target"),
    *(("generate", f"a template that multiplies: {template}",
       lambda w, template=template: w.generate(chat("user", "abc"), w.with_template(template)), ValueError,
       "chat template makes more than 65536 characters of the chat")
      for template in ("{{ messages[0].content * 10**12 }}", "{{ 10**12 * 'abc' }}", "{{ [messages] * 10**12 }}",
                       "{{ 'a' * 10**6 }}", "{{ messages[0].content * 10**5 }}",
                       "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
                       "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}")),
    ("generate", "a template that multiplies a little",
     lambda w: w.answers_text("abcabcabc", w.with_template("{{ messages[0].content * 3 }}")), True, ""),
    ("generate", "a template that is none",
     lambda w: w.generate(chat("user"), w.with_template("{% for %}")), ValueError, "refuses the chat"),
    ("generate", "no chat template",
     lambda w: w.generate(chat("user"), EagleModel.from_parts(w.pair.target.model, w.pair.draft, bare_tokenizer())),
     ValueError, "no chat template"),
    ("generate", "no tokenizer",
     lambda w: w.generate("hi", EagleModel.from_parts(w.pair.target.model, w.pair.draft)), ValueError, "no tokenizer"),
    ("generate", "a model of another kind", lambda w: w.generate(model=tiny_target()), TypeError, "eagle_fsd.load"),
    # generate: numbers
    ("generate", "0 new tokens", lambda w: w.generate(max_new_tokens=0), ValueError, "at least 1, got 0"),
    ("generate", "-1 new tokens", lambda w: w.generate(max_new_tokens=-1), ValueError, "at least 1, got -1"),
    ("generate", "1.5 new tokens", lambda w: w.generate(max_new_tokens=1.5), TypeError, "an int, got 1.5"),
    ("generate", "True new tokens", lambda w: w.generate(max_new_tokens=True), TypeError, "an int, got True"),
    ("generate", "10^30 new tokens end at the last position",
     lambda w: len(w.generate(max_new_tokens=10**30).token_ids) == 128 - len(PROMPT), True, ""),
    ("generate", "NaN temperature", lambda w: w.generate(temperature=NAN), ValueError, "temperature .*got nan"),
    ("generate", "infinite temperature", lambda w: w.generate(temperature=INF), ValueError, "temperature .*got inf"),
    ("generate", "a temperature that float32 has not", lambda w: w.generate(temperature=1e-320), ValueError, "1e-06"),
    ("generate", "NaN top_p", lambda w: w.generate(top_p=NAN), ValueError, r"top_p must be .*\(0, 1\], got nan"),
    ("generate", "top_k as a float", lambda w: w.generate(top_k=2.0), TypeError, "top_k must be an int"),
    ("generate", "NaN penalty", lambda w: w.generate(repetition_penalty=NAN), ValueError, "repetition_penalty"),
    ("generate", "a negative seed", lambda w: w.generate(seed=-1), ValueError, "seed must be at least 0"),
    ("generate", "a huge seed", lambda w: w.generate(seed=2**63), ValueError, r"seed must be below 2\*\*63"),
    ("generate", "a float seed", lambda w: w.generate(seed=1.0), TypeError, "seed must be an int"),
    ("generate", "ignore_eos as text", lambda w: w.generate(ignore_eos="no"), TypeError, "ignore_eos must be a bool"),
    # generate: rules
    ("generate", "NaN threshold", lambda w: w.generate(threshold=NAN), ValueError, "threshold .*got nan"),
    ("generate", "infinite threshold of fsd", lambda w: len(w.generate(threshold=INF).token_ids) == 12, True, ""),
    ("generate", "infinite threshold of tilt", lambda w: w.generate(acceptance="tilt", threshold=INF), ValueError,
     r"\[0, 1000\], got inf"),
    ("generate", "a tensor as threshold", lambda w: w.generate(threshold=torch.tensor(0.1)), TypeError, "a number"),
    ("generate", "an unknown rule", lambda w: w.generate(acceptance="best"), ValueError, "'best'; accepted: exact"),
    ("generate", "an unknown divergence", lambda w: w.generate(divergence="l2"), ValueError, "'l2'; accepted: kl"),
    ("generate", "an unknown divergence, not gated on",
     lambda w: w.generate(acceptance="tilt", divergence="js"), ValueError, "has no option 'divergence'"),
    ("generate", "a NaN budget", lambda w: w.generate(budget=NAN), ValueError, "budget .*got nan"),
    ("generate", "a budget as text", lambda w: w.generate(budget="1"), TypeError, "a number of nats"),
    ("generate", "a promise of another form", lambda w: w.generate(quality="fast", threshold=None), ValueError,
     "is no promise; accepted are such as"),
    ("generate", "a promise that was not calibrated", lambda w: w.generate(quality="kl<=0.1", threshold=None),
     ValueError, "not calibrated for kl<=0.1"),
    ("generate", "a tree as tuple", lambda w: w.generate(tree=(16, 5, 4)), TypeError, "tree must be a TreeConfig"),
    ("generate", "a rule that returns nothing", lambda w: w.rule(lambda v: None), TypeError, "a Decision or a Tensor"),
    ("generate", "a rule of another shape", lambda w: w.rule(lambda v: v.warped_logits[0]), ValueError, "of shape"),
    ("generate", "a rule of integers", lambda w: w.rule(lambda v: v.warped_logits.long()), TypeError, "float tensor"),
    ("generate", "a rule of NaN", lambda w: w.rule(lambda v: v.warped_logits * NAN), ValueError, "not NaN"),
    ("generate", "a rule without weight", lambda w: w.rule(lambda v: v.warped_logits - INF), ValueError, "above -inf"),
    ("generate", "a rule that raises", lambda w: w.rule(broken), RuntimeError, "the user's function broke"),
    ("generate", "a rule that writes into the logits",
     lambda w: len(w.rule(lambda v: v.warped_logits.zero_()).token_ids) == 12, True, ""),
    ("generate", "a rule without known KL and a budget",
     lambda w: w.rule(lambda v: v.warped_logits, budget=1.0, temperature=1.0), ValueError, "whose KL is known"),
    # generate: ends, processors, streamers
    ("generate", "an empty stop string", lambda w: w.generate(stop=["a", ""]), ValueError, "non-empty strings"),
    ("generate", "a stop string as bytes", lambda w: w.generate(stop=b"a"), TypeError, "stop must be a string or"),
    ("generate", "0 as stop string", lambda w: w.generate(stop=0), TypeError, "stop must be a string or"),
    ("generate", "a stop string in several tokens", lambda w: stops(w, 1, 4), True, ""),
    ("generate", "two stop strings, the later one first", lambda w: stops(w, 1, 4, 5, 7), True, ""),
    ("generate", "a stop string of special characters", lambda w: w.answers(stop="a.*(\\[$"), True, ""),
    ("generate", "a surrogate as stop string", lambda w: w.generate(stop="\ud800"), ValueError, "lone surrogate"),
    ("generate", "a stop token past the end", lambda w: w.generate(stop_token_ids=[VOCAB]), ValueError, "token id 32"),
    ("generate", "a bool as stop token", lambda w: w.generate(stop_token_ids=[True]), TypeError, "an int, got True"),
    ("generate", "bytes as stop tokens", lambda w: w.generate(stop_token_ids=b"a"), TypeError, "stop_token_ids"),
    ("generate", "a processor outside a list", lambda w: w.generate(logits_processor=broken), TypeError, "a list"),
    ("generate", "a number as processor", lambda w: w.generate(logits_processor=[5]), TypeError, "must hold functions"),
    ("generate", "a processor that gives NaN",
     lambda w: w.generate(logits_processor=[processor(lambda s: s * NAN)]), ValueError, "no token can be drawn.*nan"),
    ("generate", "a processor that bans everything",
     lambda w: w.sampled(logits_processor=[processor(lambda s: s - INF)]), ValueError, "no token can be drawn.*-inf"),
    ("generate", "a processor of another shape",
     lambda w: w.generate(logits_processor=[processor(lambda s: s[:, :1])]), ValueError, r"\[1, 32\], got \[1, 1\]"),
    ("generate", "a processor that returns nothing",
     lambda w: w.generate(logits_processor=[processor(lambda s: None)]), ValueError, "got None"),
    ("generate", "a processor in half precision",
     lambda w: w.answers(logits_processor=[processor(lambda s: s.half())]), True, ""),
    ("generate", "a processor that raises", lambda w: w.generate(logits_processor=[processor(broken)]), RuntimeError,
     "the user's function broke"),
    ("generate", "a criterion that raises", lambda w: w.generate(stopping_criteria=[broken]), RuntimeError, "broke"),
    ("generate", "a criterion that answers nothing",
     lambda w: w.generate(stopping_criteria=[lambda ids, scores: None]), TypeError, "a bool or a tensor of one"),
    ("generate", "a number as criterion", lambda w: w.generate(stopping_criteria=[5]), TypeError, "stopping_criteria"),
    ("generate", "a streamer that raises in the middle", lambda w: w.generate(streamer=Streamer()), RuntimeError,
     "the streamer broke"),
    ("generate", "text as streamer", lambda w: w.generate(streamer="stdout"), TypeError, "methods put and end"),
    # custom_generate
    ("custom_generate", "a direct call", lambda w: custom_generate(w.pair.target.model, IDS), TypeError, "by generate"),
    ("custom_generate", "no head", lambda w: w.inside(draft=None), ValueError, "draft= is missing"),
    ("custom_generate", "a number as head", lambda w: w.inside(draft=5), TypeError, "a directory or a hub id, got 5"),
    ("custom_generate", "beams", lambda w: w.inside(num_beams=2), ValueError, "num_beams must be 1"),
    ("custom_generate", "padding on the right",
     lambda w: w.inside(attention_mask=torch.tensor([[1] * (len(PROMPT) - 1) + [0]])), ValueError, "on the left only"),
    ("custom_generate", "padding", lambda w: w.inside(attention_mask=(IDS != 3).long()), ValueError,
     "padded on the left only"),
    ("custom_generate", "a mask of ones", lambda w: w.inside(attention_mask=torch.ones_like(IDS)).shape[1] == 24, True,
     ""),
    ("custom_generate", "a huge seed", lambda w: w.inside(seed=2**70), ValueError, r"below 2\*\*63"),
    ("custom_generate", "a head of another target",
     lambda w: w.inside(draft=tiny_head(tiny_target(vocab_size=40))), ValueError, "vocabulary size is 40"),
    # The options that calls are made of
    ("SamplingOptions", "half a token", lambda w: SamplingOptions(max_new_tokens=0.5), TypeError, "must be an int"),
    ("SamplingOptions", "a NaN", lambda w: SamplingOptions(temperature=math.nan), ValueError, "temperature must be 0"),
    ("AcceptanceOptions", "two choices", lambda w: AcceptanceOptions(threshold=0.1, quality="kl<=1"), ValueError,
     "leave acceptance=, threshold=, divergence= and gate_threshold= out"),
    ("AcceptanceOptions", "a budget in words", lambda w: AcceptanceOptions(budget="all"), TypeError, "number of nats"),
    ("LoadOptions", "two places", lambda w: LoadOptions(device="cpu", device_map="auto"), ValueError, "not both"),
    ("LoadOptions", "a head alone", lambda w: LoadOptions(draft="d"), ValueError, "target= is missing"),
    # TreeConfig
    ("TreeConfig", "no room for a draft", lambda w: TreeConfig(total_tokens=1), ValueError, "at least 2"),
    ("TreeConfig", "a tree without end", lambda w: TreeConfig(16, 10**9, 4), ValueError, "depth must be at most 256"),
    ("TreeConfig", "text", lambda w: TreeConfig("16"), TypeError, "must be an int, got '16'"),
    ("TreeConfig", "a bool temperature", lambda w: TreeConfig(draft_temperature=True), ValueError, "positive number"),
    ("TreeConfig", "text as reach", lambda w: TreeConfig(least_reach="a"), ValueError, "least_reach must be a number"),
    # rules
    ("RULES", "another name", lambda w: RULES["greedy"], KeyError, "greedy"),
    ("RULES", "a rule with NaN", lambda w: RULES["fsd"](NAN), ValueError, "got nan"),
    ("make_rule", "a class", lambda w: make_rule(RULES["fsd"]), TypeError, "a name, a rule or a function"),
    ("make_rule", "an unknown option", lambda w: make_rule("fsd", guard=1), ValueError, "accepted: threshold, head_g"),
    ("make_rule", "a NaN guard", lambda w: make_rule("fsd", head_guard=NAN), ValueError, r"in \[0, 1\], got nan"),
    ("make_rule", "a list as sibling", lambda w: make_rule("fsd", sibling=["draft"]), ValueError, "one of target"),
    ("Decision", "no weights", lambda w: Decision(None), TypeError, "float tensor .*got None"),
    ("Decision", "stops of another shape",
     lambda w: w.rule(lambda v: Decision(v.warped_logits, stop=v.is_child[0])), ValueError, "Decision.stop"),
    ("Decision", "a number as KL", lambda w: w.rule(lambda v: Decision(v.warped_logits, kl=5)), TypeError, "kl must"),
    ("Verification", "an unknown divergence", lambda w: w.rule(lambda v: v.divergence("l2")), ValueError, "accepted"),
    ("Verification", "nothing", lambda w: Verification(), TypeError, "missing"),
    # results
    ("Chat", "no tokenizer", lambda w: Chat(tiny_pair()), ValueError, "a tokenizer with a chat template"),
    ("Chat", "a number as system text", lambda w: w.chat(system=5).send("a"), ValueError, '"content", both text'),
    ("Chat", "a number as message", lambda w: w.chat().send(5), ValueError, '"content", both text'),
    ("Chat", "a message that is too long", lambda w: w.chat().send("a" * 500), ValueError, "the target takes at most"),
    ("Chat", "an option of another name", lambda w: w.chat(speed=2).send("a"), TypeError, "speed"),
    ("Session", "another model's", lambda w: w.other_session(), ValueError, "one Session per model"),
    ("Session", "text", lambda w: w.generate(session="mine"), TypeError, "session must be a Session or None"),
    ("Engine", "text as model", lambda w: Engine("smollm2"), TypeError, "from eagle_fsd.load, got str"),
    ("Engine", "half a row", lambda w: Engine(w.pair, max_rows=0.5), TypeError, "max_rows must be an int, got 0.5"),
    ("Engine", "room for nothing", lambda w: Engine(w.pair, max_tokens=3), ValueError, "max_tokens must be at least"),
    ("Engine", "an option with a slip", lambda w: w.ask_engine(max_token=5), TypeError, "unknown option 'max_token'"),
    ("Engine", "a batch", lambda w: w.ask_engine([PROMPT, PROMPT]), TypeError, "not a mixture or others"),
    ("QueueFull", "too many requests", lambda w: w.ask_engine(requests=2), QueueFull, "1 requests wait already"),
    ("EngineClosed", "after close", lambda w: w.ask_engine(closed=True), EngineClosed, "it was closed"),
    ("Ticket", "nothing", lambda w: Ticket(), TypeError, "missing"),
    ("Piece", "nothing", lambda w: Piece(), TypeError, "missing"),
    ("Output", "nothing", lambda w: Output(), TypeError, "missing"),
    ("Stats", "an unknown field", lambda w: Stats(tokens=5), TypeError, "tokens"),
    ("Receipt", "too little", lambda w: Receipt("exact"), TypeError, "missing"),
    # heads on disk
    ("load_head", "nothing", lambda w: load_head(None), TypeError, "a directory or a hub id, got None"),
    ("load_head", "no such directory", lambda w: load_head("/no/such/head"), ValueError, "there is no directory"),
    ("load_head", "a file", lambda w: load_head(__file__), ValueError, "test_hostile.py' is a file"),
    ("load_head", "no config", lambda w: w.head(remove("config.json")), ValueError, "no config.json"),
    ("load_head", "a broken config", lambda w: w.head(write("config.json", "{")), ValueError, "is no Llama config"),
    ("load_head", "a config of lists", lambda w: w.head(write("config.json", "[" * 9**5)), ValueError, "no Llama con"),
    ("load_head", "a config of sizes no head has",
     lambda w: w.head(write("config.json", '{"num_hidden_layers": 1, "vocab_size": 1000000000000000}')), ValueError,
     "describes no head that can be made"),
    *(("load_head", f"{name} {value!r}",
       lambda w, name=name, value=value: w.head(fields(**{"rope_parameters": None, name: value})), ValueError,
       f"config.json.*{name}")
      for name, value in (
          ("hidden_act", "magic"), ("hidden_act", 3), ("rope_theta", NAN), ("rope_theta", -1.0), ("rope_theta", "x"),
          ("rope_theta", 0), ("rms_norm_eps", NAN), ("rms_norm_eps", -1.0), ("rms_norm_eps", "a"),
          ("num_key_value_heads", 3), ("intermediate_size", -1), ("intermediate_size", 0), ("vocab_size", 0),
          ("hidden_size", 0), ("max_position_embeddings", -5))),
    *(("load_head", f"a rotary embedding {rope}",
       lambda w, rope=rope: w.head(fields(rope_theta=None, rope_parameters=rope)), ValueError, f"config.json.*{word}")
      for rope, word in (({"rope_type": "magic", "rope_theta": 1e4}, "rope_type"), ({"rope_type": "yarn"}, "factor"),
                         ({"rope_type": "linear", "factor": NAN, "rope_theta": 1e4}, "factor"))),
    ("load_head", "weights by number", lambda w: w.head(pickled(lambda state: state.update({3: torch.ones(1)}))),
     ValueError, "no dictionary of tensors by name"),
    ("load_head", "sparse weights",
     lambda w: w.head(pickled(lambda state: state.update({"fc.weight": state["fc.weight"].to_sparse()}))), ValueError,
     "fc.weight is no plain tensor but torch.sparse_coo"),
    ("load_head", "weights without data",
     lambda w: w.head(pickled(lambda state: state.update({"fc.weight": state["fc.weight"].to("meta")}))), ValueError,
     "fc.weight is no plain tensor but meta"),
    *(("load_head", f"weights of {dtype}", lambda w, dtype=dtype: w.head(cast(dtype)), ValueError,
       f"fc.weight is of {dtype}; read are .* quantised are not")
      for dtype in (torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2)),
    ("load_head", "weights of float64", lambda w: bool(w.head(cast(torch.float64))), True, ""),
    ("load_head", "empty weights", lambda w: w.head(cut(0)), ValueError, "model.safetensors cannot be read"),
    ("load_head", "truncated weights", lambda w: w.head(cut(-2)), ValueError, "model.safetensors cannot be read"),
    *(("load_head", f"bit flipped in byte {at} of the header", lambda w, at=at: w.head(flip(at)), ValueError,
       "model.safetensors") for at in (0, 3, 7, 8, 20, 60, 200)),
    ("load_head", "a number that is not finite", lambda w: w.head(spoil("fc.weight")), ValueError,
     "fc.weight holds values that are not finite"),
    ("load_head", "a bit flipped among the numbers goes unnoticed", lambda w: bool(w.head(flip(-2))), True, ""),
    ("load_head", "a pickle with code in it", lambda w: w.head(exploit), ValueError, "more than tensors"),
    ("save_head", "a state dict", lambda w: save_head({}, w.folder / "new"), TypeError, "writes a DraftHead, got dict"),
    ("save_head", "a path as file", lambda w: save_head(w.pair.draft, w.folder / "new", file="../x"), ValueError,
     "file must be one of model.safetensors"),
    ("save_head", "dtype as text", lambda w: save_head(w.pair.draft, w.folder / "new", dtype="bfloat16"), TypeError,
     "a torch dtype or None"),
    ("save_head", "integers", lambda w: save_head(w.pair.draft, w.folder / "new", dtype=torch.int8), ValueError,
     "floating point"),
    ("save_head", "a file as directory", lambda w: save_head(w.pair.draft, __file__), OSError, "Not a directory"),
    ("load_head", "a draft vocabulary with code in it",
     lambda w: w.head(lambda folder: (folder / "token_map.pt").write_bytes(pickle.dumps(Exploit(), 2))), ValueError,
     "token_map.pt was refused, since it holds more than tensors"),
    ("load_head", "a draft vocabulary of another target",
     lambda w: w.head(lambda folder: torch.save([VOCAB], folder / "token_map.pt")), ValueError,
     "token_map.pt cannot be used: draft token 32"),
    ("DraftHead", "a dict as config", lambda w: DraftHead({}), TypeError, "made from a LlamaConfig, got dict"),
    ("DraftHead", "two layers", lambda w: DraftHead(LlamaConfig(**SIZES)), ValueError, "1 layer, the config has 2"),
    ("EagleModel", "text as target", lambda w: EagleModel.from_parts("gpt2", None), TypeError, "target must be a Pre"),
    ("EagleModel", "text as head", lambda w: EagleModel.from_parts(w.pair.target.model, "head"), TypeError, "draft"),
    ("EagleModel", "text as tokenizer", lambda w: EagleModel.from_parts(w.pair.target.model, None, "gpt2"), TypeError,
     "tokenizer must be"),
    ("EagleModel", "a head of another hidden size",
     lambda w: EagleModel.from_parts(tiny_target(hidden_size=32), tiny_head(tiny_target())), ValueError,
     "hidden size is 16, the target's is 32"),
    ("EagleModel", "a target with NaN", lambda w: EagleModel.from_parts(spoiled_target(), None), ValueError,
     "lm_head.weight holds values that are not finite"),
    # load
    ("load", "text as compile", lambda w: load(compile="yes"), TypeError, "compile must be a bool, got 'yes'"),
    ("load", "only a target", lambda w: load("somewhere"), ValueError, "draft= is missing"),
    ("load", "a number as target", lambda w: w.load(5), TypeError, "target must be a directory or a hub id, got 5"),
    ("load", "no such target", lambda w: w.load("/no/such/target"), ValueError, "there is no directory '/no/such"),
    ("load", "a file as target", lambda w: w.load(__file__), ValueError, "is a file"),
    ("load", "a target without config", lambda w: w.damaged_target(remove("config.json")), ValueError, "Unrecognized"),
    ("load", "a target with a broken config", lambda w: w.damaged_target(write("config.json", "{")), OSError,
     "config.json' is not a valid JSON"),
    ("load", "a target without weights", lambda w: w.damaged_target(remove("model.safetensors")), OSError, "no file"),
    ("load", "a truncated target", lambda w: w.damaged_target(cut(-2)), ValueError, "cannot be loaded as a causal LM"),
    *(("load", f"a target with a bit flipped in byte {at} of the header", lambda w, at=at: w.damaged_target(flip(at)),
       ValueError, "cannot be loaded as a causal LM") for at in (0, 7, 20, 60)),
    ("load", "a target that lacks weights",
     lambda w: w.damaged_target(numbers(lambda state: state.pop("model.layers.0.mlp.up_proj.weight"))), ValueError,
     "lacks weights: model.layers.0.mlp.up_proj.weight"),
    ("load", "a target with NaN", lambda w: w.damaged_target(spoil("model.layers.1.mlp.up_proj.weight")), ValueError,
     "model.layers.1.mlp.up_proj.weight holds values that are not finite"),
    ("load", "a target without tokenizer",
     lambda w: w.damaged_target(remove("tokenizer.json")).tokenizer is None, True, ""),
    ("load", "a tokenizer that is none",
     lambda w: w.damaged_target(write("tokenizer.json", "{}")).tokenizer is None, True, ""),
    ("load", "an unknown dtype", lambda w: w.load(dtype="float99"), ValueError, "dtype must be .*'float99'"),
    ("load", "an integer dtype", lambda w: w.load(dtype=torch.int8), ValueError, "dtype must be .*torch.int8"),
    ("load", "an unknown device", lambda w: w.load(device="abacus"), ValueError, "device 'abacus' cannot be used"),
    ("load", "a device that is not there", lambda w: w.load(device="cuda:99"), ValueError, "cannot be used here"),
    ("load", "a device without data", lambda w: w.load(device="meta"), ValueError, "device 'meta' cannot be used"),
    ("load", "two places", lambda w: w.load(device="cpu", tp_plan="auto"), ValueError, "or tp_plan=.*not both"),
    ("load", "a plan for nobody", lambda w: w.load(device=None, tp_plan="auto"), ValueError, "torchrun"),
    ("load", "a plan that is none", lambda w: w.load(device=None, tp_plan="all"), ValueError,
     'tp_plan must be "auto".*got .all.'),
    ("load", "an empty plan", lambda w: w.load(device=None, tp_plan={}), ValueError, "tp_plan must be"),
    ("load", "a quantisation by name", lambda w: w.load(quantization_config="int8"), TypeError,
     "quantization_config must be one of transformers or None, got 'int8'"),
    ("load", "an unknown quantisation", lambda w: w.load(quantization_config={"quant_method": "magic"}), ValueError,
     "magic"),
    ("load", "an unknown attention", lambda w: w.load(attn_implementation="flash"), ValueError, "split, got 'fl"),
    ("load", "a tree as tuple", lambda w: w.load(tree=(16, 5, 4)), ValueError, "tree must be"),
    ("load", "calibrations nowhere", lambda w: w.load(calibration="/no/such"), ValueError, "there is no directory"),
    ("load", "broken calibrations", lambda w: w.beside_head("calibration.json", "{"), ValueError, "cannot be read"),
    ("load", "a calibrated promise of another form",
     lambda w: w.beside_head("calibration.json", calibrations(promise="fast")), ValueError, "'fast' is no promise"),
    ("load", "a calibrated rule that is none",
     lambda w: w.beside_head("calibration.json", calibrations(options={"rule": "best"})), ValueError, "'best'"),
    ("load", "a broken tree log", lambda w: w.beside_head("tree.json", "["), ValueError, "tree.json cannot be read"),
    ("load", "a tree log of no cycles", lambda w: w.beside_head("tree.json", logs()), ValueError, "without cycles"),
    ("load", "a tree log of children before parents",
     lambda w: w.beside_head("tree.json", logs([[0, -1], [0, 0], [-0.1, -0.2], []])), ValueError, "parents before"),
]


def strict_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only users') if messages[0].role != 'user' }}"
    return tokenizer


def bare_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def spoiled_target():
    target = tiny_target()
    with torch.no_grad():
        target.lm_head.weight[VOCAB - 1, 0] = INF
    return target


def stops(world, *edges):
    """Whether an answer ends with the first of the stop strings that are given by their edges in the free answer."""
    free = world.generate().text
    wanted = [free[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    output = world.generate(stop=wanted[::-1])
    return output.text == free[: free.find(wanted[0])] and output.finish_reason == "stop"


@pytest.mark.parametrize(("name", "given", "call", "expected", "message"), CASES,
                         ids=[f"{name}: {given}" for name, given, *_ in CASES])
def test_hostile_inputs(world, reference, monkeypatch, name, given, call, expected, message):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(world.folder / "cache"))
    if expected is True:
        assert call(world)
    else:
        with pytest.raises(expected, match=f"(?s){message}"):
            call(world)
    assert answers(world) == reference


def test_every_export_has_bad_inputs():
    refused = {name for name, _, _, expected, _ in CASES if expected is not True}
    assert refused == set(eagle_fsd.__all__)


def test_the_table_is_as_long_as_promised():
    assert len(CASES) == len({(name, given) for name, given, *_ in CASES}) >= 60


# What a cache file may hold in place of what was measured: another version's, damaged, or edited by hand.
FOREIGN = ["", "{", "[" * 9**5, "[]", "3", "null", '"text"', "\udcff"]
LATENCY = {"base": {"1": 1.0, "2": 2.0}, "level": {"1": 0.5}, "plain": 1.0, "row": 0.1, "plain_row": 0.0}
FOREIGN_ENTRIES = [
    [], 3, "text", {}, LATENCY | {"more": 1}, {name: LATENCY[name] for name in ("base", "level")},
    *(LATENCY | {"plain": bad} for bad in (0, -1.0, None, "fast", [1.0], NAN, INF)),
    *(LATENCY | {"base": bad} for bad in ({}, [], {"1": 0}, {"1": None}, {"one": 1.0}, {"2": 1.0}, 5, {"1": -1.0})),
    *(LATENCY | {"level": bad} for bad in ({}, [1.0], {"1": NAN}, {"1": -1.0}, None)),
    *(LATENCY | {"row": bad} for bad in (-1.0, None, NAN, "2 s")),
]


def damaged_cache(folder, file, content):
    """Write the file anew: text as it is; else in place of the only entry that is there."""
    path = folder / file
    if isinstance(content, str) and content in FOREIGN:
        path.write_text(content, errors="surrogateescape")
    else:
        (key,) = json.loads(path.read_text())
        path.write_text(json.dumps({key: content}))


@pytest.mark.parametrize("content", FOREIGN + FOREIGN_ENTRIES, ids=lambda content: str(content)[:40])
def test_a_latency_of_another_form_is_measured_again(world, tmp_path, monkeypatch, content):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    measured = []
    latency = Latency({1: 1.0, 2: 2.0}, {1: 0.5}, 1.0)
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *_: measured.append(1) or latency)
    world.load()
    damaged_cache(tmp_path, "latency.json", content)
    for count in (2, 2):  # kept in place of what was there
        assert world.load().trees.latency == latency and len(measured) == count


@pytest.mark.parametrize("content", [*FOREIGN, [], 3, None, {}, "magic", ["eager"]], ids=lambda each: str(each)[:40])
def test_an_attention_of_another_form_is_measured_again(world, tmp_path, monkeypatch, content):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    measured = []
    times = {"eager": 1.0, "sdpa": 2.0}
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure_attention", lambda *_: measured.append(1) or times)
    world.load(attn_implementation="auto", tree=None)
    damaged_cache(tmp_path, "attention.json", content)
    for count in (2, 2):
        pair = world.load(attn_implementation="auto", tree=None)
        assert pair.target.config._attn_implementation == "eager" and len(measured) == count


@pytest.fixture
def no_hub(monkeypatch):
    """What the hub is asked for while it cannot be reached; 23 seconds of trying are not begun."""
    asked = []

    def refuse(url, *args, **options):
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("eagle_fsd.data.sources.get_hf_file_metadata", refuse)
    monkeypatch.setattr("eagle_fsd.data.sources.cached_file", lambda *_, **__: pytest.fail("tried for long"))
    return asked


@pytest.mark.parametrize("call", [
    lambda w: load_head("someone/no-such-head"), lambda w: load("someone/no-such-target", "someone/no-such-head"),
    lambda w: load("someone/no-such-target", w.folder / "head"),
], ids=["a head", "a pair", "a target"])
def test_a_hub_that_cannot_be_reached_is_said_to_be(world, no_hub, call):
    with pytest.raises(OSError, match="'someone/no-such-.*the hub cannot be reached: Name or service not known"):
        call(world)
    assert len(no_hub) == 1


def test_what_was_fetched_is_used_while_the_hub_cannot_be_reached(world, no_hub, monkeypatch):
    """And of further files there are none."""
    kept = {name: str(world.folder / "head" / name) for name in ("config.json", "model.safetensors")}
    monkeypatch.setattr("eagle_fsd.data.sources.try_to_load_from_cache", lambda source, name: kept.get(name))
    monkeypatch.setattr("eagle_fsd.data.sources.cached_file", lambda source, name, **_: kept[name])
    assert load_head("someone/head").token_map is None
    assert [url.rpartition("/")[2] for url in no_hub] == ["token_map.pt"]


QUESTION = b'{"prompt": "hi"}'
DEEP = b"[" * 10**5 + b"]" * 10**5
QUESTION_FILES = [
    (b"\xef\xbb\xbf" + QUESTION, None),
    (QUESTION + b"\r\n\r\n" + QUESTION, None),
    (QUESTION + b"\ngarbage", r"questions.jsonl, line 2: not JSON: Expecting value, at character 1"),
    (b'{"prompt": ', r"line 1: not JSON: Expecting value, at character 12"),
    (b'{"prompt": ' + DEEP + b"}", "line 1: not JSON that can be read: nested too deep"),
    (QUESTION + b"\n" + DEEP, "line 2: not JSON that can be read: nested too deep"),
    (QUESTION + b"\n\xff\xfe", "line 2: not UTF-8"),
    ("hello".encode("utf-16"), "line 1: not UTF-8"),
    (b'{"turns": "hi"}', "line 1: turns must be a list of strings"),
    (b'{"turns": [["hi"]]}', "line 1: turns must be a list of strings"),
    (b'{"prompt": "hi", "question_id": [1]}', "line 1: question_id must be a number or a string"),
    (b'{"prompt": 3, "task_id": "a"}', "line 1: prompt must be a string"),
    (b'{"prompt": "hi", "task_id": "a", "test": "t"}', "line 1: 'entry_point' is missing"),
    (b"3", "line 1: not a JSON object"),
    (b"", "holds no question"),
    (b"\xef\xbb\xbf", "holds no question"),
]


@pytest.mark.parametrize(("content", "message"), QUESTION_FILES, ids=lambda each: str(each)[:40])
def test_question_files(tmp_path, capsys, content, message):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(content)
    if message is None:
        assert {question.turns for question in read_questions(path)} == {("hi",)}
        return
    with pytest.raises(ValueError, match=f"questions.jsonl.*{message.removeprefix('questions.jsonl')}"):
        read_questions(path)
    assert main(["tune", "--prompts", str(path)]) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1 and str(path) in errors and len(errors) < 400


@pytest.mark.parametrize("line", [b"garbage", DEEP, b"\xff"], ids=["garbage", "deep", "bytes"])
def test_a_line_of_a_log_that_is_none_is_named(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match="log.jsonl, line 2: not (JSON|UTF-8)"):
        read_lines(path)


def test_a_byte_order_mark_is_no_text_to_learn(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}')
    for name in ("text.txt", "rows.jsonl"):
        assert [record.text for record in read_records(str(tmp_path / name))] == ["hello"]


MISREAD = [
    ([], "Expected one of {generate, chat, demo, serve, heads, calibrate, tune, inspect, export, vocab}"),
    (["sing"], "Unrecognized options: sing"),
    (["generate"], "Missing from eagle-fsd generate: PROMPT"),
    (["generate", "hi", "--max-new-tokens", "many"], "--max-new-tokens: invalid literal for int.* 'many'"),
    (["generate", "hi", "--max-new-tokens"], "Missing value for argument '--max-new-tokens'"),
    (["generate", "hi", "--seed", "None"], "--seed: .* 'None'"),
    (["generate", "hi", "--tree", "16,5,four"], "--tree: '16,5,four' is no tree; it takes total_tokens,depth"),
    (["generate", "hi", "--tree", "1,5,4"], "TreeConfig.total_tokens must be at least 2, got 1"),
    (["generate", "hi", "--acceptance", "best"], "--acceptance: unknown rule 'best'; accepted: exact, fsd"),
    (["generate", "hi", "--attn-implementation", "flash"], "invalid choice 'flash' for .*'sdpa'"),
    (["generate", "hi", "--speed", "2"], "Unrecognized options: --speed"),
    (["generate", "hi", "--no-ignore-eos"], "Unrecognized options: --no-ignore-eos"),
    (["generate", "hi", "--draft", "head"], "--target is missing: give both --target and --draft, or neither"),
    (["generate", "hi", "--tp-plan", "auto", "--device", "cpu"], "give --device 'cpu' or --tp-plan 'auto', not both"),
    (["generate", "hi", "--quality", "good"], "'good' is no promise"),
    (["generate", "hi", "--quality", "kl<=0.02", "--threshold", "0.1"],
     "--quality 'kl<=0.02' chooses the rule: leave --acceptance, --threshold, "
     "--divergence and --gate-threshold out"),
    (["generate", "hi", "--budget", "nan"], "--budget must be at least 0 nats, got nan"),
    (["generate", "hi", "--temperature", "nan"], "--temperature must be .* got nan"),
    (["generate", "hi", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    (["chat", "--stop", ""], "--stop must hold non-empty strings, got ''"),
    (["chat", "--tp-plan", "auto"], "Unrecognized options: --tp-plan"),
    (["calibrate", "--prompts", "x", "--budget", "kl<=1", "--acceptance", "best"],
     r"--acceptance: .* \['best'\] .*\{exact,fsd,"),
    (["tune", "--prompts", "x", "--temperature", "-1"], "--temperature must be .* got -1"),
    (["export", "head", "--to", "word", "--out", "out"], "invalid choice 'word' for argument '--to'.* 'vllm'"),
    (["vocab", "head"], "Missing from eagle-fsd vocab: --data"),
    (["vocab", "head", "--data", "x", "--size", "8", "--coverage", "0.5"], "--size and --coverage are not allowed"),
]
COMMANDS = [
    (["generate", "hi", "--target", "/no/such"], "there is no directory '/no/such'"),
    (["generate", "hi", "--target", "some/model"], "--draft is missing, and no head is known for 'some/model'"),
    (["generate", "hi", "--target", "/no/such", "--draft", "/no/such"], "there is no directory '/no/such'"),
    (["generate", "hi", "--device", "abacus"], "--device 'abacus' cannot be used here"),
    (["generate", "hi", "--dtype", "float99"], "eagle-fsd: --dtype must be"),
    (["tune", "--prompts", "/no/such.jsonl"], "No such file"),
    (["calibrate", "--prompts", "/no/such.jsonl", "--budget", "fast"], "'fast' is no promise"),
    (["calibrate", "--prompts", "x", "--budget", "kl<=1", "--acceptance"], "--acceptance needs a rule: fsd, tilt"),
    (["calibrate", "--prompts", "x", "--budget", "kl<=1", "--acceptance", "exact"], "must be one of fsd, tilt"),
    (["inspect", "/no/such/head"], "there is no directory '/no/such/head'"),
    (["inspect", __file__], "is a file"),
    (["export", "/no/such/head", "--to", "vllm", "--out", "/no/such/out"], "there is no directory"),
    (["vocab", "/no/such/head", "--data", "text.txt"], "there is no directory '/no/such/head'"),
    (["vocab", "/no/such/head", "--data"], "--data needs a file"),
    (["demo", "--repeats", "0"], "--repeats must be at least 1"),
    (["tiny", "a\udcffb"], "lone surrogate"),
]


@pytest.mark.parametrize(("arguments", "message"), MISREAD, ids=lambda value: None)
def test_words_that_cannot_be_read_end_with_status_2(world, capsys, arguments, message):
    """With a message in a box, which names the flag, the value and what is accepted, before anything is loaded."""
    status, errors = world.command(capsys, *arguments)
    text = " ".join(re.sub("[|\u2500-\u257f]", " ", errors).split())
    assert status == 2 and re.search(message, text) and "Traceback" not in text and "Loading" not in text


@pytest.mark.parametrize(("arguments", "message"), COMMANDS, ids=lambda value: None)
def test_wrong_arguments_end_with_status_2_and_one_line(world, capsys, arguments, message):
    status, errors = world.command(capsys, *arguments)
    lines = [line for line in errors.splitlines() if line and "Loading weights" not in line]  # a bar of transformers
    assert status == 2 and len(lines) == 1 and message in lines[0]
