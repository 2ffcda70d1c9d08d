"""`eagle-fsd demo`: the same prompts with and without drafting, shown and timed."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .arguments import Loading
from .terminal import BOLD, DIM, SourceStreamer, coloured, legend

if TYPE_CHECKING:
    from ..measure.methods import Answer

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

        from ..measure.methods import engine, hf_generate
        from ..options import GenerateOptions

        fuzzy = {"acceptance": "fsd", "threshold": self.threshold}
        GenerateOptions(**fuzzy, max_new_tokens=self.max_new_tokens)  # refused before anything is loaded
        ways = {"plain": {"acceptance": "exact", "plain": True}, "exact": {"acceptance": "exact"},
                f"fsd {self.threshold:g}": fuzzy}
        print("Loading the model and its draft head.", flush=True)
        model = self.pair.load()
        dtype = str(model.target.dtype).removeprefix("torch.")
        print(f"""
The model has {model.target.model.num_parameters() / 1e6:.0f} M parameters; {dtype} on {model.target.device}, \
{torch.get_num_threads()} threads. All answers are greedy.

  plain    no drafting: one token per step.
  exact    a draft head proposes tokens; the model checks them all in one step and keeps those that it would have
           written itself: the same text in fewer steps.
  fsd      also keeps a drafted token where model and head nearly agree on what comes next (threshold
           {self.threshold:g}) and the model finds it nearly as probable as its own: another text.

{legend()}
Each prompt is first answered by {BASELINE}, unseen, to compare with.
""")
        baseline, hello = hf_generate(model), [{"role": "user", "content": "Hello"}]
        for method in (baseline, engine(model, **fuzzy)):
            method(hello, 8)  # once unmeasured
        answers: dict[str, list[Answer]] = {BASELINE: [], **{name: [] for name in ways}}
        for kind, turns in PROMPTS.items():
            chat = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
            print("\n".join(coloured(f"[{kind}] {turn}", BOLD) for turn in turns), flush=True)
            answers[BASELINE].append(baseline(chat, self.max_new_tokens))
            seen: dict[str, Answer] = {}  # of this prompt
            for name, options in ways.items():
                sys.stdout.write(coloured(f"{name}: ", DIM))
                method = engine(model, **options, streamer=SourceStreamer(model.tokenizer))
                seen[name] = method(chat, self.max_new_tokens)
                answers[name].append(seen[name])
                print(coloured(f"[{remarks(name, seen, dtype)}]", DIM), flush=True)
            print()
        print(f"{'method':<16}{'tokens':>8}{'tokens/s':>10}{'speed-up':>10}  same text as {BASELINE}")
        for name, given in answers.items():
            same = sum(ours.token_ids == theirs.token_ids
                       for ours, theirs in zip(given, answers[BASELINE], strict=True))
            print(f"{name:<16}{sum(len(answer.token_ids) for answer in given):>8}{rate(*given):>10.1f}"
                  f"{rate(*given) / rate(*answers[BASELINE]):>9.2f}x  {same} of {len(given)}")


def remarks(name: str, seen: Mapping[str, Answer], dtype: str) -> str:
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
            tied = f", a tie in {dtype}" if abs(chances[0] - chances[1]) < 0.05 else ""
            said.append(f"there plain's token has probability {chances[0]:.1%} and its own {chances[1]:.1%}{tied}")
    elif name != "plain":
        said.append("the same text as plain")
    said += [f"not faster than {other}" for other in seen if other != name and rate(answer) <= rate(seen[other])]
    return "; ".join(said)


def rate(*answers: Answer) -> float:
    """Tokens per second."""
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)
