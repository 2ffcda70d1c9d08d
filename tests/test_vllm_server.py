"""The plug-in in vLLM itself: `make test-vllm`, in an environment of its own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

from eagle_fsd.export.servers import export_head  # noqa: E402
from eagle_fsd.heads.checkpoint import save_head  # noqa: E402
from eagle_fsd.heads.eagle3 import Eagle3Head  # noqa: E402

pytestmark = pytest.mark.slow
PAIRS = Path(__file__).parent / "pairs"
TARGET = str(PAIRS / "small-target")
TEXTS = ["What is the capital of France?", "Once upon a time", "List three colours."]
STARTS = 240  # seconds within which a server must


@contextmanager
def serving(speculative: dict | None, log: Path, **environment: str):
    """A server of the small target with a client; fails with the end of its log where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    drafts = [] if speculative is None else ["--speculative-config", json.dumps(speculative)]
    options = f"--served-model-name m --host 127.0.0.1 --port {port} --enforce-eager --dtype float32"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", TARGET, *options.split(),
               "--max-model-len", "512", "--max-num-seqs", "8", "--no-enable-prefix-caching", *drafts]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as said, subprocess.Popen(command, stdout=said, stderr=said,
                                                  env=os.environ | settings | environment) as process:
        try:
            until = time.monotonic() + STARTS
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
                    time.sleep(0.5)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        finally:
            process.terminate()


def say(client, text: str, temperature: float = 0.0, **extra) -> str:
    return client.completions.create(model="m", prompt=text, max_tokens=40, temperature=temperature, seed=7,
                                     extra_body={"vllm_xargs": extra} if extra else None).choices[0].text


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head") / "vllm"
    export_head(PAIRS / "small-draft", "vllm", folder, dtype=torch.float32)
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 3}


def test_exact_rows_are_vllms_own_and_thresholds_are_served(head, tmp_path):
    with serving(head, tmp_path / "plain.log") as client:
        plain = [say(client, text) for text in TEXTS]
    with serving(head, tmp_path / "fuzzy.log", EAGLE_FSD_VLLM="1") as client:
        assert [say(client, text) for text in TEXTS] == plain
        assert [say(client, text, eagle_fsd_threshold=0) for text in TEXTS] == plain
        fuzzy = {threshold: [say(client, text, eagle_fsd_threshold=threshold) for text in TEXTS]
                 for threshold in (0.3, 0.5)}
        assert any(texts != plain for texts in fuzzy.values())
        # One batch of both kinds.
        with ThreadPoolExecutor(8) as pool:
            loose = [pool.submit(say, client, text, eagle_fsd_threshold=0.5) for text in TEXTS]
            assert list(pool.map(lambda text: say(client, text), TEXTS)) == plain
            assert all(each.result() for each in loose)
        for rule in ("typical", "relaxed", "lenience", "fsd_paper"):
            assert say(client, TEXTS[0], eagle_fsd_threshold=0.3, eagle_fsd_rule=rule)
        for extra, message in (({"eagle_fsd_threshold": -1}, "got -1"),
                               ({"eagle_fsd_threshold": 1, "eagle_fsd_rule": "x"}, "unknown rule 'x'")):
            with pytest.raises(openai.BadRequestError, match=message):
                say(client, TEXTS[0], **extra)


def test_drafts_without_a_distribution_are_refused(tmp_path):
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with serving(ngram, tmp_path / "log", EAGLE_FSD_VLLM="1") as client:
        assert say(client, TEXTS[0])
        with pytest.raises(openai.BadRequestError, match="method 'ngram' does not provide"):
            say(client, TEXTS[0], eagle_fsd_threshold=0.3)


def test_eagle3_heads_load_and_serve(tmp_path):
    """A random one, of a reduced draft vocabulary."""
    own = {"num_hidden_layers": 1, "draft_vocab_size": 500, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config = LlamaConfig(**LlamaConfig.from_pretrained(TARGET).to_dict() | own)
    torch.manual_seed(0)
    made = Eagle3Head(config)
    made.d2t.copy_(torch.arange(500) * 3)
    save_head(made, tmp_path / "head")
    export_head(tmp_path / "head", "vllm", tmp_path / "vllm", dtype=torch.float32)
    spec = {"method": "eagle3", "model": str(tmp_path / "vllm"), "num_speculative_tokens": 2}
    with serving(None, tmp_path / "plain.log") as client:
        plain = say(client, TEXTS[1])
    with serving(spec, tmp_path / "log", EAGLE_FSD_VLLM="1") as client:
        assert say(client, TEXTS[1]) == plain
        assert say(client, TEXTS[1], eagle_fsd_threshold=0.5)
