"""A research task of three questions: what its agents are told, their tools, and what the policy says.

Tools and policy speak in sentences drawn from a seed, so a recording repeats itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Set
from enum import StrEnum

SYSTEM = """\
You are a research assistant of a city's planning office. You answer questions about how streets, roofs, parks and water
keep a city cool in summer, for people who decide about money and who read your answer once, on the way to a meeting.

How to work:
1. Look for reports first. Search with a few plain words; a search that finds nothing is worth another wording, not a
guess. Never name a report that no search has shown you.
2. Read the section that bears on the question before you quote a report: "summary" for what it found, "methods" for how
it was measured, "costs" for money and upkeep. An abstract alone is not evidence.
3. Where two measures are set against each other, compare them with the tool instead of working numbers out yourself,
and say in which unit and for which season the comparison holds.
4. When a call of a tool fails, read what it says, mend the arguments and call again. Do not repeat a call that worked.
5. Think before every step: what is known, what is missing, which call would tell it. Keep it short.

How to answer:
- Begin with the answer in one sentence, then give the two or three findings that carry it, each with its report.
- Give numbers with their unit and their range. Where reports disagree, say so and say which one you trust, and why.
- Say what you do not know. A gap that is named is worth more than a sentence that sounds sure.
- No lists of more than five items, no tables, no headings; 60 to 150 words.
- Answer in English, whatever language a report is in, and keep the names of places as they are.
"""
QUESTIONS = (
    "Our square of four hectares is paved and full of people in July. What lowers the felt temperature at noon more: "
    "young trees, or awnings over a third of it? We can pay for one of them this year.",
    "The council now asks about the roofs around that square. Is it worth painting them white, or does planting them "
    "bring more over ten years? Think of the people on the top floors as well as of the street.",
    "Last point: somebody wants a shallow water basin in the middle. Set it against what you found so far and tell us "
    "in which order you would build, and what could make you change your mind.",
)
HELPER_SYSTEM = """\
You check one claim of a colleague against the reports it names. Read the section that would show it to be wrong, then
say in two or three sentences whether the claim holds, what it leaves out, and how sure you are. Add no other claims.
"""
SUMMARISE = (
    "Sum up our conversation so far for a colleague who goes on from here: the questions, the reports that were read, "
    "the numbers with their units, and what is still open."
)

SUBJECTS = (
    "The survey of eleven squares",
    "A row of plane trees",
    "An awning of light cloth",
    "The white coating",
    "The measured roof",
    "A planted roof of ten centimetres",
    "The basin",
    "Shade at noon",
    "The mast at head height",
    "A wet surface",
    "The second summer",
    "The report from the harbour district",
    "Evaporation from young leaves",
    "Upkeep by the district",
)
VERBS = (
    "lowered",
    "explains",
    "delayed",
    "did not change",
    "halved",
    "raised",
    "accounts for",
    "is reported with",
    "leaves open",
    "was set against",
)
OBJECTS = (
    "the felt temperature by {a} to {b} degrees",
    "the surface temperature by {b} degrees at {a} o'clock",
    "the yearly cost by {a}{b} euros a square metre",
    "the number of hot nights by {a}",
    "the need for cooling by {b} percent",
    "the wind at head height",
    "the glare that residents complained about",
    "the humidity by {a} percent",
    "what the model had predicted within {a} degrees",
    "the water use by {b}{a} litres a day",
)
ENDINGS = (
    "in the first two weeks of July",
    "where the sky view was below a half",
    "as long as the soil was watered",
    "but only on the side that faces south",
    "with a wide spread between the sites",
    "after the third year",
    "compared with bare asphalt",
    "although the sample was small",
    "on days without wind",
    "once the coating had aged",
)
THOUGHTS = (
    "What is missing is how it was measured.",
    "That bears on the question of money more than on heat.",
    "I should not lean on one site alone.",
    "The section on costs would settle it.",
    "So far both findings point the same way.",
    "The unit differs from the one before, so I have to be careful.",
    "Let me see whether another report disagrees.",
)
REMARKS = ("Let me look that up.", "One more report bears on this.", "I will check how it was measured.", "")
WORDS = (
    "shade",
    "street trees",
    "awnings",
    "white roofs",
    "green roofs",
    "basin",
    "heat stress",
    "upkeep",
    "night cooling",
)
SECTIONS = ("summary", "methods", "costs")


class Habit(StrEnum):
    """What an agent does beside asking, calling tools and answering."""

    HAS_HELPER = "has_helper"
    """It hands a claim to another agent during the second question."""
    ASKS_TWICE = "asks_twice"
    """It sends the second question's first request again and goes on from the second reply."""
    SUMS_UP = "sums_up"
    """A summary takes the place of history before the third question."""
    ANSWERS_BY_TOOL = "answers_by_tool"
    """Its answer is a call of `final_answer`."""


def search(query: str, max_results: int = 3) -> str:
    """Searches the library of reports and returns the number, title and one finding of each report found.

    Args:
        query: What to look for, in a few plain words.
        max_results: How many reports to return at most, from 1 to 5.
    """
    draw = random.Random(f"search/{query}/{max_results}")
    return "\n".join(
        f"R{draw.randrange(100, 1000)}: {draw.choice(WORDS)} and {draw.choice(WORDS)}, {draw.randrange(2009, 2025)}. "
        + sentence(draw)
        for _ in range(max_results)
    )


def read_report(report: str, section: str = "summary") -> str:
    """Reads one section of a report from the library.

    Args:
        report: The report's number as a search shows it, such as R271.
        section: Which section to read: summary, methods or costs.
    """
    draw = random.Random(f"read/{report}/{section}")
    return f"{report}, {section}. " + text(draw, draw.randint(3, 6))


def compare(first: str, second: str, years: int = 10) -> str:
    """Compares two measures by the library's tables: cooling at noon, cooling at night, cost and water.

    Args:
        first: The first measure, in a word or two.
        second: The second measure, in a word or two.
        years: Over how many years cost and water are summed up.
    """
    draw = random.Random(f"compare/{first}/{second}/{years}")
    rows = ("felt temperature at noon, degrees", "air at night, degrees", f"euros over {years} years", "litres a day")
    lines = (f"{row}: {first} {draw.randrange(10, 900) / 10}, {second} {draw.randrange(10, 900) / 10}" for row in rows)
    return "\n".join(lines)


TOOLS = (search, read_report, compare)


def sentence(draw: random.Random) -> str:
    """One finding."""
    result = draw.choice(OBJECTS).format(a=draw.randrange(2, 9), b=draw.randrange(10, 40))
    return f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {result} {draw.choice(ENDINGS)}."


def text(draw: random.Random, num_sentences: int) -> str:
    """Findings behind each other."""
    return " ".join(sentence(draw) for _ in range(num_sentences))


def replies(habits: Set[Habit], seed: str) -> list[str]:
    """What the policy says in an episode, call by call. Once it leaves out an argument, is told so and calls again."""
    draw = random.Random(seed)
    said: list[str] = []
    for number in range(len(QUESTIONS)):
        for step in range(draw.randint(2, 4)):
            if (number, step) == (0, 1):
                said.append(calling(draw, "read_report", {"section": "costs"}))
            if (number, step) == (1, 0) and Habit.ASKS_TWICE in habits:
                said.append(calling(draw, *tool_call(draw, step)))
            said.append(calling(draw, *tool_call(draw, step)))
        if number == 1 and Habit.HAS_HELPER in habits:
            said.append(calling(draw, "check", {"input": text(draw, 2)}))
            said.append(calling(draw, "read_report", {"report": report(draw), "section": draw.choice(SECTIONS)}))
            said.append(thinking(draw) + text(draw, 2))
        answer = text(draw, draw.randint(3, 6))
        if Habit.ANSWERS_BY_TOOL in habits:
            said.append(calling(draw, "final_answer", {"answer": answer}))
        else:
            said.append(thinking(draw) + answer)
        if number == 1 and Habit.SUMS_UP in habits:
            said.append(thinking(draw) + text(draw, 7))
    return said


def tool_call(draw: random.Random, step: int) -> tuple[str, dict[str, object]]:
    """A tool with arguments; the first step searches."""
    name = "search" if step == 0 else draw.choice(("search", "read_report", "read_report", "compare"))
    if name == "search":
        return name, {"query": " ".join(draw.sample(WORDS, 2)), "max_results": draw.randint(2, 4)}
    if name == "read_report":
        return name, {"report": report(draw), "section": draw.choice(SECTIONS)}
    first, second = draw.sample(WORDS, 2)
    return name, {"first": first, "second": second, "years": draw.choice((5, 10, 20))}


def report(draw: random.Random) -> str:
    """The number of a report."""
    return f"R{draw.randrange(100, 1000)}"


def calling(draw: random.Random, name: str, arguments: dict[str, object]) -> str:
    """A reply that thinks, may say something, and calls a tool."""
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    return thinking(draw) + "\n".join(filter(None, (draw.choice(REMARKS), call)))


def thinking(draw: random.Random) -> str:
    """Reasoning between its tags."""
    parts = [*(sentence(draw) for _ in range(draw.randint(1, 3))), *draw.sample(THOUGHTS, draw.randint(1, 2))]
    return f"<think>\n{' '.join(parts)}\n</think>\n\n"


def corpus() -> Iterator[str]:
    """Texts of other episodes, for a tokenizer that shares their words."""
    yield SYSTEM
    yield from QUESTIONS
    for number in range(20):
        yield from replies(set(), f"corpus/{number}")
