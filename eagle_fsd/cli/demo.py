"""`eagle-fsd demo`: the same prompts with and without drafting, shown and timed."""

from __future__ import annotations

import itertools
import math
import operator
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..options import GenerateOptions
from .arguments import Loading
from .terminal import BOLD, DIM, SourceStreamer, coloured, legend

if TYPE_CHECKING:
    from ..measure.methods import Answer
    from ..pair import EagleModel

BASELINE = "model.generate"
PROMPTS = {  # turns of user and assistant
    "question": ["How do plants make their food?"],
    "rewrite": ["Correct the spelling: I beleive she recieved the lettar yesturday. He was realy suprised, becuase it "
                "was adressed to his freind."],
    "function": ["Write a Python function that reverses a string."],
    "follow-up": ["What is the capital of France?", "The capital of France is Paris.", "What can I visit there?"],
}


@dataclass(frozen=True)
class DemoCommand:
    """Compare plain, exact and fuzzy decoding on a question, a rewrite, a function and a follow-up turn.

    In float32 exact writes the same tokens as model.generate; in bfloat16 (--dtype) two tokens can tie.

    Args:
        threshold: of fsd.
        max_new_tokens: of each answer.
    """

    threshold: float = 0.5
    max_new_tokens: int = 96
    pair: Loading = Loading(dtype="float32")

    def run(self) -> None:
        import torch

        from ..api import generate
        from ..measure.methods import hf_generate

        exact = GenerateOptions(acceptance="exact", max_new_tokens=self.max_new_tokens)
        ways = {"plain": exact, "exact": exact,
                f"fsd {self.threshold:g}": replace(exact, acceptance="fsd", threshold=self.threshold)}
        print("Loading the model and its draft head.", flush=True)
        model = self.pair.load()
        print(f"""
The model has {model.target.model.num_parameters() / 1e6:.0f} M parameters; {name_of(model.target.dtype)} on \
{model.target.device}, {torch.get_num_threads()} threads. All answers are greedy.

  plain    no drafting: one token per step.
  exact    a draft head proposes tokens; the model checks them all in one step and keeps those that it would have
           written itself: the same text in fewer steps.
  fsd      also keeps a drafted token where model and head nearly agree on what comes next (threshold
           {self.threshold:g}) and the model finds it nearly as probable as its own: another text.

{legend()}
Before that, unseen, each prompt is answered by model.generate.
""")
        answers: dict[str, list[Answer]] = {BASELINE: [], **{name: [] for name in ways}}
        baseline, hello = hf_generate(model), [{"role": "user", "content": "Hello"}]
        baseline(hello, 8)  # once unmeasured
        generate(hello, model, options=replace(exact, max_new_tokens=8))
        for kind, turns in PROMPTS.items():
            chat = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
            print("\n".join(coloured(f"[{kind}] {turn}", BOLD) for turn in turns), flush=True)
            answers[BASELINE].append(baseline(chat, self.max_new_tokens))
            seen: dict[str, Answer] = {}  # of this prompt
            for name, options in ways.items():
                sys.stdout.write(coloured(f"{name}: ", DIM))
                seen[name] = shown(model, chat, options, drafting=name != "plain")
                answers[name].append(seen[name])
                print(coloured(f"[{remarks(name, seen, model)}]", DIM), flush=True)
            print()
        print(f"{'method':<16}{'tokens':>8}{'tokens/s':>10}{'speed-up':>10}  same text as {BASELINE}")
        for name, given in answers.items():
            same = sum(ours.token_ids == theirs.token_ids
                       for ours, theirs in zip(given, answers[BASELINE], strict=True))
            print(f"{name:<16}{sum(len(answer.token_ids) for answer in given):>8}{rate(*given):>10.1f}"
                  f"{rate(*given) / rate(*answers[BASELINE]):>9.2f}x  {same} of {len(given)}")


def shown(model: EagleModel, chat: list[dict[str, str]], options: GenerateOptions, *, drafting: bool) -> Answer:
    """An answer, written as it comes."""
    from ..api import generate
    from ..measure.methods import Answer
    from ..pair import EagleModel

    used = model if drafting else EagleModel(model.target, None, model.tokenizer)
    started = time.perf_counter()
    output = generate(chat, used, options=options, streamer=SourceStreamer(model.tokenizer))
    return Answer(time.perf_counter() - started, output.token_ids, output.text, output)


def remarks(name: str, seen: Mapping[str, Answer], model: EagleModel) -> str:
    """What is to be said of the last of a prompt's answers, and of what it is beside those before it."""
    answer, plain = seen[name], seen["plain"]
    ours, theirs = answer.token_ids, plain.token_ids
    said = [f"{len(ours)} tokens, {rate(answer):.0f} tokens/s, "
            f"{answer.output.stats.mean_accepted_length:.1f} tokens per step"]
    if ours != theirs:
        shared = sum(itertools.takewhile(bool, map(operator.eq, ours, theirs)))
        longer = len(ours) - len(theirs)
        fuzzy = sum(receipt.source == "fuzzy" for receipt in answer.output.receipts)
        said += [f"{fuzzy} fuzzy tokens"] if fuzzy else []
        said.append(f"another text than plain after {shared} tokens")
        said += [f"{abs(longer)} tokens {'longer' if longer > 0 else 'shorter'}"] if longer else []
        if name == "exact":
            chances = [math.exp(each.output.receipts[shared].logprob) for each in (plain, answer)]
            tied = f", a tie in {name_of(model.target.dtype)}" if abs(chances[0] - chances[1]) < 0.05 else ""
            said.append(f"there plain's token has probability {chances[0]:.1%} and its own {chances[1]:.1%}{tied}")
    elif name != "plain":
        said.append("the same text as plain")
    said += [f"not faster than {other}" for other in seen if other != name and rate(answer) <= rate(seen[other])]
    return "; ".join(said)


def rate(*answers: Answer) -> float:
    """Tokens per second."""
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)


def name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
