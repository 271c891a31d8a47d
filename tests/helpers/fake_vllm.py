"""A vLLM process without vLLM: the real line, memory and messages, replies by our own sampler on the weights given.

It is started as the interpreter that A3R_VLLM_PYTHON names; `fake_vllm` writes that file. What it does wrong is read
from `fake_vllm.json` beside it, see `Faults`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import stat
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Faults:
    dies_at: str = ""
    """The message at which it kills itself."""
    fails_at: str = ""
    """The message at which it says that it failed."""
    keeps: tuple[str, ...] = ()
    """Weights that stay those of the start."""
    never_loads_after: int | None = None
    """Version after which weights are no longer taken."""
    token_s: float = 0.0
    """Seconds that it sleeps before every step."""


def fake_vllm(folder: Path, **faults: Any) -> Path:
    """Write the interpreter that is this fake, and its faults."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fake_vllm.json").write_text(json.dumps(asdict(Faults(**faults))))
    program = folder / "fake_python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} --home {folder} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def main() -> None:
    import torch

    from swarm_engine.models.decoder import Decoder, DecoderConfig
    from swarm_engine.protocol import Cancel, Failed, Generate, frame, unframe
    from swarm_engine.sampler.grammar import Grammars
    from swarm_engine.sampler.shared_weights import mapped, views
    from swarm_engine.sampler.slots import SlotSampler
    from swarm_engine.sampler.vllm_messages import (
        Asleep,
        LoadModel,
        LoadWeights,
        Sleep,
        WeightsLoaded,
        from_vllm,
        to_vllm,
    )

    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path)
    parser.add_argument("--line", type=int)
    parser.add_argument("--memory", type=int)
    arguments, _ = parser.parse_known_args()
    faults = Faults(**json.loads((arguments.home / "fake_vllm.json").read_text()))
    (arguments.home / "pid").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    is_asleep = False
    line = socket.socket(fileno=arguments.line)
    buffer = bytearray()
    samplers: dict[str, SlotSampler] = {}

    def send(*answers: Any) -> None:
        line.sendall(b"".join(frame(from_vllm.dump_json(answer)) for answer in answers))

    while True:
        is_idle = is_asleep or all(sampler.is_idle for sampler in samplers.values())
        line.setblocking(is_idle)
        try:
            chunk = line.recv(1 << 20)
            if not chunk:
                os._exit(0)
            buffer += chunk
        except BlockingIOError:
            pass
        line.setblocking(True)
        for payload in unframe(buffer):
            message = to_vllm.validate_json(payload)
            if message.type == faults.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if message.type == faults.fails_at:
                send(Failed("vLLM failed: out of memory"))
                return
            match message:
                case LoadModel():
                    (arguments.home / "load_model.json").write_bytes(payload)
                    model = Decoder(DecoderConfig.from_json(message.config_json))
                    places, dtype = message.places, getattr(torch, message.dtype)
                    grammars = Grammars(message.tokenizer_json, model.config.vocab_size, message.end_ids)
                    samplers["replies"] = SlotSampler(
                        model, message.end_ids, version=-1, is_lockstep=True, grammars=grammars
                    )
                    samplers["probes"] = SlotSampler(model, (), version=-1, is_lockstep=True)
                    kept: dict[str, torch.Tensor] = {}
                case LoadWeights(version, probes):
                    if faults.never_loads_after is None or version <= faults.never_loads_after:
                        found = {name: view.clone() for name, view in views(mapped(arguments.memory), places, dtype)}
                        for name in faults.keeps:
                            found[name] = kept.setdefault(name, found[name])
                        model.load_weights(found)
                    is_asleep = False
                    for sampler in samplers.values():
                        send(*sampler.weights_changed(version))
                    send(WeightsLoaded(version))
                    for probe in probes:
                        send(*samplers["probes"].submit(probe))
                case Sleep():
                    is_asleep = True
                    for weight in model.parameters():
                        weight.data.fill_(torch.nan)
                    with (arguments.home / "slept").open("a") as slept:
                        slept.write("z")
                    send(Asleep())
                case Generate():
                    send(*samplers["replies"].submit(message))
                case Cancel(request_id):
                    send(*samplers["replies"].cancel(request_id))
        for sampler in samplers.values():
            if not (is_asleep or sampler.is_idle):
                time.sleep(faults.token_s)
                send(*sampler.step())


if __name__ == "__main__":
    main()
