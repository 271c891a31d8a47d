"""A whole step of training, three ways that take turns: TRL's GRPOTrainer, ours in process, ours behind HTTP.

A step is everything from one update to the next: prompts, replies, tool calls, rewards, loss, backward, optimizer.
TRL's own `train()` loop runs in a thread and hands over at the end of each of its steps, so that one of the three runs
at any moment; in process ours is driven by a loop over episodes, as the server drives it. Rewards are drawn at random,
so no group is flat and every episode is trained by both.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import torch
from datasets import Dataset
from trainer_tasks import END_ID, Game, Guess, Player, call_tool, guess_text, load_codec
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from swarm_engine import child
from swarm_engine.client import SwarmClient, SyncEpisode, Task
from swarm_engine.config import TrainerConfig
from swarm_engine.models.loading import load_policy
from swarm_engine.protocol import Finished, Generate, Sampled
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.seeding import derive_seed
from swarm_engine.tracker.messages import Message
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord, Episode, FinishReason, Mode, Outcome, SamplingParams

GROUP_SIZE = 8
LEARNING_RATE = 1e-6
"""Small: what is measured is a step, and replies should stay as they are for all of them."""
CLIP = 0.2
TRL_MICROBATCH = 8
"""Episodes that TRL takes forward and backward at once. Of 4, 8 and 16 none was faster than another by a tenth."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all."""

    model: Path
    game: Game
    num_groups: int

    @property
    def num_episodes(self) -> int:
        """Of a step."""
        return self.num_groups * GROUP_SIZE

    def tasks(self, step: int) -> list[int]:
        """Numbers of the tasks of a step, one a group."""
        return [step * self.num_groups + group for group in range(self.num_groups)]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took."""

    cpu_s: float
    """Of all its processes."""
    wall_s: float
    num_sampled: int
    """Tokens of replies."""
    num_trained: int
    """Tokens that the update computed, TRL's padding included."""
    rollout_s: float | None = None
    """CPU time up to the rewards; None where it is not told apart."""
    num_read: int | None = None
    """Tokens of prompts and histories that the rollout computed, TRL's padding included."""
    num_calls: int | None = None
    """Tool calls that were carried out."""
    num_flat: int = 0
    """Episodes whose group had one reward for all."""


class Contestant(Protocol):
    """Somebody who takes steps."""

    def step(self) -> Step:
        """Take the next one."""
        ...


@dataclass(slots=True)
class Clock:
    """CPU and wall time since it was made."""

    cpu_s: float
    wall_s: float

    @staticmethod
    def start() -> Clock:
        """Begin."""
        return Clock(time.process_time(), time.perf_counter())

    def read(self) -> tuple[float, float]:
        """CPU and wall seconds so far."""
        return time.process_time() - self.cpu_s, time.perf_counter() - self.wall_s


# TRL


class CountingTrainer(GRPOTrainer):
    """TRL's trainer, which also tells where its time went and how many tokens it computed."""

    rollout_s = 0.0
    num_sampled = num_read = num_trained = num_calls = 0

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        start = time.process_time()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.rollout_s += time.process_time() - start
        mask = output["completion_mask"]
        self.num_sampled += int((mask * output.get("tool_mask", 1)).sum())
        return output

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        self.num_read += len(prompt_ids) * max(map(len, prompt_ids))
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _tool_call_loop(self, *args: Any) -> Any:
        output = super()._tool_call_loop(*args)
        self.num_calls += output[4]
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.num_trained += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        return loss


class Turns(TrainerCallback):
    """Stops the training loop after each of its steps until it may go on."""

    def __init__(self) -> None:
        self.may_go, self.has_come = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.may_go.acquire()

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        self.has_come.release()
        self.may_go.acquire()
        control.should_training_stop = self.is_over


class TrlRun:
    """TRL, step by step."""

    def __init__(self, setting: Setting, folder: Path, num_steps: int, microbatch: int = TRL_MICROBATCH) -> None:
        draw = random.Random("rewards of TRL")
        self._turns = Turns()
        self._error: BaseException | None = None
        tasks = [task for step in range(num_steps) for task in setting.tasks(step)]
        self._trainer = CountingTrainer(
            model=AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [draw.random() for _ in completions],
            args=trl_config(setting, folder, num_steps, microbatch),
            train_dataset=Dataset.from_list([{"prompt": setting.game.opening(task), "task": task} for task in tasks]),
            processing_class=AutoTokenizer.from_pretrained(setting.model),
            environment_factory=Guess if setting.game.tools else None,
            callbacks=[self._turns],
        )
        self._trainer.remove_callback(PrinterCallback)  # it prints a summary among the rows
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        torch.set_num_threads(1)
        try:
            self._trainer.train()
        except BaseException as error:  # noqa: BLE001  # it is the other thread's to raise
            self._error = error
        finally:
            self._turns.has_come.release()

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """A first prompt as TRL makes it."""
        self._trainer._batch_environments = [None]
        (found,) = self._trainer._tokenize_prompts([messages])[0]
        return list(found)

    def result_ids(self, result: str) -> list[int]:
        """What TRL appends to a reply that called the tool."""
        return list(self._trainer._get_tool_suffix_ids([{"role": "tool", "name": "guess", "content": result}]))

    def step(self) -> Step:
        trainer = self._trainer
        trainer.rollout_s = 0.0
        trainer.num_sampled = trainer.num_read = trainer.num_trained = trainer.num_calls = 0
        clock = Clock.start()
        self._turns.may_go.release()
        self._turns.has_come.acquire()
        if self._error is not None:
            raise self._error
        cpu_s, wall_s = clock.read()
        flat = trainer._metrics["train"]["frac_reward_zero_std"][-1]
        return Step(
            cpu_s,
            wall_s,
            trainer.num_sampled,
            trainer.num_trained,
            trainer.rollout_s,
            trainer.num_read,
            trainer.num_calls,
            round(flat * trainer.args.generation_batch_size),
        )

    def close(self) -> None:
        """Let the loop end."""
        self._turns.is_over = True
        self._turns.may_go.release()
        self._thread.join()


def trl_config(setting: Setting, folder: Path, num_steps: int, microbatch: int) -> GRPOConfig:
    """The loss is ours, on policy and without a reference; the rest is chosen for speed on a CPU."""
    game = setting.game
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=num_steps,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=setting.num_episodes // microbatch,
        # Of the whole episode; a single reply's limit is below, else one that does not end would cost all of it.
        max_completion_length=3000,
        generation_kwargs={"max_new_tokens": game.max_tokens},
        max_tool_calling_iterations=game.num_turns - 1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        epsilon=CLIP,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


# Ours


def own_config(setting: Setting) -> TrainerConfig:
    """The loss of `trl_config`, as ours says it."""
    return TrainerConfig(
        group_size=GROUP_SIZE,
        tasks_per_update=setting.num_groups,
        learning_rate=LEARNING_RATE,
        clip_low=CLIP,
        clip_high=CLIP,
    )


class OwnRun:
    """Codec, tracker, sampler and trainer in this process."""

    def __init__(self, setting: Setting) -> None:
        policy = load_policy(setting.model)
        self._setting = setting
        self.codec = load_codec(setting.model)
        self._sampler = SlotSampler(policy.model, policy.end_ids, max_running=setting.num_episodes)
        self._trainer = Trainer(policy.model, own_config(setting))
        self._draw = random.Random("rewards of ours")

    def step(self) -> Step:
        trainer, sampler = self._trainer, self._sampler
        read = sampler.num_prefilled
        clock = Clock.start()
        players = self.play()
        episodes = [self._judged(player, place, group) for place, (group, player) in enumerate(players)]
        rollout_s, _ = clock.read()
        record = BatchRecord(trainer.step + 1, tuple(episode.episode_id for episode in episodes), seed=0)
        updated = trainer.update(record, episodes)
        sampler.weights_changed(trainer.step)
        cpu_s, wall_s = clock.read()
        computed = updated.metrics["num_computed_tokens"]
        assert computed is not None
        return Step(
            cpu_s,
            wall_s,
            sum(len(call.completion_ids) for episode in episodes for call in episode.calls),
            int(computed),
            rollout_s,
            sampler.num_prefilled - read,
            sum(player.num_calls for _, player in players),
            sum(updated.drops.values()),
        )

    def play(self) -> list[tuple[int, Player]]:
        """Every episode of a step to its end, each with its task."""
        game, sampler, version = self._setting.game, self._sampler, self._trainer.step
        players = [
            (task, Player(game, task, f"{task}-{place}", self.codec))
            for task in self._setting.tasks(version)
            for place in range(GROUP_SIZE)
        ]
        asked = {}
        sampled: dict[str, Sampled] = {}

        def ask(player: Player) -> None:
            draft = player.ask()
            params = SamplingParams(game.max_tokens, seed=derive_seed("trainer", draft.call_id))
            asked[draft.call_id] = (player, draft)
            refused = sampler.submit(Generate(draft.call_id, "policy", draft.prompt_ids, params, is_streamed=False))
            assert not refused, refused

        for _, player in players:
            ask(player)
        while not sampler.is_idle:
            for reply in sampler.step():
                if isinstance(reply, Sampled):
                    sampled[reply.request_id] = reply
                    continue
                assert isinstance(reply, Finished), reply
                player, draft = asked.pop(reply.request_id)
                said = sampled.pop(reply.request_id)
                if player.take(draft, said.token_ids, said.logprobs, version, reply.finish_reason):
                    ask(player)
        return players

    def _judged(self, player: Player, place: int, task: int) -> Episode:
        calls = player.tracker.calls()
        return Episode(
            episode_id=calls[0].call_id,
            task_id=str(task),
            group_id=str(task),
            index=place % GROUP_SIZE,
            mode=Mode.TRAIN,
            policy_version=self._trainer.step,
            calls=calls,
            rewards={"main": self._draw.random()},
            outcome=Outcome.SUCCESS,
        )


class HttpRun:
    """A server of ours with a client that plays all episodes of a step side by side."""

    def __init__(self, setting: Setting, client: SwarmClient, server: psutil.Process) -> None:
        self._setting = setting
        self._client = client
        self._server = server
        self._http = httpx.Client(limits=httpx.Limits(max_connections=None), timeout=600.0, trust_env=False)
        self._draw = random.Random("rewards over HTTP")
        self._num_steps = 0

    def step(self) -> Step:
        clock, before_s = Clock.start(), self._server_cpu_s()
        after = self._client.status().last_seq
        tasks = [Task(str(task)) for task in self._setting.tasks(self._num_steps)]
        self._num_steps += 1
        num_sampled: list[int] = []
        events = self._client.events(after)
        self._client.run(
            tasks,
            lambda episode, task: num_sampled.append(self._play(episode, int(task.task_id))),
            group_size=GROUP_SIZE,
            concurrency=self._setting.num_episodes,
        )
        updated = next(event for event in events if event.kind == "step")
        cpu_s, wall_s = clock.read()
        cpu_s += self._server_cpu_s() - before_s
        computed = updated.payload["metrics"]["num_computed_tokens"]
        return Step(cpu_s, wall_s, sum(num_sampled), int(computed))

    def _play(self, episode: SyncEpisode, task: int) -> int:
        """Play an episode as any agent would; returns the tokens that it sampled."""
        game, messages, num_sampled = self._setting.game, self._setting.game.opening(task), 0
        environment = Guess()
        environment.reset(task)
        for turn in range(game.num_turns):
            body = {"model": "policy", "messages": messages, "max_tokens": game.max_tokens, "temperature": 1}
            answer = self._http.post(
                f"{episode.base_url}/chat/completions",
                json=body | ({"tools": game.tools} if game.tools else {}),
                headers={"authorization": f"Bearer {episode.api_key}"},
            )
            assert answer.status_code == httpx.codes.OK, answer.text
            said = answer.json()
            num_sampled += said["usage"]["completion_tokens"]
            message = said["choices"][0]["message"]
            calls = message.get("tool_calls") or ()
            if turn == game.num_turns - 1 or not calls:
                break
            messages.append(message)
            for call in calls:
                result = call_tool(environment, call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "content": result, "tool_call_id": call["id"]})
        episode.end(reward=self._draw.random())
        return num_sampled

    def _server_cpu_s(self) -> float:
        processes = [self._server, *self._server.children(recursive=True)]
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    def close(self) -> None:
        """Hang up."""
        self._http.close()


@contextlib.contextmanager
def http_run(setting: Setting, folder: Path) -> Iterator[HttpRun]:
    """Serve the setting's model in `folder` and train it there."""
    shutil.copytree(setting.model, folder / "models" / "policy")
    command = child.command("swarm_engine.cli", "serve", "--run-dir", str(folder), "--exit-with-stdin", "--json")
    server = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin
    assert server.stdout
    try:
        about = json.loads(server.stdout.readline())
        tokens = json.loads(Path(about["token_file"]).read_text(encoding="utf-8"))
        with SwarmClient(about["url"], tokens["operator"]) as client:
            config = {
                "policies": {"policy": {"model": "policy"}},
                "num_threads": 1,
                "trainer": {**own_config(setting).model_dump(exclude_unset=True), "checkpoint_every": 10_000},
            }
            client.start(config, wait=True)
            run = HttpRun(setting, client, psutil.Process(server.pid))
            yield run
            run.close()
    finally:
        server.stdin.close()
        server.wait(60)
        server.stdout.close()


def have_same_prompts(trl: TrlRun, own: OwnRun, setting: Setting) -> bool:
    """Whether both give the model the same prompts: the first of every task of a step, and one behind a tool call."""
    game = setting.game
    for task in setting.tasks(0):
        player = Player(game, task, "compared", own.codec)
        draft = player.ask()
        expected = trl.prompt_ids(game.opening(task))
        if list(draft.prompt_ids) != expected:
            return False
        if game.tools:
            reply = (*own.codec.encode(guess_text(1)), END_ID)
            player.take(draft, reply, [0.0] * len(reply), 0, FinishReason.STOP)
            environment = Guess()
            environment.reset(task)
            expected = [*expected, *reply, *trl.result_ids(environment.guess(1))]
            if list(player.ask().prompt_ids) != expected:
                return False
    return True


def take_turns(contestants: Mapping[str, Contestant], num_steps: int) -> dict[str, list[Step]]:
    """The steps of each, after one that warms it up, in an order that changes with every round."""
    steps: dict[str, list[Step]] = {name: [] for name in contestants}
    for number in range(num_steps + 1):
        for name in sorted(contestants, reverse=number % 2 == 0):
            step = contestants[name].step()
            steps[name].append(step)
            print(f"step {number} of {name}: {step.cpu_s:.2f} s", file=sys.stderr, flush=True)
    return {name: some[1:] for name, some in steps.items()}
