"""Servers with an OpenAI-compatible API as methods of a comparison: llama.cpp's, vLLM's, OpenVINO's, Ollama's.

An endpoint is written "NAME=URL" or "NAME=URL#MODEL", such as "llama.cpp BF16=http://127.0.0.1:8081/v1". Prompt caches
are turned off by the request where a server allows it (llama.cpp's cache_prompt), for vLLM when it is started
(--no-enable-prefix-caching).
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from eagle_fsd import EagleModel
from eagle_fsd.measure.methods import Answer, Method, prompt_seed

TIMEOUT = 600  # seconds for an answer
UNCACHED = {"cache_prompt": False}


def read_endpoints(texts: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """URL and model of each endpoint by name; the model is the server's first where none is named.

    Raises:
        ValueError: one that is not of the form above, is named twice, or does not answer.
    """
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        url, _, model = address.rstrip("/").partition("#")
        if not equals or not name.strip() or not url.startswith(("http://", "https://")):
            raise ValueError(f'{text!r} is no endpoint; it takes "NAME=URL" or "NAME=URL#MODEL", such as '
                             '"llama.cpp=http://127.0.0.1:8081/v1"')
        if name in found:
            raise ValueError(f"two endpoints are called {name!r}")
        known = [entry["id"] for entry in ask(f"{url}/models").get("data", [])]
        if not (model or known):
            raise ValueError(f"{url} names no model: give one as {name}={url}#MODEL")
        found[name] = url, model or known[0]
    return found


def ask(url: str, body: Mapping[str, object] | None = None) -> dict:
    """The JSON that a server answers; a body is posted.

    Raises:
        ValueError: no answer, or an error, with the server's message.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answers {error.code}: {error.read(2000).decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{url} gives no answer: {error}") from error


def endpoint_method(model: EagleModel, url: str, name: str, *, temperature: float, seed: int) -> Method:
    """Answers of a server's model, one at a time.

    Tokens are counted with the target's tokenizer, since servers count differently; an answer that ended by itself has
    one more, its end token, as in our own engine. The first of its calls finds out whether the server takes `UNCACHED`.
    """
    further: dict[str, object] = dict(UNCACHED)

    def answer(prompt: object, max_new_tokens: int) -> Answer:
        place, asked = ("completions", {"prompt": prompt}) if isinstance(prompt, str) else (
            "chat/completions", {"messages": prompt})
        body = {"model": name, **asked, "max_tokens": max_new_tokens, "temperature": temperature,
                "seed": prompt_seed(seed, prompt) % 2**31}
        started = time.perf_counter()
        try:
            found = ask(f"{url}/{place}", {**body, **further})
        except ValueError as error:
            if not further or " answers 4" not in str(error):
                raise
            further.clear()
            started = time.perf_counter()
            found = ask(f"{url}/{place}", body)
        seconds = time.perf_counter() - started
        choice = found["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        if choice.get("finish_reason") == "stop" and model.tokenizer.eos_token_id is not None:
            ids.append(model.tokenizer.eos_token_id)
        return Answer(seconds, ids, text)

    return answer
