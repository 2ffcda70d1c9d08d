"""Conversations with every answer replaced by the target's own, which is what a head will have to predict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import eagle_fsd
from eagle_fsd.data.conversations import BadRow, Record
from eagle_fsd.data.files import append_lines, read_lines
from eagle_fsd.pair import EagleModel
from train.data.chat_mask import render


def regenerate(
    records: Iterable[Record], model: EagleModel, store: Path, *, temperature: float, max_new_tokens: int, seed: int,
    about: dict | None = None,
) -> Iterator[Record]:
    """The records with every answer replaced by the target's own, turn by turn, decoded losslessly.

    Args:
        store: JSON lines file that each conversation is added to when it is finished; those found there are not
            generated again.
        about: what the answers depend on; kept in the store's first line.

    Raises:
        ValueError: the store was begun for something else.
    """
    about = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed, **(about or {})}
    begun, *finished = read_lines(store) or [None]
    if begun is None:
        append_lines(store, [about])
    elif begun != json.loads(json.dumps(about)):
        raise ValueError(f"{store} was begun with other settings, {begun}; delete it or choose another --out")
    done: dict[int, list[dict[str, str]] | str] = dict(finished)
    for number, record in enumerate(records):
        if record.messages is None:
            yield record
            continue
        if number not in done:
            done[number] = answer_conversation(
                record.messages, model, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed + number
            )
            append_lines(store, [[number, done[number]]])
        answered = done.pop(number)
        yield Record(reason=answered) if isinstance(answered, str) else Record(messages=answered)


def answer_conversation(
    messages: list[dict[str, str]], model: EagleModel, *, temperature: float, max_new_tokens: int, seed: int
) -> list[dict[str, str]] | str:
    """The conversation with the model's own answers, cut before a turn that does not fit; or why there is none."""
    answered: list[dict[str, str]] = []
    reason = "no answer to learn"
    for message in messages:
        if message["role"] != "assistant":
            answered.append(message)
            continue
        try:
            ids = model.tokenizer(render(model.tokenizer, answered, True), add_special_tokens=False)["input_ids"]
        except BadRow as error:
            reason = str(error)
            break
        if model.target.max_positions is not None and len(ids) >= model.target.max_positions:
            reason = "prompt too long to answer"
            break
        output = eagle_fsd.generate(
            ids, model, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, acceptance="exact"
        )
        if not (output.text or "").strip():
            reason = "empty answer of the target"
            break
        answered.append({"role": "assistant", "content": output.text or ""})
    while answered and answered[-1]["role"] != "assistant":
        answered.pop()
    return answered or reason
