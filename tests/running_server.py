"""Servers for tests: the tiny trained pair behind HTTP, in a thread."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from test_llm import PAIR, write_tokenizer

from serving import LLM
from serving.async_llm import AsyncLLM
from serving.server import Server
from serving.server_app import Limits, create_app

KEY = "a-key"
LIMITS = Limits(queue=60, request_bytes=20_000)


def write_target(folder: Path) -> Path:
    """The target, with a chat template that can refuse."""
    shutil.copytree(PAIR / "target", folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    refusing = "{% if shout is defined %}{{ raise_exception('no shouting') }}{% endif %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": refusing + config["chat_template"]})
    )
    return folder


def small(target: Path) -> LLM:
    """The pair with few rows and one block size, so that little compiles."""
    return LLM(target, PAIR / "draft", dtype="float32", max_num_seqs=4, prefill_chunk=128, block_size=8)


@contextmanager
def serving(llm: LLM, limits: Limits = LIMITS, key: str | None = KEY, grace: int = 5) -> Iterator[str]:
    """A server in a thread; its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    front = AsyncLLM(llm)
    server = Server(front, grace, uvicorn.Config(create_app(front, "tiny", limits, key), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def post(url: str, path: str, body: dict[str, Any] | bytes, key: str | None = KEY) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.post(f"{url}{path}", content=content, headers=headers, timeout=60)


def metric(url: str, name: str, labels: dict[str, str] | None = None) -> float:
    """The value of a sample on /metrics."""
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics").text)
    found = [s.value for f in families for s in f.samples if s.name == name and s.labels == (labels or {})]
    return found[0] if found else 0.0


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
