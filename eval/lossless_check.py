"""Check that a pair decodes losslessly, against `model.generate`: greedy tokens, and the distribution of samples.

    python -m eval.lossless_check --target T --draft D --questions prompts.jsonl
    python -m eval.lossless_check --questions mt_bench.jsonl spec_bench.jsonl --per-category 8 --settings exact "fsd 0"

`model.generate` computes in the pair's dtype: of a checkpoint in 16 bits that the pair computes in float32, too. With
--quantization int8, greedy answers are compared with the pair's own without drafts, and have to be equal to the token.

Greedy: the share of answers that are equal token for token, and for each other answer its first difference. That is a
numerical tie if the gap between the target's logits of the two tokens is at most its change between a forward pass over
the whole text and one over the last token, plus the rounding of the logits.

Sampled: both methods answer the first prompts many times. At every position a chi-square test of homogeneity compares
the token counts, with Bonferroni's correction over all tests. The exit status is 0 if all greedy differences are ties
and the samples do not differ significantly, else 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from eagle_fsd.api import generate
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.decoding.batch import Session
from eagle_fsd.decoding.output import Output
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.measure.methods import Method, engine, hf_generate
from eagle_fsd.measure.records import environment, write_json
from eagle_fsd.measure.settings import QuestionOptions, parse_setting
from eagle_fsd.measure.statistics import first_difference
from eagle_fsd.models import linear
from eagle_fsd.models.cache import cache_name
from eagle_fsd.models.kernels import KERNELS, Kernel
from eagle_fsd.models.linear import Int8, is_int8, packed_form
from eagle_fsd.utils.progress import Progress
from eval.command import option_record, run_command

LEAST_EXPECTED = 5  # rarer tokens at a position are pooled
SIGNIFICANCE = 0.01
CLOSE = 0.1  # nats between the two best tokens; among fewer tokens gaps have a constant density


@dataclass(frozen=True, kw_only=True)
class LosslessArguments(QuestionOptions):
    """Options of `eval.lossless_check`, which asks the first turn of each question.

    Args:
        settings: lossless rules; with a lossy one, such as "fsd 0.5", the check fails. Sampling uses the first.
        tree: size of the draft tree. If omitted: the fastest known on this machine.
        ways: further ways to decode greedily: the tree (16, 5, 4), without copies from the text, in a session that has
            read half of the prompt; in int8 with all products by oneDNN, and with all by FBGEMM.
        rows: with more than one, also answer as many questions in a batch.
        ties: also count near-ties: how far apart the two best tokens of each position are, and how much their distance
            differs between a tree and `model.generate`'s modules.
        max_new_tokens: most tokens in a greedy answer.
        temperature: temperature of the sampled answers.
        samples: sampled answers to each prompt; 0: none.
        sampled_prompts: number of prompts with sampled answers.
        sampled_tokens: most tokens in a sampled answer.
        out: JSON file to write.
    """

    pair: Loading = Loading()
    settings: tuple[str, ...] = ("exact",)
    tree: Tree = None
    ways: tuple[Literal["tree", "no-copies", "session", "oneDNN", "FBGEMM"], ...] = ()
    rows: int = 1
    ties: bool = False
    max_new_tokens: int = 128
    temperature: float = 1.0
    samples: int = 100
    sampled_prompts: int = 1
    sampled_tokens: int = 8
    out: Path | None = None


@dataclass(frozen=True)
class Difference:
    """The first difference between a greedy answer and `model.generate`'s."""

    question: int | str
    position: int
    theirs: int | None  # None: the answer has ended
    ours: int | None
    gap: float  # logit of theirs minus logit of ours, in a forward pass over the whole text
    noise: float  # change of the gap between two ways to compute it, plus the rounding of the logits
    tie: bool


@torch.inference_mode()
def explain(
    model: EagleModel, prompt: list[int], theirs: list[int], ours: list[int], question: int | str
) -> Difference:
    """The first difference of two answers."""
    at = first_difference(ours, theirs)
    assert at is not None
    tokens = [answer[at] if at < len(answer) else None for answer in (theirs, ours)]
    if None in tokens:
        return Difference(question, at, *tokens, gap=float("inf"), noise=0.0, tie=False)
    ids = torch.tensor([prompt + theirs[:at]], device=model.target.input_device)
    whole = model.target.model(ids, use_cache=False).logits[0, -1].float()
    cache = cache_name(type(model.target.model))
    before = model.target.model(ids[:, :-1], use_cache=True)
    step = model.target.model(ids[:, -1:], **{cache: before[cache]}).logits[0, -1].float()
    gap, other_gap = ((logits[tokens[0]] - logits[tokens[1]]).item() for logits in (whole, step))
    noise = abs(gap - other_gap) + torch.finfo(model.target.dtype).eps * whole[tokens].abs().max().item()
    return Difference(question, at, *tokens, gap=gap, noise=noise, tie=abs(gap) <= noise)


def check_greedy(
    model: EagleModel, chats: Sequence[tuple[int | str, list]], plain: Method, methods: Mapping[str, Method],
    new_tokens: int, rows: int = 1,
) -> tuple[dict[str, list[Difference]], int]:
    """The answers of each method that differ from plain decoding's, and the total tokens of the latter.

    Args:
        chats: the id and the chat of each question; questions of several files may have one id.
        rows: with more than one, as many chats are also answered in a batch.
    """
    total, group = 0, []
    by_method: dict[str, list[Difference]] = {name: [] for name in [*methods, *([f"batch of {rows}"] * (rows > 1))]}

    def compare(name: str, question: int | str, chat: list, first: list[int], second: list[int]) -> None:
        if first != second:
            by_method[name].append(explain(model, encode_prompt(chat, model), first, second, question))

    for number, (question, chat) in enumerate(Progress(chats, desc="greedy", unit="prompt"), 1):
        first = plain(chat, new_tokens).token_ids
        total += len(first)
        for name, ours in methods.items():
            compare(name, question, chat, first, ours(chat, new_tokens).token_ids)
        if rows > 1:
            group.append((question, chat, first))
            if len(group) == rows or number == len(chats):
                batch = generate([chat for _question, chat, _first in group], model, max_new_tokens=new_tokens,
                                 repetition_penalty=1.0)
                for each, output in zip(group, batch, strict=True):
                    compare(f"batch of {rows}", *each, output.token_ids)
                group = []
    return by_method, total


@torch.inference_mode()
def near_ties(model: EagleModel, stock: PreTrainedModel, chats: Sequence[list], new_tokens: int) -> dict:
    """How often rounding could decide a greedy token: gaps between the logits of the two best tokens, and their changes
    from our trees to a forward of the stock modules over the whole text."""
    ours, theirs = [], []
    for chat in Progress(chats, desc="near-ties", unit="prompt"):
        output = generate(chat, model, max_new_tokens=new_tokens, top_logprobs=2, repetition_penalty=1.0)
        prompt, best = encode_prompt(chat, model), [receipt.top for receipt in output.receipts]
        ids = torch.tensor([[*prompt, *output.token_ids[:-1]]], device=model.target.input_device)
        logits = stock(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        tokens = torch.tensor([[token for token, _ in pair] for pair in best], device=logits.device)
        theirs.append(-logits.gather(1, tokens).diff()[:, 0].cpu())
        ours.append(torch.tensor([first - second for (_, first), (_, second) in best]))
    gaps, changes = torch.cat(theirs), (torch.cat(ours) - torch.cat(theirs)).abs()
    # A token changes where a gap is below its change, which is as often a gain: the density of gaps near 0, times the
    # mean of the losses.
    density = (gaps < CLOSE).double().mean() / CLOSE
    below = {f"below {most:g}": int((gaps < most).sum()) for most in (0.1, 0.01, 1e-3, 1e-4)}
    return {"tokens": len(gaps), "gaps": below,
            "median change": changes.median().item(), "largest change": changes.max().item(),
            "gaps within their change": int((gaps <= changes).sum()),
            "expected other tokens in a million": 1e6 * (density * changes.double().mean() / 2).item()}


def load_with(kernel: type[Kernel], args: LosslessArguments) -> EagleModel:
    """The pair with all int8 products by one kernel."""
    own, linear.fastest_kernel = linear.fastest_kernel, lambda outputs, inputs: kernel
    try:
        return args.pair.load(args.tree)
    finally:
        linear.fastest_kernel = own


def in_session(model: EagleModel) -> Method:
    """Answers in a session that has read, and begun to answer, a chat with half of the last message."""
    def answer(messages: list[dict], max_new_tokens: int) -> Output:
        *before, last = messages
        session, half = Session(), last["content"][: len(last["content"]) // 2]
        for content, count in ((half, 3), (last["content"], max_new_tokens)):
            output = generate([*before, {**last, "content": content}], model, session=session, max_new_tokens=count,
                              repetition_penalty=1.0)
        return output

    return answer


def homogeneity(first: Sequence[object], second: Sequence[object]) -> float:
    """p-value of a chi-square test that two samples have the same distribution; rare values are pooled."""
    counts, both = [Counter(first), Counter(second)], Counter([*first, *second])
    share = min(len(first), len(second)) / both.total()
    common = [value for value, count in both.items() if count * share >= LEAST_EXPECTED]
    seen = torch.tensor([[count[value] for value in common] for count in counts], dtype=torch.float64)
    sizes = torch.tensor([[len(first)], [len(second)]], dtype=torch.float64)
    seen = torch.cat([seen, sizes - seen.sum(1, keepdim=True)], 1)  # [2, values], the pooled rare ones last
    seen = seen[:, seen.sum(0) > 0]
    expected = sizes * seen.sum(0) / both.total()
    statistic, freedom = ((seen - expected) ** 2 / expected).sum(), seen.shape[1] - 1
    if freedom == 0:
        return 1.0
    return torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2).item()


def check_sampling(
    model: EagleModel, chats: Sequence[list], stock: PreTrainedModel, options: dict, temperature: float, samples: int,
    new_tokens: int,
) -> list[dict]:
    """The p-value of the two-sample test for each prompt and position."""
    rows = []
    for number, chat in enumerate(chats):
        drawn: list[list[list[int]]] = [[], []]
        for seed in Progress(range(samples), desc=f"samples of prompt {number + 1}", unit="answer"):
            # Different seeds, so that the two samples are independent.
            methods = (hf_generate(model, stock=stock, temperature=temperature, seed=seed),
                       engine(model, temperature=temperature, seed=samples + seed, **options))
            for texts, method in zip(drawn, methods, strict=True):
                texts.append(method(chat, new_tokens).token_ids)
        for position in range(new_tokens):
            first, second = ([text[position] if position < len(text) else None for text in texts] for texts in drawn)
            rows.append({"prompt": number, "position": position, "p": homogeneity(first, second)})
    return rows


def print_differences(name: str, differences: Sequence[Difference], prompts: int) -> None:
    same = prompts - len(differences)
    print(f"{name}, greedy: {same} of {prompts} answers equal those of plain decoding, token for token")
    for difference in differences:
        cause = "a numerical tie" if difference.tie else "NOT a tie"
        print(f"  question {difference.question}: token {difference.position + 1} is {difference.ours} instead of "
              f"{difference.theirs}, {cause} (gap {difference.gap:.3g}, rounding {difference.noise:.3g})")


def run(args: LosslessArguments) -> int:
    """Print and store the differences; return 0 if the pair appears lossless, else 1."""
    options = {name: {**parse_setting(name)[1], "tree": args.tree} for name in args.settings}
    if not options:
        raise ValueError("--settings needs at least one rule, for example exact")
    check_counts(args, "limit", "per_category", "max_new_tokens", "sampled_prompts", "sampled_tokens", "rows")
    check_counts(args, "samples", least=0)
    questions = args.chosen_questions()
    model = args.pair.load(args.tree)
    chats = [(question.id, [{"role": "user", "content": question.turns[0]}]) for question in questions]
    # In the dtype that the pair computes in. The plain decoding of int8 weights is that of our engine.
    quantised = is_int8(model.target.model)
    stock = model.target.model if quantised else model.stock_in(model.target.dtype)
    plain = engine(model, speculative=False) if quantised else hf_generate(model, stock=stock)
    methods = {name: engine(model, **each) for name, each in options.items()}
    methods |= {kernel.NAME: engine(load_with(kernel, args), **options[args.settings[0]])
                for kernel in KERNELS if kernel.NAME in args.ways}
    ways = {"tree": engine(model, tree=TreeConfig(16, 5, 4)), "no-copies": engine(model, text_drafts="off"),
            "session": in_session(model)}
    methods |= {name: ways[name] for name in args.ways if name in ways}
    by_method, tokens = check_greedy(model, chats, plain, methods, args.max_new_tokens, args.rows)
    for name, differences in by_method.items():
        print_differences(name, differences, len(chats))
    invariant = packed_form(model.target.model) == Int8.NAME and model.target.fused is not None
    lossless = all(difference.tie and not invariant for found in by_method.values() for difference in found)
    record = {"environment": environment(), "arguments": option_record(args), "dtype": str(model.target.dtype),
              "names": dict(zip(("target", "head"), model.described(), strict=True)),
              "prompts": len(chats), "tokens": tokens,
              "identical": {name: len(chats) - len(found) for name, found in by_method.items()},
              "differences": {name: [asdict(each) for each in found] for name, found in by_method.items()}}
    if args.ties:
        record["near-ties"] = near_ties(model, stock, [chat for _, chat in chats], args.max_new_tokens)
        print(f"near-ties: {record['near-ties']}")
    if args.samples:
        sampled = [chat for _, chat in chats[: args.sampled_prompts]]
        rows = check_sampling(model, sampled, stock, options[args.settings[0]], args.temperature, args.samples,
                              args.sampled_tokens)
        corrected = min(1.0, min(row["p"] for row in rows) * len(rows))
        apart = corrected < SIGNIFICANCE
        lossless &= not apart
        print(f"sampled: {args.samples} answers of each to {args.sampled_prompts} prompts at temperature "
              f"{args.temperature:g} {'DIFFER' if apart else 'do not differ'} significantly (smallest corrected p of "
              f"{len(rows)} tests: {corrected:.3g})")
        record["sampling"] = {"tests": rows, "corrected_p": corrected}
    if args.out:
        write_json(args.out, record)
    return int(not lossless)


main = partial(run_command, "eval.lossless_check", LosslessArguments, run)

if __name__ == "__main__":
    sys.exit(main())
