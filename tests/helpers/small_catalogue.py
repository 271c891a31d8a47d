"""Two games with few knobs, so that planning is tested without the built-in games."""

from __future__ import annotations

from a3r.planner.catalogue import Catalogue, Game, Knob
from swarm_engine.config import ModelKind, TrainerConfig

OWN_VALUES = TrainerConfig().resolved(ModelKind.EMBEDDED, has_lora=False)
SETTINGS = {f"trainer.{name}": value for name, value in OWN_VALUES.model_dump(mode="json").items()} | {
    "training.updates": 40,
    "training.eval_every": 10,
    "training.eval_games": 150,
}

TICTACTOE = Game(
    name="tictactoe",
    version="1",
    title="Tic-tac-toe",
    names=("tic tac toe", "tictactoe", "noughts and crosses"),
    knobs=(
        Knob("rules.opponent", "opponent", ("opponent",), str, "random", choices=("random", "expert")),
        Knob("rules.moves_first", "moves first", ("moves first", "moving first"), bool, True),
    ),
    rules={"opponent": "random", "moves_first": True},
    settings=SETTINGS,
    start_weights="nano-tictactoe",
    reward_low=-1.0,
    reward_high=1.0,
)
GRIDWALK = Game(
    name="gridwalk",
    version="1",
    title="Grid walk",
    names=("grid walk", "gridwalk", "frozen lake"),
    knobs=(
        Knob("rules.size", "size", ("grid size", "size"), int, 3, 2, 8),
        Knob("rules.holes", "holes", ("number of holes", "holes"), int, 2, 0, 21),
    ),
    rules={"size": 3, "holes": 2},
    settings=SETTINGS,
    start_weights="nano-gridwalk",
    reward_low=-0.5,
    reward_high=1.0,
)

CATALOGUE = Catalogue((TICTACTOE, GRIDWALK))
