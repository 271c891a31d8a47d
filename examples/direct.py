"""Train with nothing but OpenAI's SDK: your agent, your reward, your loop. The model learns to write the letter X.

    swarm serve --run-dir .a3r/swarm      (in another terminal)
    python examples/direct.py .a3r/swarm

The mean reward of each update is printed at the end. The swarm is reached past proxies that HTTP_PROXY names."""

import json
import sys
from pathlib import Path

from openai import DefaultHttpxClient, OpenAI

from swarm_engine.client import SwarmClient, SyncEpisode, Task

CONFIG = {"policies": {"policy": {"model": "nano-tictactoe"}}, "trainer": {"group_size": 8, "tasks_per_update": 4}}
TASKS = [Task(f"game-{number}", {"question": f"Game {number}. Your move?"}) for number in range(4)]
AGENT = OpenAI(base_url="http://set-later", api_key="set-later", http_client=DefaultHttpxClient(trust_env=False))


def play(episode: SyncEpisode, task: Task) -> None:
    """One episode: ask, judge, end."""
    agent = AGENT.with_options(base_url=episode.base_url, api_key=episode.api_key)
    question = {"role": "user", "content": task.data["question"]}
    reply = agent.chat.completions.create(model="policy", messages=[question], max_tokens=8)
    episode.end(reward=(reply.choices[0].message.content or "").count("X") / 8)


args = sys.argv[1:] or sys.exit(__doc__)
run_dir, updates = Path(args[0]), int(args[1]) if len(args) > 1 else 8
url = json.loads((run_dir / "server.json").read_text())["url"]
token = json.loads((run_dir / "token.json").read_text())["operator"]
with SwarmClient(url, token) as client:
    client.start(CONFIG, wait=True)
    for _ in range(updates):
        client.run(TASKS, play, group_size=8, concurrency=16)
    client.stop()
    for event in client.events(follow=False):
        if event.kind == "step":
            print(event.payload["step"], event.payload["metrics"]["reward_mean"])
