"""`eagle-fsd demo`: answer the same prompts with and without drafting, and time them."""

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
PROMPTS = {  # turns, of user and assistant alternately
    "question": ["How do plants make their food?"],
    "rewrite": ["Correct the spelling: I beleive she recieved the lettar yesturday. He was realy suprised, becuase it "
                "was adressed to his freind."],
    "function": ["Write a Python function that reverses a string."],
    "follow-up": ["What is the capital of France?", "The capital of France is Paris.", "What can I visit there?"],
}


@dataclass(frozen=True)
class DemoCommand:
    """Compare plain, exact and fuzzy decoding on a question, a rewrite, a function and a follow-up turn.

    Exact decoding gives the tokens of model.generate. The demo computes in float32 from 16-bit weights. With --dtype
    bfloat16 two tokens can tie after rounding, and the texts may differ from there.

    Args:
        threshold: threshold of fsd.
        max_new_tokens: most tokens per answer.
    """

    threshold: float = 0.5
    max_new_tokens: int = 64
    pair: Loading = Loading()

    def run(self) -> None:
        import torch

        from ..measure.methods import engine, hf_generate
        from ..options.generate import GenerateOptions

        fuzzy = {"acceptance": "fsd", "threshold": self.threshold}
        GenerateOptions(**fuzzy, max_new_tokens=self.max_new_tokens)  # raises before the models are loaded
        print("Loading the model and its draft head. This takes up to a minute and a half longer the first time, "
              "beside other work more.", flush=True)
        model = self.pair.load()
        model.stock = model.stock_in(model.target.dtype)
        half_precision = model.target.dtype != torch.float32
        print(f"""
A language model generates one token (a word or part of a word) per step. A small draft head proposes several
tokens, and the model verifies all of them in one step. The demo answers the same prompts in three ways:

  {BASELINE}   decodes without drafts, as in transformers: one token per step.
  exact            accepts the drafts that the model itself would have generated: the same text in fewer steps.
  fsd {self.threshold:<13g}also accepts a draft if model and head nearly agree on the next token (the threshold sets
                   how nearly) and it is nearly as probable as the model's own choice: the text can change.

{legend()}
{model.stock.num_parameters() / 1e6:.0f} M parameters, computed in {str(model.target.dtype).removeprefix("torch.")}, \
{model.target.input_device}, {torch.get_num_threads()} threads. Decoding is greedy. A model this small makes mistakes.
""")
        ways = {BASELINE: lambda **shown: hf_generate(model, **shown),
                "exact": lambda **shown: engine(model, acceptance="exact", **shown),
                f"fsd {self.threshold:g}": lambda **shown: engine(model, **fuzzy, **shown)}
        for way in ways.values():
            way()([{"role": "user", "content": "Hello"}], 8)  # warm-up
        answers: dict[str, list[Answer]] = {name: [] for name in ways}
        for kind, turns in PROMPTS.items():
            chat = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
            print("\n".join(coloured(f"[{kind}] {turn}", BOLD) for turn in turns), flush=True)
            for name, way in ways.items():
                print(coloured(f"{name}: ", DIM), end="")
                answers[name].append(way(streamer=SourceStreamer(model.tokenizer))(chat, self.max_new_tokens))
                summary = summarise(answers[name][-1], answers[BASELINE][-1], half_precision=half_precision)
                print(coloured(f"[{summary}]", DIM), flush=True)
            print()
        if half_precision:
            print("In half precision two tokens can tie after rounding. A text of exact can differ after a tie and is "
                  "still the\nmodel's own. With --dtype float32 the texts are the same.\n")
        print(f"{'total':<16}{'tokens':>8}{'tokens/s':>10}{'speed-up':>10}  same text as {BASELINE}")
        for name, ours in answers.items():
            same = sum(own.token_ids == theirs.token_ids for own, theirs in zip(ours, answers[BASELINE], strict=True))
            print(f"{name:<16}{sum(len(answer.token_ids) for answer in ours):>8}{rate(*ours):>10.1f}"
                  f"{rate(*ours) / rate(*answers[BASELINE]):>9.2f}x  {same} of {len(ours)}")


def summarise(answer: Answer, baseline: Answer, *, half_precision: bool = False) -> str:
    """Speed of an answer, and how it differs from the baseline.

    Args:
        half_precision: both are computed in half precision, so that lossless texts may differ after a tie.
    """
    ours, theirs = answer.token_ids, baseline.token_ids
    parts = [f"{count(len(ours))}, {rate(answer):.0f} tokens/s"]
    if answer.output is None:
        return parts[0]
    parts[0] += f", {answer.output.stats.mean_accepted_length:.1f} tokens per step"
    if ours == theirs:
        parts.append("same text")
    else:
        shared, longer = sum(itertools.takewhile(bool, map(operator.eq, ours, theirs))), len(ours) - len(theirs)
        fuzzy = sum(receipt.source == "fuzzy" for receipt in answer.output.receipts)
        tied = ", at a tie after rounding" if half_precision and not fuzzy else ""
        parts.append(f"text differs after {count(shared)}{tied}")
        parts += [f"{count(fuzzy)} accepted that the model would not have generated"] if fuzzy else []
        parts += [f"{count(abs(longer))} {'longer' if longer > 0 else 'shorter'}"] if longer else []
    parts += ["not faster"] if rate(answer) <= rate(baseline) else []
    return "; ".join(parts)


def count(tokens: int) -> str:
    return f"{tokens} token" + ("s" if tokens != 1 else "")


def rate(*answers: Answer) -> float:
    """Tokens per second."""
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)
