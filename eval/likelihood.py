"""Judge the answers of a comparison by their likelihood under other models, where no grader applies.

    python -m eval.likelihood --answers runs/chat.answers/run_1/*.jsonl --questions mt_bench.jsonl \\
        --judges HuggingFaceTB/SmolLM2-135M-Instruct qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --out runs/chat-judged

The answers are those of `eagle-fsd calibrate` or `eagle-fsd benchmark`. Each judge reads every question in its own chat
template and measures the answer's nats per byte, which are comparable across tokenizers; lower is likelier. Repetitive
answers are likely too, so the table also has the share of repeated 4-grams and the length.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.questions import Question
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.loading.load import load
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.measure.answers import digest_of, read_answers
from eagle_fsd.measure.records import bullets, decimals, markdown, percent, shown, with_span, write_record
from eagle_fsd.measure.settings import REFERENCE, QuestionOptions
from eagle_fsd.measure.statistics import interval
from eagle_fsd.models.target import TargetModel
from eagle_fsd.utils.progress import Progress
from eval.command import option_record, run_command


@dataclass(frozen=True, kw_only=True)
class LikelihoodArguments(QuestionOptions):
    """Options of `eval.likelihood`.

    Args:
        answers: the files of a comparison, OUT.answers/run_1/*.jsonl.
        judges: models that judge: directories, Hub IDs or GGUF files.
        dtype: dtype of the judges. auto: as in eagle_fsd.load.
        reference: the method with which the others are compared.
        out: write OUT.json and OUT.md.
    """

    answers: tuple[Path, ...]
    judges: tuple[str, ...]
    dtype: str = "auto"
    reference: str = REFERENCE
    out: Path


@torch.inference_mode()
def log_probs(target: TargetModel, ids: Sequence[int]) -> Tensor:
    """[T - 1, V] log-probabilities of the next token after each token of a text but the last."""
    tokens = torch.tensor([ids], device=target.input_device)
    return target.logits(target.prefill(tokens, target.new_cache(len(ids))))[0, :-1].log_softmax(-1)


def nats_of(judge: EagleModel, question: Question, turns: Sequence[str]) -> float:
    """-log p of the answers to a question's turns, each after the conversation before it."""
    chat, nats = [], 0.0
    for asked, text in zip(question.turns, turns, strict=False):  # a conversation may have exceeded the context length
        chat.append({"role": "user", "content": asked})
        prompt = encode_prompt(chat, judge)
        ids = judge.tokenizer.encode(text, add_special_tokens=False)
        if ids:
            log_p = log_probs(judge.target, [*prompt, *ids])[len(prompt) - 1 :]
            nats -= log_p.gather(1, torch.tensor(ids, device=log_p.device)[:, None]).sum().item()
        chat.append({"role": "assistant", "content": text})
    return nats


def answered(
    paths: Sequence[Path], questions: Sequence[Question], reference: str
) -> list[tuple[Question, dict[str, dict]]]:
    """Each question with its records by method.

    Raises:
        ValueError: a file does not exist, or there are no answers of the reference, or by all methods to a question.
    """
    records: dict[str, dict[str, dict]] = {}
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is no file; --answers takes OUT.answers/run_1/*.jsonl of a comparison")
        for record in read_answers(path):
            records.setdefault(record.get("asked"), {})[record["model_id"]] = record
    names = list(dict.fromkeys(name for by_method in records.values() for name in by_method))
    if reference not in names:
        raise ValueError(f"there are no answers of {reference!r}; --reference takes one of {', '.join(names)}")
    complete = [(question, records[digest]) for question in questions
                if len(records.get(digest := digest_of(question), ())) == len(names)]
    if not complete:
        raise ValueError(f"there are answers by all of {', '.join(names)} to none of these questions")
    return complete


def likelihood_rows(
    complete: Sequence[tuple[Question, Mapping[str, Mapping]]], judges: Mapping[str, EagleModel], reference: str
) -> list[dict]:
    """One row per method: tokens per answer, repeated 4-grams, and for each judge the nats per byte, the difference
    from the reference, and its 95% interval over questions."""
    def difference(nats: np.ndarray, sizes: np.ndarray, their_nats: np.ndarray, their_sizes: np.ndarray) -> np.ndarray:
        return nats.sum(-1) / sizes.sum(-1) - their_nats.sum(-1) / their_sizes.sum(-1)

    methods = list(complete[0][1])
    texts = [{name: records[name]["choices"][0]["turns"] for name in methods} for _, records in complete]
    sizes = {name: np.array([max(1, len("".join(each[name]).encode())) for each in texts], float) for name in methods}
    nats = {(judge, name): np.empty(len(complete)) for judge in judges for name in methods}
    for number, (question, _) in enumerate(Progress(complete, desc="reading", unit="question")):
        for judge, model in judges.items():
            for name in methods:
                nats[judge, name][number] = nats_of(model, question, texts[number][name])
    rows = []
    for name in methods:
        by_judge = {}
        for judge in judges:
            columns = nats[judge, name], sizes[name], nats[judge, reference], sizes[reference]
            by_judge[judge] = {"nats_per_byte": float(columns[0].sum() / columns[1].sum()),
                               "difference": float(difference(*columns)), "interval": interval(difference, *columns)}
        rows.append({"method": name, "answers": len(complete), "judges": by_judge,
                     **{key: sum(records[name][key] for _, records in complete) / len(complete)
                        for key in ("tokens", "repeated")}})
    return rows


def run(args: LikelihoodArguments) -> None:
    check_counts(args, "per_category", "limit")
    complete = answered(args.answers, args.chosen_questions(), args.reference)
    judges = {shown(name): load(name, dtype=args.dtype) for name in args.judges}
    rows = likelihood_rows(complete, judges, args.reference)
    table = markdown({
        "method": row["method"], "tokens/answer": decimals(row["tokens"], 0),
        "repeated 4-grams": percent(row["repeated"]),
        **{f"nats/byte, {Path(judge).name}; difference (95%)":
           f"{each['nats_per_byte']:.3f}, {with_span(format(each['difference'], '+.3f'), each['interval'], 3)}"
           for judge, each in row["judges"].items()}} for row in rows)
    print(write_record(args.out, {"settings": option_record(args), "rows": rows},
                       f"""\
{chr(10).join(f"Judge: {model.described()[0]}{chr(92)}" for model in judges.values())}
{len(complete)} questions

{table}

""" + bullets({"nats/byte": "-log p of an answer under the judge, per UTF-8 byte; lower is likelier",
               "difference (95%)": f"difference from {args.reference}, with a bootstrap interval over questions",
               "repeated 4-grams": "share of 4-grams that occur earlier in the answer; repetitive text is likely"})))


main = partial(run_command, "eval.likelihood", LikelihoodArguments, run)

if __name__ == "__main__":
    sys.exit(main())
