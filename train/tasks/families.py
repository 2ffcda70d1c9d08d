"""The families of tasks: each draws a problem of a level from 1 to 3 and works it out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from train.tasks.wordings import (
    CITIES,
    EVENTS,
    ITEMS,
    NAMES,
    PHRASES,
    STORY_EVENTS,
    STRING_EDITS,
    UNITS,
    WORDS,
    Problem,
    Writer,
)


def _solve_chain(w: Writer, level: int) -> tuple[str, list[str], int, tuple]:
    """A chain of +, - and at most one product: expression text, sentences, value, operands."""
    rng = w.rng
    high = (60, 100, 200)[level - 1]
    terms = rng.randint(2, 3) if level < 3 else 3
    product_at = rng.randrange(terms)
    values, shown, sentences = [], [], []
    for t in range(terms):
        if t == product_at:
            a, b = rng.randint(3, (25, 40, 60)[level - 1]), rng.randint(2, 9)
            sentence, value = w.calc("mul", a, b)
            sentences.append(sentence)
            values.append(value)
            shown.append(f"{a} * {b}")
        else:
            values.append(rng.randint(5, high))
            shown.append(str(values[-1]))
    total, text, operands = values[0], shown[0], [shown[0]]
    for value, term in zip(values[1:], shown[1:], strict=True):
        op = "sub" if total >= value and rng.random() < 0.45 else "add"
        sentence, total = w.calc(op, total, value)
        sentences.append(sentence)
        text += f" {'-' if op == 'sub' else '+'} {term}"
        operands.append(("-" if op == "sub" else "+") + term)
    return text, sentences, total, tuple(operands)


def _arithmetic(w: Writer, level: int) -> Problem:
    text, sentences, total, operands = _solve_chain(w, level)
    return Problem([w.ask("arithmetic", x=text)], sentences, str(total), operands)


def _story(w: Writer, level: int) -> Problem:
    rng = w.rng
    name, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    if rng.random() < 0.3:
        return _cost(w, level, name)
    total = start = rng.randint(8, 50 * level)
    parts = [rng.choice([f"{name} has {start} {item}.", f"There are {start} {item} in {name}'s bag."])]
    operands: list = [start]
    sentences = [w.say("story_start", n=name, a=start, i=item)]
    for event_index in range(1 + level):
        kind = rng.choice(["gain", "lose", "packs"])
        lead = "" if event_index == 0 else rng.choice(["", "Then "])
        wording = rng.choice(STORY_EVENTS[kind])
        if kind == "packs":
            count, size = rng.randint(2, 9), rng.randint(3, 12 * level)
            parts.append(lead + wording.format(p=name, b=size, m=friend, k=count) + ".")
            sentence, amount = w.calc("mul", size, count)
            sentences.append(sentence)
            operands.append((count, size))
        else:
            if kind == "lose" and total < 12:
                kind = "gain"
                wording = rng.choice(STORY_EVENTS[kind])
            amount = rng.randint(2, min(total - 2, 90)) if kind == "lose" else rng.randint(2, 45 * level)
            parts.append(lead + wording.format(p=name, b=amount, m=friend) + ".")
            operands.append(amount if kind == "gain" else -amount)
        sentence, total = w.calc("sub" if kind == "lose" else "add", total, amount)
        sentences.append(sentence)
    sentences.append(w.say("story_end", n=name, r=total, i=item))
    parts.append(w.ask("story", i=item, n=name))
    return Problem([" ".join(parts)], sentences, str(total), (name, item, *operands))


def _cost(w: Writer, level: int, name: str) -> Problem:
    rng = w.rng
    kinds = rng.sample(ITEMS, min(level + 1, 3))
    parts, sentences, operands, totals = [], [], [], []
    for item in kinds:
        count, price = rng.randint(2, 9), rng.randint(2, 10 + 6 * level)
        parts.append(f"{count} {item} {rng.choice(['at', 'for'])} {price} dollars each")
        sentence, cost = w.calc("mul", price, count)
        sentences.append(sentence)
        totals.append(cost)
        operands.append((item, count, price))
    total = totals[0]
    for cost in totals[1:]:
        sentence, total = w.calc("add", total, cost)
        sentences.append(sentence)
    sentences.append(w.say("cost_end", n=name, r=total))
    question = f"{name} buys {', '.join(parts[:-1])} and {parts[-1]}. " + w.ask("cost", n=name)
    return Problem([question], sentences, str(total), (name, *operands))


def _convert(w: Writer, level: int) -> Problem:
    rng = w.rng
    if rng.random() < 0.35:
        return _clock(w, level)
    unit, plural, small, factor = rng.choice(UNITS)
    count = rng.randint(2, (9, 25, 99)[level - 1])
    extra = rng.randint(1, min(factor - 1, 99)) if rng.random() < 0.7 else 0
    quantity = f"{count} {plural}" + (f" and {extra} {small}" if extra else "")
    sentences = [w.say("unit", u=unit, v=small, k=factor)]
    # The larger factor is the one that is split into tens and ones.
    sentence, total = w.calc("mul", max(count, factor), min(count, factor)) if min(count, factor) < 10 else \
        _long_product(w, max(count, factor), min(count, factor))
    sentences.append(sentence)
    if extra:
        sentence, total = w.calc("add", total, extra)
        sentences.append(sentence)
    return Problem([w.ask("convert", v=small, q=quantity)], sentences, str(total), (unit, count, extra))


def _long_product(w: Writer, a: int, b: int) -> tuple[str, int]:
    """a * b for two numbers of two or more digits: b is split into tens and ones."""
    tens, ones = b - b % 10, b % 10
    if ones == 0 or a % 100 == 0:
        w.steps += 1
        return w.say("mul", l=w.pick(PHRASES["link"][1:]), a=a, b=b, c=a * b), a * b
    first, x = w.say("mul", l="First", a=a, b=tens, c=a * tens), a * tens
    w.steps += 1
    second, y = w.calc("mul", a, ones)
    last, total = w.calc("add", x, y)
    return " ".join((first, second, last)), total


def _clock(w: Writer, level: int) -> Problem:
    rng = w.rng
    event = rng.choice(EVENTS)
    hour, minute = rng.randint(6, 18), rng.randrange(0, 60, 5 if level < 3 else 1)
    length = rng.randint(6, (18, 30, 55)[level - 1]) * 5 if level < 3 else rng.randint(61, 275)
    hours, minutes = divmod(length, 60)
    sentences = [w.say("clock_hours", m=length, h=hours, x=minutes)] if hours else []
    at, start = f"{hour:02d}:{minute:02d}", f"{hour:02d}:{minute:02d}"
    if hours:
        end = f"{hour + hours:02d}:{minute:02d}"
        sentences.append(w.say("clock_add", s=at, h=hours, e=end))
        at = end
    if minutes:
        total = minute + minutes
        sentence, _ = w.calc("add", minute, minutes)
        sentences.append(sentence)
        end = f"{(hour + hours + total // 60) % 24:02d}:{total % 60:02d}"
        sentences.append(w.say("clock_minutes", x=minutes, e=end))
        at = end
    return Problem([w.ask("clock", e=event, s=start, m=length)], sentences, at, (event, start, length))


def _list(w: Writer, level: int) -> Problem:
    rng = w.rng
    kind = rng.choice(["sort", "filter", "count"])
    if kind == "sort":  # single digits at first: what is hard is to keep track of what has been taken
        numbers = rng.sample(range(1, 10) if level < 3 else range(10, 100), rng.randint(2 + level, 3 + level))
        descending = rng.random() < 0.5
        order, extreme = ("largest to smallest", "largest") if descending else ("smallest to largest", "smallest")
        ordered = sorted(numbers, reverse=descending)
        sentences = [w.say("pick", x=n, e=f"The {extreme}", f=extreme) for n in ordered]
        result = ", ".join(map(str, ordered))
        sentences.append(w.say("ordered", x=result))
        question = w.ask("sort", x=", ".join(map(str, numbers)), o=order)
        return Problem([question], sentences, result, (order, *numbers))
    condition, test, relation = _condition(rng)
    pool = [n for n in range(10, 100) if str(n) not in condition]  # the limit itself is neither above nor below
    numbers = rng.sample(pool, rng.randint(2 + level, 3 + level + level // 3))
    kept = [n for n in numbers if test(n)]
    sentences = [w.say("keep" if test(n) else "drop", x=n, r=relation(n)) for n in numbers]
    result = ", ".join(map(str, kept)) if kept else "none"
    sentences.append(w.say("kept", x=result))
    if kind == "count":
        sentences.append(w.say("count", k=len(kept)))
        result = str(len(kept))
    question = w.ask(kind, x=", ".join(map(str, numbers)), c=condition)
    return Problem([question], sentences, result, (kind, condition, *numbers))


def _condition(rng: random.Random) -> tuple[str, Callable[[int], bool], Callable[[int], str]]:
    """A condition on two-digit numbers, its test, and what an answer says of a number."""
    limit = rng.randrange(20, 90, 10)

    def side(n: int) -> str:
        return f"above {limit}" if n > limit else f"below {limit}"

    def parity(n: int) -> str:
        return "odd" if n % 2 else "even"

    condition, relation = rng.choice(
        [(f"above {limit}", side), (f"below {limit}", side), ("even", parity), ("odd", parity)]
    )
    return condition, lambda n: relation(n) == condition, relation


def _string(w: Writer, level: int) -> Problem:
    rng = w.rng
    word = rng.choice([word for word in WORDS if len(word) <= 4 + level])
    letters = list(word)
    requests, operands = [], []
    sentences = [w.say("spell", x="-".join(letters))]
    for edit in rng.sample(sorted(STRING_EDITS), level):
        a, b = rng.choice(letters), rng.choice("abcdefghijklmnoprstuvwxyz")
        if edit == "reverse":
            letters = letters[::-1]
        elif edit == "replace":
            letters = [b if x == a else x for x in letters]
            operands.append((a, b))
        elif edit == "no_vowels":
            letters = [x for x in letters if x not in "aeiou"]
        elif edit == "swap_ends":
            letters = [letters[-1], *letters[1:-1], letters[0]]
        else:
            letters = letters[1:]
        requests.append(rng.choice(STRING_EDITS[edit]).format(a=a, b=b))
        operands.append(edit)
        sentences.append(w.say(edit, x="-".join(letters), a=a, b=b))
    asked = " Then: ".join(requests)
    return Problem([w.ask("string", w=word, e=asked)], sentences, "-".join(letters), (word, *operands))


def _table(w: Writer, level: int) -> Problem:
    rng = w.rng
    people = rng.sample(NAMES, (3, 4, 7)[level - 1])
    item, towns = rng.choice(ITEMS), rng.sample(CITIES, 2)
    rows = [(p, towns[i % 2] if i < 2 else rng.choice(towns), rng.randint(3, 99)) for i, p in enumerate(people)]
    rng.shuffle(rows)
    table = "\n".join([f"|name|{item}|city|", *(f"|{p}|{n}|{c}|" for p, c, n in rows)])
    amount = {name: number for name, _, number in rows}
    kind = rng.choice(["sum", "diff", "more"])
    a, b = rng.sample(people, 2)
    if amount[a] == amount[b]:  # "who has more?" has no answer
        return _table(w, level)
    if amount[a] < amount[b] and kind == "diff":
        a, b = b, a
    operands = (kind, item, *rows, a, b)
    city = {name: town for name, town, _ in rows}
    sentences = [w.say("row", n=p, c=city[p], x=amount[p], i=item) for p in (a, b)]
    if kind == "more":
        sentences.append(w.say("most", v=max(amount[a], amount[b])))
        question = w.ask("table_more", t=table, i=item, a=a, b=b)
        return Problem([question], sentences, a if amount[a] > amount[b] else b, operands)
    sentence, total = w.calc("add" if kind == "sum" else "sub", amount[a], amount[b])
    question = w.ask("table_" + kind, t=table, i=item, a=a, b=b)
    return Problem([question], [*sentences, sentence], str(total), operands)


def _json(w: Writer, level: int) -> Problem:
    rng = w.rng
    name, city, item = rng.choice(NAMES), rng.choice(CITIES), rng.choice(ITEMS)
    count, price, shipping = rng.randint(2, 9), rng.randint(3, (12, 60, 250)[level - 1]), rng.randint(3, 150)
    record: dict[str, str | int] = {"name": name}
    facts = [rng.choice([f"{name} ordered {count} {item}.", f"The order of {name} is {count} {item}."])]
    if level > 1:
        facts.append(rng.choice([f"They go to {city}.", f"Send it to {city}.", f"{name} lives in {city}."]))
        record["city"] = city
    facts.append(rng.choice([f"Each costs {price} dollars.", f"The price of one is {price} dollars."]))
    if rng.random() < 0.5:
        facts.reverse()
    record |= {"item": item, "count": count, "price": price}
    if level > 2:
        facts.append(rng.choice([f"Sending adds {shipping} dollars.", f"The shipping is {shipping} dollars."]))
        record["shipping"] = shipping
    keys = list(record)
    sentences = [w.say("field", k=k, v=record[k]) for k in keys]
    if level > 1 or rng.random() < 0.5:
        sentence, record["total"] = w.calc("mul", price, count)
        sentences.append(sentence)
    if level > 2:
        sentence, record["total"] = w.calc("add", record["total"], shipping)
        sentences.append(sentence)
    sentences.append(w.say("json"))
    question = w.ask("json", k=", ".join(record), n=" ".join(facts))
    return Problem([question], sentences, json.dumps(record), (name, city, item, count, price, shipping, level))


def _followup(w: Writer, level: int) -> Problem:
    """A first question with its worked answer, then a second one that builds on the result."""
    rng = w.rng
    first = rng.choice([_arithmetic, _story])(w, max(1, level - 1))
    value = int(first.result)
    sentences = [w.say("before", x=value)]
    requests, operands = [], []
    for _ in range(1 + (level > 1)):
        op = rng.choice(["add", "sub", "mul"] if value < 200 else ["add", "sub"])
        if op == "sub" and value < 10:
            op = "add"
        b = rng.randint(2, 6) if op == "mul" else rng.randint(3, min(value, 80) if op == "sub" else 90)
        requests.append({"add": ["add {b}", "add {b} to it"], "sub": ["take away {b}", "subtract {b}"],
                         "mul": ["multiply it by {b}", "take it times {b}"]}[op][rng.randrange(2)].format(b=b))
        operands.append((op, b))
        a = value
        sentence, value = _by_hundreds(w, a, b) if op == "mul" and a >= 100 else w.calc(op, a, b)
        sentences.append(sentence)
    question = w.ask("then_math", x=" and ".join(requests))
    turns = [*first.turns, w.answer(first.sentences, first.result), question]
    return Problem(turns, sentences, str(value), (*first.operands, *operands))


def _by_hundreds(w: Writer, a: int, b: int) -> tuple[str, int]:
    """a * b for a three-digit a: hundreds first, then the rest."""
    hundreds, rest = a - a % 100, a % 100
    if rest == 0:
        return w.calc("mul", a, b)
    first, x = w.calc("mul", hundreds, b)
    second, y = w.calc("mul", rest, b)
    last, total = w.calc("add", x, y)
    return " ".join((first, second, last)), total


FAMILIES: dict[str, Callable[[Writer, int], Problem]] = {
    "arithmetic": _arithmetic,
    "story": _story,
    "convert": _convert,
    "list": _list,
    "string": _string,
    "table": _table,
    "json": _json,
    "followup": _followup,
}
