"""Tokens/s of OpenAI endpoints with one and several clients, and vLLM's accepted length; arms in turn.

    python -m eval.clients --questions mt_bench.jsonl --out record.json 'vLLM=http://127.0.0.1:8000/v1' \\
        'vLLM 0.3=http://127.0.0.1:8000/v1 {"vllm_xargs": {"eagle_fsd_threshold": 0.3}}'

An arm is an endpoint as in eval.endpoints, then what its requests say beside the rest.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eagle_fsd.measure.records import environment
from eval.endpoints import ask, read_endpoints


def drafted(url: str) -> tuple[float, float]:
    """Drafts and accepted tokens that vLLM has counted; zeros for other servers."""
    try:
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=10) as page:
            text = page.read().decode()
    except OSError:
        return 0.0, 0.0
    return tuple(sum(map(float, re.findall(rf"^vllm:spec_decode_num_{name}_total\S* (\S+)$", text, re.M)))
                 for name in ("drafts", "accepted_tokens"))


def measure(url: str, body: dict, prompts: list[str], clients: int) -> dict:
    """One answer to each prompt by so many clients."""
    def answer(prompt: str) -> int:
        messages = [{"role": "user", "content": prompt}]
        return ask(f"{url}/chat/completions", body | {"messages": messages})["usage"]["completion_tokens"]

    before, start = drafted(url), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(answer, prompts))
    seconds = time.perf_counter() - start
    drafts, accepted = (now - then for now, then in zip(drafted(url), before, strict=True))
    return {"clients": clients, "tokens": tokens, "seconds": seconds, "tau": 1 + accepted / drafts if drafts else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10, help="every so many-th question (10: one of each category)")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    lines = given.questions.read_text(encoding="utf-8").splitlines()[:: given.every]
    prompts, measured = [json.loads(line)["turns"][0] for line in lines], []
    for clients in given.clients:
        for arm in given.arms:
            place, _, extra = arm.partition(" {")
            (name, (url, model)), = read_endpoints((place,)).items()
            body = {"model": model, "max_tokens": given.tokens, "temperature": 0}
            body |= json.loads("{" + extra) if extra else {}
            measured.append({"arm": name} | measure(url, body, prompts, clients))
            print(measured[-1], flush=True)
    record = {"environment": environment(), "settings": {name: str(value) for name, value in vars(given).items()}}
    given.out.write_text(json.dumps(record | {"measured": measured}, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
