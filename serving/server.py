"""A server with OpenAI's API: ``python -m serving.server --target DIR``, or ``dflash-serve``.

POST /v1/completions and /v1/chat/completions (streamed or not), GET /v1/models, /health and /metrics (Prometheus). It
loads and compiles first and listens then, so a server that answers is ready. SIGINT and SIGTERM end it: what runs may
finish within ``--grace`` seconds.
"""

import asyncio
import signal
import socket
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from serving import command
from serving.async_llm import AsyncLLM
from serving.config import EngineConfig
from serving.llm import LLM
from serving.runner import use_compilation_cache
from serving.server_app import Limits, create_app

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
UNREAD_S = 5  # seconds that clients have to read their last words


@app.command(help=__doc__)
def serve(
    target: command.Target,
    drafter: command.Drafter = None,
    tokenizer: command.TokenizerFolder = None,
    served_model_name: Annotated[str | None, typer.Option(help="what clients call it; default: the target")] = None,
    host: Annotated[str, typer.Option(help="address to listen on; the default takes this machine's clients only")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, typer.Option(help="what clients must bring; seen by who lists processes")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="a file that holds it")] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="samples that may wait; beyond: 429")] = Limits.queue,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="beyond: 413")] = Limits.request_bytes,
    grace: Annotated[int, typer.Option(min=0, help="seconds that requests may finish in at the end")] = 30,
    warm_up: Annotated[bool, typer.Option(help="compile everything before listening")] = True,
    compilation_cache: command.CompilationCache = None,
    dtype: command.Dtype = "auto",
    block_size: Annotated[int | None, typer.Option(help="tokens a round; default: by what pays")] = None,
    max_model_len: command.MaxModelLen = None,
    max_num_seqs: command.MaxNumSeqs = EngineConfig.max_num_seqs,
    page_size: command.PageSize = EngineConfig.page_size,
    num_pages: command.NumPages = None,
    prefill_chunk: command.PrefillChunk = EngineConfig.prefill_chunk,
    prefix_cache: command.PrefixCache = True,
    overlap: command.Overlap = True,
    kernels: command.Kernels = EngineConfig.kernels,
    seed: Annotated[int | None, typer.Option(help="of requests that bring none; default: fresh noise")] = None,
    tensor_parallel_size: command.TensorParallelSize = 1,
) -> None:
    """The command."""
    options = command.engine_options(locals())
    try:
        key = chosen_key(api_key, api_key_file)
        use_compilation_cache(compilation_cache)
        llm = LLM(target, drafter, tokenizer=tokenizer, **options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if warm_up:
        llm.warm_up()
    if key is None and not is_loopback(host):
        print(
            f"warning: whoever reaches {host}:{port} may use this server; --api-key-file asks for a key",
            file=sys.stderr,
        )
    front = AsyncLLM(llm)
    asgi = create_app(front, served_model_name or target, Limits(max_queue, max_request_bytes), key)
    server = Server(front, grace, uvicorn.Config(asgi, host=host, port=port, access_log=False))
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn closes down, then raises the signal once more
        signal.signal(number, lambda *_: sys.exit(0))
    server.run()


class Server(uvicorn.Server):
    """Gives what runs ``grace`` seconds to finish, and then tells its clients that it does not."""

    def __init__(self, llm: AsyncLLM, grace: float, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.llm, self.grace = llm, grace
        config.timeout_graceful_shutdown = int(grace) + UNREAD_S

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, finish or abort what runs, close."""
        timer = asyncio.get_running_loop().call_later(self.grace, self.llm.close)
        await super().shutdown(sockets)
        timer.cancel()


def chosen_key(key: str | None, file: Path | None) -> str | None:
    """The API key, if there is to be one. Raises ValueError where it is given twice or empty."""
    if key is not None and file is not None:
        raise ValueError("--api-key and --api-key-file are two ways to say the same")
    chosen = key if file is None else file.read_text(encoding="utf-8").strip()
    if chosen is not None and not (chosen and chosen.isascii() and chosen.isprintable()):
        raise ValueError("the API key must be printable ASCII characters, at least one")
    return chosen


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    app(prog_name="python -m serving.server")
