"""Two policies in one server: a learner against a rival that stays as it is. The higher number wins.

    swarm serve --run-dir .a3r/duel       (in another terminal)
    python examples/two_policies.py .a3r/duel

Both speak with the weights of nano-tictactoe, which are in memory once: the learner trains a low-rank adapter beside
them, the rival has none. What the rival says stands in the learner's prompt, and is never trained. The learner's mean
reward of each update is printed at the end, then the folder with its adapter, which peft loads."""

import json
import sys
from pathlib import Path

from swarm_engine.client import SwarmClient, SyncEpisode, Task

CONFIG = {
    "policies": {
        "learner": {"model": "nano-tictactoe", "lora": {"rank": 8}},
        "rival": {"model": "nano-tictactoe", "trainable": False},
    },
    "trainer": {"group_size": 8, "tasks_per_update": 4, "learning_rate": 3e-3},
}
TASKS = [Task(f"duel-{duel}", {"question": f"Duel {duel}. Your move?"}) for duel in range(4)]


def number(said: str) -> int:
    """The first digit of a reply; 0 where it has none."""
    return next((int(letter) for letter in said if letter in "123456789"), 0)


def play(episode: SyncEpisode, task: Task) -> None:
    """One duel: the rival names its number first, the learner answers knowing it."""
    question = task.data["question"]
    rivals = episode.chat([{"role": "user", "content": question}], policy="rival", agent="rival", max_tokens=4).text
    told = [{"role": "user", "content": f"{question} Your rival says {rivals}"}]
    learners = episode.chat(told, policy="learner", agent="learner", max_tokens=4).text
    lead = (number(learners) - number(rivals)) / 8
    episode.end(reward={"learner": lead, "rival": -lead})


args = sys.argv[1:] or sys.exit(__doc__)
run_dir, updates = Path(args[0]), int(args[1]) if len(args) > 1 else 20
url = json.loads((run_dir / "server.json").read_text())["url"]
token = json.loads((run_dir / "token.json").read_text())["operator"]
with SwarmClient(url, token) as client:
    client.start(CONFIG, wait=True)
    for _ in range(updates):
        client.run(TASKS, play, group_size=8, concurrency=16)
    adapter = client.export("learner", "learner")
    client.stop()
    for event in client.events(follow=False):
        if event.kind == "step":
            print(event.payload["step"], event.payload["metrics"]["learner/reward_mean"])
    print(adapter)
