"""Read conversations: ShareGPT and OpenAI-style JSON or JSONL, plain text, and any dataset of the package `datasets`.

Readers yield one `Record` per row. A bad row does not raise: its record contains the reason. Data from the web always
has some bad rows, and a run must neither stop at them nor silently learn them.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

KEYS = {"sharegpt": ("conversations",), "messages": ("messages",), "text": ("text",)}  # of a row, by format
FORMATS = ("auto", *KEYS)
CHATS = ("conversations", "messages", "conversation", "data", "chosen")  # keys of a conversation, best first
# Keys of a question, of what it refers to, and of its answer, in rows of one turn.
QUESTIONS = ("instruction", "question", "query", "problem", "inputs", "prompt", "input")
CONTEXTS = ("context", "input")
ANSWERS = ("output", "response", "answer", "completion", "targets", "solution", "chosen")
SYSTEMS = ("system", "system_prompt")
# Sets by the names that SpecForge and speculators give them: hub id, split, and the licence that its page names.
NAMED = {
    "sharegpt": ("Aeala/ShareGPT_Vicuna_unfiltered", "train", "apache-2.0"),
    "ultrachat": ("HuggingFaceH4/ultrachat_200k", "train_sft", "mit"),
    "perfectblend": ("mlabonne/open-perfectblend", "train", "apache-2.0"),
    "magicoder": ("ise-uiuc/Magicoder-Evol-Instruct-110K", "train", "apache-2.0"),
    "open-instruct": ("VMware/open-instruct", "train", "cc-by-3.0"),
}
FILE_SUFFIXES = (".json", ".jsonl", ".txt", ".md")
TOKEN_IDS = "token_ids"  # key of an answer's tokens as the target generated them
THOUGHT = "reasoning_content"  # key of an answer's thought, which the chat template may render before its content
# ShareGPT dumps use several names for each role.
ROLES = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "assistant": "assistant", "system": "system",
}


class BadRow(ValueError):
    """A row that cannot be learned from; the message is the reason, under which it is counted."""


@dataclass(frozen=True)
class Record:
    """The content of a row: chat messages, or plain text, or the reason why it is bad."""

    messages: list[dict[str, str]] | None = None
    text: str | None = None
    reason: str | None = None


def check_messages(
    messages: list[dict[str, Any]], unanswered: bool = False, system: object = None
) -> list[dict[str, str]]:
    """The messages in the format of `transformers`, without answers before the first question, with which parts of
    longer conversations begin, and without turns after the last answer.

    Args:
        unanswered: keep a last question, with an empty answer.
        system: the row's system prompt, for messages that do not begin with one.

    Raises:
        BadRow: there are no messages, a role is unknown, a content is empty or no string, there are tool calls, or the
            roles are out of order (an optional system turn, then user and assistant alternately).
    """
    if not isinstance(messages, list) or not messages:
        raise BadRow("no messages")
    if system not in (None, ""):
        first = messages[0].get("role", messages[0].get("from")) if isinstance(messages[0], dict) else None
        messages = messages if first == "system" else [{"role": "system", "content": system}, *messages]
    checked = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadRow("a message is not an object")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise BadRow("unknown role")
        if not isinstance(content, str):
            raise BadRow("content is not a string")
        if not content.strip():
            raise BadRow("empty message")
        if message.get("tool_calls"):
            raise BadRow("tool calls are not supported")
        check_unicode(content)
        ids = message.get(TOKEN_IDS)
        tokens = {TOKEN_IDS: ids} if isinstance(ids, list) and all(type(token) is int for token in ids) else {}
        thought = message.get(THOUGHT)
        if isinstance(thought, str) and thought.strip():
            check_unicode(thought)
            tokens |= {THOUGHT: thought}
        checked.append({"role": ROLES[role.lower()], "content": content, **tokens})
    begin = int(checked[0]["role"] == "system")
    while len(checked) > begin and checked[begin]["role"] == "assistant":
        del checked[begin]
    turns = [m["role"] for m in checked[begin:]]
    if any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)):
        raise BadRow("roles out of order")
    if unanswered and turns and turns[-1] == "user":
        return [*checked, {"role": "assistant", "content": ""}]
    if "assistant" not in turns:
        raise BadRow("no answer to learn")
    return checked if checked[-1]["role"] == "assistant" else checked[:-1]


def check_unicode(text: str) -> None:
    """Raise BadRow unless the text can be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("text is not valid Unicode") from None


def parse_row(row: Any, kind: str, unanswered: bool = False) -> Record:
    """Parse a row in a format ("auto" detects it by the keys); a bare list contains messages.

    With "auto" a conversation is preferred to a question with its answer, and these to a text, which often repeats
    them.
    """
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, dict):
        return Record(reason="not an object")
    keys = KEYS.get(kind, (*CHATS, "text"))
    messages = next((row[key] for key in keys if isinstance(row.get(key), list)), None)
    if messages is None and kind == "auto":
        messages = single_turn(row, unanswered)
    try:
        if messages is None and not any(key in row for key in keys):
            prompt = ("prompt",) if unanswered and kind == "auto" else ()
            raise BadRow(f"no key {' or '.join((*keys, *prompt))}")
        if messages is None and "text" in keys and "text" in row:
            text = row["text"]
            if not isinstance(text, str) or not text.strip():
                raise BadRow("empty text")
            check_unicode(text)
            return Record(text=text)
        if row.get("tools") not in (None, "", "[]", []):
            raise BadRow("tools are not supported")
        system = next((row[name] for name in SYSTEMS if row.get(name) not in (None, "")), None)
        return Record(messages=check_messages(as_turns(messages), unanswered, system))
    except BadRow as error:
        return Record(reason=str(error))


def as_turns(messages: Any) -> Any:
    """A conversation as a list of messages: it may be a list of texts, or of pairs of input and output."""
    if not isinstance(messages, list):
        return messages
    if all(isinstance(message, dict) and {"input", "output"} <= message.keys() for message in messages):
        messages = [message[name] for message in messages for name in ("input", "output")]
    if all(isinstance(message, str) for message in messages):
        return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
    return messages


def single_turn(row: dict, unanswered: bool) -> list | None:
    """The messages of a row with a question, what it refers to, and an answer; None if the row is none of these.

    Args:
        unanswered: accept a question without an answer.
    """
    name = next((key for key in QUESTIONS if row.get(key)), None)
    answer = next((row[key] for key in ANSWERS if key != name and isinstance(row.get(key), str)), None)
    if name is None or answer is None and not unanswered:
        return None
    asked = row[name]
    if isinstance(asked, str):
        context = next((row[key] for key in CONTEXTS if key != name and isinstance(row.get(key), str)), "")
        asked = [{"role": "user", "content": f"{asked}\n\n{context}" if context.strip() else asked}]
    if not isinstance(asked, list):
        return None
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


def join_trees(rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Numbered rows, in which consecutive messages of one tree (OpenAssistant) become one conversation: its best-ranked
    answers."""
    for tree, group in itertools.groupby(rows, lambda row: row[1].get("message_tree_id") if isinstance(
            row[1], dict) and "parent_id" in row[1] else None):
        if tree is None:
            yield from group
            continue
        (number, first), *others = group
        replies: dict[Any, list[dict]] = {}
        for _, row in others:
            replies.setdefault(row["parent_id"], []).append(row)
        path = [first]
        while following := replies.get(path[-1].get("message_id")):
            path.append(min(following, key=lambda row: math.inf if row.get("rank") is None else row["rank"]))
        yield number, [{"role": row.get("role"), "content": row.get("text")} for row in path]


def read_records(
    source: str, kind: str = "auto", split: str | None = None, *, unanswered: bool = False
) -> Iterator[Record]:
    """The records of a file, or of a dataset that the package `datasets` opens from a folder or the hub.

    Args:
        source: path, name in NAMED, hub id, or hub id and configuration ("openai/gsm8k:main").
        kind: one of FORMATS; "auto": `.txt` and `.md` files are plain text, rows are detected by their keys.
        split: of a dataset that the package `datasets` opens; None: the one in NAMED, else "train".
        unanswered: include questions without an answer, and rows with a key `prompt`; their answer is empty.

    Raises:
        ValueError: the format is unknown, or a JSON array is broken as a whole.
        ImportError: `source` is no file, and `datasets` is not installed.
    """
    if kind not in FORMATS:
        raise ValueError(f"unknown format {kind!r}; accepted: {', '.join(FORMATS)}")
    path = Path(source)
    if path.is_file():
        yield from _read_file(path, kind, unanswered)
    else:
        rows = join_trees(enumerate(_open_dataset(source, split)))
        yield from (parse_row(row, kind, unanswered) for _, row in rows)


def _read_file(path: Path, kind: str, unanswered: bool) -> Iterator[Record]:
    if path.suffix in (".txt", ".md") or (kind == "text" and path.suffix not in (".json", ".jsonl")):
        try:
            yield parse_row({"text": path.read_text(encoding="utf-8-sig")}, "text")
        except UnicodeDecodeError as error:
            log.warning("%s: not UTF-8 at byte %d, skipped", path, error.start + 1)
            yield Record(reason="not UTF-8")
        return
    # Bytes that are not UTF-8 become surrogates, which valid text does not contain.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        is_array = first.lstrip().startswith("[") and not _is_list_of_messages(_parsed(first))
        if is_array:
            rows = _parsed(file.read())
            if isinstance(rows, BadRow):
                raise ValueError(f"{path} is neither a JSON array nor JSON lines")
        else:
            rows = map(_row_of_line, file)
        bad = 0
        for number, row in join_trees(enumerate(rows, 1)):
            if row is BLANK_LINE:
                continue
            record = Record(reason=str(row)) if isinstance(row, BadRow) else parse_row(row, kind, unanswered)
            if record.reason in UNREADABLE:
                bad += 1
                if bad <= MOST_WARNINGS:
                    log.warning("%s, %s %d: %s, skipped", path, "row" if is_array else "line", number, record.reason)
            yield record


BLANK_LINE = object()
MOST_WARNINGS = 3  # unreadable rows of a file that get a warning
UNREADABLE = ("broken JSON", "not UTF-8", "text is not valid Unicode")


def _row_of_line(line: str) -> Any:
    """The JSON value of a line, BLANK_LINE or a BadRow."""
    if not line.strip():
        return BLANK_LINE
    try:
        check_unicode(line)
    except BadRow:
        return BadRow("not UTF-8")
    return _parsed(line)


def _parsed(text: str) -> Any:
    """The value of a JSON text, or a BadRow."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return BadRow("broken JSON")


def _is_list_of_messages(row: Any) -> bool:
    """Whether a first line is one conversation as a bare list, not the beginning of an array of rows."""
    return isinstance(row, list) and bool(row) and isinstance(row[0], dict) and bool({"role", "from"} & row[0].keys())


def _open_dataset(source: str, split: str | None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no file; to open it as a dataset, install the package `datasets` (pip install datasets)"
        ) from error
    path = Path(source)
    if (path / "state.json").is_file():
        return datasets.load_from_disk(source)
    if (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(source)[split or "train"]
    local = path.exists()
    hub_id, own_split, licence = (source, "train", None) if local else NAMED.get(source, (source, "train", None))
    if licence is not None:
        log.info("%s is %s, split %s; its page names the licence %s", source, hub_id, split or own_split, licence)
    name, _, configuration = (source, "", "") if local else hub_id.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=split or own_split)
    except ValueError as error:  # no such split, for example
        raise ValueError(f"{source!r} cannot be opened as a dataset: {error}") from error
