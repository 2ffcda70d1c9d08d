"""Tokens per second by batch size and prompt length; `python -m eval.benchmark --batch-sizes 1 2 4 8` runs it.

Every batch is answered by every method before the next one, in an order that rotates. All batch sizes answer the same
prompts. `model.generate` gets them padded on the left and goes on until its last row has ended; only tokens up to each
row's end count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import eagle_fsd
from eagle_fsd.data.progress import Progress
from eagle_fsd.engine.receipts import Output
from eagle_fsd.measure.methods import interleaved, only_special_tokens
from eagle_fsd.measure.search import BASELINE
from eagle_fsd.pair import EagleModel
from eagle_fsd.prompts import encode_prompt, end_tokens
from eval.report.tables import markdown, percent
from train.tasks.generator import tasks
from train.tasks.source import python_texts


@dataclass(frozen=True)
class BatchAnswer:
    """A batch's new tokens, end tokens included; `outputs` where our engine made them."""

    seconds: float  # prompts included
    rows: list[list[int]]
    outputs: list[Output] | None = None


BatchMethod = Callable[[Sequence, int], BatchAnswer]  # (prompts, max_new_tokens)


def padded_generate(model: EagleModel) -> BatchMethod:
    """`model.generate` of a batch, greedy, padded on the left."""
    ends = end_tokens(model)

    def answer(prompts: Sequence, max_new_tokens: int) -> BatchAnswer:
        started = time.perf_counter()
        encoded = [encode_prompt(prompt, model) for prompt in prompts]
        longest, device = max(map(len, encoded)), model.target.device
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in encoded], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in encoded], device=device)
        with only_special_tokens(model.target.model) as stock:
            sequences = stock.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
        rows = [until_end(row, ends) for row in sequences[:, longest:].tolist()]
        return BatchAnswer(time.perf_counter() - started, rows)

    return answer


def until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """The tokens up to the first end token, which counts."""
    return tokens[: next((at for at, token in enumerate(tokens, 1) if token in ends), len(tokens))]


def batch_engine(model: EagleModel, *, plain: bool = False, **options: object) -> BatchMethod:
    """`eagle_fsd.generate` of a list of prompts; `plain`: without a draft head."""
    used = EagleModel(model.target, None, model.tokenizer) if plain else model

    def answer(prompts: Sequence, max_new_tokens: int) -> BatchAnswer:
        started = time.perf_counter()
        outputs = eagle_fsd.generate(list(prompts), used, max_new_tokens=max_new_tokens, **options)
        return BatchAnswer(time.perf_counter() - started, [output.token_ids for output in outputs], outputs)

    return answer


def batch_methods(model: EagleModel, tree: eagle_fsd.TreeConfig | None, fsd: Sequence[float]) -> dict[str, BatchMethod]:
    """The compared methods by name."""
    return {
        BASELINE: padded_generate(model),
        "plain": batch_engine(model, plain=True, acceptance="exact"),
        "exact": batch_engine(model, acceptance="exact", tree=tree),
        **{f"fsd {dial:g}": batch_engine(model, acceptance="fsd", threshold=dial, tree=tree) for dial in fsd},
    }


def prompts_of_length(model: EagleModel, length: int | None, count: int, seed: int) -> list:
    """Held-out tasks (None), or pieces of held-out Python source of exactly so many tokens.

    Raises:
        ValueError: there is not so much source.
    """
    if length is None:
        return [task.messages for task in tasks("heldout", seed=seed, count=count)]
    pieces: list[list[int]] = []
    left: list[int] = []
    for text in python_texts():
        left += encode_prompt(text, model)
        while len(left) >= length and len(pieces) < count:
            pieces.append(left[:length])
            left = left[length:]
        if len(pieces) == count:
            return pieces
    raise ValueError(f"the held-out source has {len(pieces)} pieces of {length} tokens, {count} were asked for")


def by_size(
    model: EagleModel, methods: dict[str, BatchMethod], sizes: Sequence[int], lengths: Sequence[int | None], *,
    prompts: int, max_new_tokens: int, repeats: int, seed: int,
) -> list[dict]:
    """One row per prompt length, batch size and method.

    Raises:
        ValueError: a batch size that does not divide the number of prompts.
    """
    for size in sizes:
        if size < 1 or prompts % size:
            raise ValueError(f"every batch size must divide the number of prompts ({prompts}), {size} does not")
    rows = []
    with Progress(desc="batches", unit="size", total=len(lengths) * len(sizes)) as progress:
        for length in lengths:
            asked = prompts_of_length(model, length, prompts, seed)
            for size in sizes:
                batches = [asked[start : start + size] for start in range(0, prompts, size)]
                answers = interleaved(methods, batches, max_new_tokens, repeats, warm_up=1)
                rows += [batch_row(name, given, answers[BASELINE], answers["plain"], length, size)
                         for name, given in answers.items()]
                progress.update()
    return rows


def batch_row(
    name: str, given: Sequence[BatchAnswer], baseline: Sequence[BatchAnswer], plain: Sequence[BatchAnswer],
    length: int | None, size: int,
) -> dict:
    """One method's figures at a prompt length and a batch size."""
    def rate(answers: Sequence[BatchAnswer]) -> float:
        return sum(len(row) for answer in answers for row in answer.rows) / sum(a.seconds for a in answers)

    pairs = [(row, alike) for answer, other in zip(given, plain, strict=True)
             for row, alike in zip(answer.rows, other.rows, strict=True)]
    accepted = [n for answer in given for output in answer.outputs or () for n in output.stats.accepted_lengths]
    return {
        "prompt_length": length, "batch_size": size, "method": name, "tokens_per_second": rate(given),
        "speedup": rate(given) / rate(baseline), "speedup_over_plain": rate(given) / rate(plain),
        "seconds_per_batch": statistics.fmean(answer.seconds for answer in given),
        "tau": statistics.fmean(accepted) + 1 if accepted else 1.0,
        "same_as_plain": statistics.fmean(row == alike for row, alike in pairs),
    }


def batch_table(rows: Sequence[dict]) -> str:
    """The rows in Markdown. tau = tokens of a row per target forward that it took part in."""
    return markdown({
        "prompts": "tasks" if row["prompt_length"] is None else row["prompt_length"], "batch": row["batch_size"],
        "method": row["method"], "tokens/s": f"{row['tokens_per_second']:.0f}",
        "vs model.generate": f"{row['speedup']:.2f}x", "vs plain": f"{row['speedup_over_plain']:.2f}x",
        "tau": f"{row['tau']:.2f}", "s/batch": f"{row['seconds_per_batch']:.3f}",
        "= plain": percent(row["same_as_plain"]),
    } for row in rows)
