"""From files of conversations to a dataset: formats, bad rows, lengths, answers by the target itself."""

import json
import sys

import numpy as np
import pytest
from tiny import tiny_pair, tiny_tokenizer

import eagle_fsd
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.data.conversations import BadRow, Record, check_messages, read_records
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.files import only_writer
from train.data.encoding import encode_dataset, encode_record, pack
from train.data.regeneration import Respondent, is_sensible, regenerate, self_prompted
from train.prepare_data import Arguments, run


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{% if m.role == 'assistant' %}<bot>{{ m.content }}</s>{% else %}"
        "<user>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    return tokenizer


def write(path, lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


SHAREGPT = {"id": "1", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}


def test_every_format_gives_the_same_messages(tmp_path):
    wanted = chat("hi", "yes")
    sources = [
        write(tmp_path / "array.json", [json.dumps([SHAREGPT], indent=2)]),
        write(tmp_path / "lines.jsonl", [SHAREGPT]),
        write(tmp_path / "openai.jsonl", [{"messages": wanted}]),
        write(tmp_path / "bare.jsonl", [wanted, wanted]),
    ]
    for source in sources:
        rows = list(read_records(source))
        assert rows and all(row.messages == wanted for row in rows), source


def test_text_files_and_text_records(tmp_path):
    assert list(read_records(write(tmp_path / "a.txt", ["one", "two"]))) == [Record(text="one\ntwo")]
    assert list(read_records(write(tmp_path / "b.jsonl", [{"text": "one"}]))) == [Record(text="one")]


def test_a_folder_of_the_datasets_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([SHAREGPT]).save_to_disk(str(tmp_path / "d"))
    assert [row.messages for row in read_records(str(tmp_path / "d"))] == [chat("hi", "yes")]


def test_a_dataset_name_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        list(read_records("someone/some-dataset"))


BAD = [
    ("{broken", "broken JSON"),
    ('"text"', "not an object"),
    ({"prompt": "hi"}, "no key conversations or messages or conversation or text"),
    ({"messages": []}, "no messages"),
    ({"messages": "hi"}, "no messages"),
    ({"messages": ["hi"]}, "a message is not an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "unknown role"),
    ({"messages": [{"role": 3, "content": "x"}]}, "unknown role"),
    ({"messages": [{"role": "user", "content": None}]}, "content is not a string"),
    ({"messages": chat("hi", " ")}, "empty message"),
    ({"messages": chat("hi", "a\ud800")}, "text is not valid Unicode"),
    ({"messages": chat("hi")}, "no answer to learn"),
    ({"messages": [*chat("hi"), *chat("hi", "yes")]}, "roles out of order"),
    ({"messages": chat("hi", "yes")[1:]}, "roles out of order"),
    ({"text": " "}, "empty text"),
]


@pytest.mark.parametrize(("record", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_bad_rows_say_why(tmp_path, record, reason):
    rows = list(read_records(write(tmp_path / "x.jsonl", [record, SHAREGPT])))
    assert [row.reason for row in rows] == [reason, None]


def test_turns_after_the_last_answer_are_cut():
    assert check_messages(chat("hi", "yes", "and?")) == chat("hi", "yes")
    with_system = [{"role": "system", "content": "be kind"}, *chat("hi", "yes")]
    assert check_messages(with_system) == with_system


def test_bad_rows_are_counted_and_the_rest_is_learned(tmp_path, tokenizer):
    lines = [record for record, _ in BAD] + [SHAREGPT] * 3 + [{"messages": chat("hi", "a" * 40)}]
    rows = read_records(write(tmp_path / "x.jsonl", lines))
    documents, summary = encode_dataset(rows, tokenizer, max_length=24, long="drop")
    assert len(documents) == 3
    assert summary["rows"] == len(BAD) + 4 and summary["bad_rows"] == len(BAD) + 1
    assert summary["bad_reasons"]["over-long"] == 1 and summary["bad_reasons"]["roles out of order"] == 2
    assert sum(summary["bad_reasons"].values()) == summary["bad_rows"]
    tokens, learned = documents.document(0)
    assert tokenizer.decode(tokens[learned]) == "yes</s>"


def test_nothing_usable_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="none of 1 rows.*broken JSON"):
        encode_dataset([Record(reason="broken JSON")], tokenizer, max_length=24)


def test_long_conversations_are_truncated_unless_nothing_is_left_to_learn(tokenizer):
    row = Record(messages=chat("hi", "a" * 40))
    ((ids, learned),) = encode_record(row, tokenizer, 12, "truncate")
    assert len(ids) == len(learned) == 12 and learned[-1]
    with pytest.raises(BadRow, match="nothing to learn"):
        encode_record(Record(messages=chat("a" * 40, "yes")), tokenizer, 12, "truncate")


def test_plain_text_is_cut_into_documents_that_begin_alike(tokenizer):
    pieces = encode_record(Record(text="abcdefghij"), tokenizer, 5, "truncate")
    assert [len(ids) for ids, _ in pieces] == [5, 5, 4]  # a start token each, one end token in all
    assert all(ids[0] == tokenizer.bos_token_id and learned == [False] + [True] * (len(ids) - 1)
               for ids, learned in pieces)
    assert tokenizer.decode(sum((ids[1:] for ids, _ in pieces), []), skip_special_tokens=True) == "abcdefghij"


def test_packing_joins_without_exceeding_the_length():
    documents = [(np.full(n, i), np.full(n, True)) for i, n in enumerate([3, 4, 2, 9, 1])]
    assert [ids.tolist() for ids, _ in pack(documents, 9)] == [[0] * 3 + [1] * 4 + [2] * 2, [3] * 9, [4]]


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_pair(tokenizer=tokenizer)


def writer(model, **options) -> Respondent:
    return Respondent(model, **{"batch": 4, "temperature": 0.0, "max_new_tokens": 4, "seed": 0} | options)


def test_regenerated_answers_are_the_targets_own_and_are_not_made_twice(tmp_path, model, tokenizer, monkeypatch):
    rows = [Record(messages=chat("hi", "x", "and", "y")), Record(reason="broken JSON"), Record(messages=chat("b", "x"))]
    options = {"temperature": 0.0, "max_new_tokens": 6, "seed": 0}
    record = tmp_path / "answers.jsonl"
    made = list(regenerate(rows, Respondent(model, batch=2, **options), record))
    first = eagle_fsd.generate(chat("hi"), model, max_new_tokens=6, acceptance="exact").text
    assert made[0].messages[1]["content"] == first
    assert [m["role"] for m in made[0].messages] == ["user", "assistant"] * (len(made[0].messages) // 2)
    assert made[1].reason == "broken JSON"

    lines = record.read_text().splitlines(keepends=True)
    assert json.loads(lines[0]) == options
    record.write_text(lines[0] + lines[1] + lines[2][:7])  # interrupted while writing the second one
    asked = []
    generate = eagle_fsd.generate

    def recorded(prompt, *args, **options):
        asked.append(prompt)
        return generate(prompt, *args, **options)

    monkeypatch.setattr(eagle_fsd, "generate", recorded)
    assert list(regenerate(rows, Respondent(model, batch=2, **options), record)) == made
    first, *later = [[tokenizer.decode(prompt) for prompt in batch] for batch in asked]
    assert first == ["<s><user>hi<bot>"] and len(later) <= 1  # and its second turn; the other one is kept


def test_answers_of_other_settings_are_not_taken_over(tmp_path, model):
    rows, record = [Record(messages=chat("hi", "x"))], tmp_path / "answers.jsonl"
    list(regenerate(rows, writer(model), record))
    with pytest.raises(ValueError, match="begun with other settings"):
        list(regenerate(rows, writer(model, max_new_tokens=5), record))


def test_conversations_that_cannot_be_answered_become_bad_rows(tmp_path, model):
    rows = [Record(messages=chat("a" * 200, "x")), Record(messages=chat("hi", "x"))]
    made = list(regenerate(rows, writer(model), tmp_path / "a.jsonl"))
    assert made[0].reason == "prompt too long to answer" and made[1].messages is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_batch(tmp_path, model, temperature):
    rows = [Record(messages=chat(*"a" * turns)) for turns in (2, 4, 2, 6)] + [Record(messages=chat("bcd", "x"))]
    made = [list(regenerate(rows, writer(model, batch=batch, temperature=temperature), tmp_path / f"{batch}.jsonl"))
            for batch in (1, 2, 8)]
    assert made[0] == made[1] == made[2] and len(made[0]) == 5


def test_the_target_prompts_itself(tmp_path, model, monkeypatch):
    monkeypatch.setattr("train.data.regeneration.is_sensible", lambda text: len(text) > 1)
    store = tmp_path / "own.jsonl"
    made = list(self_prompted(6, writer(model), store, follow_ups=0.5))
    assert len(made) == 6 and len({record.messages[0]["content"] for record in made}) == 6
    assert {len(record.messages) for record in made} <= {2, 4}
    assert all([m["role"] for m in r.messages] == ["user", "assistant"] * (len(r.messages) // 2) for r in made)
    longer = next(record.messages for record in made if len(record.messages) == 2)
    again = eagle_fsd.generate(longer[:1], model, max_new_tokens=4, acceptance="exact")
    assert again.text == longer[1]["content"]  # greedily, whatever was sampled before


def test_a_killed_run_loses_at_most_its_batch(tmp_path, model, monkeypatch):
    monkeypatch.setattr("train.data.regeneration.is_sensible", lambda text: len(text) > 1)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    made = list(self_prompted(9, writer(model, temperature=1.0), whole))
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:5]) + lines[5][:9])
    kept = [json.loads(line)[1] for line in lines[1:5]]
    again = list(self_prompted(9, writer(model, temperature=1.0), cut))
    assert [record.messages for record in again[:4]] == kept == [record.messages for record in made[:4]]
    assert len(again) == 9
    with pytest.raises(ValueError, match="begun with other settings"):
        list(self_prompted(9, writer(model, temperature=0.5), cut))


def test_a_target_without_sensible_turns_is_given_up(tmp_path, model, monkeypatch):
    monkeypatch.setattr("train.data.regeneration.is_sensible", lambda text: False)
    with pytest.raises(ValueError, match="hardly writes a user's turn"):
        list(self_prompted(4, writer(model), tmp_path / "own.jsonl"))


@pytest.mark.parametrize(("text", "sensible"), [
    ("How do I bake bread without yeast?", True), ("hi", False), ("1 2 3 4 5 6 7 8 9 10 11", False),
    ("the same again " * 12, False), ("word " * 400, False), ("Schreibe ein Gedicht über den Herbst.", True),
])
def test_which_turns_are_worth_an_answer(text, sensible):
    assert is_sensible(text) is sensible


def test_the_command_writes_a_dataset_with_its_summary(tmp_path, model, tokenizer):
    model.target.model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    source = write(tmp_path / "chat.jsonl", [SHAREGPT, "{broken", {"messages": chat("a", "b")}])
    common = ["--target", str(tmp_path / "target"), "--data", source, "--max-length", "32"]
    summary = run(parse_options(Arguments, [*common, "--out", str(tmp_path / "data")]))
    documents = Documents.load(tmp_path / "data")
    assert len(documents) == summary["documents"] == 2 and summary["bad_reasons"] == {"broken JSON": 1}
    own = run(parse_options(
        Arguments, [*common, "--out", str(tmp_path / "own"), "--regenerate", "greedy", "--max-new-tokens", "4"]
    ))
    with only_writer(tmp_path / "taken.answers.jsonl"), pytest.raises(ValueError, match="is being written by process"):
        run(parse_options(Arguments, [*common, "--out", str(tmp_path / "taken"), "--regenerate", "greedy"]))
    assert own["documents"] == 2 and own["regenerated"] == "greedy"
    assert not np.array_equal(Documents.load(tmp_path / "own").tokens, documents.tokens)


@pytest.mark.parametrize(
    ("option", "match"), [(["--max-length", "3"], "--max-length.*3"), (["--limit", "0"], "--limit.*0"),
                          (["--max-new-tokens", "0"], "--max-new-tokens.*0"), ([], "holds chat.json")]
)
def test_bad_options_are_refused_before_anything_is_loaded(tmp_path, option, match):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chat.json").write_text("[]")
    words = ["--target", "nowhere", "--data", "x.jsonl", "--out", str(tmp_path / "data"), *option]
    with pytest.raises(ValueError, match=match):
        run(parse_options(Arguments, words))
