"""Many clients stream from a server at once, each again and again, and compare every answer with the unstreamed one.

Shows how many answers came, how many were wrong, what clients waited, and whether the server's memory grew.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

VARIANTS = 24  # different requests; half of them greedy, half drawn with a seed each
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass
class Outcome:
    """What clients saw."""

    answers: int = 0
    tokens: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def table(self) -> Table:
        """All of it, in a column."""
        table = Table(show_header=False)
        for name, value in (
            ("answers", f"{self.answers:,}"),
            ("wrong", f"{self.wrong:,}"),
            ("errors", f"{len(self.errors):,}"),
            ("tokens/s", f"{self.tokens / self.seconds:,.0f}"),
            ("first text, s", spread(self.first_token_s)),
            ("whole answer, s", spread(self.answer_s)),
            (
                "server's memory each second, MB",
                " ".join(f"{m:.0f}" for m in self.memory_mb[:: len(self.memory_mb) // 10 + 1]),
            ),
        ):
            table.add_row(name, value)
        return table


def spread(seconds: list[float]) -> str:
    """Median and 95th percentile."""
    ordered = sorted(seconds)
    return (
        f"median {ordered[len(ordered) // 2]:.2f}, 95 % below {ordered[len(ordered) * 95 // 100]:.2f}"
        if ordered
        else "-"
    )


def resident_mb(pid: int) -> float:
    """Memory of a process, in MB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def variant(i: int, model: str, max_tokens: int) -> dict[str, Any]:
    """The i-th request."""
    draw = {"temperature": 0} if i % 2 else {"temperature": 1, "seed": i}
    prompt = f"Q: add {10 + i} and {50 - i}\nA:"
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, **draw}


async def client(
    api: AsyncOpenAI, number: int, until: float, expected: list[tuple[dict[str, Any], str, int]], seen: Outcome
) -> None:
    """One client, until the time is over."""
    turn = number
    while time.perf_counter() < until:
        request, text, tokens = expected[turn % len(expected)]
        turn += 1
        start, got, counted, first = time.perf_counter(), "", 0, True
        try:
            stream = await api.completions.create(**request, stream=True, stream_options={"include_usage": True})
            async for part in stream:
                if first:
                    seen.first_token_s.append(time.perf_counter() - start)
                    first = False
                got += "".join(choice.text for choice in part.choices)
                counted += part.usage.completion_tokens if part.usage else 0
        except Exception as error:  # whatever a client meets is a finding
            seen.errors.append(repr(error))
            continue
        seen.answers += 1
        seen.tokens += counted
        seen.wrong += (got, counted) != (text, tokens)
        seen.answer_s.append(time.perf_counter() - start)


async def load(
    url: str, model: str, clients: int, seconds: float, max_tokens: int, pid: int | None, key: str
) -> Outcome:
    """Ask each variant alone, then let all clients stream for a while."""
    seen = Outcome()
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=600) as api:
        expected = []
        for request in (variant(i, model, max_tokens) for i in range(VARIANTS)):
            whole = await api.completions.create(**request)
            assert whole.usage is not None
            expected.append((request, whole.choices[0].text, whole.usage.completion_tokens))
        start = time.perf_counter()
        work = [asyncio.create_task(client(api, i, start + seconds, expected, seen)) for i in range(clients)]
        pending = set(work)
        while pending:
            if pid is not None:
                seen.memory_mb.append(resident_mb(pid))
            _, pending = await asyncio.wait(pending, timeout=1)
        await asyncio.gather(*work)
        seen.seconds = time.perf_counter() - start
    return seen


@app.command(help=__doc__)
def main(
    url: Annotated[str, typer.Option()] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="as the server calls it")] = "model",
    clients: Annotated[int, typer.Option()] = 200,
    seconds: Annotated[float, typer.Option()] = 30,
    max_tokens: Annotated[int, typer.Option()] = 40,
    pid: Annotated[int | None, typer.Option(help="of the server, to watch its memory")] = None,
    key: Annotated[str, typer.Option(help="API key")] = "none",
) -> None:
    """The command; ends with status 1 where an answer was wrong or missing."""
    seen = asyncio.run(load(url, model, clients, seconds, max_tokens, pid, key))
    Console().print(seen.table())
    for error in sorted(set(seen.errors))[:5]:
        Console().print(f"error: {error}", markup=False)
    if seen.wrong or seen.errors:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
