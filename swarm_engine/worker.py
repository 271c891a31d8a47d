"""The engine worker: the process that holds the weights, samples from them and trains them.

    python -P -m swarm_engine.worker --socket ADDRESS

It connects to the front at ADDRESS (a Unix socket's path, or HOST:PORT), speaks `swarm_engine.protocol`, and ends when
the connection does, so that no worker outlives its front. One thread reads, one computes: sampler steps, updates and
checkpoints take turns, hence weights never change inside a step. With `trainer.max_staleness` above 0 updates and
checkpoints run on a third thread, on weights of their own, and the sampler gets a copy of them between two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, assert_never

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from swarm_engine.config import EngineConfig, PlacementKind, SamplerBackend
from swarm_engine.errors import CheckpointError, SwarmEngineError, WorkerError
from swarm_engine.folders import whole_folder
from swarm_engine.hosted import HostedPolicy, load_policies
from swarm_engine.models.decoder import num_parameters
from swarm_engine.models.device import find_device
from swarm_engine.models.loading import LoadedPolicy, save_policy
from swarm_engine.protocol import (
    Boot,
    Booted,
    Cancel,
    Export,
    Failed,
    Finished,
    Generate,
    Rejected,
    Sampled,
    Save,
    Saved,
    Stop,
    Update,
    Updated,
    frame,
    from_front,
    from_worker,
    read_frames,
)
from swarm_engine.trainer.checkpoints import CheckpointFolder, TrainedWeights, load_checkpoint
from swarm_engine.trainer.parts import combined
from swarm_engine.trainer.trainer import Trainer

if TYPE_CHECKING:
    from swarm_engine.ray_cluster import Room

Question = Boot | Generate | Cancel | Update | Save | Export | Stop
Answer = Booted | Sampled | Finished | Rejected | Updated | Saved | Failed
Inbox = queue.SimpleQueue[Question | Future[Updated | Saved] | None]
"""What is asked, the answers of the thread that trains, and None where a sampler in another process has replies."""

ONE_THREAD_PARAMETERS = 10_000_000
"""Models up to this size run on one thread: on two cores that others use too, a second thread was measured to make a
model of 0.44 million parameters ten times slower, for threads then wait for each other at every small matrix."""

_sending = threading.Lock()
"""Held for whole frames: a lost rank is reported from another thread."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Engine:
    """The policies of one run, and its checkpoints."""

    policies: dict[str, HostedPolicy]
    checkpoints: CheckpointFolder
    step: int
    """Updates in the weights of every policy that is trained."""
    room: Room | None = None
    """What a Ray cluster holds for this engine."""

    @staticmethod
    def boot(
        boot: Boot, wake: Callable[[], None] = lambda: None, on_loss: Callable[[str], None] | None = None
    ) -> Engine:
        """Load the policies, from the newest whole checkpoint where there is one.

        Args:
            boot: what the front asked for.
            wake: called from any thread when a sampler that computes in another process has replies.
            on_loss: ends the process with the reason when a rank that helps to train is lost, on any thread.

        Raises:
            ModelError: a model can't be found or run, or the checkpoint is of another one.
            CheckpointError: there are checkpoints of another run.
            WorkerError: there is no such device, sampler and trainer disagree about a policy, or a Ray cluster has no
                room for the engine.
            ValidationError: the config is not one.
        """
        config = EngineConfig.model_validate(boot.config)
        torch.set_num_threads(config.num_threads or 1)
        loaded = load_policies(config, boot.model_root, find_device(config.device))
        largest = max(num_parameters(policy.model) for policy in loaded.values())
        if config.num_threads is None and largest > ONE_THREAD_PARAMETERS:
            # Sampler and trainer share the cores where they compute at the same time.
            torch.set_num_threads(max(1, _num_cores(config) // (2 if config.trainer.is_asynchronous else 1)))
        room = _room_of(config)
        trainers = {
            name: _trainer_of(loaded[name], config, room, on_loss or _end)
            for name, policy in config.policies.items()
            if policy.trainable
        }
        checkpoints = CheckpointFolder(Path(boot.checkpoint_dir), boot.run_id, config.trainer.keep_last)
        checkpoints.tidy()
        checkpoint = checkpoints.newest()
        if checkpoint is not None:
            for name, trainer in trainers.items():
                load_checkpoint(checkpoint, name, loaded[name], trainer.optimizer)
                trainer.resume(checkpoint.step)
            log.info("%s: going on from %s", ", ".join(trainers), checkpoint.path)
        policies = {
            name: HostedPolicy.serve(name, policy, trainers.get(name), config, room, wake)
            for name, policy in loaded.items()
        }
        return Engine(policies, checkpoints, checkpoint.step if checkpoint else 0, room)

    def close(self) -> None:
        """End what samples or trains in other processes."""
        for policy in self.policies.values():
            policy.sampler.close()
            if policy.trainer is not None:
                policy.trainer.close()
        if self.room is not None:
            self.room.close()

    @property
    def trained(self) -> dict[str, HostedPolicy]:
        """The policies that are not frozen."""
        return {name: policy for name, policy in self.policies.items() if policy.trainer is not None}

    @property
    def is_idle(self) -> bool:
        """Whether no sampler has anything to do."""
        return all(policy.sampler.is_idle for policy in self.policies.values())

    @property
    def is_asynchronous(self) -> bool:
        """Whether the samplers have weights of their own, so that an update disturbs none of their steps."""
        return any(policy.goes_on for policy in self.policies.values())

    def ready(self) -> Booted:
        """What the front needs to know."""
        return Booted(tuple(policy.ready() for policy in self.policies.values()), self.step)

    def generate(self, request: Generate) -> list[Answer]:
        """Take a request for a reply."""
        if request.policy not in self.policies:
            there = ", ".join(map(repr, self.policies))
            return [Rejected(request.request_id, f"there is no policy {request.policy!r} here, only {there}")]
        return list(self.policies[request.policy].sampler.submit(request))

    def cancel(self, cancel: Cancel) -> list[Answer]:
        """Stop a request, wherever it runs."""
        return [answer for policy in self.policies.values() for answer in policy.sampler.cancel(cancel.request_id)]

    def sample(self) -> list[Answer]:
        """The next token of everything that runs."""
        busy = [policy for policy in self.policies.values() if not policy.sampler.is_idle]
        return [answer for policy in busy for answer in policy.sample()]

    def update(self, update: Update) -> list[Answer]:
        """Train on a batch and sample with what came of it."""
        sleepers = [policy.sleeper for policy in self.policies.values() if policy.sleeper is not None]
        for sleeper in sleepers:
            sleeper.begin_sleep()
        before = [answer for sleeper in sleepers for answer in sleeper.wait_asleep()]
        updated = self.train(update)
        if sleepers:
            torch.cuda.empty_cache()  # they wake on this card
        return [*before, *self.serve_weights(), updated]

    def train(self, update: Update) -> Updated:
        """Train every policy that is not frozen on its part of a batch.

        Raises:
            WorkerError: it is not the next one, or every policy is frozen.
        """
        trained = self.trained
        if not trained:
            raise WorkerError(
                f"policy {', '.join(map(repr, self.policies))} is frozen (trainable: false) and was given a batch to "
                "train on"
            )
        if update.record.step != self.step + 1:
            raise WorkerError(
                f"batch {update.record.step} was given to weights of step {self.step}; they come in order"
            )
        updates = {name: policy.train(update.record, update.episodes) for name, policy in trained.items()}
        self.step = update.record.step
        return combined(updates) if len(self.policies) > 1 else updates.popitem()[1]

    def serve_weights(self) -> list[Answer]:
        """Sample with the trainers' weights as they are now, which wakes what sleeps; what runs goes on under them."""
        changed = [policy for policy in self.policies.values() if policy.trainer or policy.sleeper]
        return [answer for policy in changed for answer in policy.serve_weights()]

    def save(self, save: Save) -> Saved:
        """Write a checkpoint."""
        if not self.trained:
            return Saved(self.step, None, "every policy is frozen (trainable: false), so there is nothing to save")
        try:
            checkpoint = self.checkpoints.save(self.step, self._saved(), save.protected_steps)
        except CheckpointError as error:
            log.warning("%s", error)
            return Saved(self.step, None, str(error))
        return Saved(self.step, str(checkpoint.path))

    def _saved(self) -> dict[str, TrainedWeights]:
        """What a checkpoint holds."""
        return {
            name: TrainedWeights(policy.policy, policy.trainer.optimizer)
            for name, policy in self.policies.items()
            if policy.trainer is not None
        }

    def export(self, export: Export) -> Saved:
        """Write a policy where transformers can load it; never over something else."""
        target = Path(export.path)
        if export.policy not in self.policies:
            there = ", ".join(map(repr, self.policies))
            return Saved(self.step, None, f"there is no policy {export.policy!r} here; this worker serves {there}")
        if os.path.lexists(target):
            return Saved(self.step, None, f"{target} is there already; name another folder")
        policy = self.policies[export.policy].policy
        if export.is_merged and policy.adapter is None:
            return Saved(self.step, None, f"policy {export.policy!r} has no adapter to merge; export it without merged")
        try:
            with whole_folder(target) as folder:
                save_policy(policy, folder, is_merged=export.is_merged)
        except (OSError, SafetensorError) as error:
            why = f"policy {export.policy!r} could not be written to {target}: {error}; make room and ask again"
            return Saved(self.step, None, why)
        return Saved(self.step, str(target))


def _room_of(config: EngineConfig) -> Room | None:
    """What the config asks a Ray cluster to hold."""
    if config.placement.kind is PlacementKind.LOCAL:
        return None
    from swarm_engine.ray_cluster import Room

    has_vllm = config.sampler.backend is SamplerBackend.VLLM
    return Room.reserve(config.placement, sampled=tuple(config.policies) if has_vllm else ())


def _trainer_of(
    policy: LoadedPolicy, config: EngineConfig, room: Room | None, on_loss: Callable[[str], None]
) -> Trainer:
    if config.placement.num_workers == 1:
        return Trainer(policy.model, config.trainer)
    # Importing what shards a model takes another second, half as long as torch itself.
    from swarm_engine.trainer.first_rank import SharedTrainer

    return SharedTrainer.start(policy, config, torch.get_num_threads(), room, on_loss)


def serve(line: socket.socket) -> None:
    """Answer the front until it says stop.

    Raises:
        ModelError, WorkerError, ValidationError: see `Engine`.
    """
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, inbox), daemon=True).start()
    boot = inbox.get()
    if isinstance(boot, Stop):
        return
    assert isinstance(boot, Boot), boot

    def on_loss(reason: str) -> None:
        with contextlib.suppress(OSError):
            _send(line, [Failed(reason)])
        _end(reason)

    with contextlib.closing(Engine.boot(boot, wake=lambda: inbox.put(None), on_loss=on_loss)) as engine:
        _serve(line, inbox, engine)


def _serve(line: socket.socket, inbox: Inbox, engine: Engine) -> None:
    beside = Beside(engine, inbox) if engine.is_asynchronous else None
    _send(line, [engine.ready()])
    while True:
        for question in _take(inbox, must_wait=engine.is_idle):
            match question:
                case Stop():
                    return
                case Future():
                    assert beside is not None
                    _send(line, beside.finish(question))
                case Update() | Save() | Export() if beside is not None:
                    beside.take(question)
                case _:
                    _send(line, _answer(engine, question))
        _send(line, engine.sample())


def _answer(engine: Engine, question: Boot | Generate | Cancel | Update | Save | Export) -> list[Answer]:
    match question:
        case Generate():
            return engine.generate(question)
        case Cancel():
            return engine.cancel(question)
        case Update():
            return engine.update(question)
        case Save():
            return [engine.save(question)]
        case Export():
            return [engine.export(question)]
        case Boot():
            raise WorkerError("boot was asked for twice; start another worker")
        case _:
            assert_never(question)


class Beside:
    """The thread that trains, saves and exports while the sampler goes on; one question at a time, in order, so that
    what is saved is the weights of one step.

    Its answers come into the inbox, and the next question is begun only after `finish`: weights that the sampler is
    about to copy do not move.
    """

    def __init__(self, engine: Engine, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self._waiting: deque[Update | Save | Export] = deque()
        self._is_busy = False
        # Threads do not inherit how many threads torch may use, and the last bit of a sum may depend on it.
        self._thread = ThreadPoolExecutor(1, "train", torch.set_num_threads, (torch.get_num_threads(),))

    def take(self, question: Update | Save | Export) -> None:
        """Answer a question after those that came before it."""
        self._waiting.append(question)
        self._begin()

    def finish(self, done: Future[Updated | Saved]) -> list[Answer]:
        """The answer that came into the inbox, with what new weights make the sampler say.

        Raises:
            Exception: what the question failed of.
        """
        answer = done.result()
        said = self._engine.serve_weights() if isinstance(answer, Updated) else []
        self._is_busy = False
        self._begin()
        return [*said, answer]

    def _begin(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self._thread.submit(self._work, self._waiting.popleft()).add_done_callback(self._inbox.put)

    def _work(self, question: Update | Save | Export) -> Updated | Saved:
        match question:
            case Update():
                return self._engine.train(question)
            case Save():
                return self._engine.save(question)
            case Export():
                return self._engine.export(question)
            case _:
                assert_never(question)


def _take(inbox: Inbox, *, must_wait: bool) -> list[Question | Future[Updated | Saved]]:
    """Everything that came since the last look. Where there is nothing else to do, wait for something."""
    found = [inbox.get()] if must_wait else []
    while not inbox.empty():
        found.append(inbox.get())
    return [question for question in found if question is not None]


def _read(line: socket.socket, inbox: Inbox) -> None:
    """Read questions until the line breaks, which ends the process at once: nothing here outlives its front, and what
    is on disk is whole at any moment."""
    try:
        for message in read_frames(line):
            inbox.put(from_front.validate_json(message))
    except (OSError, ValidationError) as error:
        log.error("the line to the front broke: %s", error)
    leave(0)


def leave(code: int) -> NoReturn:
    """End the process at once: torch must not be taken down under a thread that computes."""
    logging.shutdown()
    os._exit(code)


def _send(line: socket.socket, answers: Iterable[Answer]) -> None:
    payload = b"".join(frame(from_worker.dump_json(answer)) for answer in answers)
    if payload:
        with _sending:
            line.sendall(payload)


def _end(reason: str) -> None:
    """End the process, whatever its threads wait for."""
    log.error("the worker ends: %s", reason)
    leave(1)


def _connect(address: str) -> socket.socket:
    """The line to the front, at a Unix socket's path or at HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in address:
        return socket.create_connection((host, int(port)))
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    return line


def _num_cores(config: EngineConfig) -> int:
    """The cores that are there for this process, beside the ranks that it starts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_here = config.placement.num_workers if config.placement.kind is PlacementKind.LOCAL else 1
    return max(1, cores // num_here)


def main(argv: list[str] | None = None) -> int:
    """Parse, connect, serve; 0 after a stop, 1 with a `Failed` to the front otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m swarm_engine.worker", description="Sample from a policy and train it."
    )
    parser.add_argument("--socket", required=True, metavar="ADDRESS", help="where the front listens: path or HOST:PORT")
    address = parser.parse_args(argv).socket
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    faulthandler.enable()  # a crash in native code leaves the threads' stacks in the log
    try:
        line = _connect(address)
    except OSError as error:
        log.error("no front listens at %s (%s); it has ended, or given up waiting", address, error.strerror)
        return 1
    try:
        serve(line)
    except Exception as error:
        log.exception("the worker ends")
        is_expected = isinstance(error, SwarmEngineError | ValidationError)
        reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
        _send(line, [Failed(reason)])
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
