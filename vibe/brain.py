"""Who reads a description: a brain turns words into a `GameSpec`, or refuses and says what it can do.

`offline` needs no key and no network. It knows nothing but the templates' own words: weighted phrases say which game a
text means, phrases beside a number say which rule the number sets. What it can't use it lists; it never guesses a rule.
"""

from __future__ import annotations

import difflib
import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vibe import library, numbers
from vibe.errors import NoTemplateError, UsageError
from vibe.library import Knob, KnobKind, Template
from vibe.numbers import Number
from vibe.spec import GameSpec, Requirement, RequirementKind, RuleValue, Unused

MIN_SCORE = 4.0
"""A name alone is worth 5, one telling word 2 or 3: it takes a name, or words that agree."""
MIN_LEAD = 1.0
"""A description that speaks for two games about equally is refused rather than tossed for."""
MAX_REACH = 6
"""Words between a choice and the word that says what is chosen."""
MAX_DESCRIPTION = 20_000
"""Characters; a game is described in fewer."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


FUNCTION_WORDS = _set(
    "a an the of on in from to with per at and or for by is are be that then than who which each one it its them they "
    "all any until while after before when if as into off out up down over under between"
)
LINKS = _set("a an the of size is are be has exactly only length most least to")
"""Words that may stand between a number and the word before it that says what it counts."""
COUNTED_ELSEWHERE = _set(
    "second minute hour day game match time point percent dollar euro life level team turn step try hand"
)
"""Things that people count in games and that no rule here is about, unless the template's own words say so."""

OTHER_GAMES = (
    "backgammon, battleship, blackjack, checkers, chess, codenames, connect four, connect 4, crossword, dominoes, "
    "go fish, gomoku, hangman, mahjong, mastermind, minesweeper, othello, poker, reversi, rock paper scissors, "
    "scrabble, shogi, solitaire, sudoku, tetris, werewolf, wordle"
)
"""Games with names of their own that no template plays, however alike some words are."""


class Brain(Protocol):
    """Reads descriptions."""

    def read(self, description: str) -> GameSpec:
        """The game that a description means.

        Raises:
            NoTemplateError: it fits none that can be played.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a sentence asks for that is so under every rule of the game."""

    sentence: int
    text: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A value for one rule, as a sentence gives it."""

    sentence: int
    text: str
    knob: Knob
    value: RuleValue


class OfflineBrain:
    """Rules only: the templates' own words and numbers, nothing else."""

    def read(self, description: str) -> GameSpec:
        """See `Brain.read`."""
        if len(description) > MAX_DESCRIPTION:
            raise UsageError(
                f"the description has {len(description)} characters, the limit is {MAX_DESCRIPTION}; shorten it"
            )
        if any(unicodedata.category(char) == "Cs" for char in description):
            raise UsageError("the description is not valid UTF-8; write it in UTF-8")
        sentences = split_sentences(description)
        template = choose(sentences)
        readings, facts, unread = read_rules(sentences, template)
        accepted, refused = settle(template, readings)
        rules = template.rules(**{reading.knob.name: reading.value for reading in accepted})
        return GameSpec(
            title=template.title,
            source_sentences=sentences,
            requirements=_number_them(_requirements(sentences, template, facts, accepted)),
            template=template.name,
            template_version=template.version,
            rules=rules,
            unused=_in_order(
                *unread,
                *refused,
                *_otherwise(sentences, template),
                *_idle_choices(sentences, template, accepted),
                *_not_understood(sentences, template, accepted),
            ),
            assumptions=tuple(
                f"{knob.name} = {knob.default}: {knob.meaning}"
                for knob in template.knobs
                if knob.name not in {reading.knob.name for reading in accepted}
            ),
        )


BRAINS: Mapping[str, type[Brain]] = {"offline": OfflineBrain}


def split_sentences(description: str) -> tuple[str, ...]:
    """The sentences of a text, word for word, without the white space around them.

    Characters that would steer a terminal are taken for spaces.
    """
    plain = "".join(" " if unicodedata.category(char) == "Cc" and char != "\n" else char for char in description)
    parts = re.split(r"(?<=[.!?])\s+|\n+", plain)
    return tuple(part.strip() for part in parts if part.strip())


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, hyphens opened, apostrophes and the plural's s taken off."""
    return [singular(word) for word in re.findall(r"[^\W_]+", re.sub("['’]", "", text.lower()))]


def singular(word: str) -> str:
    """A word without a final s, so that `votes` and `vote` are one."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def spans(phrase: str, words: Sequence[str]) -> list[tuple[int, int]]:
    """Where a phrase stands in a list of words: first word and one past the last. A `*` in it is up to four words."""
    parts = [part if part == "*" else " ".join(words_of(part)) for part in phrase.split()]
    pattern = " ".join(map(re.escape, parts)).replace(r"\* ", r"(?:\S+ ){0,4}")
    text = " ".join(words)
    found = re.finditer(rf"(?<!\S){pattern}(?!\S)", text)
    return [(text.count(" ", 0, match.start()), text.count(" ", 0, match.end()) + 1) for match in found]


def hits(text: str, keywords: Mapping[str, float]) -> dict[str, float]:
    """The phrases of a text that speak for a game, each once with its weight."""
    words = words_of(text)
    return {phrase: weight for phrase, weight in _normalised(keywords).items() if spans(phrase, words)}


def _normalised(keywords: Mapping[str, float]) -> dict[str, float]:
    """Keywords as `words_of` would write them; of two that become one, the heavier counts."""
    weights: dict[str, float] = {}
    for phrase, weight in keywords.items():
        normal = " ".join(words_of(phrase))
        weights[normal] = max(weight, weights.get(normal, 0.0))
    return weights


def choose(sentences: Sequence[str]) -> Template:
    """The template that a description means.

    Raises:
        NoTemplateError: no template's words are there often enough, or those of two are.
    """
    text = "\n".join(sentences)
    templates = [library.load(name) for name in library.names()]
    scores = {template.name: sum(hits(text, template.keywords).values()) for template in templates}
    ranked = sorted(templates, key=lambda template: (-scores[template.name], -_likeness(text, template), template.name))
    best, second = ranked[0], ranked[1]
    others = [name for name in OTHER_GAMES.split(", ") if spans(name, words_of(text))]
    lead = scores[best.name] - scores[second.name]
    if scores[best.name] >= MIN_SCORE and lead >= MIN_LEAD and not others:
        return best
    if not words_of(text):
        reason = "the description says nothing"
    elif others:
        reason = f"the description names {others[0]}, which is another game; the nearest template is {best.name}"
    elif scores[best.name] >= MIN_SCORE and lead < MIN_LEAD:
        reason = f"the description could mean {best.name} or {second.name}; leave out what speaks for the other"
    else:
        said = ", ".join(hits(text, best.keywords))
        about = f"of its words there is only: {said}" if said else "none of its words is there"
        reason = f"no template fits the description; the nearest is {best.name}, but {about}"
    raise NoTemplateError(f"{reason}.\n{what_can_be_described(templates)}", nearest=best.name)


def _likeness(text: str, template: Template) -> float:
    """How alike the letters of a text and the template's examples are; only ranks what has no word in common."""
    return max(
        difflib.SequenceMatcher(None, text.lower()[:400], example.lower()).ratio() for example in template.examples
    )


def what_can_be_described(templates: Sequence[Template]) -> str:
    """The games there are, each with a description that means it."""
    lines = [f'  {template.name:<10} "{template.examples[0]}"' for template in templates]
    return "\n".join(["The offline brain knows these games; describe one of them, for example:", *lines])


def read_rules(sentences: Sequence[str], template: Template) -> tuple[list[Reading], list[Fact], list[Unused]]:
    """Every rule that the sentences state, every number that is so anyway, and every number that is neither."""
    readings: list[Reading] = []
    facts: list[Fact] = []
    unread: list[Unused] = []
    for index, sentence in enumerate(sentences):
        found = numbers.find(sentence)
        reason = "it is no plain number; write one such as 8 or eight"
        odd = numbers.not_read(sentence, ((number.start, number.end) for number in found))
        unread += [Unused(sentence=index, text=text, reason=reason) for text in odd]
        for number in found:
            match _read_number(index, sentence, number, template):
                case Reading() as reading:
                    readings.append(reading)
                case Fact() as fact:
                    facts.append(fact)
                case Unused() as note:
                    unread.append(note)
                case None:
                    pass
        readings += _read_choices(index, sentence, template)
    return readings, facts, unread


def _read_number(index: int, sentence: str, number: Number, template: Template) -> Reading | Fact | Unused | None:
    """What one number of a sentence sets; None for a `one` that counts nothing (`one of them`)."""
    after, before = numbers.words_after(sentence, number.end), numbers.words_before(sentence, number.start)
    text = _with_noun(sentence, number, after)
    noun = after[0] if text != number.text else None
    always = {singular(name): (name, count) for name, count in template.always.items()}
    if noun and singular(noun) in always:
        name, count = always[singular(noun)]
        if number.values == (count,):
            return Fact(index, text, f"{name} = {count}, as always in this game")
        return Unused(sentence=index, text=text, reason=f"{template.name} always has {name} = {count}")
    knob = _knob_of_size(template) if number.is_size else _knob_beside(template, before, after)
    if knob is None:
        if number.values == (1,) and number.text.isalpha():
            return None
        what = f"counts {noun}" if noun else "takes this number"
        return Unused(sentence=index, text=text, reason=f"no rule of {template.name} {what}")
    value = _one_value(number)
    if value is None:
        return Unused(sentence=index, text=text, reason=f"{knob.name} takes one whole number of {knob.unit}")
    if problem := knob.problem(value):
        return Unused(sentence=index, text=text, reason=problem)
    return Reading(index, text, knob, value)


def _one_value(number: Number) -> int | None:
    """The one whole number that is meant, or None: 4 for `4x4`, 3 for `one to three` and `1, 2 or 3`."""
    if not number.is_whole:
        return None
    values = [int(value) for value in number.values]
    if number.is_size or len(values) == 1:
        return values[0] if len(set(values)) == 1 else None
    counts_up = values == list(range(1, values[-1] + 1))
    spans_up = len(values) == 2 and values[0] == 1 < values[1] and re.search(r"to|-|–|through", number.text)
    return values[-1] if counts_up or spans_up else None


def _knob_of_size(template: Template) -> Knob | None:
    """The knob that a size such as `4x4` sets."""
    return next((knob for knob in template.knobs if knob.is_size), None)


def _knob_beside(template: Template, before: Sequence[str], after: Sequence[str]) -> Knob | None:
    """The knob that the words beside a number point at.

    The word before wins over an equally near one after it: of `up to 3 coins` the 3 is what may be taken.
    """
    counted = [singular(word) for word in itertools.takewhile(lambda word: word not in FUNCTION_WORDS, after)]
    numeric = [knob for knob in template.knobs if knob.kind is KnobKind.INT]
    own = {word for knob in numeric for phrase in knob.words for word in words_of(phrase)}
    if counted and counted[0] in _counted_elsewhere() - own:
        return None
    after, before = [singular(word) for word in after], [singular(word) for word in before]
    best: tuple[float, Knob] | None = None
    for knob in numeric:
        for phrase in knob.words:
            nearness = max(_nearness_before(phrase, before), _nearness_after(phrase, after))
            if nearness > 0 and (best is None or nearness > best[0]):
                best = (nearness, knob)
    return best[1] if best else None


def _counted_elsewhere() -> frozenset[str]:
    """What numbers count in some game, as single words."""
    words = {
        words_of(phrase)[-1]
        for name in library.names()
        for knob in library.load(name).knobs
        if knob.kind is KnobKind.INT
        for phrase in knob.words
    }
    return COUNTED_ELSEWHERE | words


def _nearness_after(phrase: str, after: Sequence[str]) -> float:
    """1 for a phrase right after a number, less behind adjectives, 0 behind a function word or nowhere."""
    for start, _ in spans(phrase, after):
        if not FUNCTION_WORDS.intersection(after[:start]):
            return 1 / (1 + start)
    return 0.0


def _nearness_before(phrase: str, before: Sequence[str]) -> float:
    """Just over 1 for a phrase right before a number, less where linking words stand between, else 0."""
    for _, end in reversed(spans(phrase, before)):
        between = before[end:]
        if LINKS.issuperset(between):
            return 1.1 / (1 + len(between))
    return 0.0


def _with_noun(sentence: str, number: Number, after: Sequence[str]) -> str:
    """A number and the word it counts, as they stand in the sentence."""
    if not after or singular(after[0]) in FUNCTION_WORDS:
        return number.text
    end = sentence.lower().index(after[0], number.end) + len(after[0])
    return sentence[number.start : end]


def _read_choices(index: int, sentence: str, template: Template) -> Iterator[Reading]:
    """The choices that a sentence makes: a value's phrase near a word that says what is chosen."""
    words = words_of(sentence)
    for knob in template.knobs:
        if knob.choices is None:
            continue
        pointers = [start for phrase in knob.words for start, _ in spans(phrase, words)]
        best: tuple[int, int, str, str] | None = None
        for value, phrases in knob.choices.items():
            for phrase in phrases:
                for start, end in spans(phrase, words):
                    reach = min((_gap(pointer, start, end) for pointer in pointers), default=MAX_REACH + 1)
                    candidate = (reach, start - end, value, phrase)
                    if reach <= MAX_REACH and (best is None or candidate < best):
                        best = candidate
        if best:
            yield Reading(index, _verbatim(sentence, best[3]), knob, best[2])


def _idle_choices(sentences: Sequence[str], template: Template, accepted: Sequence[Reading]) -> Iterator[Unused]:
    """The words that speak of a choice and set none: a value that nothing says is meant, a subject without a value.

    A subject is left out where another sentence gives its value, or where it is what the game is called.
    """
    chosen = {reading.knob.name: reading.value for reading in accepted}
    used = {(reading.sentence, reading.knob.name) for reading in accepted}
    for index, sentence in enumerate(sentences):
        words = words_of(sentence)
        read = [words_of(reading.text) for reading in accepted if reading.sentence == index]
        for knob in template.knobs:
            if knob.choices is None or (index, knob.name) in used:
                continue
            values = [
                phrase
                for value, phrases in knob.choices.items()
                for phrase in phrases
                if value != chosen.get(knob.name) and spans(phrase, words)
            ]
            subjects = [
                word
                for word in knob.words
                if word not in template.keywords and spans(word, words) and not any(spans(word, text) for text in read)
            ]
            if values and not subjects:
                reason = f"it may be about {knob.name}; say it beside one of: {', '.join(knob.words)}"
                yield Unused(sentence=index, text=_verbatim(sentence, values[0]), reason=reason)
            elif subjects and (values or knob.name not in chosen):
                known = ", ".join(f"{phrases[0]!r} ({value})" for value, phrases in knob.choices.items())
                reason = f"nothing usable beside it says {knob.name}; it knows such as {known}"
                yield Unused(sentence=index, text=_verbatim(sentence, subjects[0]), reason=reason)


def _gap(pointer: int, start: int, end: int) -> int:
    """Words between a pointing word and a phrase; 0 where it is inside or beside it."""
    return max(0, start - pointer - 1, pointer - end)


def _verbatim(sentence: str, phrase: str) -> str:
    """A phrase as it stands in the sentence."""
    parts = [r"[\W_]+".join(rf"{re.escape(word)}(?:s|es)?" for word in words_of(part)) for part in phrase.split("*")]
    found = re.search(rf"(?<![^\W_]){'.*?'.join(parts)}", sentence, re.IGNORECASE)
    return found[0] if found else sentence


def settle(template: Template, readings: Sequence[Reading]) -> tuple[list[Reading], list[Unused]]:
    """The readings that go together, and those that don't; of two for one rule the first counts."""
    waiting: list[Reading] = []
    refused: list[Unused] = []
    for reading in readings:
        first = next((other for other in waiting if other.knob.name == reading.knob.name), None)
        if first is None:
            waiting.append(reading)
        elif first.value != reading.value:
            reason = f"{reading.knob.name} is {first.value} already, by {first.text!r}"
            refused.append(Unused(sentence=reading.sentence, text=reading.text, reason=reason))
    accepted: list[Reading] = []
    problems: dict[str, str] = {}
    # A rule may fit only once another is in force: four in a row needs the larger board, whichever was said first.
    while True:
        problems.clear()
        for reading in waiting:
            try:
                template.rules(**{other.knob.name: other.value for other in (*accepted, reading)})
            except UsageError as error:
                problems[reading.knob.name] = str(error)
            else:
                accepted.append(reading)
        waiting = [reading for reading in waiting if reading.knob.name in problems]
        if len(accepted) + len(refused) + len(problems) == len(readings) or not waiting:
            break
    refused += [
        Unused(sentence=reading.sentence, text=reading.text, reason=problems[reading.knob.name]) for reading in waiting
    ]
    return sorted(accepted, key=readings.index), refused


def _requirements(
    sentences: Sequence[str], template: Template, facts: Sequence[Fact], accepted: Sequence[Reading]
) -> Iterator[tuple[int, RequirementKind, str, str, tuple[str, ...]]]:
    """What each sentence asks for and gets: sentence, kind, words, meaning, rules."""
    for index, sentence in enumerate(sentences):
        if said := hits(sentence, template.keywords):
            yield index, RequirementKind.GAME, sentence, f"the game is {template.title} ({', '.join(said)})", ()
        for fact in facts:
            if fact.sentence == index:
                yield index, RequirementKind.GAME, fact.text, fact.meaning, ()
        for reading in accepted:
            if reading.sentence == index:
                knob = reading.knob
                meaning = f"{knob.name} = {reading.value}: {knob.meaning}"
                yield index, RequirementKind.RULE, reading.text, meaning, (knob.name,)


def _number_them(items: Iterator[tuple[int, RequirementKind, str, str, tuple[str, ...]]]) -> tuple[Requirement, ...]:
    return tuple(
        Requirement(id=f"R{number}", sentence=sentence, kind=kind, text=text, meaning=meaning, rules=rules)
        for number, (sentence, kind, text, meaning, rules) in enumerate(items, 1)
    )


def _not_understood(sentences: Sequence[str], template: Template, accepted: Sequence[Reading]) -> Iterator[Unused]:
    """The sentences of which nothing was used."""
    used = {reading.sentence for reading in accepted}
    for index, sentence in enumerate(sentences):
        if index not in used and not hits(sentence, template.keywords):
            yield Unused(sentence=index, text=sentence, reason=f"nothing in {template.name} does this")


def _otherwise(sentences: Sequence[str], template: Template) -> Iterator[Unused]:
    """What was asked for and is otherwise in this game."""
    for index, sentence in enumerate(sentences):
        for pattern, instead in template.otherwise.items():
            for found in re.finditer(rf"\b(?:{pattern})\b", sentence, re.IGNORECASE):
                yield Unused(sentence=index, text=found[0], reason=instead)


def _in_order(*notes: Unused) -> tuple[Unused, ...]:
    return tuple(sorted(notes, key=lambda note: note.sentence))
