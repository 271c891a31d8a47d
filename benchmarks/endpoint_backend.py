"""What both servers of endpoint.py stand in front of: a sampler that answers at once, always the same.

    python benchmarks/endpoint_backend.py --socket ADDRESS    as the worker of a swarm engine, over its own protocol
    python benchmarks/endpoint_backend.py --http              as an OpenAI-compatible server; prints its port

Both answer with the same sixteen tokens, so the time a request takes is the time of whatever stands before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import cast

import uvloop

from swarm_engine.models import NANO_DIR
from swarm_engine.protocol import (
    Boot,
    Booted,
    Finished,
    Generate,
    PolicyReady,
    Sampled,
    Save,
    Saved,
    Stop,
    frame,
    from_front,
    from_worker,
    unframe,
)
from swarm_engine.types import FinishReason

END_ID = 2
REPLY_IDS = (*range(3, 18), END_ID)
"""The shipped tokenizer's first fifteen characters, then its end token."""
REPLY_TEXT = "!\"#$%&'()*+,-./"
LOGPROBS = (-1.0,) * len(REPLY_IDS)
MAX_CONTEXT = 1 << 15
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class WorkerFace(asyncio.Protocol):
    """The engine's worker protocol."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        replies: list[bytes] = []
        for payload in unframe(self._buffer):
            match from_front.validate_json(payload):
                case Boot(config):
                    ((name, policy),) = config["policies"].items()
                    ready = PolicyReady(name, 0, policy["trainable"], str(NANO_DIR), (END_ID,), MAX_CONTEXT)
                    replies.append(from_worker.dump_json(Booted((ready,), 0)))
                case Generate(request_id):
                    replies.append(from_worker.dump_json(Sampled(request_id, REPLY_IDS, LOGPROBS, 0)))
                    replies.append(from_worker.dump_json(Finished(request_id, FinishReason.STOP)))
                case Save():
                    replies.append(from_worker.dump_json(Saved(0, None, "nothing to save")))
                case Stop():
                    self._transport.close()
        if replies:
            self._transport.write(b"".join(map(frame, replies)))

    def connection_lost(self, _exc: Exception | None) -> None:
        self._ended.set_result(None)


class HttpFace(asyncio.Protocol):
    """`POST /chat/completions` with one fixed answer, and nothing else; requests of a connection follow each other."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        body = json.dumps(
            {
                "id": "chatcmpl-fixed",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": REPLY_TEXT},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 100, "completion_tokens": len(REPLY_IDS), "total_tokens": 116},
            }
        ).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._answer = head.encode() + body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            _, found, rest = head.partition(b"content-length:")
            total = end + 4 + (int(rest.split(b"\r\n", 1)[0]) if found else 0)
            if len(self._buffer) < total:
                return
            # LiteLLM looks around at its start, for models that this backend does not list.
            is_chat = head.startswith(b"post /chat/completions")
            assert not is_chat or json.loads(self._buffer[end + 4 : total])["messages"], "a request without messages"
            del self._buffer[:total]
            self._transport.write(self._answer if is_chat else NOT_FOUND)


async def be_worker(address: str) -> None:
    """Answer one front until it hangs up."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    await loop.create_unix_connection(lambda: WorkerFace(ended), address)
    await ended


async def be_http() -> None:
    """Answer until killed."""
    server = await asyncio.get_running_loop().create_server(HttpFace, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> int:
    """Be one of the two."""
    parser = argparse.ArgumentParser(description="A sampler that answers at once.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--socket", metavar="ADDRESS", help="connect there as an engine's worker")
    how.add_argument("--http", action="store_true", help="serve OpenAI's chat completions on a free port")
    args = parser.parse_args()
    uvloop.run(be_http() if args.http else be_worker(args.socket))
    return 0


if __name__ == "__main__":
    sys.exit(main())
