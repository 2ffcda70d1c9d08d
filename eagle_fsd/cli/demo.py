"""`eagle-fsd demo`: the same prompts by three methods, shown and then timed."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Loading
from .exits import check_counts
from .terminal import BOLD, COLOURS, DIM, RESET, SourceStreamer, use_colour

if TYPE_CHECKING:
    from ..experiments.methods import Answer
    from ..pair import EagleModel

DEMO_PROMPTS = Path(__file__).with_name("demo_prompts.json")


@dataclass(frozen=True)
class DemoCommand:
    """Compare plain, exact and fuzzy decoding.

    Args:
        threshold: of fsd.
        max_new_tokens: of each answer.
        repeats: timed runs per prompt and method (their median counts).
    """

    threshold: float = 0.3
    max_new_tokens: int = 200
    repeats: int = 2
    pair: Loading = Loading()

    def run(self) -> None:
        from ..experiments.methods import engine, hf_generate, interleaved

        check_counts(self, "repeats")
        model = self.pair.load()
        entries = json.loads(DEMO_PROMPTS.read_text(encoding="utf-8"))
        ours = {"exact": {"acceptance": "exact"},
                f"fsd {self.threshold:g}": {"acceptance": "fsd", "threshold": self.threshold}}
        self.show(model, entries, ours)
        print("The same again against the clock, one after the other on each prompt:", flush=True)
        methods = {"model.generate": hf_generate(model)}
        methods |= {name: engine(model, **options) for name, options in ours.items()}
        answers = interleaved(methods, [entry["prompt"] for entry in entries], self.max_new_tokens, self.repeats)
        print_table(answers, [entry["result"] for entry in entries])

    def show(self, model: EagleModel, entries: list[dict], ours: dict[str, dict]) -> None:
        """The machine, a legend, and each prompt with its answers in colour."""
        import torch

        from ..api import generate

        print(f"{type(model.target.model).__name__} on {model.target.device}, {model.target.dtype}, "
              f"{torch.get_num_threads()} threads; greedy decoding. Tree: {model.describe_tree(None)}\n")
        colour = use_colour()
        legend = {source: f"{COLOURS[source]}{source}{RESET}" if colour else source for source in COLOURS}
        print(f"Token sources: {legend['exact']} = drafted, and the target's own choice; {legend['fuzzy']} = drafted "
              f"and accepted by the rule only; {legend['target']} = drawn by the target.\n")
        for entry in entries:
            prompt = entry["prompt"]
            shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            print(f"{BOLD if colour else ''}[{entry['kind']}] {shown}{RESET if colour else ''}")
            for name, options in ours.items():
                sys.stdout.write(f"{DIM if colour else ''}{name}:{RESET if colour else ''} ")
                generate(prompt, model, max_new_tokens=self.max_new_tokens, **options,
                         streamer=SourceStreamer(model.tokenizer, colour))
            print()


def print_table(answers: dict[str, list[Answer]], results: list[str | None]) -> None:
    """Speed, tau and correctness of each method's answers to the demo's prompts."""
    from ..experiments.grading import extract_result

    def rate(given: list[Answer]) -> float:
        return sum(len(answer.token_ids) for answer in given) / sum(answer.seconds for answer in given)

    baseline = rate(answers["model.generate"])
    print(f"\n{'method':<16}{'tokens/s':>10}{'speed-up':>10}{'tau':>7}{'s/answer':>10}{'tokens/answer':>15}"
          f"{'correct':>9}")
    for name, given in answers.items():
        lengths = [length for answer in given if answer.output for length in answer.output.stats.accepted_lengths]
        tau = f"{sum(lengths) / len(lengths) + 1:.2f}" if lengths else "1"
        correct = [extract_result(a.text) == wanted for a, wanted in zip(given, results, strict=True) if wanted]
        seconds = statistics.fmean(answer.seconds for answer in given)
        length = statistics.fmean(len(answer.token_ids) for answer in given)
        print(f"{name:<16}{rate(given):>10.1f}{rate(given) / baseline:>9.2f}x{tau:>7}{seconds:>10.3f}{length:>15.1f}"
              f"{f'{sum(correct)}/{len(correct)}':>9}")
    print("\ntau = tokens per target forward. Speed-up is in tokens/s; s/answer includes the prompt.")
