"""A lab whose trainings are fake and whose everything else is real: graph, database, executor, processes.

    python fake_lab.py HOME new QUESTION EFFECTS_JSON      begin a study and run it
    python fake_lab.py HOME go STUDY EFFECTS_JSON          go on with it

`EFFECTS_JSON` maps an arm's key (or `*`) to what `fake_project/train.py` reads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from a3r import store
from a3r.executor import LocalExecutor, supervise
from a3r.graph.driver import Approval, drive
from a3r.graph.state import GRAPH_VERSION, Deps
from a3r.paths import Home
from a3r.planner.catalogue import Catalogue
from a3r.prereg.plan import Arm, Plan
from a3r.workshop import nested
from experiments_db.engine import open_database
from experiments_db.models import StudyStatus

HERE = Path(__file__).parent
DEFAULTS: dict[str, Any] = {"start": 0.3, "rise": 0.4, "sd": 0.02, "games": 20}


def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("a3r_conftest", HERE / "conftest.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeWorkshop:
    """Copies the fake project and says what its runs shall come to."""

    def __init__(self, effects: dict[str, Any]) -> None:
        self.effects = effects

    def template_sha(self, plan: Plan) -> str:
        return hashlib.sha256(plan.template.name.encode()).hexdigest()

    def build(self, plan: Plan, arm: Arm, folder: Path) -> str:
        settings = nested(plan.settings_of(arm))
        effects = DEFAULTS | self.effects.get("*", {}) | self.effects.get(arm.key, {})
        effects |= {
            "arm": arm.key,
            "updates": settings["training"]["updates"],
            "eval_every": settings["training"]["eval_every"],
            "games": plan.controls.evaluation_games,
            "trainer": settings["trainer"],
        }
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "fake_project" / "train.py", folder / "train.py")
        supervise.write_whole(folder / "effects.json", effects)
        return hashlib.sha256(json.dumps(effects, sort_keys=True).encode()).hexdigest()


class Lab:
    """A home, and what it takes to run studies there."""

    def __init__(self, root: Path, effects: dict[str, Any] | None = None, slots: int = 4) -> None:
        module = conftest()
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.deps = Deps(
            database=open_database(home=root),
            home=Home(root),
            executor=LocalExecutor(root / "jobs", slots),
            catalogue=Catalogue((module.TICTACTOE, module.GRIDWALK)),
            workshop=FakeWorkshop(effects or {}),
            python=sys.executable,
            tell=lambda kind, /, **fields: self.told.append((kind, fields)),
        )

    def begin(self, question: str, **wishes: Any) -> str:
        study = store.create_study(self.deps.database, question, {"python": "3"}, GRAPH_VERSION)
        paths = self.deps.home.study(study)
        paths.root.mkdir(parents=True)
        asked = {"seeds": None, "extra_seeds": 2, "updates": 6, "eval_games": 20, "minutes": None, "parallel": 2}
        supervise.write_whole(paths.request, {"question": question, "wishes": asked | wishes})
        return study

    def go(self, study: str, *, is_approved: bool = True) -> StudyStatus:
        return drive(study, self.deps, lambda _: Approval(is_approved, "test"))


if __name__ == "__main__":
    home, what, text, effects = sys.argv[1:]
    lab = Lab(Path(home), json.loads(effects))
    chosen = lab.begin(text) if what == "new" else text
    print(chosen, flush=True)
    print(lab.go(chosen), flush=True)
