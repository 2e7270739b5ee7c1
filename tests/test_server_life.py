"""The server's queue, clients that leave, failures, and the end."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from running_server import metric, post, serving, small, write_target
from test_llm import PROMPTS

from serving import LLM, SamplingParams
from serving.server import chosen_key, is_loopback
from serving.server_app import Limits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return small(target)


async def endless(api: AsyncOpenAI, **options: Any) -> Any:
    """A request that goes on to the end of the context."""
    return await api.completions.create(
        model="tiny", prompt="Q:", temperature=0, max_tokens=500, extra_body={"ignore_eos": True}, **options
    )


async def until(holds: Any) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_a_full_queue_is_429_and_departures_make_room(llm: LLM) -> None:
    scheduler = llm.engine.scheduler

    async def scenario(url: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            asks = [asyncio.create_task(endless(api, stream=False)) for _ in range(4)]
            streams = [await endless(api, stream=True) for _ in range(6)]
            await until(lambda: len(scheduler.rows) + len(scheduler.waiting) == 10)
            with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
                await endless(api)
            assert caught.value.response.headers["retry-after"] == "1"
            for ask in asks:
                ask.cancel()
            for stream in streams:
                await stream.close()
            await until(lambda: not llm.engine.busy)
            done = await api.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=8)
            assert done.choices[0].text == " 18 plus"

    with serving(llm, Limits(queue=6), key=None) as url:
        asyncio.run(scenario(url))
        assert metric(url, "dflash_refused_total") == 1
        assert metric(url, "dflash_requests_total", {"finish_reason": "abort"}) == 10


def test_what_outlasts_the_grace_time_is_aborted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate(
        ["Q:"] * 2, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )  # so that nothing compiles
    step, before = llm.engine.step, llm.engine.stats.tokens

    def slow() -> Any:
        time.sleep(0.2)
        return step()

    async def scenario(url: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            asking, stream = asyncio.create_task(endless(api)), await endless(api, stream=True)
            await until(lambda: len(llm.engine.scheduler.rows) == 2)
            await asyncio.gather(asyncio.to_thread(stop.set), told_whole(asking), told_in_stream(stream))

    async def told_whole(asking: asyncio.Task[Any]) -> None:
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            await asking
        assert caught.value.status_code == 503

    async def told_in_stream(stream: Any) -> None:
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass

    def serve() -> None:
        with serving(llm, key=None, grace=1) as url:
            urls.put(url)
            stop.wait(30)

    monkeypatch.setattr(llm.engine, "step", slow)
    stop, urls, thread = threading.Event(), SimpleQueue[str](), threading.Thread(target=serve)
    thread.start()
    asyncio.run(scenario(urls.get()))
    thread.join()
    assert llm.engine.stats.tokens - before < 800
    assert not llm.engine.scheduler.waiting


def test_a_failed_engine_is_told_to_everybody(
    target: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(target, dtype="float32", max_num_seqs=2)
    step = llm.engine.step
    failing = threading.Event()

    def sometimes() -> Any:
        if failing.is_set():
            raise MemoryError("the device is full")
        return step()

    async def scenario(url: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            stream = await endless(api, stream=True)
            await anext(stream)
            failing.set()
            with pytest.raises(openai.APIError, match="the device is full"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError, match="the device is full"):
                await endless(api)
        assert httpx2.get(f"{url}/health").status_code == 503

    monkeypatch.setattr(llm.engine, "step", sometimes)
    with serving(llm, key=None) as url:
        assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
        asyncio.run(scenario(url))
    assert "MemoryError" in capfd.readouterr().err


def test_an_error_inside_is_500_without_its_details(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> SamplingParams:
        raise RuntimeError("a secret")

    monkeypatch.setattr(llm, "default_sampling_params", broken)
    with serving(llm, key=None) as url:
        answer = post(url, "/v1/completions", {"prompt": "x"}, key=None)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer.text
    assert "a secret" in capfd.readouterr().err


def test_the_command_serves_and_ends_with_status_0(target: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "key").write_text("the-secret-key\n")
    options = (
        f"--port {port} --served-model-name tiny --dtype float32 --max-num-seqs 1 --max-model-len 256 --no-warm-up"
    )
    command = [sys.executable, "-m", "serving.server", "--target", str(target), *options.split()]
    command += ["--api-key-file", str(tmp_path / "key"), "--compilation-cache", str(tmp_path / "xla")]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(600):
                with socket.socket() as attempt:
                    if process.poll() is not None or attempt.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="the-secret-key", max_retries=0) as client:
                stream = client.completions.create(
                    model="tiny",
                    prompt=PROMPTS[0],
                    temperature=0,
                    max_tokens=200,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                parts = [next(stream)]
                process.send_signal(signal.SIGTERM)
                parts += list(stream)  # what runs may finish
            assert parts[-1].choices[0].finish_reason == "length"
            assert process.wait(60) == 0
        finally:
            process.kill()
        said = process.stderr.read() if process.stderr else ""
    assert f"http://127.0.0.1:{port}" in said
    assert "the-secret-key" not in said


def test_keys_and_addresses(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    assert chosen_key(None, None) is None
    assert chosen_key("given", None) == "given"
    assert chosen_key(None, tmp_path / "key") == "from-a-file"
    (tmp_path / "key").write_text("\n")
    for key, file in (("given", tmp_path / "key"), (None, tmp_path / "key"), ("", None), ("sch\u00f6n", None)):
        with pytest.raises(ValueError, match="key"):
            chosen_key(key, file)
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [
        True,
        True,
        True,
        False,
        False,
    ]
