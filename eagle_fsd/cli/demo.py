"""`eagle-fsd demo`: the same prompts with and without drafting, shown and timed."""

from __future__ import annotations

import itertools
import operator
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

    Exact writes the tokens of model.generate. All of it is computed in float32, from weights of 16 bits. With --dtype
    bfloat16, which is faster with drafting, two tokens can tie in rounding, and texts may part.

    Args:
        threshold: of fsd.
        max_new_tokens: of each answer.
    """

    threshold: float = 0.5
    max_new_tokens: int = 64
    pair: Loading = Loading()

    def run(self) -> None:
        import torch

        from ..measure.methods import engine, hf_generate
        from ..options import GenerateOptions

        fuzzy = {"acceptance": "fsd", "threshold": self.threshold}
        GenerateOptions(**fuzzy, max_new_tokens=self.max_new_tokens)  # refused before anything is loaded
        print("Loading the model and its draft head. The first time takes a minute longer.", flush=True)
        model = self.pair.load()
        model.stock = model.stock_in(model.target.dtype)
        rounds = model.target.dtype != torch.float32
        print(f"""
A language model writes one token (a word or a part of one) per step. A small draft head guesses the next few,
and the model checks all guesses in one step. Three ways to answer the same prompts:

  {BASELINE}   without drafting, as transformers does it: one token per step.
  exact            keeps the guesses that the model would have written itself: the same text, in fewer steps.
  fsd {self.threshold:<13g}also keeps a guess where model and head nearly agree on what comes next (the threshold
                   says how nearly) and it is nearly as probable as the model's own choice: another text.

{legend()}
{model.stock.num_parameters() / 1e6:.0f} M parameters, computed in {str(model.target.dtype).removeprefix("torch.")}, \
{model.target.device}, {torch.get_num_threads()} threads. The most probable words are written; so small a model errs.
""")
        ways = {BASELINE: lambda **shown: hf_generate(model, **shown),
                "exact": lambda **shown: engine(model, acceptance="exact", **shown),
                f"fsd {self.threshold:g}": lambda **shown: engine(model, **fuzzy, **shown)}
        for way in ways.values():
            way()([{"role": "user", "content": "Hello"}], 8)  # once unmeasured
        answers: dict[str, list[Answer]] = {name: [] for name in ways}
        for kind, turns in PROMPTS.items():
            chat = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
            print("\n".join(coloured(f"[{kind}] {turn}", BOLD) for turn in turns), flush=True)
            for name, way in ways.items():
                print(coloured(f"{name}: ", DIM), end="")
                answers[name].append(way(streamer=SourceStreamer(model.tokenizer))(chat, self.max_new_tokens))
                said = remarks(answers[name][-1], answers[BASELINE][-1], rounds=rounds)
                print(coloured(f"[{said}]", DIM), flush=True)
            print()
        if rounds:
            print("In half precision tokens tie in rounding: texts of exact that differ part at a tie, and are the "
                  "model's own\nas well. With --dtype float32 they are the same.\n")
        print(f"{'in all':<16}{'tokens':>8}{'tokens/s':>10}{'speed-up':>10}  same text as {BASELINE}")
        for name, given in answers.items():
            same = sum(ours.token_ids == theirs.token_ids
                       for ours, theirs in zip(given, answers[BASELINE], strict=True))
            print(f"{name:<16}{sum(len(answer.token_ids) for answer in given):>8}{rate(*given):>10.1f}"
                  f"{rate(*given) / rate(*answers[BASELINE]):>9.2f}x  {same} of {len(given)}")


def remarks(answer: Answer, baseline: Answer, *, rounds: bool = False) -> str:
    """What is to be said of an answer, beside the one without drafting.

    Args:
        rounds: whether both are computed in half precision, where lossless texts may part at a tie.
    """
    ours, theirs = answer.token_ids, baseline.token_ids
    said = [f"{count(len(ours))}, {rate(answer):.0f} tokens/s"]
    if answer.output is None:
        return said[0]
    said[0] += f", {answer.output.stats.mean_accepted_length:.1f} tokens per step"
    if ours == theirs:
        said.append("the same text")
    else:
        shared, longer = sum(itertools.takewhile(bool, map(operator.eq, ours, theirs))), len(ours) - len(theirs)
        fuzzy = sum(receipt.source == "fuzzy" for receipt in answer.output.receipts)
        tied = ", where two tie in rounding" if rounds and not fuzzy else ""
        said.append(f"another text after {count(shared)}{tied}")
        said += [f"{count(fuzzy)} kept that the model would not have written"] if fuzzy else []
        said += [f"{count(abs(longer))} {'longer' if longer > 0 else 'shorter'}"] if longer else []
    said += ["not faster"] if rate(answer) <= rate(baseline) else []
    return "; ".join(said)


def count(tokens: int) -> str:
    return f"{tokens} token" + ("s" if tokens != 1 else "")


def rate(*answers: Answer) -> float:
    """Tokens per second."""
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)
