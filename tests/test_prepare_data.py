"""From files of conversations to a dataset: formats, bad rows, lengths, answers by the target itself."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from served import here as serving
from tiny import save_pair, tiny_pair, tiny_tokenizer, tiny_trainable_pair

import eagle_fsd
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.data.conversations import BadRow, Record, read_records
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.encoding import encode_dataset, encode_record
from eagle_fsd.heads.checkpoint import save_head
from eagle_fsd.models.linear import Int8
from eagle_fsd.utils.files import append_lines
from train import answers
from train.answers import Respondent, endpoint_writer, is_sensible, local_writer, regenerate, self_prompted
from train.prepare_data import Arguments, exclude_overlapping, run


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def rows(*chats: list[dict[str, str]]) -> list[Record]:
    return [Record(messages=messages) for messages in chats]


@pytest.fixture(scope="module")
def model():
    return tiny_trainable_pair()


def write(path, lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


SHAREGPT = {"id": "1", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}

CALL = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"function": {"name": "f"}}]}


def test_every_format_is_read(tmp_path):
    wanted = chat("hi", "yes")
    for name, line in (("array.json", json.dumps([SHAREGPT], indent=2)), ("lines.jsonl", SHAREGPT),
                       ("openai.jsonl", {"messages": chat("hi", "yes", "and?")}), ("bare.jsonl", wanted)):
        assert list(read_records(write(tmp_path / name, [line]))) == rows(wanted), name
    assert list(read_records(write(tmp_path / "a.txt", ["one", "two"]))) == [Record(text="one\ntwo")]


def sharegpt(*texts: str, names=("human", "gpt")) -> list[dict[str, str]]:
    return [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)]


def oasst(*messages: tuple) -> list[dict]:
    return [{"message_id": name, "parent_id": parent, "message_tree_id": name[0], "rank": rank, "text": text,
             "role": "prompter" if rank is None else "assistant"} for name, parent, rank, text in messages]


FOUR = chat("a", "b", "c", "d")
SYSTEM = [{"role": "system", "content": "s"}]
# Layout of some of the best-known sets: rows as they have them, and the turns that are read. Each answer is learned.
LAYOUTS = {
    "ShareGPT": ([{"conversations": sharegpt("a", "b", "c", "d")}], FOUR),
    "ShareGPT, split": ([{"conversations": sharegpt("z", "a", "b", "c", "d", names=("gpt", "human"))}], FOUR),
    "UltraChat": ([{"id": "0", "data": ["a", "b", "c", "d"]}], FOUR),
    "ultrachat_200k": ([{"prompt": "a", "prompt_id": "x", "messages": FOUR}], FOUR),
    "OpenHermes-2.5": ([{"conversations": [{"from": "system", "value": "s"}, *sharegpt("a", "b")], "source": "x",
                         "system_prompt": None, "custom_instruction": False, "title": None}], [*SYSTEM, *FOUR[:2]]),
    "Magpie": ([{"instruction": "a", "response": "b", "conversations": sharegpt("a", "b", "c", "d")}], FOUR),
    "LMSYS-Chat-1M": ([{"conversation_id": "x", "model": "m", "conversation": FOUR}], FOUR),
    "WildChat": ([{"conversation": [{**m, "toxic": False} for m in FOUR]}], FOUR),
    "Tulu 3": ([{"id": "x", "messages": FOUR, "source": "y"}], FOUR),
    "Alpaca": ([{"instruction": "a", "input": "", "output": "b", "text": "below is a"}], FOUR[:2]),
    "Alpaca, input": ([{"instruction": "a", "input": "c", "output": "b", "text": "below is a"}], chat("a\n\nc", "b")),
    "Dolly": ([{"instruction": "a", "context": "c", "response": "b", "category": "qa"}], chat("a\n\nc", "b")),
    "OASST": (oasst(("x0", None, None, "a"), ("x1", "x0", 1, "z"), ("x2", "x0", 0, "b"), ("x3", "x2", None, "c"),
                    ("x4", "x3", 0, "d")), FOUR),
    "Nemotron, post-training": ([{"input": chat("a", "b", "c"), "output": "d", "category": "chat", "reasoning": "off",
                                  "system_prompt": "s"}], [*SYSTEM, *FOUR]),
    "Nemotron, v2": ([{"uuid": "x", "messages": [{**m, "tool_calls": []} for m in FOUR], "reasoning": "off"}], FOUR),
    "SmolTalk": ([{"messages": FOUR, "source": "everyday", "full_topic": "x"}], FOUR),
    "OpenOrca": ([{"id": "x", "system_prompt": "s", "question": "a", "response": "b"}], [*SYSTEM, *FOUR[:2]]),
    "SlimOrca": ([{"conversations": [{"from": "system", "value": "s", "weight": None},
                                     *sharegpt("a", "b")]}], [*SYSTEM, *FOUR[:2]]),
    "Capybara": ([{"conversation": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]}], FOUR),
    "LIMA": ([{"conversations": ["a", "b", "c", "d"], "source": "x"}], FOUR),
    "MetaMathQA": ([{"type": "x", "query": "a", "original_question": "z", "response": "b"}], FOUR[:2]),
    "GSM8K": ([{"question": "a", "answer": "b"}], FOUR[:2]),
    "OpenThoughts": ([{"system": "s", "conversations": sharegpt("a", "b", names=("user", "assistant"))}],
                     [*SYSTEM, *FOUR[:2]]),
    "UltraFeedback": ([{"prompt": "a", "chosen": FOUR[:2], "rejected": chat("a", "z"), "score_chosen": 8}], FOUR[:2]),
    "Magicoder": ([{"lang": "x", "raw_index": 1, "problem": "a", "solution": "b"}], FOUR[:2]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_turn_of_the_well_known_sets_is_read_and_every_answer_learned(tmp_path, model, name):
    lines, wanted = LAYOUTS[name]
    path = write(tmp_path / "rows.jsonl", [SHAREGPT, *lines, SHAREGPT])  # other rows before and after
    for unanswered in (False, True):
        found = [record.messages for record in read_records(path, unanswered=unanswered)]
        assert found == [chat("hi", "yes"), wanted, chat("hi", "yes")]
    ((ids, learned),) = encode_record(Record(messages=wanted), model.tokenizer, 64, "drop")
    answers = "".join(f"{message['content']}</s>" for message in wanted if message["role"] == "assistant")
    assert model.tokenizer.decode([token for token, mark in zip(ids, learned, strict=True) if mark]) == answers


def test_questions_without_answers_are_for_a_target_to_answer(tmp_path):
    lines = [{"prompt": "hi"}, {"messages": chat("hi", "yes", "and?")}, {"prompt": " "}]
    found = list(read_records(asked := write(tmp_path / "asked.jsonl", lines), unanswered=True))
    assert found[:2] == rows(chat("hi", ""), chat("hi", "yes", "and?", "")) and found[2].reason == "empty message"
    assert [record.reason for record in read_records(asked)][0] is not None


@pytest.mark.parametrize("row", [
    SHAREGPT, {"messages": chat("hi", "yes")}, {"messages": chat("hi", "yes"), "tools": []}, {"prompt": "hi"}])
def test_a_system_text_beside_the_turns_is_the_first_turn(tmp_path, row):
    system = {"role": "system", "content": "be kind"}

    def read(row) -> Record:
        (record,) = read_records(write(tmp_path / "rows.jsonl", [row]), unanswered=True)
        return record

    for none in (None, ""):
        assert read({**row, "system": none}) == read(row)
    assert read({**row, "system": "be kind"}).messages == [system, *read(row).messages]
    assert read({**row, "system": 3}).reason == "content is not a string"
    assert read({**row, "tools": '[{"name": "f"}]'}).reason == "tools are not supported"
    if "messages" in row:  # a turn of the conversation's own comes first
        assert read({"messages": [system, *row["messages"]], "system": "be bold"}).messages[0] == system


def test_what_is_not_utf_8_is_bad_and_its_line_is_named(tmp_path, caplog):
    good = json.dumps(SHAREGPT)
    other, invalid = good.replace("yes", "ä"), "text is not valid Unicode"
    for name, content, reasons, said in (
            ("lines.jsonl", f"{good}\n\n{other}\n{good}", [None, "not UTF-8", None], "lines.jsonl, line 3: not UTF-8"),
            ("array.json", f"[{good},\n{other}]", [None, invalid], f"array.json, row 2: {invalid}"),
            ("plain.txt", "ä", ["not UTF-8"], "plain.txt: not UTF-8 at byte 1"),
            ("escape.jsonl", json.dumps({"text": "a\ud800"}), [invalid], f"escape.jsonl, line 1: {invalid}")):
        (tmp_path / name).write_bytes(content.encode("latin-1"))
        assert [record.reason for record in read_records(str(tmp_path / name))] == reasons
        assert said in caplog.text
        (tmp_path / name).write_text(content.replace("\\ud800", ""), encoding="utf-8-sig")
        assert all(record.reason is None for record in read_records(str(tmp_path / name)))


def test_bad_rows_are_counted_by_reason_and_the_rest_is_learned(tmp_path, model):
    lines = ["{broken", {"prompt": "hi"}, {"messages": [{"role": "tool", "content": "x"}]}, {"text": " "},
             {"messages": [*chat("hi"), *chat("hi", "yes")]},
             {"messages": [chat("hi")[0], CALL]}, {"messages": chat("hi", "a" * 40)}, *[SHAREGPT] * 3]
    data = read_records(write(tmp_path / "x.jsonl", lines))
    documents, summary = encode_dataset(data, model.tokenizer, max_length=24, long="drop")
    assert summary["rows"] == 10 and summary["bad_rows"] == len(summary["bad_reasons"]) == 7
    tokens, learned = documents.document(2)
    assert len(documents) == 3 and model.tokenizer.decode(tokens[learned]) == "yes</s>"
    with pytest.raises(ValueError, match="none of 1 rows.*broken JSON"):
        encode_dataset([Record(reason="broken JSON")], model.tokenizer, max_length=24)


def test_what_is_too_long_is_cut(model):
    tokenizer = model.tokenizer
    ((ids, learned),) = encode_record(*rows(chat("hi", "a" * 40)), tokenizer, 12, "truncate")
    assert len(ids) == len(learned) == 12 and learned[-1]
    with pytest.raises(BadRow, match="nothing to learn"):
        encode_record(*rows(chat("a" * 40, "yes")), tokenizer, 12, "truncate")
    pieces = encode_record(Record(text="abcdefghij"), tokenizer, 5, "truncate")
    assert [len(ids) for ids, _ in pieces] == [5, 5, 4]  # a start token each, one end token in all
    assert all(ids[0] == tokenizer.bos_token_id and not learned[0] and all(learned[1:]) for ids, learned in pieces)
    assert encode_record(Record(text="<s>abcdefghij</s>"), tokenizer, 5, "truncate") == pieces


def writer(model, **options) -> Respondent:
    settings = {"batch": 4, "temperature": 0.0, "max_new_tokens": 4, "seed": 0}
    return Respondent(local_writer(model), model.tokenizer, **settings | options)


def test_regenerated_answers_are_the_targets_own_and_are_not_made_twice(tmp_path, model, monkeypatch):
    data = rows(chat("hi", "x", "and", "y"), chat("b", "x"), chat("a" * 200, "x"))
    data.insert(1, Record(reason="broken JSON"))
    store = tmp_path / "answers.jsonl"
    made = list(regenerate(data, writer(model, batch=2), store, {}))
    assert made[0].messages[1]["content"] == eagle_fsd.generate(
        chat("hi"), model, max_new_tokens=4, acceptance="exact").text
    assert [m["role"] for m in made[0].messages] == ["user", "assistant"] * 2 and len(made[2].messages) == 2
    assert [made[1].reason, made[3].reason] == ["broken JSON", "prompt too long to answer"]

    lines = store.read_text().splitlines(keepends=True)
    store.write_text("".join(lines[:-1]) + lines[-1][:7])  # killed while writing the last one
    asked, decode = [], answers.decode_requests
    monkeypatch.setattr(answers, "decode_requests", lambda model, requests, **options: asked.append(len(requests))
                        or decode(model, requests, **options))
    assert list(regenerate(data, writer(model, batch=2), store, {})) == made and set(asked) == {1}
    with pytest.raises(ValueError, match=r"made with another max_new_tokens \(was 4, now 5\)"):
        list(regenerate(data, writer(model, max_new_tokens=5), store, {}))
    store.write_text(lines[0])  # begun, and stopped before the first answer: that binds nobody
    assert list(regenerate(data[:1], writer(model, max_new_tokens=5), store, {}))


def test_answers_are_found_again_by_their_conversation(tmp_path, model, monkeypatch):
    """Rows may move, go and come; questions that are edited or excluded since do not keep their old answers."""
    asked = []

    def answered(data: list[Record]) -> list[Record]:
        asking = writer(model)
        write = asking.write
        asking.write = lambda texts, *given, **sampling: asked.extend(texts) or write(texts, *given, **sampling)
        return list(regenerate(data, asking, tmp_path / "answers.jsonl", {}))

    first = answered(data := rows(chat("hi", "x", "and", "y"), chat("b", "x"), chat("cd", "x"), chat("b", "x")))
    assert len(asked) == 5
    bad = Record(reason="excluded")
    assert answered([data[2], bad, *data[:2]]) == [first[2], bad, *first[:2]]
    assert len(asked) == 5  # nothing new
    edited = answered(rows(chat("hi", "x", "but", "y"), chat("cd", "other")))
    assert [m["content"] for m in edited[0].messages[::2]] == ["hi", "but"] and edited[1] == first[2]
    assert len(asked) == 7
    sampled = [record.messages for record in regenerate(
        rows(*[chat("b", "x")] * 4), writer(model, temperature=2.0), tmp_path / "sampled.jsonl", {})]
    assert len(set(map(str, sampled))) > 1  # equal rows are separate samples


def test_answers_after_an_opened_thought_are_written_and_learned(tmp_path):
    """The generation prompt ends within the answer, which earlier turns do not show."""
    model = tiny_trainable_pair()
    model.tokenizer.chat_template = model.tokenizer.chat_template.replace(
        "{% if add_generation_prompt %}<bot>", "{% if add_generation_prompt %}<bot>ab ")
    made = list(regenerate(rows(chat("hi", "x", "and", "y"), chat("b", "x")), writer(model), tmp_path / "a.jsonl", {}))
    documents, summary = encode_dataset(made, model.tokenizer, max_length=64)
    assert summary["bad_rows"] == 0 and len(documents) == 3
    answered = [message["token_ids"] for record in made for message in record.messages[1::2]]
    for number, own in enumerate(answered):
        tokens, learned = documents.document(number)
        assert tokens[learned].tolist() == own
        assert model.tokenizer.decode(tokens[~learned]).endswith("<bot>ab ")


def test_an_answer_cut_off_on_a_server_without_token_ids_does_not_end(tmp_path, model):
    def choice(text: str, reason: str) -> dict:
        return {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}

    found = {}
    for reason in ("length", "stop"):
        client = SimpleNamespace(
            models=SimpleNamespace(list=lambda: []),
            completions=SimpleNamespace(create=lambda reason=reason, **body: SimpleNamespace(
                choices=[SimpleNamespace(**choice("ab", reason))])))
        with pytest.MonkeyPatch.context() as context:
            context.setattr("openai.OpenAI", lambda client=client, **given: client)
            write, name = endpoint_writer("http://x/v1", "m", model.tokenizer, 1)
        said = Respondent(write, model.tokenizer, batch=1, temperature=0.0, max_new_tokens=2, seed=0)
        (record,) = regenerate(rows(chat("hi", "x")), said, tmp_path / f"{reason}.jsonl", {})
        ((ids, learned),) = encode_record(record, model.tokenizer, 64, "truncate")
        found[reason] = model.tokenizer.decode([token for token, mark in zip(ids, learned, strict=True) if mark])
    assert found == {"length": "ab", "stop": "ab</s>"}


def test_no_prompt_is_lost_while_a_server_rejects_options_of_vllm(model, monkeypatch, caplog):
    """The second prompt is rejected after the first was answered without these options."""
    openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
    second_sent, first_done, found = threading.Event(), threading.Event(), {}

    def create(*, prompt: list[int], extra_body: dict | None = None, **body: object) -> SimpleNamespace:
        if extra_body:
            if prompt == prompts[0]:
                assert second_sent.wait(60)
            else:
                second_sent.set()
                assert first_done.wait(60)
            raise openai.BadRequestError("unknown", response=httpx.Response(
                400, request=httpx.Request("POST", "http://x")), body=None)
        return SimpleNamespace(choices=[SimpleNamespace(text="ab", finish_reason="stop")])

    def done(number: int, result: object) -> None:
        found[number] = result
        first_done.set()

    texts = ["a", "b"]
    prompts = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    client = SimpleNamespace(completions=SimpleNamespace(create=create))
    monkeypatch.setattr("openai.OpenAI", lambda **given: client)
    write, _ = endpoint_writer("http://x/v1", "m", model.tokenizer, 2)
    write(texts, [0, 1], done, max_new_tokens=2)
    assert [found[number] for number in range(2)] == [("ab", None)] * 2
    assert "the server rejects return_token_ids" in caplog.text


def test_what_answers_depend_on_is_compared_before_any_is_written(tmp_path, model, monkeypatch):
    """Each of the parts, changed alone, is named; what may change freely is not asked about."""
    def saved(name: str, pair) -> str:
        pair.target.model.save_pretrained(tmp_path / name)
        pair.tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    other = tiny_tokenizer("bacdefghijklmnopqrstuvwxyz .")
    other.chat_template = model.tokenizer.chat_template
    scaled, sampling = tiny_trainable_pair(), tiny_trainable_pair()
    scaled.target.model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    sampling.target.model.generation_config.repetition_penalty = 1.3
    template = write(tmp_path / "t.jinja", [model.tokenizer.chat_template.replace("<bot>", "<bot> ")])
    data = write(tmp_path / "asked.jsonl", [{"prompt": text} for text in ("hi", "b", "cd")])
    same = ["--target", saved("target", model), "--data", data, "--max-length", "32", "--dtype", "float32",
            "--regenerate", "sampled", "--max-new-tokens", "4"]

    def prepared(*more: str) -> dict:
        return run(parse_options(Arguments, [*same, "--out", f"{tmp_path}/data", *more]))

    assert prepared()["documents"]
    monkeypatch.setattr(answers, "decode_requests", lambda *given, **options: pytest.fail("computed something"))
    for more in (["--limit", "2"], ["--batch", "2"], ["--draft", str(tmp_path / "head")], ["--max-length", "30"],
                 ["--target", saved("copy", model)]):
        save_head(model.draft, tmp_path / "head")
        prepared(*more)
    for more, part in (
            (["--target", saved("other", tiny_trainable_pair(seed=3))], "target"),
            (["--target", saved("scaled", scaled)], "target"),
            (["--target", saved("sampling", sampling)], "generation_config"),
            (["--target", saved("vocabulary", tiny_pair(tokenizer=other))], "vocabulary"),
            (["--chat-template", template], "chat_template"), (["--dtype", "bfloat16"], "dtype"),
            (["--quantization", "int8"], "quantization"), (["--temperature", "0.5"], "temperature"),
            (["--regenerate", "greedy"], "temperature"), (["--max-new-tokens", "5"], "max_new_tokens"),
            (["--seed", "1"], "seed")):
        if part == "quantization" and not torch.cpu._is_vnni_supported():
            continue
        with pytest.raises(ValueError, match=f"answers.jsonl was made with another .*{part} ") as refused:
            prepared(*more)
        assert part != "quantization" or f"now {Int8.NAME})" in str(refused.value)
    with serving(model) as server, pytest.raises(ValueError, match="another .*endpoint .*endpoint_model "):
        prepared("--endpoint", f"{server.url}/v1")


def test_excluded_questions_leave_the_data_on_a_second_start(tmp_path, model):
    model.target.model.save_pretrained(tmp_path / "target")
    model.tokenizer.save_pretrained(tmp_path / "target")
    data = write(tmp_path / "asked.jsonl", [{"prompt": text} for text in ("hi", "b", "cd")])
    judged = write(tmp_path / "judged.jsonl", [{"prompt": "b"}])
    words = ["--target", f"{tmp_path}/target", "--data", data, "--out", f"{tmp_path}/data", "--max-length", "32",
             "--regenerate", "greedy", "--max-new-tokens", "4"]
    assert run(parse_options(Arguments, words))["bad_reasons"] == {}
    again = run(parse_options(Arguments, [*words, "--exclude", judged]))
    assert again["bad_reasons"] == {"shares words with --exclude": 1} and again["documents"] == 2


def test_answers_without_an_end_are_counted_and_said(tmp_path, model, caplog):
    """With their share and the option, again on a second start; and nothing stays but the dataset and its answers."""
    save_pair(tmp_path, model)
    asked = write(tmp_path / "asked.jsonl", [{"prompt": text} for text in ("hi", "b", "cd")])
    made = Arguments(target=f"{tmp_path}/target", data=(asked,), out=tmp_path / "own" / "data", regenerate="greedy",
                     max_new_tokens=4, max_length=40)
    for _ in range(2):
        caplog.clear()
        summary = run(made)
        assert summary["answers"] == 3 and 0 < summary["cut_off"] <= 3
        assert f"{summary['cut_off']} of 3 answers were cut off at 4 tokens" in caplog.text
        assert "--max-new-tokens sets the limit" in caplog.text
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"data", "data.answers.jsonl"}


TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]


@pytest.mark.parametrize(("source", "opened", "row"), [
    ("sharegpt", ("Aeala/ShareGPT_Vicuna_unfiltered", None, "train"), {"id": "1", "conversations": TURNS}),
    ("ultrachat", ("HuggingFaceH4/ultrachat_200k", None, "train_sft"),
     {"prompt": "hi", "prompt_id": "1", "messages": chat("hi", "yes")}),
    ("perfectblend", ("mlabonne/open-perfectblend", None, "train"), {"conversations": TURNS, "source": "a"}),
    ("magicoder", ("ise-uiuc/Magicoder-Evol-Instruct-110K", None, "train"), {"instruction": "hi", "response": "yes"}),
    ("open-instruct", ("VMware/open-instruct", None, "train"),
     {"alpaca_prompt": "Below is an instruction hi", "response": "yes", "instruction": "hi", "source": "a"}),
    ("openai/gsm8k:main", ("openai/gsm8k", "main", "train"), {"question": "hi", "answer": "yes"}),
])
def test_usual_sets_have_names(tmp_path, model, monkeypatch, caplog, source, opened, row):
    """A stand-in for the package `datasets` and the hub, with the columns of each set."""
    calls = []

    def load_dataset(name, configuration=None, *, split):
        calls.append((name, configuration, split))
        return [row]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    caplog.set_level("INFO", "eagle_fsd")
    save_pair(tmp_path, model)
    made = Arguments(target=f"{tmp_path}/target", data=(source,), out=tmp_path / "data", max_length=32)
    assert run(made)["documents"] == 1 and calls == [opened]
    assert ("names the licence" in caplog.text) == ("/" not in source)
    assert list(read_records(source, split="test")) == rows(chat("hi", "yes")) and calls[1] == (*opened[:2], "test")
    (tmp_path / "copy").mkdir()  # a local copy
    assert list(read_records(str(tmp_path / "copy"))) == rows(chat("hi", "yes"))
    assert calls[2] == (str(tmp_path / "copy"), None, "train")


def test_several_processes_make_the_same_dataset(tmp_path, model):
    records = [*rows(*[chat("ab" * (n % 7 + 1), "cd " * (n % 5)) for n in range(70)]), Record(reason="broken JSON"),
               Record(text="abc " * 40)]
    alone, counts = encode_dataset(records, model.tokenizer, max_length=24)
    together, same = encode_dataset(iter(records), model.tokenizer, max_length=24, processes=2)
    assert together.digest() == alone.digest() and same == counts and counts["bad_reasons"]["broken JSON"] == 1


@pytest.mark.parametrize("name", ["teknium/OpenHermes-2.5", "org/data.v2"])
def test_names_of_datasets_may_have_dots(tmp_path, monkeypatch, name):
    def opened(source: str, split: str | None):
        raise KeyboardInterrupt(source)

    monkeypatch.setattr("eagle_fsd.data.conversations._open_dataset", opened)
    with pytest.raises(KeyboardInterrupt, match=name):
        run(Arguments(target="nowhere", out=tmp_path / "data", data=(name,), regenerate="greedy"))
    for missing in ("chats.jsonl", "a/chats.json", f"{tmp_path}/folder", "a/b/c"):
        with pytest.raises(ValueError, match=f"{missing} does not exist"):
            run(Arguments(target="nowhere", out=tmp_path / "data", data=(missing,)))


@pytest.mark.parametrize("kills", [1, 3, 5])
def test_an_answer_is_kept_as_soon_as_it_is_finished(tmp_path, model, kills):
    """Killed after some of the answers of a batch, it asks for the others; a second turn does not lose the first."""
    data = rows(chat("hi", "x", "and", "y"), chat("b", "x", "c", "y"), chat("ab", "x"), chat("cd", "x"))
    whole, cut, asked = writer(model), writer(model), []

    def watched(texts, seeds, done, **sampling):
        def counted(number, said):
            if len(asked) == kills:
                raise KeyboardInterrupt
            asked.append(texts[number])
            done(number, said)

        whole.write(texts, seeds, counted, **sampling)

    cut.write = watched
    with pytest.raises(KeyboardInterrupt):
        list(regenerate(data, cut, tmp_path / "cut.jsonl", {}))
    assert len(asked) == kills and len((tmp_path / "cut.jsonl").read_text().splitlines()) == 1 + kills
    kills = 99
    continued = list(regenerate(data, cut, tmp_path / "cut.jsonl", {}))
    assert continued == list(regenerate(data, whole, tmp_path / "whole.jsonl", {}))
    assert len(asked) == len(set(asked)) == 6


def test_what_a_target_wrote_to_itself_is_kept_as_soon_as_it_is_finished(tmp_path, model, monkeypatch):
    monkeypatch.setattr("train.answers.is_sensible", lambda text: len(text) > 1)
    monkeypatch.setattr("train.answers.USER_TOKENS", 12)
    store, kept = tmp_path / "own.jsonl", []

    def killed(path, lines):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.extend(lines)
        append_lines(path, lines)

    with monkeypatch.context() as context:
        context.setattr("train.answers.append_lines", killed)
        with pytest.raises(KeyboardInterrupt):
            list(self_prompted(6, writer(model, batch=6), store, {}, follow_ups=0.2))
    made = [record.messages for record in self_prompted(6, writer(model, batch=6), store, {}, follow_ups=0.2)]
    assert made[:2] == [messages for _, messages in kept] and len(made) == 6


def test_questions_that_cannot_be_read_are_told_before_a_model_is_loaded(tmp_path, caplog):
    data = write(tmp_path / "chats.jsonl", [{"promt": "hi"}, "", '{"prompt": '])
    with pytest.raises(ValueError, match="chats.jsonl: no row can be answered: .* or prompt': 1, 'broken JSON': 1"):
        run(Arguments(target="nowhere", out=tmp_path / "data", data=(data,), regenerate="greedy"))
    assert f"{data}, line 3: broken JSON" in caplog.text and not list(tmp_path.glob("data*"))


def test_answers_keep_the_tokens_that_the_target_wrote(model):
    """A text can be tokenised in several ways; an answer that was cut off does not teach its end mark."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["ab"])
    tokenizer.chat_template = model.tokenizer.chat_template
    a, b, ab, end = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "ab", "</s>"))

    def learned_of(own):
        messages = chat("hi", "abab", "and", "ab")
        messages[1]["token_ids"] = own
        ((ids, learned),) = encode_record(Record(messages=messages), tokenizer, 64, "truncate")
        return [token for token, mark in zip(ids, learned, strict=True) if mark]

    assert learned_of([ab, a, b, end]) == [ab, a, b, end, ab, end]
    assert learned_of([a, b, ab]) == [a, b, ab, ab, end]
    for unknown in (None, [a, b, end], [ab, ab, -1], [ab, ab, 2**40]):  # not what the text says
        assert learned_of(unknown) == [ab, ab, end, ab, end]


def test_files_may_hold_the_tokens_of_answers(tmp_path):
    for kept, tokens in (({"token_ids": [3, 4]}, [3, 4]), ({"token_ids": "34"}, None), ({}, None)):
        messages = [*chat("hi"), {"role": "assistant", "content": "ab", **kept}]
        (record,) = read_records(write(tmp_path / "own.jsonl", [{"messages": messages}]))
        assert record.messages[1].get("token_ids") == tokens


def test_a_server_answers_in_place_of_the_model(tmp_path, model):
    """Ours here; what it says is what the model would."""
    data = rows(chat("hi", "x", "and", "y"), chat("b", "x"))
    here = list(regenerate(data, writer(model), tmp_path / "here.jsonl", {}))
    with serving(model) as server:
        write, name = endpoint_writer(f"{server.url}/v1", None, model.tokenizer, 2)
        there = Respondent(write, model.tokenizer, batch=4, temperature=0.0, max_new_tokens=4, seed=0)
        assert texts_of(regenerate(data, there, tmp_path / "there.jsonl", {})) == texts_of(here)
        assert there.tokens > 0 and name == "tiny"
    with pytest.raises(ValueError, match="does not answer"):
        endpoint_writer("http://127.0.0.1:9/v1", None, model.tokenizer, 1)


def texts_of(records):
    return [[(message["role"], message["content"]) for message in record.messages] for record in records]


def test_questions_of_the_evaluation_are_left_out(tmp_path):
    long = "Please tell me, step by step, how bread rises without any yeast in it."
    questions = Path(write(tmp_path / "questions.jsonl", [{"prompt": long}, {"prompt": "Why not?"}]))
    data = rows(chat("So: please TELL me step by step how bread rises without any butter", "x"), chat("why not", "x"),
                chat("And why not now?", "x"), chat("tell me step by step how bread rises", "x"))
    found = [record.reason for record in exclude_overlapping(data, [questions])]
    assert found == ["shares words with --exclude"] * 2 + [None] * 2
    assert [record.reason for record in exclude_overlapping(data, [])] == [None] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_batch(tmp_path, model, temperature):
    data = rows(*(chat(*"a" * turns) for turns in (2, 4, 2, 6)), chat("bcd", "x"))
    data[1].messages.insert(0, {"role": "system", "content": "be kind"})
    made = [list(regenerate(data, writer(model, batch=batch, temperature=temperature), tmp_path / f"{batch}.jsonl", {}))
            for batch in (1, 3)]
    assert made[0] == made[1] and len(made[0]) == 5


def test_the_target_prompts_itself_and_goes_on_after_a_kill(tmp_path, model, monkeypatch):
    monkeypatch.setattr("train.answers.is_sensible", lambda text: len(text) > 1)
    monkeypatch.setattr("train.answers.USER_TOKENS", 12)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    made = [record.messages for record in self_prompted(6, writer(model, batch=3), whole, {}, follow_ups=0.5)]
    assert len({messages[0]["content"] for messages in made}) == 6 and {len(messages) for messages in made} == {2, 4}
    assert all([m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2) for messages in made)
    short = next(messages for messages in made if len(messages) == 2)
    again = eagle_fsd.generate(short[:1], model, max_new_tokens=4, acceptance="exact")
    assert again.text == short[1]["content"]  # greedily, though the user's turn was sampled
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:4]) + lines[4][:9])
    kept = [record.messages for record in self_prompted(6, writer(model, batch=3), cut, {}, follow_ups=0.5)]
    assert len(kept) == 6 and kept[:3] == made[:3]
    for changes, share, part in (({"batch": 2}, 0.5, "batch"), ({"seed": 1}, 0.5, "seed"), ({}, 0.4, "follow_ups")):
        with pytest.raises(ValueError, match=f"whole.jsonl was made with another {part} "):
            list(self_prompted(6, writer(model, **{"batch": 3} | changes), whole, {}, follow_ups=share))
    monkeypatch.setattr("train.answers.is_sensible", lambda text: False)
    with pytest.raises(ValueError, match="fewer than one in 20"):
        list(self_prompted(4, writer(model), tmp_path / "own.jsonl", {}))


@pytest.mark.parametrize(("share", "count"), [(0.01, 2), (0.3, 60), (1.0, 200), (0.0, 0)])
def test_the_share_of_second_turns_is_the_one_asked_for(share, count):
    turns = []
    fake = SimpleNamespace(
        batch=20, seed=0, user_turns=lambda conversations, seeds: turns.append(len(conversations)) or [
            f"question {seed} x" for seed in seeds],
        answers=lambda conversations, seeds, done: [done(at, {"role": "assistant", "content": "b"})
                                                    for at in range(len(conversations))])
    for batch in range(10):
        answers.write_batch(fake, batch, set(), share, lambda messages: None)
    assert sum(turns[1::2]) == count


def test_seeds_share_no_conversations():
    """A self-prompted conversation takes several seeds."""
    def taken(seed: int) -> list[int]:
        seeds = []
        fake = SimpleNamespace(batch=16, seed=seed, answers=lambda conversations, drawn, done: seeds.extend(drawn),
                               user_turns=lambda conversations, drawn: seeds.extend(drawn) or ["a question"] * 16)
        with pytest.MonkeyPatch.context() as context:
            context.setattr(answers, "is_sensible", bool)
            answers.ask_and_answer(fake, {number: [] for number in range(16)}, 0, lambda *given: None)
        return seeds

    assert len({seed for each in range(9) for seed in taken(each)}) == 9 * 32


@pytest.mark.parametrize(("text", "sensible"), [
    ("How do I bake bread without yeast?", True), ("hi", False), ("1 2 3 4 5 6 7 8 9 10 11", False),
    ("the same again " * 12, False), ("word " * 400, False),
])
def test_which_turns_are_worth_an_answer(text, sensible):
    assert is_sensible(text) is sensible


def test_the_command_writes_a_dataset_with_its_summary(tmp_path, model):
    model.target.model.save_pretrained(tmp_path / "target")
    model.tokenizer.save_pretrained(tmp_path / "target")
    source = write(tmp_path / "chat.jsonl", [SHAREGPT, "{broken", {"messages": chat("a", "b")}])

    def prepared(name: str, *more: str) -> dict:
        return run(parse_options(Arguments, ["--target", f"{tmp_path}/target", "--data", source, "--max-length", "32",
                                             "--out", f"{tmp_path}/{name}", *more]))

    own = ["--regenerate", "greedy", "--max-new-tokens", "4"]
    assert prepared("data")["bad_reasons"] == {"broken JSON": 1} and prepared("own", *own)["documents"] == 2
    given, answered = Documents.load(tmp_path / "data"), Documents.load(tmp_path / "own")
    assert len(given) == 2 and not np.array_equal(answered.tokens, given.tokens)
    (tmp_path / "full").mkdir()
    write(tmp_path / "full" / "notes.txt", ["mine"])
    for more, match in ((["--max-length", "3"], "--max-length.*3"), (["--limit", "0"], "--limit.*0"),
                        (["--self-prompted", "3"], "either --data or"), (["--out", f"{tmp_path}/full"], "notes.txt")):
        with pytest.raises(ValueError, match=match):
            prepared("refused", "--target", "nowhere", *more)
