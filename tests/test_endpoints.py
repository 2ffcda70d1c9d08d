"""Servers as methods of a comparison: their answers, how tokens are counted, and what goes wrong with them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from llguidance import LLMatcher
from served import here as serving
from tiny import tiny_chat_pair

from eagle_fsd.cli import main
from eagle_fsd.decoding.grammar import grammar_of
from eagle_fsd.measure.endpoints import endpoint_method, read_endpoints
from eval import clients, llama_server, structured

CHAT = [{"role": "user", "content": "hi"}]


class Protocol(BaseHTTPRequestHandler):
    """Answers "abc", by the end token unless one token is asked for; `strict` servers refuse what they do not know."""

    strict, models = False, ["the model"]
    asked: list[dict] = []

    def do_GET(self):
        self.reply(200, {"data": [{"id": name} for name in self.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, **body})
        if self.strict and "cache_prompt" in body:
            return self.reply(400, {"error": "unknown field cache_prompt"})
        if body["model"] == "broken":
            return self.reply(500, {"error": "out of memory"})
        ended = "stop" if body["max_tokens"] > 3 else "length"
        said = {"text": "abc"} if "prompt" in body else {"message": {"role": "assistant", "content": "abc"}}
        self.reply(200, {"choices": [{**said, "finish_reason": ended}]})

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Protocol, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Protocol) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/v1"
        running.shutdown()


@pytest.fixture(scope="module")
def model():
    return tiny_chat_pair()


def test_answers_are_counted_as_our_own(server, model):
    method = endpoint_method(model, *read_endpoints((f"other={server}/",))["other"], temperature=0.5, seed=3)
    ended, cut, text = method(CHAT, 8), method(CHAT, 3), method("hi", 8)
    assert len(cut.token_ids) == len(model.tokenizer.encode("abc", add_special_tokens=False))
    assert ended.token_ids == text.token_ids == [*cut.token_ids, model.tokenizer.eos_token_id]
    assert ended.text == "abc" and ended.output is None and ended.seconds > 0
    first, _, last = Protocol.asked
    assert (first["path"], first["messages"], first["model"]) == ("/v1/chat/completions", CHAT, "the model")
    assert (first["temperature"], first["max_tokens"], first["cache_prompt"]) == (0.5, 8, False)
    assert first["repetition_penalty"] == 1
    assert (last["path"], last["prompt"]) == ("/v1/completions", "hi")


@pytest.mark.parametrize("kept", [True, False])
def test_later_turns_use_the_prompt_cache_of_a_server_if_history_is_kept(kept, server, model):
    method = endpoint_method(model, server, "the model", temperature=0.0, seed=0, keep_history=kept)
    for prompt in (CHAT, [*CHAT, {"role": "assistant", "content": "abc"}, *CHAT], CHAT, "hi"):
        method(prompt, 8)
    assert [asked["cache_prompt"] for asked in Protocol.asked] == [False, kept, False, False]


def test_a_server_that_refuses_unknown_fields_is_asked_without(server, model, monkeypatch):
    monkeypatch.setattr(Protocol, "strict", True)
    method = endpoint_method(model, server, "the model", temperature=0.0, seed=0)
    assert [method(CHAT, 8).text for _ in range(2)] == ["abc", "abc"]
    assert ["cache_prompt" in asked for asked in Protocol.asked] == [True, False, False]
    assert ["repetition_penalty" in asked for asked in Protocol.asked] == [True, False, False]


def test_errors_name_the_server_and_what_it_says(server, model, monkeypatch):
    with pytest.raises(ValueError, match=r"chat/completions answers 500: .*out of memory"):
        endpoint_method(model, server, "broken", temperature=0.0, seed=0)(CHAT, 8)
    monkeypatch.setattr(Protocol, "models", [])
    with pytest.raises(ValueError, match="lists no model: pass other="):
        read_endpoints((f"other={server}",))
    assert read_endpoints((f"other={server}#mine",)) == {"other": (server, "mine")}
    with pytest.raises(ValueError, match="two endpoints have the name 'other'"):
        read_endpoints((f"other={server}#a", f"other={server}#b"))


@pytest.mark.parametrize("text", ["http://127.0.0.1:1/v1", "=http://127.0.0.1:1/v1", "llama=127.0.0.1:1", "llama="])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(ValueError, match="pass \"NAME=URL\""):
        read_endpoints((text,))


def test_an_unreachable_one_is_refused_before_anything_is_loaded(tmp_path, capsys):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"prompt": "hi"}\n')
    assert main(["benchmark", "--questions", str(questions), "--endpoints", "x=http://127.0.0.1:9/v1", "--out",
                 str(tmp_path / "out")]) == 2
    assert "http://127.0.0.1:9/v1/models does not answer" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_file_that_is_not_there_is_not_served(tmp_path, capsys):
    there, missing = tmp_path / "there.gguf", str(tmp_path / "no.gguf")
    there.touch()
    for words, message in (([missing], "no.gguf does not"), ([str(there), "--draft", missing], "no.gguf does not"),
                           ([str(there), "--draft", str(there), "--ngram", "simple"], "--ngram or --draft, not both"),
                           ([str(there), "--draft-tokens", "3"], "--draft-tokens needs --draft"),
                           ([str(there), "--draft", str(there), "--draft-tokens", "0"], "must be at least 1, got 0")):
        assert llama_server.main(words) == 2 and message in capsys.readouterr().err


def test_a_gguf_file_is_written_in_another_type(tmp_path):
    gguf = pytest.importorskip("gguf")
    import numpy as np

    matrix = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(1)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("m", gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("v", matrix[0])
    writer.add_tensor("d2t", np.array([3, 5, 8]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert llama_server.main([str(tmp_path / "a.gguf"), "--convert", str(tmp_path / "b.gguf")]) == 0
    found = gguf.GGUFReader(tmp_path / "b.gguf")
    m, v, tokens = found.tensors
    assert tokens.data.tolist() == [3, 5, 8] and llama_server.draft_type(tmp_path / "b.gguf") == "DRAFT_SIMPLE"
    assert (m.tensor_type, v.tensor_type) == (gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32)
    assert np.allclose(gguf.quants.dequantize(m.data, m.tensor_type), matrix, atol=0.05)
    assert np.allclose(v.data, matrix[0])
    assert found.fields["llama.block_count"].contents() == 1
    assert found.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_BF16
    assert found.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert llama_server.main([str(tmp_path / "a.gguf"), "--convert", str(tmp_path / "b.gguf")]) == 2


def test_clients_in_turn_and_what_is_refused_before_any_is_asked(tmp_path, capsys):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("hi", "ab", "cd")))
    given = ["--questions", str(questions), "--out", str(tmp_path / "found"), "--limit", "2", "--tokens", "5"]
    with serving() as found:
        arms = [f"plain={found.url}/v1", f'fuzzy={found.url}/v1 {{"acceptance": "fsd", "threshold": 0.3}}']
        assert clients.main(["--clients", "1", "2", *given, *arms]) == 0
        rows = json.loads((tmp_path / "found.json").read_text())["measured"]
        assert [(row["arm"], row["clients"], row["tokens"]) for row in rows] == [
            (name, count, 10) for count in (1, 2) for name in ("plain", "fuzzy")]
        capsys.readouterr()
        for wrong, said in (([*given, arms[0] + " {x"], "must be a JSON object"), ([*given, "plain"], "an endpoint"),
                            ([*given, "--limit", "0", arms[0]], "--limit must be at least 1, got 0")):
            assert clients.main(wrong) == 2 and said in capsys.readouterr().err


def test_structured_output_of_each_arm(server, tmp_path, capsys):
    """Every arm decodes the same valid answers; a server's that follow no schema are found out, or cut off."""
    pairs = Path(__file__).parent / "pairs"
    schemas = tmp_path / "schemas.jsonl"
    schemas.write_text("".join(json.dumps({"id": i, "kind": "x", "prompt": "A colour.", "schema": schema}) + "\n"
                               for i, schema in enumerate([{"enum": ["red", "blue"]}, {"type": "boolean"}])))
    words = ["--target", str(pairs / "small-target"), "--draft", str(pairs / "small-draft"), "--dtype", "float32",
             "--schemas", str(schemas), "--endpoints", f"other={server}", "--out", str(tmp_path / "out")]
    assert structured.main([*words, "--max-new-tokens", "16"]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    for row in record["rows"]:
        ours = [row["arms"][name] for name in structured.ARMS]
        assert all(answer["fault"] is None and not answer["cut"] for answer in ours)
        assert len({tuple(answer["token_ids"]) for answer in ours}) == 1
        assert "Expecting value" in row["arms"]["other"]["fault"]
    assert row["arms"]["plain"]["accepted"] == {} and row["arms"]["head and grammar"]["accepted"]["grammar"] > 0
    assert "| plain | 2 of 2 | 0 | 2 |" in capsys.readouterr().out
    assert structured.main([*words, "--repeats", "0"]) == 2 and "--repeats" in capsys.readouterr().err


def test_the_schemas_can_be_served():
    rows = [json.loads(line) for line in structured.SCHEMAS.read_text().splitlines()]
    assert len(rows) == 30 and len({row["prompt"] for row in rows}) == 30
    assert not any(LLMatcher.validate_grammar(grammar_of(row["schema"])) for row in rows)
