"""Reads "does FACTOR at LEVELS change METRIC on TEMPLATE" in the ways people say it. Rules only, no language model.

Every number of a question must find its place: a level of the factor, a control ("with 5 seeds"), a threshold. A number
or a factor that finds none is a refusal, for a study of a question nobody asked costs as much as one of the right one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from a3r.errors import QuestionError
from a3r.planner.catalogue import Catalogue, Game, Knob
from a3r.prereg.plan import Direction, Level, MetricKind
from vibe import numbers

_NUMBER = re.compile(
    r"(?P<minus>(?<![\w.])[-−](?=[\d.])|(?<![\w-])(?:minus|negative)\s+)?"
    r"(?:(?<![\w.])(?P<digits>\d+(?:,\d{3})+(?![\d,])|(?:\d+(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?)(?P<percent>\s?%)?(?![\w]|\.\d)"
    rf"|(?<![\w-])(?P<word>{numbers.WORDED})(?![\w-]))"
)
_REACH = re.compile(
    r"\b(?:reach(?:es|ing|ed)?|gets? to|getting to|hits?|attains?|threshold|until|episodes to)"
    r"(?:[\s:=]+(?:an?|the|held[- ]?out|mean|average|final|reward|score|win rate|level|threshold|of|at|is))*[\s:=]*$"
)
_CONTROL = (
    ("seeds", re.compile(r"\s*(?:random |training )?seeds?\b")),
    ("updates", re.compile(r"\s*(?:optimi[sz]er )?(?:updates|steps)\b")),
    ("eval_games", re.compile(r"\s*(?:held[- ]?out|evaluation|eval)(?: evaluation)? games\b")),
    ("episodes_per_update", re.compile(r"\s*episodes (?:per|an|each|every) (?:update|step)\b")),
    (
        "episodes",
        re.compile(r"\s*(?:training )?episodes(?: in (?:all|total)| of training)?\b(?! (?:per|an|each|every)\b)"),
    ),
)
_SAME = re.compile(r"(?:same|equal|fixed|identical|constant|matched)(?: number of)?\s+$")
_REFERENCE = re.compile(
    r"\b(?:than|instead of|rather than|versus|vs\.?|against|over|compared (?:to|with)|relative to|from|beats?)\b"
)
_FASTER = re.compile(
    r"\b(?:faster|fast|quick(?:er|ly)?|speed(?:s)?(?: up)?|sooner|earlier|slow(?:er|ly|s)?(?: down)?"
    r"|sample[- ]efficien\w+|auc|area under|learning curve|learns? more)\b"
)
_FINAL = re.compile(
    r"\b(?:final|in the end|at the end|end(?:s)? up|better|worse|best|higher|lower|more reward|less reward|reward|score"
    r"|win(?:s|ning)?(?: rate)?|improve[sd]?|performance|stronger|weaker|help(?:s)?|hurt(?:s)?|beats?|outperform\w*)\b"
)
_ANY_METRIC = re.compile(
    r"\b(?:change[sd]?|affect(?:s|ed)?|matter(?:s|ed)?|influence[sd]?|differ(?:s|ence)?|effect|impact)\b"
)
_BETTER = re.compile(
    r"\b(?:faster|quicker|sooner|earlier|better|higher|more|improve[sd]?|stronger|help(?:s)?|beats?|outperform\w*|fewer)\b"
)
_WORSE = re.compile(r"\b(?:slower|worse|lower|weaker|less|later|hurt(?:s)?|harm(?:s)?)\b")
_ON = re.compile(r"\b(?:with|on|true|yes|enabled?|turning on|switching on)\b")
_OFF = re.compile(r"\b(?:without|off|false|no|disabled?|turning off|switching off|dropping)\b")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a question came to."""

    question: str
    game: Game
    knob: Knob
    """The factor."""
    levels: tuple[Level, ...]
    """In order of mention, at least two, each once."""
    reference: Level
    expected: Direction
    """Of the other levels against the reference."""
    metric: MetricKind
    threshold: float | None
    controls: dict[str, Level] = field(default_factory=dict)
    """Other knobs that the question fixes, by path."""
    counts: dict[str, int] = field(default_factory=dict)
    """Stated numbers of seeds, updates, eval_games, episodes_per_update, episodes."""
    read_as: tuple[tuple[str, str], ...] = ()
    """Words of the question, and what they were taken for."""
    assumed: tuple[str, ...] = ()
    """What the question left open and how it was settled."""
    names_same_episodes: bool = False
    """The question itself asks for equal numbers of episodes."""


@dataclass(slots=True)
class _Text:
    """The question, in which words that were understood are crossed out. Places stay what they were."""

    original: str
    left: str

    @classmethod
    def of(cls, question: str) -> _Text:
        plain = question.replace("’", "'").replace("‑", "-").replace("–", "-").replace("—", "-")
        lowered = "".join(char.lower() if len(char.lower()) == 1 else char for char in plain)
        return cls(question, lowered)

    @property
    def words(self) -> str:
        """What is left, with - _ . between letters as spaces, so that `tic-tac-toe` is three words."""
        return re.sub(r"(?<=[a-z])[-_./](?=[a-z])", " ", self.left)

    def cross_out(self, start: int, end: int) -> str:
        """Take these characters away; returns them as they were written."""
        self.left = self.left[:start] + " " * (end - start) + self.left[end:]
        return self.original[start:end]


@dataclass(slots=True)
class _Mention:
    """A knob that the question names, and the levels that belong to it."""

    knob: Knob
    start: int
    end: int
    levels: list[tuple[int, Level]] = field(default_factory=list)
    """Place in the question and value."""

    def distinct(self) -> list[Level]:
        """Each level once, in order of mention."""
        return list(dict.fromkeys(level for _, level in sorted(self.levels, key=lambda pair: pair[0])))


def read(question: str, catalogue: Catalogue) -> Reading:
    """What a question asks.

    Raises:
        QuestionError: it can't be read. The message says why, and what can be.
    """
    if not re.search(r"[^\W\d_]{2}", question):
        raise _refusal("the question is empty or holds no words", catalogue)
    text = _Text.of(question)
    read_as: list[tuple[str, str]] = []
    game = _game(text, catalogue, read_as)
    names_same = bool(
        re.search(r"same (?:number|amount|count) of (?:training )?(?:episodes|games)|same episodes", text.words)
    )
    metric, threshold, assumed = _metric(text, game, catalogue, read_as)
    counts = _counts(text, read_as)
    mentions = _mentions(text, catalogue.knobs(game))
    if odd := numbers.not_read(text.left, ((start, end) for _, start, end in _numbers(text.left))):
        raise _refusal(
            f"{odd[0]} is no plain number; write it as 8, 0.5, 1e-3 or 50 %, and two levels as 8 against 4", catalogue
        )
    _attach_numbers(text, mentions, catalogue)
    _attach_words(text, mentions, catalogue.knobs(game))
    factor, controls = _factor(mentions, catalogue, game)
    levels = factor.distinct()
    reference, expected, why = _reference(text, factor)
    read_as.append((factor.knob.label, f"factor {factor.knob.path} at {', '.join(shown(level) for level in levels)}"))
    for path, level in controls.items():
        read_as.append((path.partition(".")[2].replace("_", " "), f"{path} = {shown(level)} in every arm"))
    if why:
        assumed.append(why)
    if factor.knob.path == "trainer.clip_high" and not re.search(r"upper|high", text.original.lower()):
        assumed.append("`clip` is taken as the upper limit of the ratio, trainer.clip_high.")
    return Reading(
        question=question.strip(),
        game=game,
        knob=factor.knob,
        levels=tuple(levels),
        reference=reference,
        expected=expected,
        metric=metric,
        threshold=threshold,
        controls=controls,
        counts=counts,
        read_as=tuple(read_as),
        assumed=tuple(assumed),
        names_same_episodes=names_same,
    )


def shown(level: Level) -> str:
    """A level as people write it."""
    if isinstance(level, bool):
        return "on" if level else "off"
    return f"{level:g}" if isinstance(level, float) else str(level)


def _refusal(problem: str, catalogue: Catalogue) -> QuestionError:
    return QuestionError(f"{problem}.\n{catalogue.in_words()}")


def _game(text: _Text, catalogue: Catalogue, read_as: list[tuple[str, str]]) -> Game:
    found: dict[str, Game] = {}
    phrases = sorted(((name, game) for game in catalogue.games for name in game.names), key=lambda pair: -len(pair[0]))
    for name, game in phrases:
        for match in re.finditer(rf"(?<![a-z]){re.escape(name)}(?![a-z])", text.words):
            read_as.append((text.cross_out(*match.span()), f"template {game.name}"))
            found[game.name] = game
    if not found:
        raise _refusal("the question names no template I know", catalogue)
    if len(found) > 1:
        raise _refusal(f"the question names {' and '.join(sorted(found))}; a study is on one template", catalogue)
    return next(iter(found.values()))


def _metric(
    text: _Text, game: Game, catalogue: Catalogue, read_as: list[tuple[str, str]]
) -> tuple[MetricKind, float | None, list[str]]:
    """What is measured. A stated level to reach comes first, then speed, then the final reward."""
    words = text.words
    for number, start, end in _numbers(text.left):
        if (reach := _REACH.search(words[:start])) and not any(rule.match(words[end:]) for _, rule in _CONTROL):
            if not game.reward_low < number <= game.reward_high:
                raise QuestionError(
                    f"a held-out reward of {number:g} can't be reached on {game.name}: its rewards go from "
                    f"{game.reward_low:g} to {game.reward_high:g}"
                )
            read_as.append(
                (text.cross_out(reach.start(), end).strip(), f"metric episodes to a held-out reward of {number:g}")
            )
            return MetricKind.EPISODES_TO, number, []
    if re.search(r"episodes (?:needed )?to (?:a |the )?(?:threshold|level|target)|time to threshold", words):
        raise _refusal('"episodes to a threshold" needs the threshold, e.g. "episodes to reach 0.6"', catalogue)
    if match := _FASTER.search(words):
        read_as.append(
            (text.original[match.start() : match.end()], "metric area under the held-out curve over episodes")
        )
        return MetricKind.AREA, None, []
    if match := _FINAL.search(words):
        read_as.append((text.original[match.start() : match.end()], "metric final held-out reward"))
        return MetricKind.FINAL_REWARD, None, []
    if match := _ANY_METRIC.search(words):
        return (
            MetricKind.FINAL_REWARD,
            None,
            [f"`{text.original[match.start() : match.end()]}` names no metric; the final held-out reward is taken."],
        )
    raise _refusal("the question names nothing to measure", catalogue)


def _numbers(text: str) -> Iterator[tuple[float, int, int]]:
    """Every number, in digits or as a word, with its place; those of `one` factor or `the one` are no numbers."""
    for match in _NUMBER.finditer(text):
        if match["word"] == "one" or not numbers.stands_alone(text, match.start(), match.end()):
            continue
        value = numbers.value_of(match["digits"] or match["word"])
        value = value / 100 if match["percent"] else value
        yield (-value if match["minus"] else value), match.start(), match.end()


def _counts(text: _Text, read_as: list[tuple[str, str]]) -> dict[str, int]:
    """Numbers that say how much is run: `with 5 seeds`."""
    counts: dict[str, int] = {}
    for number, start, end in list(_numbers(text.left)):
        for name, rule in _CONTROL:
            if match := rule.match(text.words[end:]):
                if not number.is_integer() or number < 1:
                    raise QuestionError(f"{number:g} {name.replace('_', ' ')} can't be run; give a whole number from 1")
                if counts.get(name, number) != number:
                    raise QuestionError(
                        f"the question says {counts[name]} {name.replace('_', ' ')} and {number:g}; leave one out"
                    )
                read_as.append((text.cross_out(start, end + match.end()), f"{name.replace('_', ' ')} = {number:g}"))
                counts[name] = int(number)
                break
    return counts


def _mentions(text: _Text, knobs: Sequence[Knob]) -> list[_Mention]:
    """Knobs the question names, longest name first, each place once. `at the same learning rate` names none."""
    mentions: dict[str, _Mention] = {}
    phrases = [(name, knob) for knob in knobs for name in (*knob.names, knob.path.replace("_", " ").replace(".", " "))]
    for name, knob in sorted(phrases, key=lambda pair: -len(pair[0])):
        while match := re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", text.words):
            is_control = _SAME.search(text.words[: match.start()])
            text.cross_out(*match.span())
            if not is_control:
                mention = mentions.setdefault(knob.path, _Mention(knob, *match.span()))
                if match.start() < mention.start:
                    mention.start, mention.end = match.span()
    return sorted(mentions.values(), key=lambda mention: mention.start)


def _attach_numbers(text: _Text, mentions: list[_Mention], catalogue: Catalogue) -> None:
    """Give every number that is left to the knob it stands with: `8 holes`, else the last one named, else the next."""
    numeric = [mention for mention in mentions if mention.knob.kind in (int, float)]
    for number, start, end in list(_numbers(text.left)):
        follows = [mention for mention in numeric if 0 <= mention.start - end <= 2]
        before = [mention for mention in numeric if mention.end <= start]
        after = [mention for mention in numeric if mention.start >= end]
        owner = next(iter(follows or before[-1:] or after), None)
        said = text.cross_out(start, end)
        if owner is None:
            raise _refusal(f"the number {said} belongs to no factor I know", catalogue)
        owner.levels.append((start, owner.knob.value(number)))


def _attach_words(text: _Text, mentions: list[_Mention], knobs: Sequence[Knob]) -> None:
    """Levels that are words: the choices of a knob, which need not be named itself, and on and off."""
    for knob in knobs:
        mention = next((each for each in mentions if each.knob.path == knob.path), None)
        found = [
            (match.start(), choice)
            for choice in knob.choices
            for match in re.finditer(rf"(?<![a-z]){re.escape(choice.replace('_', ' '))}(?![a-z])", text.words)
        ]
        if found and mention is None and len({choice for _, choice in found}) > 1:
            mention = _Mention(knob, min(start for start, _ in found), max(start for start, _ in found))
            mentions.append(mention)
        if mention is not None and knob.choices:
            mention.levels += found
        if mention is not None and knob.kind is bool:
            on, off = _ON.search(text.words), _OFF.search(text.words)
            mention.levels += [(match.start(), value) for match, value in ((on, True), (off, False)) if match]
            if len(mention.distinct()) == 1:
                # `without X` is against the default; where the default is what was said, against the other.
                mention.levels.append((len(text.left), not mention.distinct()[0]))


def _factor(mentions: list[_Mention], catalogue: Catalogue, game: Game) -> tuple[_Mention, dict[str, Level]]:
    """The one knob with several levels; knobs with one level are controls."""
    several = [mention for mention in mentions if len(mention.distinct()) > 1]
    single = [mention for mention in mentions if len(mention.distinct()) == 1]
    if len(several) > 1:
        both = " and ".join(mention.knob.label for mention in several)
        raise _refusal(f"the question varies {both}; a study varies one factor and fixes the rest", catalogue)
    if several:
        return several[0], {mention.knob.path: mention.distinct()[0] for mention in single}
    if len(mentions) > 1:
        named = " and ".join(
            f"{mention.knob.label} "
            + (f"at {shown(mention.distinct()[0])}" if mention in single else "without a level")
            for mention in mentions
        )
        raise _refusal(
            f"the question names {named}; a question compares one factor, so give one of them two levels or more",
            catalogue,
        )
    if single:
        knob, level = single[0].knob, single[0].distinct()[0]
        raise _refusal(
            f"{knob.label} has one level ({shown(level)}); a comparison needs two, e.g. {shown(level)} against "
            f"{shown(knob.default) if knob.default != level else 'another'} ({knob.limits})",
            catalogue,
        )
    if mentions:
        knob = mentions[0].knob
        raise _refusal(f"the question names {knob.label} without levels; say which ({knob.limits})", catalogue)
    raise _refusal(f"the question names no factor that can be measured on {game.name}", catalogue)


def _reference(text: _Text, factor: _Mention) -> tuple[Level, Direction, str | None]:
    """The level to compare with, what is expected of the others, and the assumption made, if any."""
    levels = sorted(factor.levels, key=lambda pair: pair[0])
    said = [match.end() for match in _REFERENCE.finditer(text.words)]
    expected = Direction.DIFFERENT
    better, worse = _BETTER.search(text.words), _WORSE.search(text.words)
    for end in said:
        following = [level for start, level in levels if start >= end]
        if following and any(start < end and level != following[0] for start, level in levels):
            if better or worse:
                expected = Direction.BETTER if better else Direction.WORSE
            return following[0], expected, None
    distinct = factor.distinct()
    if factor.knob.default in distinct:
        return factor.knob.default, expected, f"The default, {shown(factor.knob.default)}, is the reference."
    return distinct[0], expected, f"The first level named, {shown(distinct[0])}, is the reference."
