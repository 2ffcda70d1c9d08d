"""`eagle-fsd demo`: the same prompts with and without drafting, shown and then timed."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Loading
from .exits import check_counts
from .terminal import BOLD, COLOURS, DIM, RESET, SourceStreamer, use_colour

if TYPE_CHECKING:
    from ..measure.methods import Answer
    from ..pair import EagleModel

DEMO_PROMPTS = Path(__file__).with_name("demo_prompts.json")
BASELINE = "model.generate"


@dataclass(frozen=True)
class DemoCommand:
    """Compare plain, exact and fuzzy decoding on a question, a rewrite, a function and a follow-up turn.

    Args:
        threshold: of fsd.
        max_new_tokens: of each answer that is shown.
        timed_tokens: of each answer that is timed.
        repeats: timed runs per prompt and method (their median counts).
    """

    threshold: float = 0.3
    max_new_tokens: int = 96
    timed_tokens: int = 64
    repeats: int = 2
    pair: Loading = Loading()

    def run(self) -> None:
        from ..data.bundled import default_pair, small_pair
        from ..measure.methods import engine, hf_generate, interleaved

        check_counts(self, "max_new_tokens", "timed_tokens", "repeats")
        target = self.pair.target or default_pair()[0]
        print(f"Loading {Path(target).name} and its draft head.", flush=True)
        model = self.pair.load()
        small = Path(target).resolve() == Path(small_pair()[0]).resolve()
        entries = json.loads(DEMO_PROMPTS.read_text(encoding="utf-8"))["small" if small else "usual"]
        fsd = f"fsd {self.threshold:g}"
        ours = {"exact": engine(model, acceptance="exact"),
                fsd: engine(model, acceptance="fsd", threshold=self.threshold)}
        self.introduce(model, fsd)
        self.show(model, entries, fsd)
        print("The same against model.generate and the clock, one after the other on each prompt (about a minute):",
              flush=True)
        answers = interleaved({BASELINE: hf_generate(model), **ours}, [entry["prompt"] for entry in entries],
                              self.timed_tokens, self.repeats)
        print_table(answers)
        ties = sum(is_tie(model, entry["prompt"], *pair) for entry, *pair in zip(
            entries, answers["exact"], answers[BASELINE], strict=True))
        print(f"\n{conclusion(answers, fsd, ties)}")

    def introduce(self, model: EagleModel, fsd: str) -> None:
        """What is compared, in words."""
        import torch

        from ..acceptance import make_rule

        head, chosen = model.draft, model.default_tree
        if model.trees is not None:
            chosen = model.trees.of(make_rule("exact"), 0.0).tree
        size = "one layer" if head is None else f"{sum(each.numel() for each in head.parameters()) / 1e6:.1f} M numbers"
        print(f"\nThe model has {model.target.model.num_parameters() / 1e6:.0f} M numbers, its draft head {size}; "
              f"{str(model.target.dtype).removeprefix('torch.')} on {model.target.device}, {torch.get_num_threads()} "
              "threads. All answers are greedy.")
        print("Drafting is slower than plain decoding on this machine, so that exact and fsd will draft little." if
              chosen is None else f"Each step the head drafts up to {chosen.total_tokens - 1} tokens, at most "
              f"{chosen.depth} in a row, and the model checks all of them at once.")
        print(f"""
  plain   no drafting: one token per step.
  exact   keeps drafted tokens that the model would have written itself: the same text in fewer steps.
  {fsd} also keeps drafted tokens where model and head nearly agree on what comes next (threshold
          {self.threshold:g}): fewer steps still, another text.
""")
        colour = use_colour()
        legend = {source: f"{COLOURS[source]}{source}{RESET}" if colour else source for source in COLOURS}
        if colour:
            print(f"Colours: {legend['exact']} = drafted, and the model's own choice; {legend['fuzzy']} = drafted, "
                  f"kept by fsd alone; {legend['target']} (no colour) = written by the model.\n")

    def show(self, model: EagleModel, entries: Sequence[dict], fsd: str) -> None:
        """Each prompt with its answers, as they come."""
        from ..api import generate
        from ..pair import EagleModel

        plain = EagleModel(model.target, None, model.tokenizer)
        ways = {"plain": (plain, {"acceptance": "exact"}), "exact": (model, {"acceptance": "exact"}),
                fsd: (model, {"acceptance": "fsd", "threshold": self.threshold})}
        colour = use_colour()
        bold, dim, reset = (BOLD, DIM, RESET) if colour else ("", "", "")
        for entry in entries:
            prompt = entry["prompt"]
            for turn in [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]:
                print(f"{bold}[{entry['kind']}] {turn}{reset}")
            for name, (used, options) in ways.items():
                sys.stdout.write(f"{dim}{name}:{reset} ")
                output = generate(prompt, used, max_new_tokens=self.max_new_tokens, **options,
                                  streamer=SourceStreamer(model.tokenizer, colour))
                print(f"{dim}[{output.stats.new_tokens} tokens, {output.stats.tokens_per_second:.0f} tokens/s, "
                      f"{output.stats.mean_accepted_length:.1f} tokens per step]{reset}", flush=True)
            print()


def rate(given: Sequence[Answer]) -> float:
    """Tokens per second."""
    return sum(len(answer.token_ids) for answer in given) / sum(answer.seconds for answer in given)


def tokens_per_step(given: Sequence[Answer]) -> float:
    """1 where nothing was drafted."""
    lengths = [length for answer in given if answer.output for length in answer.output.stats.accepted_lengths]
    return statistics.fmean(lengths) + 1 if lengths else 1.0


def same_texts(answers: Mapping[str, Sequence[Answer]], name: str) -> int:
    """How many of a method's answers are those of `model.generate`."""
    pairs = zip(answers[name], answers[BASELINE], strict=True)
    return sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)


def is_tie(model: EagleModel, prompt: object, ours: Answer, theirs: Answer) -> bool:
    """Whether two texts part where two tokens are as probable as each other, as far as the dtype can tell."""
    import torch

    from ..prompts import encode_prompt

    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    at = next((number for number, (left, right) in enumerate(pairs) if left != right), None)
    if at is None:
        return False
    text = torch.tensor([[*encode_prompt(prompt, model), *ours.token_ids[:at]]], device=model.target.device)
    with torch.inference_mode():
        logits = model.target.model(text).logits[0, -1].double()
    rounding = 2 * torch.finfo(model.target.dtype).eps * logits.abs().max()
    return bool((logits[ours.token_ids[at]] - logits[theirs.token_ids[at]]).abs() <= rounding)


def print_table(answers: Mapping[str, Sequence[Answer]]) -> None:
    """Speed of each method, and how many of its texts are those of `model.generate`."""
    baseline = rate(answers[BASELINE])
    print(f"\n{'method':<16}{'tokens/s':>10}{'speed-up':>10}{'tokens/step':>13}{'seconds/answer':>16}{'same text':>11}")
    for name, given in answers.items():
        seconds = statistics.fmean(answer.seconds for answer in given)
        same = f"{same_texts(answers, name)} of {len(given)}"
        print(f"{name:<16}{rate(given):>10.1f}{rate(given) / baseline:>9.2f}x{tokens_per_step(given):>13.2f}"
              f"{seconds:>16.2f}{same:>11}")


def conclusion(answers: Mapping[str, Sequence[Answer]], fsd: str, ties: int = 0) -> str:
    """What was seen, in one sentence.

    Args:
        ties: answers of `exact` that part from those of `model.generate` at a tie.
    """
    count, same = len(answers[BASELINE]), same_texts(answers, "exact")
    speed = {name: rate(answers[name]) / rate(answers[BASELINE]) for name in ("exact", fsd)}
    text = "the same text as model.generate"
    if same < count:
        text += f" in {same} of {count} answers" + (
            f" (and in {ties} more up to a tie: two tokens as probable as each other after rounding)" if ties else "")
    pace = "times as fast" if speed["exact"] >= 1 else "times as fast, so that drafting does not pay here"
    return (f"Seen here: exact wrote {text}, {speed['exact']:.1f} {pace}, with {tokens_per_step(answers['exact']):.1f} "
            f"tokens per step; {fsd} was {speed[fsd]:.1f} times as fast and wrote another text in "
            f"{count - same_texts(answers, fsd)} of {count} answers.")
