"""A seeded generator of verifiable tasks: chat questions with worked answers and one checkable result.

Every task has a worked answer that ends in a line `#### result`, as in GSM8K. Each step of an answer is
phrased in one of several ways drawn at random, so that the text cannot be predicted from the question alone:
what remains to be chosen at each step is what a draft head gets wrong, and what a fuzzy rule may accept.

Splits: a task's operands (all numbers, words and names that determine its result) are hashed; one hash bucket
in eight is held out, so no operand tuple of a held-out task ever occurs in training. Held-out tasks can
also be asked in wordings that are never trained on (`unseen_wording=True`).

    for task in tasks("heldout", seed=0, count=500): print(task.messages, task.answer, task.result)

    python -m train.tasks --count 2000 --out tasks.json    # conversations in ShareGPT's format
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle_fsd.experiments.grading import extract_result, same_json

HELDOUT_BUCKETS = 8  # one operand tuple in eight is never trained on
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Task:
    """One question with its worked answer.

    `messages` ends with a user turn (follow-up tasks have earlier turns); `answer` is the worked assistant
    turn; `result` is the string behind `####`; `level` (1..3) is the size of the problem.
    """

    family: str
    messages: list[dict[str, str]]
    answer: str
    result: str
    level: int
    operands: tuple = field(repr=False)
    unseen_wording: bool = False


def is_correct(task: Task, text: str) -> bool:
    """Whether `text` states the task's result (JSON results are compared as values)."""
    stated = extract_result(text)
    return stated is not None and (same_json if task.family == "json" else str.__eq__)(stated, task.result)


# ---------------------------------------------------------------------------------------------------------
# Words

NAMES = """Ana Ben Carla David Emma Felix Grace Hugo Ines Jonas Kira Leo Maria Nora Oscar Paula Quinn Rosa
Sam Tara Uma Victor Wendy Yusuf Zoe Amir Bella Chen Dina Erik""".split()
ITEMS = """apples pencils stickers marbles books coins cards shells stamps cookies beads plums eggs tickets
bottles chairs boxes buttons candles flowers""".split()
CITIES = "Oslo Lima Cairo Paris Quito Tokyo Delhi Rome Accra Perth".split()
WORDS = """planet garden window button castle rocket silver forest market pencil dragon butter candle winter
summer bridge copper desert engine flower guitar hammer island jacket kitten lemon magnet needle orange pepper
rabbit saddle tunnel velvet wallet yellow anchor basket cactus donkey eagle fabric goblin harbor insect jungle
kettle ladder mirror napkin oyster parrot quartz ribbon shadow ticket umpire violin walnut zipper bottle camera
doctor effort father ground honest impact junior knight length method nature object people query reason
system theory update volume weight expert yield zebra cloud brick plant stone table river mouse light
train bread chair dance earth field grape house knife lunch money north ocean piano queen radio snake tiger
uncle voice water youth actor beach crown drift flame globe horse ivory jewel koala lotus maple nurse olive
pearl quilt robot spoon tulip unity viper wheat blanket cabinet diamond feather glacier harvest kingdom lantern
meadows orchard pelican rainbow station thunder village whistle airplane calendar dinosaur elephant festival
hospital magazine notebook painting sandwich triangle umbrella vacation wardrobe""".split()

# ---------------------------------------------------------------------------------------------------------
# Phrasings. Every entry has at least four; `say` draws one. Later entries are rarer, as in real text.

PHRASES: dict[str, list[str]] = {
    "open": [
        "Let's work it out step by step.", "Here is how to do it.", "Let me go through it.", "Sure.",
        "We take it one step at a time.", "Okay, let's see.", "This takes a few steps.",
    ],
    "close": [
        "So the answer is {r}.", "That gives {r}.", "The result is {r}.", "Therefore it is {r}.",
        "We end up with {r}.", "Hence {r}.",
    ],
    "link": [
        "First", "Next", "Then", "Now", "After that", "Here",
    ],
    "add": [
        "{l}, {a} + {b} = {c}.", "{l} we add {b} to {a}, which makes {c}.", "{l}, {a} plus {b} is {c}.",
        "{l} the sum of {a} and {b} is {c}.", "{l}, adding {a} and {b}: {a} + {b} = {c}.",
    ],
    "sub": [
        "{l}, {a} - {b} = {c}.", "{l} we take {b} from {a}, leaving {c}.", "{l}, {a} minus {b} is {c}.",
        "{l} the difference of {a} and {b} is {c}.", "{l}, subtracting {b}: {a} - {b} = {c}.",
    ],
    "mul": [
        "{l}, {a} * {b} = {c}.", "{l} we multiply {a} by {b} and get {c}.", "{l}, {a} times {b} is {c}.",
        "{l} the product of {a} and {b} is {c}.", "{l}, multiplying: {a} * {b} = {c}.",
    ],
    "mul_parts": [
        "{l}, {a} * {b} is {t} * {b} + {u} * {b} = {tb} + {ub} = {c}.",
        "{l} we split {a} into {t} and {u}: {tb} + {ub}, so {a} * {b} = {c}.",
        "{l}, for {a} * {b} take {tb} and {ub}, together {c}.",
        "{l} multiply {a} by {b}: {t} * {b} = {tb}, {u} * {b} = {ub}, in all {c}.",
    ],
    "div": [
        "{l}, {a} / {b} = {c}.", "{l} we divide {a} by {b} and get {c}.", "{l}, {a} divided by {b} is {c}.",
        "{l} sharing {a} among {b} gives {c}, since {b} * {c} = {a}.",
    ],
    "story_start": [
        "{n} starts with {a} {i}.", "At first {n} has {a} {i}.", "We begin with {n}'s {a} {i}.",
        "To begin, there are {a} {i}.",
    ],
    "story_end": [
        "{n} has {r} {i} in the end.", "That leaves {n} with {r} {i}.", "So {n} now has {r} {i}.",
        "In the end {n} owns {r} {i}.",
    ],
    "cost_end": [
        "{n} pays {r} dollars.", "So the total is {r} dollars.", "In all {n} spends {r} dollars.",
        "The bill comes to {r} dollars.",
    ],
    "unit": [
        "One {u} is {k} {v}.", "There are {k} {v} in a {u}.", "We know that a {u} has {k} {v}.",
        "A {u} equals {k} {v}.", "Each {u} counts {k} {v}.",
    ],
    "clock_hours": [
        "{m} minutes are {h} h {x} min.", "Since 60 minutes make an hour, {m} min is {h} h {x} min.",
        "Splitting {m} minutes gives {h} h and {x} min.", "We write {m} min as {h} h {x} min.",
    ],
    "clock_add": [
        "From {s}, {h} hours later it is {e}.", "{h} hours after {s} the clock shows {e}.",
        "Adding {h} h to {s} gives {e}.", "Start at {s} and go {h} h ahead: {e}.",
    ],
    "clock_minutes": [
        "Another {x} minutes bring us to {e}.", "With {x} more minutes we reach {e}.",
        "Then {x} min later it is {e}.", "Adding {x} min gives {e}.",
    ],
    "keep": [
        "{x} is {r}, so it stays.", "{x} is {r} and is kept.", "{x} is {r}: yes.", "{x}, being {r}, fits.",
    ],
    "drop": [
        "{x} is {r}, so it goes.", "{x} is {r} and is left out.", "{x} is {r}: no.", "{x}, being {r}, does not fit.",
    ],
    "kept": [
        "What remains: {x}.", "We are left with {x}.", "The ones kept are {x}.", "This leaves {x}.",
    ],
    "count": [
        "That is {k} in total.", "Counting them gives {k}.", "There are {k} of them.", "So we count {k}.",
    ],
    "pick": [
        "{e} of the rest is {x}.", "Now {x} comes, the {f}.", "The {f} left is {x}.", "Take {x} as the {f}.",
        "Next is {x}.",
    ],
    "ordered": [
        "In order: {x}.", "The sorted list is {x}.", "Put together: {x}.", "So the order is {x}.",
    ],
    "spell": [
        "The letters are {x}.", "Spelled out it is {x}.", "Letter by letter: {x}.", "We write it as {x}.",
    ],
    "reverse": [
        "Backwards that is {x}.", "Reading from the end gives {x}.", "Reversed: {x}.",
        "Turned around it becomes {x}.",
    ],
    "replace": [
        "With {b} for {a} we get {x}.", "Replacing {a} by {b} gives {x}.", "Every {a} turns into {b}: {x}.",
        "Put {b} where {a} was: {x}.",
    ],
    "no_vowels": [
        "Without vowels it is {x}.", "Dropping the vowels leaves {x}.", "Only consonants: {x}.",
        "The vowels go, so {x}.",
    ],
    "swap_ends": [
        "Swapping the first and last letter gives {x}.", "The ends change places: {x}.",
        "First and last swapped: {x}.", "Exchange both ends to get {x}.",
    ],
    "drop_first": [
        "Without the first letter it is {x}.", "Cutting off the first letter leaves {x}.",
        "The first letter goes: {x}.", "From the second letter on: {x}.",
    ],
    "row": [
        "The row |{n}|{x}|{c}| says that {n} has {x} {i}.", "We find |{n}|{x}|{c}|, that is {x} {i}.",
        "Look at |{n}|{x}|{c}|: there are {x} {i}.", "For {n} we read |{n}|{x}|{c}|.",
        "In the table, |{n}|{x}|{c}| gives {x} {i}.",
    ],
    "most": [
        "The larger value is {v}.", "{v} is the higher of the two.", "Of these, {v} is more.",
        "More than the other is {v}.",
    ],
    "field": [
        "The {k} is {v}.", "For {k} we have {v}.", "{k}: {v}.", "We read {v} as the {k}.",
    ],
    "json": [
        "Filled in:", "As JSON:", "So the record is:", "This is the object:",
    ],
    "before": [
        "Before we had {x}.", "The earlier result was {x}.", "We go on from {x}.", "The last answer was {x}.",
    ],
}
# Questions: (trained wordings, wordings kept for evaluation).
QUESTIONS: dict[str, tuple[list[str], list[str]]] = {
    "arithmetic": (
        ["What is {x}?", "Compute {x}.", "Please calculate {x}.", "Work out {x}.", "Find the value of {x}.",
         "Can you evaluate {x}?", "How much is {x}?", "I need the result of {x}."],
        ["Tell me what {x} comes to.", "Give me the value of {x}, please."],
    ),
    "convert": (
        ["How many {v} are {q}?", "Convert {q} to {v}.", "Express {q} in {v}.", "What is {q} in {v}?",
         "Please turn {q} into {v}.", "Write {q} as {v}."],
        ["Give {q} as a number of {v}.", "I have {q}. What is that in {v}?"],
    ),
    "clock": (
        ["A {e} starts at {s} and lasts {m} minutes. When does it end?",
         "The {e} begins at {s}. It takes {m} minutes. At what time is it over?",
         "If a {e} of {m} minutes starts at {s}, when is it finished?",
         "It is {s}. The {e} takes {m} minutes from now. What time will it be then?"],
        ["When will a {e} end that starts at {s} and takes {m} minutes?"],
    ),
    "sort": (
        ["Sort {x} from {o}.", "Put these numbers in order, {o}: {x}.", "Arrange {x} {o}.",
         "Order the list {x} from {o}.", "Please sort these {o}: {x}."],
        ["Bring {x} into order, {o}.", "Here are some numbers: {x}. List them {o}."],
    ),
    "filter": (
        ["Which of {x} are {c}?", "From {x}, keep only the numbers {c}.", "List the numbers {c} in {x}.",
         "Take {x} and keep those {c}.", "Find all numbers {c} among {x}."],
        ["Remove everything from {x} but the numbers {c}."],
    ),
    "count": (
        ["How many of {x} are {c}?", "Count the numbers {c} in {x}.", "In {x}, how many are {c}?",
         "Give the count of numbers {c} among {x}.", "Look at {x}. How many are {c}?"],
        ["Tell me how many numbers {c} there are in {x}."],
    ),
    "string": (
        ["Take the word {w}. {e}", "Start with {w}. {e}", "Here is a word: {w}. {e}", "Use the word {w}. {e}",
         "Given the word {w}: {e}"],
        ["My word is {w}. {e}"],
    ),
    "table_sum": (
        ["{t}\nHow many {i} do {a} and {b} have together?", "{t}\nWhat is the total of {i} for {a} and {b}?",
         "{t}\nAdd up the {i} of {a} and {b}.", "{t}\nTogether, how many {i} do {a} and {b} own?"],
        ["{t}\nPlease sum the {i} of {a} and {b}."],
    ),
    "table_diff": (
        ["{t}\nHow many more {i} does {a} have than {b}?", "{t}\nBy how much do the {i} of {a} exceed those of {b}?",
         "{t}\nWhat is the difference in {i} between {a} and {b}?", "{t}\nCompare {a} and {b}: how many more {i}?"],
        ["{t}\n{a} has more {i} than {b}. How many more?"],
    ),
    "table_more": (
        ["{t}\nWho has more {i}, {a} or {b}?", "{t}\nWhich of {a} and {b} has more {i}?",
         "{t}\nCompare {a} with {b}: who owns more {i}?", "{t}\nDoes {a} or {b} have more {i}?"],
        ["{t}\n{a} or {b}: whose {i} are more?"],
    ),
    "json": (
        ["Fill the JSON {k} from this note: {n}", "Read this note: {n} Give a JSON object with {k}.",
         "Turn this into JSON with {k}: {n}", "Make a record {k} out of: {n}"],
        ["{n} Please write that as a JSON object with {k}."],
    ),
    "then_math": (
        ["Now {x}.", "And then {x}. What do you get?", "Good. Now {x}.", "Next, {x}.", "Thanks. Please {x}."],
        ["Take that result and {x}."],
    ),
}
STORY_EVENTS = {
    "gain": ["{p} buys {b} more", "{p} finds {b} more", "{p} gets {b} from {m}", "{m} gives {p} {b}"],
    "lose": ["{p} loses {b}", "{p} gives {b} to {m}", "{p} sells {b}", "{m} takes {b} from {p}"],
    "packs": ["{p} buys {k} packs of {b}", "{p} gets {k} bags with {b} each",
              "{m} gives {p} {k} boxes of {b}", "{p} finds {k} bags of {b}"],
}
STORY_QUESTIONS = (
    ["How many {i} does {n} have now?", "How many {i} are left?", "How many {i} does {n} have in the end?",
     "What is the number of {i} now?"],
    ["Count the {i} that {n} has after that."],
)
COST_QUESTIONS = (
    ["How much does {n} pay?", "What is the total price?", "How many dollars does {n} spend?", "What does it cost?"],
    ["Find the sum that {n} has to pay."],
)


class _Writer:
    """Draws the wordings of one task. Trained and unseen question wordings never mix within a list."""

    def __init__(self, rng: random.Random, unseen: bool):
        self.rng = rng
        self.unseen = unseen
        self.steps = 0

    def pick(self, wordings: list[str]) -> str:
        """One wording, the first ones a little more often (weights 1/(rank + 3))."""
        return self.rng.choices(wordings, weights=[1 / (i + 4) for i in range(len(wordings))])[0]

    def ask(self, wordings: tuple[list[str], list[str]], **values) -> str:
        return self.rng.choice(wordings[self.unseen]).format(**values)

    def say(self, phrase: str, **values) -> str:
        return self.pick(PHRASES[phrase]).format(**values)

    def calc(self, op: str, a: int, b: int) -> tuple[str, int]:
        """One calculation step: its sentence and its value."""
        link = "First" if self.steps == 0 and self.rng.random() < 0.7 else self.pick(PHRASES["link"][1:])
        self.steps += 1
        if op == "add":
            return self.say("add", l=link, a=a, b=b, c=a + b), a + b
        if op == "sub":
            return self.say("sub", l=link, a=a, b=b, c=a - b), a - b
        if op == "div":
            return self.say("div", l=link, a=a, b=b, c=a // b), a // b
        if a < 10 or a % 10 == 0:
            return self.say("mul", l=link, a=a, b=b, c=a * b), a * b
        tens, ones = a - a % 10, a % 10
        return self.say("mul_parts", l=link, a=a, b=b, t=tens, u=ones, tb=tens * b, ub=ones * b, c=a * b), a * b


@dataclass(frozen=True)
class _Problem:
    """What a family returns: chat turns before the answer, the sentences of the answer, and the result."""

    turns: list[str]
    sentences: list[str]
    result: str
    operands: tuple


def _solve_chain(w: _Writer, level: int) -> tuple[str, list[str], int, tuple]:
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


def _arithmetic(w: _Writer, level: int) -> _Problem:
    text, sentences, total, operands = _solve_chain(w, level)
    return _Problem([w.ask(QUESTIONS["arithmetic"], x=text)], sentences, str(total), operands)


def _story(w: _Writer, level: int) -> _Problem:
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
    parts.append(w.ask(STORY_QUESTIONS, i=item, n=name))
    return _Problem([" ".join(parts)], sentences, str(total), (name, item, *operands))


def _cost(w: _Writer, level: int, name: str) -> _Problem:
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
    question = f"{name} buys {', '.join(parts[:-1])} and {parts[-1]}. " + w.ask(COST_QUESTIONS, n=name)
    return _Problem([question], sentences, str(total), (name, *operands))


UNITS = [  # unit, plural, small unit, factor
    ("hour", "hours", "minutes", 60), ("day", "days", "hours", 24), ("week", "weeks", "days", 7),
    ("year", "years", "weeks", 52), ("year", "years", "days", 365), ("ream", "reams", "sheets", 480),
    ("dozen", "dozens", "eggs", 12), ("minute", "minutes", "seconds", 60), ("year", "years", "months", 12),
    ("kilometre", "kilometres", "metres", 1000), ("kilogram", "kilograms", "grams", 1000),
    ("metre", "metres", "centimetres", 100), ("foot", "feet", "inches", 12), ("yard", "yards", "feet", 3),
]
EVENTS = "film concert meeting lesson train game walk party".split()


def _convert(w: _Writer, level: int) -> _Problem:
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
    return _Problem([w.ask(QUESTIONS["convert"], v=small, q=quantity)], sentences, str(total), (unit, count, extra))


def _long_product(w: _Writer, a: int, b: int) -> tuple[str, int]:
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


def _clock(w: _Writer, level: int) -> _Problem:
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
    return _Problem([w.ask(QUESTIONS["clock"], e=event, s=start, m=length)], sentences, at, (event, start, length))


def _list(w: _Writer, level: int) -> _Problem:
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
        question = w.ask(QUESTIONS["sort"], x=", ".join(map(str, numbers)), o=order)
        return _Problem([question], sentences, result, (order, *numbers))
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
    question = w.ask(QUESTIONS[kind], x=", ".join(map(str, numbers)), c=condition)
    return _Problem([question], sentences, result, (kind, condition, *numbers))


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


STRING_EDITS: dict[str, list[str]] = {
    "reverse": ["Reverse it.", "Write it backwards.", "Turn it around.", "Spell it from the end."],
    "replace": ["Replace {a} by {b}.", "Change every {a} to {b}.", "Put {b} instead of {a}.", "Swap {a} for {b}."],
    "no_vowels": ["Remove the vowels.", "Drop all vowels.", "Take out every vowel.", "Leave out the vowels."],
    "swap_ends": ["Swap the first and last letter.", "Exchange its first and last letter.",
                  "Let the first and last letter trade places.", "Switch the two end letters."],
    "drop_first": ["Remove the first letter.", "Drop its first letter.", "Cut off the first letter.",
                   "Leave out the first letter."],
}


def _string(w: _Writer, level: int) -> _Problem:
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
    return _Problem([w.ask(QUESTIONS["string"], w=word, e=asked)], sentences, "-".join(letters), (word, *operands))


def _table(w: _Writer, level: int) -> _Problem:
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
        question = w.ask(QUESTIONS["table_more"], t=table, i=item, a=a, b=b)
        return _Problem([question], sentences, a if amount[a] > amount[b] else b, operands)
    sentence, total = w.calc("add" if kind == "sum" else "sub", amount[a], amount[b])
    question = w.ask(QUESTIONS["table_" + kind], t=table, i=item, a=a, b=b)
    return _Problem([question], [*sentences, sentence], str(total), operands)


def _json(w: _Writer, level: int) -> _Problem:
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
    question = w.ask(QUESTIONS["json"], k=", ".join(record), n=" ".join(facts))
    return _Problem([question], sentences, json.dumps(record), (name, city, item, count, price, shipping, level))


def _followup(w: _Writer, level: int) -> _Problem:
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
    question = w.ask(QUESTIONS["then_math"], x=" and ".join(requests))
    turns = [*first.turns, _answer_text(w, first.sentences, first.result), question]
    return _Problem(turns, sentences, str(value), (*first.operands, *operands))


def _by_hundreds(w: _Writer, a: int, b: int) -> tuple[str, int]:
    """a * b for a three-digit a: hundreds first, then the rest."""
    hundreds, rest = a - a % 100, a % 100
    if rest == 0:
        return w.calc("mul", a, b)
    first, x = w.calc("mul", hundreds, b)
    second, y = w.calc("mul", rest, b)
    last, total = w.calc("add", x, y)
    return " ".join((first, second, last)), total


def _answer_text(w: _Writer, sentences: list[str], result: str) -> str:
    """Opening, sentences, mostly a closing sentence, and the marked result."""
    parts = [w.say("open"), *sentences]
    if w.rng.random() < 0.75 and len(result) < 12:
        parts.append(w.say("close", r=result))
    return " ".join(parts) + f"\n#### {result}"


FAMILIES: dict[str, Callable[[_Writer, int], _Problem]] = {
    "arithmetic": _arithmetic,
    "story": _story,
    "convert": _convert,
    "list": _list,
    "string": _string,
    "table": _table,
    "json": _json,
    "followup": _followup,
}


def split_of(family: str, operands: tuple) -> str:
    """The split that a task with these operands belongs to, a function of nothing else."""
    bucket = zlib.crc32(repr((family, operands)).encode()) % HELDOUT_BUCKETS
    return "heldout" if bucket == 0 else "train"


def make_task(family: str, rng: random.Random, split: str, *, level: int | None = None,
              unseen_wording: bool = False) -> Task:
    """Draw one task of `family` from `split`; `level` 1..3, drawn evenly where None.

    Raises:
        ValueError: unknown family or split, or unseen wordings asked for in training.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown task family {family!r}; known: {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if unseen_wording and split == "train":
        raise ValueError("unseen wordings are for held-out tasks only")
    level = level or rng.randint(1, 3)
    while True:
        w = _Writer(rng, unseen_wording)
        problem = FAMILIES[family](w, level)
        if split_of(family, problem.operands) == split:
            break
    roles = ["user", "assistant"] * len(problem.turns)
    messages = [{"role": r, "content": t} for r, t in zip(roles, problem.turns, strict=False)]
    answer = _answer_text(w, problem.sentences, problem.result)
    return Task(family, messages, answer, problem.result, level, problem.operands, unseen_wording)


def tasks(
    split: str, *, seed: int, count: int, unseen_wording: bool = False, families: Sequence[str] = tuple(FAMILIES)
) -> Iterator[Task]:
    """`count` tasks of `split`, the families in turn; the same for the same arguments."""
    rng = random.Random(f"{split}/{seed}/{unseen_wording}")
    for index in range(count):
        yield make_task(families[index % len(families)], rng, split, unseen_wording=unseen_wording)


def as_sharegpt(task: Task) -> dict:
    """The whole conversation as a ShareGPT record."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [*task.messages, {"role": "assistant", "content": task.answer}]
    return {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write task conversations as a ShareGPT JSON file.")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count must be at least 1, got {args.count}")
    records = [as_sharegpt(task) for task in tasks(args.split, seed=args.seed, count=args.count)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(f"{args.count} conversations in {args.out}")


if __name__ == "__main__":
    main()
