"""docs/trainer.md has every metric of an update, and says which of them can be null."""

from __future__ import annotations

import re
from pathlib import Path

from episodes import conversations

from swarm_engine.config import TrainerConfig
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
SECTION = re.compile(r"^## Metrics$(.*?)^## ", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (`.*?`) \| .*? \| .*? \| ([^|]+) \|$", re.MULTILINE)


def rows() -> dict[str, str]:
    """When each metric is null, by its name."""
    section = SECTION.search(PAGE.read_text(encoding="utf-8"))
    assert section is not None
    listed = [(name, null) for names, null in ROW.findall(section[1]) for name in re.findall(r"`(\w+)`", names)]
    assert len(dict(listed)) == len(listed), "a metric stands there twice"
    return dict(listed)


def test_the_page_has_every_metric_of_an_update_and_no_other(tiny: LoadedPolicy) -> None:
    metrics = Trainer(tiny.model, TrainerConfig()).update(BatchRecord(1, (), 0), conversations(1)).metrics
    assert sorted(metrics.keys() - rows().keys()) == [], "metrics without a row in docs/trainer.md"
    assert sorted(rows().keys() - metrics.keys()) == [], "rows of docs/trainer.md without a metric"


def test_what_the_page_says_is_never_null_has_a_value_in_an_update_of_nothing(tiny: LoadedPolicy) -> None:
    metrics = Trainer(tiny.model, TrainerConfig()).update(BatchRecord(1, (), 0), []).metrics
    assert {name for name, value in metrics.items() if value is None} == {
        name for name, null in rows().items() if null != "never"
    }
