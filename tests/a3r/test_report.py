"""Slots, lint, charts and renderers: what a report may say, and how it says it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3r import claims
from a3r.errors import ReportError
from a3r.prereg.tree import Leaf
from a3r.report import charts, html, lint, markdown
from a3r.report.document import Bullets, Document, Paragraph, Section, Table, Tone, Verbatim
from a3r.report.slots import Number, Source, amount, filled, p_value, resolve
from experiments_db.models import ClaimStrength


def number(
    key: str, value: float | None, unit: str = "reward", ci: tuple[float | None, float | None] = (None, None)
) -> Number:
    return Number(
        key,
        "what",
        "paired_t",
        value,
        unit,
        ci,
        0.95,
        3,
        150,
        p=0.0129,
        p_adj=0.0258,
        se_seed=0.01,
        se_eval=0.02,
        inputs_sha="ab",
    )


SOURCE = Source(
    {
        "gain": number("gain", 0.0942, ci=(0.0271, 0.1612)),
        "loss": number("loss", -0.0942, ci=(-0.1612, None)),
        "reach": number("reach", 612.4, "episodes"),
        "failed": number("failed", 1 / 3, "share"),
        "nothing": number("nothing", None),
    },
    {"question": "Why <b>?", "level": "8"},
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{{e:gain.value}}", "0.094"),
        ("{{e:gain.value|signed}}", "+0.094"),
        ("{{e:loss.value}}", "−0.094"),
        ("{{e:loss.value|abs}}", "0.094"),
        ("{{e:gain.ci|signed}}", "[+0.027, +0.161]"),
        ("{{e:loss.ci}}", "[−0.161, ∞]"),
        ("{{e:reach.value}}", "612"),
        ("{{e:failed.value}}", "33%"),
        ("{{e:nothing.value}}", "–"),
        ("p {{e:gain.p}}, adjusted {{e:gain.p_adj}}", "p 0.013, adjusted 0.026"),
        ("{{e:gain.level}} of {{e:gain.n_seeds}}", "95% of 3"),
        ("at {{f:level}}", "at 8"),
    ],
)
def test_a_slot_is_filled_from_its_row(text, shown):
    assert filled(text, SOURCE) == shown


@pytest.mark.parametrize("text", ["{{e:other.value}}", "{{e:gain.mood}}", "{{f:weather}}"])
def test_a_slot_without_a_row_is_an_error(text):
    with pytest.raises(ReportError):
        resolve(text, SOURCE)


def test_a_number_knows_the_estimate_it_came_from():
    pieces = resolve("by {{e:gain.value}} at {{f:level}}", SOURCE)
    assert [(piece.text, piece.estimate) for piece in pieces] == [
        ("by ", None),
        ("0.094", "gain"),
        (" at ", None),
        ("8", None),
    ]


@pytest.mark.parametrize(("value", "shown"), [(0.0004, "0.000"), (-0.0004, "0.000"), (0.0, "0.000")])
def test_nothing_has_no_sign(value, shown):
    assert amount(value, "reward", "signed") == shown


def test_small_p_values_are_only_said_to_be_small():
    assert [p_value(value) for value in (0.0004, 0.05, 1.0, None)] == ["< 0.001", "0.050", "1.000", "–"]


@pytest.mark.parametrize(
    "text", ["It rose to 0.8.", "It rose twofold.", "Half of them failed.", "Rewards doubled.", "Three seeds."]
)
def test_a_typed_number_is_refused(text):
    with pytest.raises(ReportError, match="types the number"):
        lint.check_prose(text)


@pytest.mark.parametrize(
    "text", ["It learns faster.", "This is no improvement.", "There is no difference.", "A is better than B."]
)
def test_a_comparison_outside_a_claim_is_refused(text):
    with pytest.raises(ReportError, match="outside a claim"):
        lint.check_prose(text)
    lint.check_prose(text, is_claim=True)


def test_numbers_in_slots_are_fine():
    lint.check_prose("It rose to {{e:run/group_size=8/s1.value}} at {{f:level/group_size=8}}.")


def claim_source(value: float, low: float = -0.01, high: float = 0.01) -> Source:
    keys = ("contrast", "equivalence")
    facts = {"title": "Tic-tac-toe", "level/group_size=8": "8", "reference": "4", "margin": "0.050", "threshold": "–"}
    return Source(
        {f"{key}/group_size=8/look1": number(f"{key}/group_size=8/look1", value, ci=(low, high)) for key in keys}
        | {"told": number("told", 0.076)},
        facts,
    )


@pytest.mark.parametrize(
    ("leaf", "value"), [(Leaf.SUPERIOR, 0.1), (Leaf.INFERIOR, -0.1), (Leaf.EQUIVALENT, 0.0), (Leaf.INCONCLUSIVE, 0.1)]
)
def test_a_claim_says_what_its_rows_say(plan_of, leaf, value):
    plan = plan_of()
    draft = claims.compared(plan, plan.arm("group_size=8"), leaf, 1, strength=ClaimStrength.SUPPORTED, told="told")
    claims.verify(draft, claim_source(value), leaf, plan)
    with pytest.raises(ReportError):
        claims.verify(draft, claim_source(value), Leaf.SUPERIOR if leaf is not Leaf.SUPERIOR else Leaf.INFERIOR, plan)


@pytest.mark.parametrize(("leaf", "value"), [(Leaf.SUPERIOR, -0.1), (Leaf.INFERIOR, 0.1), (Leaf.SUPERIOR, 0.0)])
def test_a_claim_with_the_wrong_sign_is_refused(plan_of, leaf, value):
    plan = plan_of()
    draft = claims.compared(plan, plan.arm("group_size=8"), leaf, 1, strength=ClaimStrength.SUPPORTED, told="told")
    with pytest.raises(ReportError, match="its estimate"):
        claims.verify(draft, claim_source(value), leaf, plan)


def test_an_equivalence_whose_interval_leaves_the_margin_is_refused(plan_of):
    plan = plan_of()
    draft = claims.compared(
        plan, plan.arm("group_size=8"), Leaf.EQUIVALENT, 1, strength=ClaimStrength.SUPPORTED, told=None
    )
    with pytest.raises(ReportError, match="says equivalent"):
        claims.verify(draft, claim_source(0.0, low=-0.2, high=0.01), Leaf.EQUIVALENT, plan)


def test_the_verb_is_bound_to_the_strength(plan_of):
    plan, arm = plan_of(), plan_of().arm("group_size=8")
    texts = {
        strength: claims.compared(plan, arm, Leaf.SUPERIOR, 1, strength=strength, told=None).text
        for strength in ClaimStrength
    }
    assert texts[ClaimStrength.SUPPORTED].startswith("Group size {{f:level/group_size=8}} learns faster than")
    assert texts[ClaimStrength.EXPLORATORY].startswith("The runs suggest that group size")
    assert texts[ClaimStrength.CONFIRMED].startswith("We confirm that group size")
    assert texts[ClaimStrength.DESCRIPTIVE].startswith("In these runs group size")


def test_a_claim_with_a_typed_number_is_refused(plan_of):
    plan = plan_of()
    draft = claims.compared(
        plan, plan.arm("group_size=8"), Leaf.SUPERIOR, 1, strength=ClaimStrength.SUPPORTED, told=None
    )
    lie = claims.ClaimDraft(draft.key, draft.form, draft.strength, draft.text + " By 40%.", draft.hypothesis)
    with pytest.raises(ReportError, match="types the number"):
        claims.verify(lie, claim_source(0.1), Leaf.SUPERIOR, plan)


EVIL = "<img src=x onerror=alert(1)> | **b** `c` [l](http://x) # h"
DOCUMENT = Document(
    title=EVIL,
    subtitle="plan",
    sections=(
        Section(
            "answer",
            "Answer",
            (
                Paragraph("It is {{f:evil}}: {{e:gain.value}}.", Tone.ANSWER),
                Bullets(("{{f:evil}}",)),
                Table(("a", "b"), (("{{f:evil}}", "{{e:gain.value}}"),), numeric=(1,), caption="{{f:evil}}"),
                Verbatim("```\n</pre><script>1</script>"),
            ),
        ),
        Section("numbers", "Every number", (Table(("key",), (("{{f:key}}",),)),)),
    ),
)
EVIL_SOURCE = Source(SOURCE.estimates, {"evil": EVIL, "key": "gain"})


def test_html_holds_no_markup_but_ours_and_links_each_number_to_its_row():
    page = html.render(DOCUMENT, EVIL_SOURCE)
    assert "<img" not in page
    assert "<script" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 5
    assert '<a class="number" href="#n-gain" title="gain">0.094</a>' in page
    assert '<tr id="n-gain">' in page
    assert "default-src 'none'" in page


def test_markdown_holds_no_markup_but_ours():
    text = markdown.render(DOCUMENT, EVIL_SOURCE)
    outside = re.sub(r"````text.*?````", "", text, flags=re.DOTALL)
    assert "<img" not in outside
    assert "**b**" not in outside.replace(r"\*\*b\*\*", "")
    assert "````text\n```\n</pre><script>1</script>\n````" in text, "the fence is longer than any in the text"
    rows = [line for line in text.splitlines() if line.startswith("| ") and "onerror" in line]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows), "a bar in a cell does not end it"


@given(st.text())
def test_escaped_markdown_has_no_line_of_its_own_and_no_tag(text):
    shown = markdown.escape(text)
    assert "\n" not in shown
    assert "<" not in shown


def test_charts_are_well_formed_and_escape_their_labels():
    line = charts.Line("<8>", (0, 64), (0.2, 0.5), (0.1, 0.4), (0.3, 0.6), (("seed & 1", (0, 64), (0.2, 0.5)),))
    dots = charts.Dots("<8>", (("seed 1", 0.5, False), ("seed 2", -1.0, True)), -0.25, float("-inf"), float("inf"))
    gap = charts.Gap("8 & 4", 0.1, -0.1, 0.3, 0.0, 0.2)
    for svg in (
        charts.curves([line], x_label="episodes", y_label="reward", title='a "title"'),
        charts.dots([dots], x_label="area", title="t"),
        charts.gaps([gap], margin=0.05, told=0.2, x_label="difference", title="t"),
    ):
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        assert "nan" not in svg
        assert "inf" not in svg


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_ticks_are_round_and_inside(low, width):
    places = charts.ticks(low, low + width)
    assert 1 <= len(places) <= 12
    assert all(low - width * 1e-6 <= place <= low + width * (1 + 1e-6) for place in places)
