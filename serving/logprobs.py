"""Log-probabilities in the two forms of OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Any

from serving.tokenizer import BROKEN, Tokenizer

LEAST = -9999.0  # JSON has no infinity; vLLM's stand-in
Entry = Mapping[int, float]  # a token's own log-probability first, then those of the likeliest


def chat_logprobs(entries: Sequence[Entry], top: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """As chat completions give them, with the ``top`` likeliest of each position."""

    def shown(token: int, value: float) -> dict[str, Any]:
        text = text_of(token, tokenizer)
        return {
            "token": text or name_of(token),
            "logprob": max(value, LEAST),
            "bytes": None if text is None else list(text.encode()),
        }

    content = []
    for entry in entries:
        own, value = next(iter(entry.items()))
        content.append(
            shown(own, value) | {"top_logprobs": [shown(token, value) for token, value in likeliest(entry, top)]}
        )
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[Entry], top: int, tokenizer: Tokenizer | None, offset: int) -> dict[str, Any]:
    """As completions give them; ``offset``: length of the text before. The sampled token stands among the likeliest."""

    def shown(token: int) -> str:
        return text_of(token, tokenizer) or name_of(token)

    tokens = [next(iter(entry)) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(text_of(token, tokenizer) or "")
    return {
        "tokens": [shown(token) for token in tokens],
        "token_logprobs": [max(entry[token], LEAST) for token, entry in zip(tokens, entries, strict=True)],
        "top_logprobs": [{shown(i): max(x, LEAST) for i, x in entry.items()} for entry in entries] if top else None,
        "text_offset": offsets,
    }


def likeliest(entry: Entry, top: int) -> list[tuple[int, float]]:
    """The ``top`` likeliest tokens of a position, best first."""
    return sorted(entry.items(), key=lambda item: -item[1])[:top]


def text_of(token: int, tokenizer: Tokenizer | None) -> str | None:
    """The text of one token; None where it has none of its own: part of a character, a special token, no tokenizer."""
    text = "" if tokenizer is None else tokenizer.decode([token])
    return None if not text or BROKEN in text else text


def name_of(token: int) -> str:
    """What a token without text is called, as in vLLM."""
    return f"token_id:{token}"
