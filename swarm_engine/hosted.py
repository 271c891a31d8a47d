"""One policy of a worker: its weights, what samples from them and, unless it is frozen, what trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swarm_engine.config import EngineConfig, LoraConfig, PolicyConfig, SamplerBackend
from swarm_engine.errors import ModelError
from swarm_engine.models import resolve
from swarm_engine.models.decoder import Decoder
from swarm_engine.models.loading import CPU, LoadedPolicy, adapt, load_adapter, load_policy, read_json, weights_sha256
from swarm_engine.models.lora import ADAPTER_CONFIG, read_peft_config
from swarm_engine.protocol import PolicyReady, StartWeights, Updated
from swarm_engine.sampler import Reply, Sampler, Sleeper
from swarm_engine.sampler.agreement import Probe, check_agreement
from swarm_engine.sampler.grammar import Grammars
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.sampler.vllm_link import Links, LocalLinks, Wake
from swarm_engine.sampler.vllm_sampler import start_vllm
from swarm_engine.seeding import derive_seed
from swarm_engine.trainer.parts import part_of
from swarm_engine.trainer.ranks import frozen_copy
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord, Episode

if TYPE_CHECKING:
    from swarm_engine.ray_cluster import Room


@dataclass(frozen=True, slots=True)
class Start:
    """What a policy begins with."""

    model: str
    """Name of the model whose weights it has, or has branches beside."""
    path: Path
    """Of those weights."""
    lora: LoraConfig | None
    adapter: Path | None
    """The folder that its branches come from; None where they begin without an effect."""

    @staticmethod
    def of(policy: PolicyConfig, model_root: str) -> Start:
        """Find the model that a config names, or the adapter and the model that it is for.

        Raises:
            ModelError: there is none, or the adapter is not what the config asks for.
        """
        path = resolve(policy.model, model_root)
        if not (path / ADAPTER_CONFIG).is_file():
            return Start(policy.model, path, policy.lora, None)
        lora, base = read_peft_config(read_json(path / ADAPTER_CONFIG), f"{path / ADAPTER_CONFIG}")
        if policy.lora not in (None, lora):
            raise ModelError(f"model {policy.model!r} is an adapter of another form than lora says; leave lora out")
        return Start(base, resolve(base, model_root), lora, path)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of all that is read from disk."""
        return (self.path,) if self.adapter is None else (self.path, self.adapter)


def load_policies(config: EngineConfig, model_root: str, device: torch.device = CPU) -> dict[str, LoadedPolicy]:
    """The start weights of every policy, by name. What is frozen is in memory once, whoever serves it.

    Raises:
        ModelError: a model or an adapter can't be found or run.
    """
    frozen: dict[Path, LoadedPolicy] = {}
    hashes: dict[Path, str] = {}
    loaded = {}
    for name, policy in config.policies.items():
        start = Start.of(policy, model_root)
        if policy.trainable and start.lora is None:
            loaded[name] = load_policy(start.path, device=device)
        else:
            if start.path not in frozen:
                frozen[start.path] = load_policy(start.path, device=device)
                frozen[start.path].model.requires_grad_(False)
            loaded[name] = frozen[start.path]
        hashes |= {path: weights_sha256(path) for path in start.paths if path not in hashes}
        start_weights = tuple(StartWeights(str(path), hashes[path]) for path in start.paths)
        loaded[name] = replace(loaded[name], start_weights=start_weights)
        if start.lora is not None:
            seed = derive_seed(config.seed, "lora", name)
            loaded[name] = adapt(loaded[name], start.model, hashes[start.path], start.lora, seed)
            if start.adapter is not None:
                load_adapter(loaded[name], start.adapter)
            if not policy.trainable:
                loaded[name].model.requires_grad_(False)
    return loaded


@dataclass(slots=True)
class HostedPolicy:
    """A loaded policy with its trainer and its sampler."""

    name: str
    policy: LoadedPolicy
    """The weights that are trained and saved."""
    served: Decoder
    """Those that are sampled from: the same, or a copy where sampling goes on while an update runs."""
    trainer: Trainer | None
    """None where it is frozen."""
    sampler: Sampler
    probe: Probe | None
    """None where the sampler proves by itself that it has the trainer's weights."""
    goes_on: bool
    """Whether its sampler, on weights of its own, goes on while an update runs."""
    sleeper: Sleeper | None = None
    """The sampler where it sleeps while an update runs, and then needs the weights again, be they frozen."""

    @staticmethod
    def serve(
        name: str,
        policy: LoadedPolicy,
        trainer: Trainer | None,
        config: EngineConfig,
        room: Room | None,
        wake: Wake,
    ) -> HostedPolicy:
        """Begin to sample from weights that are as they shall be.

        Args:
            room: what a Ray cluster holds for the engine; None samples on this machine.
            wake: called from any thread when a sampler that computes in another process has replies.

        Raises:
            WorkerError: sampler and trainer disagree about them.
        """
        has_copy = config.trainer.is_asynchronous and trainer is not None
        version = trainer.step if trainer else 0
        if config.sampler.backend is SamplerBackend.VLLM:
            vllm = start_vllm(policy, config.sampler, _reach(name, config, room, wake), version=version)
            sleeper = vllm if config.sampler.vllm_sleep_mode else None
            return HostedPolicy(name, policy, policy.model, trainer, vllm, None, goes_on=has_copy, sleeper=sleeper)
        served = frozen_copy(policy.model) if has_copy else policy.model
        sampler = SlotSampler(
            served,
            policy.end_ids,
            backend=config.sampler.backend,
            max_running=config.sampler.max_running,
            is_lockstep=config.lockstep,
            version=version,
            grammars=Grammars(policy.tokenizer_dir, policy.model.config.vocab_size, policy.end_ids),
        )
        check_agreement(policy, config.lockstep)
        probe = Probe(name, policy, sampler, config.sampler.backend)
        return HostedPolicy(name, policy, served, trainer, sampler, probe, goes_on=has_copy)

    @property
    def has_copy(self) -> bool:
        """Whether its sampler has weights of its own."""
        return self.served is not self.policy.model

    @property
    def version(self) -> int:
        """Updates in its weights; 0 where it is frozen."""
        return self.trainer.step if self.trainer else 0

    def ready(self) -> PolicyReady:
        """What the front needs to know."""
        return PolicyReady(
            name=self.name,
            version=self.version,
            trainable=self.trainer is not None,
            tokenizer_dir=str(self.policy.tokenizer_dir),
            end_ids=self.policy.end_ids,
            max_context=self.policy.max_context,
            start_weights=self.policy.start_weights,
            learning_rate=self.trainer.config.learning_rate if self.trainer else None,
            warmup_updates=self.trainer.config.warmup_updates if self.trainer else None,
        )

    def train(self, record: BatchRecord, episodes: Sequence[Episode]) -> Updated:
        """Train on its part of a batch; the sampler is told by `serve_weights`."""
        assert self.trainer is not None, self.name
        parts = [part for episode in episodes if (part := part_of(episode, self.name)) is not None]
        return self.trainer.update(record, parts)

    @torch.no_grad()
    def serve_weights(self) -> list[Reply]:
        """What runs in the sampler goes on under the weights as they are now; whether it does is then asked."""
        if self.has_copy:
            for served, trained in zip(self.served.parameters(), self.policy.model.parameters(), strict=True):
                if trained.requires_grad:  # the others are shared
                    served.copy_(trained)
        replies = self.sampler.weights_changed(self.version)
        if self.probe is None:
            return replies
        replies = self.probe.take(replies)
        self.probe.begin(self.version)
        return replies

    def sample(self) -> list[Reply]:
        """The next token of everything that runs.

        Raises:
            WorkerError: after an update, the sampler has other weights than the trainer.
        """
        replies = self.sampler.step()
        return replies if self.probe is None else self.probe.take(replies)


def _reach(name: str, config: EngineConfig, room: Room | None, wake: Wake) -> Callable[[int], Links]:
    """How a policy's vLLM processes are started, given the bytes of its weights."""
    if room is None:
        count = config.placement.num_samplers
        return partial(LocalLinks, count=count, num_threads=max(1, torch.get_num_threads() // count), wake=wake)
    from swarm_engine.sampler.ray_links import RayLinks

    return partial(RayLinks, places=room.samplers[name], wake=wake)
