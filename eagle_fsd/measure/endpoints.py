"""Servers with an OpenAI-compatible API as methods of a comparison: llama.cpp's, vLLM's, OpenVINO's, Ollama's.

An endpoint is "NAME=URL" or "NAME=URL#MODEL", for example "llama.cpp BF16=http://127.0.0.1:8081/v1". Requests turn
prompt caching off if the server allows it (llama.cpp's cache_prompt), except in later turns of a chat whose history is
to be kept. Other servers do as they were started, vLLM with --no-enable-prefix-caching for instance.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from ..loading.pair import EagleModel
from .methods import Answer, Method, continues, prompt_seed

TIMEOUT = 600  # seconds for an answer
UNCACHED = {"cache_prompt": False}
UNPENALISED = {"repetition_penalty": 1.0}  # vLLM would take that of the model's generation config


def read_endpoints(texts: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """URL and model of each endpoint by name. The default model is the server's first.

    Raises:
        ValueError: an endpoint does not have the form above, does not answer, or shares its name with another.
    """
    endpoints: dict[str, tuple[str, str]] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        url, _, model = address.rstrip("/").partition("#")
        if not equals or not name.strip() or not url.startswith(("http://", "https://")):
            raise ValueError(f'{text!r} is not an endpoint: pass "NAME=URL" or "NAME=URL#MODEL", for example '
                             '"llama.cpp=http://127.0.0.1:8081/v1"')
        if name in endpoints:
            raise ValueError(f"two endpoints have the name {name!r}")
        known = [entry["id"] for entry in ask(f"{url}/models").get("data", [])]
        if not (model or known):
            raise ValueError(f"{url} lists no model: pass {name}={url}#MODEL")
        endpoints[name] = url, model or known[0]
    return endpoints


def ask(url: str, body: Mapping[str, object] | None = None) -> dict:
    """The JSON response of a server, to a POST request if there is a body, else to GET.

    Raises:
        ValueError: the server does not answer, or returns an error, whose text is in the message.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answers {error.code}: {error.read(2000).decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{url} does not answer: {error}") from error


def endpoint_method(
    model: EagleModel, url: str, name: str, *, temperature: float, seed: int, keep_history: bool = False
) -> Method:
    """A server's model as a method, with one request at a time.

    The target's tokenizer counts the tokens, because servers count differently; the end token counts too, as in our own
    decoding. The first call finds out whether the server accepts `cache_prompt` and `repetition_penalty`.

    Args:
        keep_history: later turns of a chat may use the server's prompt cache. A first turn never does: its prompt may
            have been the last one, in a warm-up.
    """
    accepts = True

    def answer(prompt: object, max_new_tokens: int) -> Answer:
        nonlocal accepts
        extra = {"cache_prompt": keep_history and continues(prompt), **UNPENALISED} if accepts else {}
        path, asked = ("completions", {"prompt": prompt}) if isinstance(prompt, str) else (
            "chat/completions", {"messages": prompt})
        body = {"model": name, **asked, "max_tokens": max_new_tokens, "temperature": temperature,
                "seed": prompt_seed(seed, prompt) % 2**31}
        started = time.perf_counter()
        try:
            response = ask(f"{url}/{path}", {**body, **extra})
        except ValueError as error:
            if not extra or " answers 4" not in str(error):
                raise
            accepts = False
            started = time.perf_counter()
            response = ask(f"{url}/{path}", body)
        seconds = time.perf_counter() - started
        choice = response["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        if choice.get("finish_reason") == "stop" and model.tokenizer.eos_token_id is not None:
            ids.append(model.tokenizer.eos_token_id)
        return Answer(seconds, ids, text, accepted_lengths=None)

    return answer
