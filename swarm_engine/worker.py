"""The engine worker: the process that holds the weights, samples from them and trains them.

    python -m swarm_engine.worker --socket ADDRESS

It connects to the front at ADDRESS (a Unix socket's path, or HOST:PORT), speaks `swarm_engine.protocol`, and ends when
the connection does, so that no worker outlives its front. One thread reads, one computes: sampler steps, updates and
checkpoints take turns, hence weights never change inside a step.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from swarm_engine.config import EngineConfig, SamplerBackend
from swarm_engine.errors import CheckpointError, SwarmEngineError, WorkerError
from swarm_engine.folders import whole_folder
from swarm_engine.models import resolve
from swarm_engine.models.decoder import num_parameters
from swarm_engine.models.loading import LoadedPolicy, load_policy, save_policy
from swarm_engine.protocol import (
    Boot,
    Booted,
    Cancel,
    Export,
    Failed,
    Finished,
    Generate,
    PolicyReady,
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
    unframe,
)
from swarm_engine.sampler import Sampler
from swarm_engine.sampler.grammar import Grammars
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.seeding import derive_seed
from swarm_engine.trainer.checkpoints import CheckpointFolder, load_checkpoint
from swarm_engine.trainer.scoring import Row, score
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import SamplingParams

Question = Boot | Generate | Cancel | Update | Save | Export | Stop
Answer = Booted | Sampled | Finished | Rejected | Updated | Saved | Failed

AGREEMENT_MAX = 1e-3
AGREEMENT_MEAN = 1e-4
"""Nats that sampler and trainer may differ by about a token, at most and on average, in float32."""

ONE_THREAD_PARAMETERS = 10_000_000
"""Models up to this size run on one thread: on two cores that others use too, a second thread was measured to make a
model of 0.44 million parameters ten times slower, for threads then wait for each other at every small matrix."""

RECEIVE_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Engine:
    """One loaded policy with its trainer and its sampler."""

    name: str
    policy: LoadedPolicy
    trainer: Trainer
    sampler: Sampler
    checkpoints: CheckpointFolder
    is_trainable: bool

    @staticmethod
    def boot(boot: Boot) -> Engine:
        """Load the policy, from the newest whole checkpoint where there is one.

        Raises:
            ModelError: the model can't be found or run, or the checkpoint is of another one.
            CheckpointError: there are checkpoints of another run.
            WorkerError: sampler and trainer disagree about it.
            ValidationError: the config is not one.
        """
        config = EngineConfig.model_validate(boot.config)
        torch.set_num_threads(config.num_threads or 1)
        ((name, policy_config),) = config.policies.items()
        policy = load_policy(resolve(policy_config.model, boot.model_root))
        if config.num_threads is None and num_parameters(policy.model) > ONE_THREAD_PARAMETERS:
            torch.set_num_threads(_num_cores())
        trainer = Trainer(policy.model, config.trainer)
        checkpoints = CheckpointFolder(Path(boot.checkpoint_dir), boot.run_id, config.trainer.keep_last)
        checkpoints.tidy()
        checkpoint = checkpoints.newest()
        if checkpoint is not None:
            load_checkpoint(checkpoint, policy, trainer.optimizer)
            trainer.step = checkpoint.step
            log.info("policy %r goes on from %s", name, checkpoint.path)
        sampler = SlotSampler(
            policy.model,
            policy.end_ids,
            backend=config.sampler.backend,
            max_running=config.sampler.max_running,
            is_lockstep=config.lockstep,
            version=trainer.step,
            grammars=Grammars(policy.tokenizer_dir, policy.model.config.vocab_size, policy.end_ids),
        )
        check_agreement(policy, config.lockstep)
        return Engine(name, policy, trainer, sampler, checkpoints, policy_config.trainable)

    @property
    def step(self) -> int:
        """Updates in the weights."""
        return self.trainer.step

    def ready(self) -> Booted:
        """What the front needs to know."""
        policy = PolicyReady(
            name=self.name,
            version=self.step,
            trainable=self.is_trainable,
            tokenizer_dir=str(self.policy.tokenizer_dir),
            end_ids=self.policy.end_ids,
            max_context=self.policy.max_context,
        )
        return Booted((policy,), self.step)

    def generate(self, request: Generate) -> list[Answer]:
        """Take a request for a reply."""
        if request.policy != self.name:
            return [Rejected(request.request_id, f"there is no policy {request.policy!r} here, only {self.name!r}")]
        return list(self.sampler.submit(request))

    def update(self, update: Update) -> list[Answer]:
        """Train on a batch; what runs in the sampler goes on under the new weights."""
        if not self.is_trainable:
            raise WorkerError(f"policy {self.name!r} is frozen (trainable: false) and was given a batch to train on")
        if update.record.step != self.step + 1:
            raise WorkerError(
                f"batch {update.record.step} was given to weights of step {self.step}; they come in order"
            )
        updated = self.trainer.update(update.record, update.episodes)
        return [*self.sampler.weights_changed(self.step), updated]

    def save(self, save: Save) -> Saved:
        """Write a checkpoint."""
        try:
            checkpoint = self.checkpoints.save(self.step, self.policy, self.trainer.optimizer, save.protected_steps)
        except CheckpointError as error:
            log.warning("%s", error)
            return Saved(self.step, None, str(error))
        return Saved(self.step, str(checkpoint.path))

    def export(self, export: Export) -> Saved:
        """Write the policy where transformers can load it; never over something else."""
        target = Path(export.path)
        if export.policy != self.name:
            return Saved(
                self.step, None, f"there is no policy {export.policy!r} here; this worker serves {self.name!r}"
            )
        if target.exists():
            return Saved(self.step, None, f"{target} is there already; name another folder")
        try:
            with whole_folder(target) as folder:
                save_policy(self.policy, folder)
        except (OSError, SafetensorError) as error:
            return Saved(self.step, None, f"policy {self.name!r} could not be written to {target}: {error}")
        return Saved(self.step, str(target))


def check_agreement(policy: LoadedPolicy, is_lockstep: bool) -> None:
    """Prove on a probe that sampler and trainer give the same tokens the same log-probability.

    Two prompts, the second going on from the first, so that the cache's prefix is part of the proof.

    Raises:
        WorkerError: they differ, so that every ratio of every update would be wrong.
    """
    draw = torch.Generator().manual_seed(derive_seed("probe"))
    length = min(64, policy.max_context)
    tokens = tuple(torch.randint(policy.model.config.vocab_size, (length,), generator=draw).tolist())
    reply = max(1, length // 4)
    sampler = SlotSampler(policy.model, (), backend=SamplerBackend.SCRIPTED, max_running=2, is_lockstep=is_lockstep)
    sampled: dict[int, float] = {}
    for start in (max(1, length // 2), length - reply):
        params = SamplingParams(max_tokens=reply)
        answers = sampler.submit(Generate("probe", "", tokens[:start], params, script=tokens[start : start + reply]))
        while not sampler.is_idle:
            answers += sampler.step()
        rejected = next((answer.message for answer in answers if isinstance(answer, Rejected)), None)
        if rejected is not None:
            raise WorkerError(f"the policy can't be sampled from: {rejected}")
        found = [logprob for answer in answers if isinstance(answer, Sampled) for logprob in answer.logprobs]
        sampled |= {start + offset: logprob for offset, logprob in enumerate(found)}
    with torch.no_grad():
        trained_N = score(policy.model, [Row(tokens, tuple(sampled), (1.0,) * len(sampled))]).logprobs_N
    difference_N = (torch.tensor(list(sampled.values()), dtype=trained_N.dtype) - trained_N).abs()
    if not (difference_N.max() <= AGREEMENT_MAX and difference_N.mean() <= AGREEMENT_MEAN):
        raise WorkerError(
            f"sampler and trainer differ by up to {float(difference_N.max()):.1e} nats about a token, the limit is "
            f"{AGREEMENT_MAX}; the weights may be broken, or this machine's matrix products are not accurate enough"
        )


def serve(line: socket.socket) -> None:
    """Answer the front until it says stop.

    Raises:
        ModelError, WorkerError, ValidationError: see `Engine`.
    """
    inbox: queue.SimpleQueue[Question] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, inbox), daemon=True).start()
    boot = inbox.get()
    if isinstance(boot, Stop):
        return
    assert isinstance(boot, Boot), boot
    engine = Engine.boot(boot)
    _send(line, [engine.ready()])
    while True:
        for question in _take(inbox, must_wait=engine.sampler.is_idle):
            if isinstance(question, Stop):
                return
            _send(line, _answer(engine, question))
        _send(line, engine.sampler.step())


def _answer(engine: Engine, question: Boot | Generate | Cancel | Update | Save | Export) -> list[Answer]:
    match question:
        case Generate():
            return engine.generate(question)
        case Cancel():
            return list(engine.sampler.cancel(question.request_id))
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


def _take(inbox: queue.SimpleQueue[Question], *, must_wait: bool) -> list[Question]:
    """Everything asked since the last look; at least one question where there is nothing else to do."""
    questions = [inbox.get()] if must_wait else []
    while not inbox.empty():
        questions.append(inbox.get())
    return questions


def _read(line: socket.socket, inbox: queue.SimpleQueue[Question]) -> None:
    """Read questions until the line breaks, which ends the process at once: nothing here outlives its front, and what
    is on disk is whole at any moment."""
    buffer = bytearray()
    try:
        while chunk := line.recv(RECEIVE_BYTES):
            buffer += chunk
            for message in unframe(buffer):
                inbox.put(from_front.validate_json(message))
    except (OSError, ValidationError) as error:
        log.error("the line to the front broke: %s", error)
    logging.shutdown()
    os._exit(0)


def _send(line: socket.socket, answers: Iterable[Answer]) -> None:
    payload = b"".join(frame(from_worker.dump_json(answer)) for answer in answers)
    if payload:
        line.sendall(payload)


def _connect(address: str) -> socket.socket:
    """The line to the front, at a Unix socket's path or at HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in address:
        return socket.create_connection((host, int(port)))
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    return line


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: list[str] | None = None) -> int:
    """Parse, connect, serve; 0 after a stop, 1 with a `Failed` to the front otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m swarm_engine.worker", description="Sample from a policy and train it."
    )
    parser.add_argument("--socket", required=True, metavar="ADDRESS", help="where the front listens: path or HOST:PORT")
    address = parser.parse_args(argv).socket
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    line = _connect(address)
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
    sys.exit(main())
