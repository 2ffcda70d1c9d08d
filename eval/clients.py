"""Compare the tokens/s of OpenAI endpoints for one and several concurrent clients, and vLLM's accepted length.

    python -m eval.clients --questions mt_bench.jsonl --per-category 1 --out runs/clients \\
        'vLLM=http://127.0.0.1:8000/v1' 'vLLM 0.3=http://127.0.0.1:8000/v1 {"vllm_xargs": {"eagle_fsd_threshold": 0.3}}'

An arm is an endpoint, "NAME=URL" or "NAME=URL#MODEL", optionally followed by a JSON object with further fields of its
requests.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tyro.conf import Positional

from eagle_fsd.cli.exits import check_counts
from eagle_fsd.measure.endpoints import ask, read_endpoints
from eagle_fsd.measure.records import decimals, markdown, write_record
from eagle_fsd.measure.settings import QuestionOptions
from eval.command import option_record, run_command


@dataclass(frozen=True, kw_only=True)
class ClientsArguments(QuestionOptions):
    """Options of `eval.clients`, which asks the first turn of each question.

    Args:
        arms: endpoints, each optionally followed by a JSON object with further fields of its requests.
        tokens: most tokens in an answer.
        clients: numbers of concurrent clients.
        out: write OUT.json and OUT.md.
    """

    arms: Positional[tuple[str, ...]]
    out: Path
    tokens: int = 48
    clients: tuple[int, ...] = (1, 8)


def drafted(url: str) -> tuple[float, float]:
    """vLLM's counters of drafts and accepted tokens; zeros for other servers."""
    try:
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=10) as page:
            text = page.read().decode()
    except OSError:
        return 0.0, 0.0
    return tuple(sum(map(float, re.findall(rf"^vllm:spec_decode_num_{name}_total\S* (\S+)$", text, re.M)))
                 for name in ("drafts", "accepted_tokens"))


def measure(url: str, body: dict, prompts: list[str], clients: int) -> dict:
    """Answer each prompt once, with `clients` concurrent requests."""
    def answer(prompt: str) -> int:
        messages = [{"role": "user", "content": prompt}]
        return ask(f"{url}/chat/completions", body | {"messages": messages})["usage"]["completion_tokens"]

    before, start = drafted(url), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(answer, prompts))
    seconds = time.perf_counter() - start
    drafts, accepted = (now - then for now, then in zip(drafted(url), before, strict=True))
    return {"clients": clients, "tokens": tokens, "seconds": seconds, "tau": 1 + accepted / drafts if drafts else None}


def read_arm(text: str) -> tuple[str, str, dict]:
    """Name, URL and request body of an arm.

    Raises:
        ValueError: see `read_endpoints`; or the text after the endpoint is not a JSON object.
    """
    place, brace, extra = text.partition(" {")
    ((name, (url, model)),) = read_endpoints((place,)).items()
    try:
        return name, url, {"model": model} | (json.loads("{" + extra) if brace else {})
    except ValueError as error:
        raise ValueError(f"{text!r}: the text after the endpoint must be a JSON object") from error


def run(args: ClientsArguments) -> None:
    check_counts(args, "per_category", "limit", "tokens")
    if not (args.arms and args.clients and min(args.clients) >= 1):
        raise ValueError(f"pass at least one endpoint, and --clients of at least 1, got {args.arms} and {args.clients}")
    prompts = [question.turns[0] for question in args.chosen_questions()]
    arms, rows = [read_arm(arm) for arm in args.arms], []
    for clients in args.clients:
        for name, url, body in arms:
            asked = body | {"max_tokens": args.tokens, "temperature": 0}
            rows.append({"arm": name} | measure(url, asked, prompts, clients))
            print(rows[-1], flush=True)
    print(write_record(args.out, {"settings": option_record(args), "measured": rows}, markdown({
        "endpoint": row["arm"], "clients": row["clients"], "tokens/s": f"{row['tokens'] / row['seconds']:.1f}",
        "tokens per forward": decimals(row["tau"])} for row in rows)))


main = partial(run_command, "eval.clients", ClientsArguments, run)

if __name__ == "__main__":
    sys.exit(main())
