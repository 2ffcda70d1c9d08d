"""Measure structured output: validity under JSON schemas, and speed with each source of drafts.

    python -m eval.structured --out runs/structured --endpoints "llama.cpp=http://127.0.0.1:8081/v1"
    python -m eval.structured --out runs/structured-float32 --dtype float32

The 30 schemas of eval/data/schemas.jsonl were written for this, after the kinds in JSONSchemaBench (arXiv 2501.10868).
All arms answer each in turn, after a warm-up with the first: plain decoding with the same masks, the head alone, the
head with the tokens that the grammar forces, and both with copies from the text. Compare the tokens with those of plain
decoding in float32 only. An endpoint gets the schema as OpenAI's `response_format`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tyro.conf import UseAppendAction

import eagle_fsd
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.decoding.grammar import Grammar
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.measure.endpoints import UNCACHED, UNPENALISED, ask, read_endpoints
from eagle_fsd.measure.methods import pair_text
from eagle_fsd.measure.records import decimals, markdown, write_record
from eagle_fsd.utils.files import read_lines
from eagle_fsd.utils.progress import Progress
from eval.command import option_record, run_command

SCHEMAS = Path(__file__).parent / "data" / "schemas.jsonl"
# Options of each arm, and whether it drafts forced tokens.
ARMS = {
    "plain": ({"speculative": False}, False),
    "head": ({"text_drafts": "off"}, False),
    "head and grammar": ({"text_drafts": "off"}, True),
    "head, grammar and text": ({}, True),
}


@dataclass(frozen=True)
class StructuredArguments:
    """Options of `eval.structured`.

    Args:
        out: write OUT.json and OUT.md.
        schemas: JSON lines with id, kind, prompt and schema.
        limit: use only the first LIMIT schemas.
        max_new_tokens: most tokens in an answer; an answer that reaches it is unfinished.
        repeats: timed answers to each schema, of which the median counts.
        endpoints: servers to compare with, as "NAME=URL" or "NAME=URL#MODEL"; see eagle_fsd/measure/endpoints.py.
    """

    out: Path
    pair: Loading = Loading()
    schemas: Path = SCHEMAS
    limit: int | None = None
    max_new_tokens: int = 256
    repeats: int = 1
    endpoints: UseAppendAction[tuple[str, ...]] = ()


@contextmanager
def no_forced_tokens(off: bool) -> Iterator[None]:
    """Do not draft forced tokens in this context, if `off`; the grammar's masks still apply."""
    kept = Grammar.forced
    if off:
        Grammar.forced = lambda *_: None
    try:
        yield
    finally:
        Grammar.forced = kept


def ours(model: EagleModel, arm: str, chat: list[dict], schema: dict, tokens: int) -> dict:
    """One answer of our decoder."""
    options, forced = ARMS[arm]
    with no_forced_tokens(not forced):
        started = time.perf_counter()
        output = eagle_fsd.generate(chat, model, max_new_tokens=tokens, response_format=schema, **UNPENALISED,
                                    **options)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "text": output.text, "cut": output.finish_reason == "length",
            "token_ids": output.token_ids, "tokens": len(output.token_ids), "forwards": output.stats.target_forwards,
            "accepted": output.stats.accepted}


def theirs(url: str, name: str, model: EagleModel, chat: list[dict], schema: dict, tokens: int) -> dict:
    """One answer of a server. The target's tokenizer counts its tokens, including the end token."""
    body = {"model": name, "messages": chat, "max_tokens": tokens, "temperature": 0, **UNCACHED, **UNPENALISED,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    started = time.perf_counter()
    try:
        choice = ask(f"{url}/chat/completions", body)["choices"][0]
    except ValueError as error:
        return {"refused": str(error)}
    seconds, text = time.perf_counter() - started, choice["message"]["content"] or ""
    cut = choice["finish_reason"] == "length"
    count = len(model.tokenizer.encode(text, add_special_tokens=False)) + (not cut)
    return {"seconds": seconds, "text": text, "cut": cut, "tokens": count}


def fault(text: str, schema: dict) -> str | None:
    """Why a text does not match a schema, or None if it does."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return None


def summary(arm: str, rows: Sequence[dict], plain: Sequence[dict]) -> dict[str, object]:
    """An arm's row of the table."""
    answers = [row["arms"][arm] for row in rows]
    answered = [answer for answer in answers if "refused" not in answer]
    finished = [answer for answer in answered if not answer["cut"]]
    tokens, seconds = (sum(answer[name] for answer in answered) for name in ("tokens", "seconds"))
    forwards = sum(answer.get("forwards", 0) for answer in answered)
    line: dict[str, object] = {
        "arm": arm, "finished": f"{len(finished)} of {len(answers)}", "refused": len(answers) - len(answered),
        "valid of them": sum(answer["fault"] is None for answer in finished), "tokens": tokens,
        "tokens/s": f"{tokens / seconds:.1f}", "seconds an answer": f"{seconds / len(answered):.2f}",
        "forwards": forwards or "", "tokens per forward": decimals(tokens / forwards if forwards else None)}
    if forwards:
        line["as plain"] = sum(a["token_ids"] == b["token_ids"] for a, b in zip(answers, plain, strict=True))
        line["accepted of head / grammar / text"] = " / ".join(
            str(sum(each["accepted"].get(source, 0) for each in answered)) for source in ("head", "grammar", "text"))
    return line


def run(args: StructuredArguments) -> None:
    try:
        import jsonschema  # noqa: F401
    except ImportError as error:
        raise ValueError("eval.structured needs the package jsonschema: pip install jsonschema") from error
    check_counts(args, "limit", "max_new_tokens", "repeats")
    endpoints = read_endpoints(args.endpoints)
    cases = read_lines(args.schemas)[: args.limit]
    model = args.pair.load()
    asks = {arm: partial(ours, model, arm) for arm in ARMS}
    asks |= {name: partial(theirs, url, served, model) for name, (url, served) in endpoints.items()}
    rows = []
    for case in Progress(cases, desc="schemas", unit="schema"):
        chat = [{"role": "user", "content": f"{case['prompt']}\nAnswer in JSON that follows this schema: "
                                            f"{json.dumps(case['schema'])}"}]
        answers_of: dict[str, list[dict]] = {arm: [] for arm in asks}
        for turn in range(args.repeats + (not rows)):
            for arm, answer in asks.items():
                result = answer(chat, case["schema"], args.max_new_tokens)
                answers_of[arm] += [result] if turn or rows else []
        row = {"id": case["id"], "kind": case["kind"], "prompt_tokens": len(encode_prompt(chat, model)), "arms": {}}
        for arm, answers in answers_of.items():
            first = answers[0]
            if "refused" not in first:
                first["seconds"] = statistics.median(answer["seconds"] for answer in answers)
                first["fault"] = fault(first["text"], case["schema"])
            row["arms"][arm] = first
        rows.append(row)
    plain = [row["arms"]["plain"] for row in rows]
    print(write_record(args.out, {"settings": option_record(args), "dtype": str(model.target.dtype), "rows": rows},
                       f"{pair_text(model)}\n\n{markdown(summary(arm, rows, plain) for arm in asks)}"))


main = partial(run_command, "eval.structured", StructuredArguments, run)

if __name__ == "__main__":
    sys.exit(main())
