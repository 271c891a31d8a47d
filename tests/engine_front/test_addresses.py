"""Claims that are sent again, and the address that agents are told: the one by which the claim came."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from conftest import SMALL, Served, serve_thread

from swarm_engine.client import SwarmClient
from swarm_engine.errors import InvalidError, JournalDamagedError
from swarm_engine.server.serve import ServeOptions, bind, listening, read_public_url
from swarm_engine.types import Mode

HI = [{"role": "user", "content": "hi"}]


def claim(served: Served, key: str | None = None, url: str | None = None, **changes: Any) -> httpx.Response:
    body = {"client_id": "c", "task_id": "t", "mode": "eval", **changes} | ({"claim_key": key} if key else {})
    headers = {"authorization": f"Bearer {served.tokens['sampler']}", **changes.pop("headers", {})}
    body.pop("headers", None)
    return httpx.post(f"{url or served.url}/swarm/v1/episodes", headers=headers, json=body, trust_env=False)


def num_claims(served: Served) -> int:
    with served.client() as client:
        return sum(event.kind == "claim" for event in client.events(follow=False))


# Claims that are sent again


def test_the_same_key_is_the_same_episode_and_counts_once(engine: Served) -> None:
    before = num_claims(engine)
    first, again, other = (claim(engine, key).json() for key in ("k1", "k1", "k2"))
    assert again == first
    assert other["episode_id"] != first["episode_id"]
    assert claim(engine, "k1", client_id="another").json()["episode_id"] != first["episode_id"]
    assert num_claims(engine) == before + 3


def test_a_key_is_for_one_episode_and_one_task(engine: Served) -> None:
    episode_id = claim(engine, "k3").json()["episode_id"]
    refused = claim(engine, "k3", task_id="another")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "claim_key_taken")
    with engine.client() as client:
        client._control("POST", f"/episodes/{episode_id}/end", {"reward": 1.0, "outcome": "success"})
    before = num_claims(engine)
    gone = claim(engine, "k3")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "episode_lost")
    assert num_claims(engine) == before


def test_claims_of_one_key_that_wait_side_by_side_get_one_episode_whichever_caller_stays(
    serving: Callable[..., Served],
) -> None:
    served = serving()

    async def work() -> list[Any]:
        headers = {"authorization": f"Bearer {served.tokens['sampler']}"}
        async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:

            def ask(key: str) -> asyncio.Task[httpx.Response]:
                body = {"client_id": "c", "task_id": "t", "wait_s": 20, "claim_key": key}
                return asyncio.ensure_future(http.post(f"{served.url}/swarm/v1/episodes", json=body))

            async def are_waiting(count: int) -> None:
                assert served.front is not None
                while len(served.front.engine.roster._waiters) != count:
                    await asyncio.sleep(0.01)

            waiting = [ask("k"), ask("k")]
            await are_waiting(2)
            third = ask("k")
            await are_waiting(3)
            third.cancel()  # its caller leaves while it waits
            await are_waiting(2)
            with served.client() as client:
                client._control("POST", f"/episodes/{held.pop().episode_id}/abort")
            answers = [(await one).json() for one in waiting]
            again = (await ask("k")).json()
            return [*answers, again]

    with served.client() as client:
        client.start({**SMALL, "trainer": {"group_size": 2, "tasks_per_update": 1}}, wait=True)
        held = [client.episode("t") for _ in range(2)]
        before = num_claims(served)
        answers = asyncio.run(work())
        assert answers == [answers[0]] * 3
        assert answers[0]["episode_id"] is not None
        assert client._control("GET", f"/episodes/{answers[0]['episode_id']}")["status"] == "running"
        assert served.front is not None
        # The caller who left is not one of them; the last of the others to leave would free the place.
        assert served.front.engine.roster.find(answers[0]["episode_id"]).num_claims == 3
        assert num_claims(served) == before + 1
        assert client.status().running == 2


# The address that agents are told


@contextlib.contextmanager
def forwarder(served: Served, swallow: threading.Event | None = None) -> Iterator[int]:
    """A port of its own from which every connection is passed on to a server.

    Args:
        swallow: where it is set, the next answer is lost with its connection.
    """
    url = urlsplit(served.url)

    def pump(source: socket.socket, target: socket.socket, is_answer: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and swallow is not None and swallow.is_set():
                    swallow.clear()
                    source.shutdown(socket.SHUT_RDWR)
                    break
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((url.hostname or "", url.port or 0)) as upstream:
                back = threading.Thread(target=pump, args=(upstream, self.request, True))
                back.start()
                pump(self.request, upstream)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_an_agent_is_told_the_address_by_which_its_claim_came(engine: Served) -> None:
    with forwarder(engine) as port:
        for host in ("127.0.0.1", "localhost"):
            url = f"http://{host}:{port}"
            with (
                SwarmClient(url, engine.tokens["sampler"]) as client,
                client.episode("t", mode=Mode.EVAL) as episode,
            ):
                assert episode.base_url == f"{url}/e/{episode.episode_id}"
                assert episode.chat(HI, max_tokens=2).finish_reason
                episode.end(reward=1.0)


def test_of_a_claim_and_a_call_whose_answers_are_lost_each_counts_once(engine: Served) -> None:
    before = num_claims(engine)
    swallow = threading.Event()
    with (
        forwarder(engine, swallow) as port,
        SwarmClient(f"http://127.0.0.1:{port}", engine.tokens["sampler"]) as client,
    ):
        assert client.completed() == {}
        swallow.set()
        with client.episode("t", mode=Mode.EVAL) as episode:
            assert not swallow.is_set()
            swallow.set()
            reply = episode.chat(HI, max_tokens=4)
            assert not swallow.is_set()
            episode.end(reward=1.0)
        timelines = client.timelines(episode.episode_id)
    assert num_claims(engine) == before + 1
    because = {line["call_ids"][0]: line["blocks"][-1]["untrained_because"] for line in timelines}
    assert len(because) == 2
    assert because.pop(reply.call_id) is None
    assert next(iter(because.values())) in ("unused_retry", "cancelled")


def test_what_a_request_says_of_proxies_before_it_is_not_believed(engine: Served) -> None:
    forged = {"x-forwarded-host": "evil.example", "x-forwarded-proto": "https", "forwarded": "host=evil.example"}
    claimed = claim(engine, headers=forged).json()
    assert claimed["base_url"] == f"{engine.url}/e/{claimed['episode_id']}"


@pytest.mark.parametrize("host", ["127.0.0.1:1@evil.example", "127.0.0.1:80/x", "[::1]x", "127.0.0.1:", "127.0.0.1?a"])
def test_a_host_header_with_more_than_a_host_and_a_port_is_refused(engine: Served, host: str) -> None:
    refused = claim(engine, headers={"host": host})
    assert (refused.status_code, refused.json()["error"]["code"]) == (421, "wrong_host")
    assert "is no host with or without a port" in refused.json()["error"]["message"]


def test_a_public_url_is_what_agents_are_told_whatever_way_a_claim_came(tmp_path: Path) -> None:
    options = {"public_url": "https://swarm.example/lab/", "allowed_hosts": ("inner",)}
    with serve_thread(tmp_path / "run", options=options) as served:
        with served.client() as client:
            client.start(SMALL, wait=True)
        for host in (urlsplit(served.url).netloc, "swarm.example", "inner:80"):
            claimed = claim(served, headers={"host": host}).json()
            assert claimed["base_url"] == f"https://swarm.example/lab/e/{claimed['episode_id']}"
        assert claim(served, headers={"host": "other.example"}).status_code == 421


@pytest.mark.parametrize(
    "text",
    ["swarm.example", "ftp://a", "http://", "http://a:b", "http://u:p@a", "http://a/?q=1", "http://a b", "http://[a"],
)
def test_a_public_url_that_no_path_can_follow_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="can't be given to agents; name http or https"):
        read_public_url(text)


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A certificate for localhost that this process trusts, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    command = ["openssl", "req", "-x509", *kind, *subject, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    return cert, key


def test_a_swarm_serves_tls_by_itself(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with serve_thread(tmp_path / "run", options={"tls_cert": cert, "tls_key": key}) as served:
        assert served.url.startswith("https://127.0.0.1:")
        with served.client() as client:
            client.start(SMALL, wait=True)
            with client.episode("t", mode=Mode.EVAL) as episode:
                assert episode.base_url.startswith(f"{served.url}/e/")
                assert episode.chat(HI, max_tokens=2).finish_reason
                episode.end(reward=1.0)


def test_a_certificate_that_can_not_be_used_is_refused_at_the_start(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    async def serve(options: ServeOptions) -> None:
        async with listening(options):
            pytest.fail("it serves")

    for cert, key in ((certificate[1], certificate[1]), (tmp_path / "none.pem", None)):
        with pytest.raises(InvalidError, match=r"the certificate .* can't be used"):
            asyncio.run(serve(ServeOptions(tmp_path / "run", tls_cert=cert, tls_key=key)))


def test_a_port_is_free_again_where_the_journal_can_not_be_opened(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "journal.db").write_bytes(b"no database" * 100)

    async def serve() -> None:
        async with listening(ServeOptions(run_dir, port=port)):
            pytest.fail("it serves")

    with pytest.raises(JournalDamagedError) as caught:
        asyncio.run(serve())
    assert caught.traceback, "which still holds whatever was not closed"
    bind("127.0.0.1", port).close()
