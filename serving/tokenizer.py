"""Text to ids and back, by transformers' tokenizer: prompts, chat templates, incremental decoding."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

# Said at import, and of no interest here: tokenizers need no PyTorch.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

from transformers import AutoTokenizer  # noqa: E402

from serving.options import is_whole  # noqa: E402

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
BROKEN = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


class Tokenizer:
    """A Hugging Face tokenizer folder."""

    def __init__(self, folder: Path) -> None:
        self.hf = AutoTokenizer.from_pretrained(folder)
        self.known = len(self.hf)

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids of a text (special tokens as the tokenizer adds them), of messages (through the chat template), or ids as
        they are.

        Raises ValueError for another kind of prompt, or messages without a chat template.
        """
        if isinstance(prompt, str):
            return tuple(self.hf.encode(prompt, verbose=False))
        if is_messages(prompt):
            if not self.hf.chat_template:
                raise ValueError("messages need a chat template, and this tokenizer has none")
            options = {"add_generation_prompt": True, **chat_template_kwargs, "tokenize": False}
            text = self.hf.apply_chat_template(checked_messages(prompt), **options)
            return tuple(self.hf.encode(text, add_special_tokens=False, verbose=False))
        return token_ids(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens; ids that the tokenizer does not know give nothing."""
        return str(self.hf.decode([i for i in ids if i < self.known], skip_special_tokens=True))


def is_messages(prompt: Any) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is a conversation."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_messages(prompt: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Raises ValueError where role or content is no text."""
    for message in prompt:
        texts = isinstance(message, Mapping) and [message.get(name) for name in ("role", "content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a message needs a role and a content, both text: {message!r}")
    return [dict(message) for message in prompt]


def token_ids(prompt: Any) -> tuple[int, ...]:
    """A prompt of ids as a tuple of ints. Raises ValueError for anything else."""
    listed = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes) else [prompt]
    if not all(map(is_whole, listed)):
        raise ValueError(f"a prompt is a text, a list of token ids or a list of messages, not {prompt!r}")
    return tuple(map(int, listed))


@dataclass
class IncrementalText:
    """Text of ids that come one by one. A piece is released when no later byte can change it.

    Only a short window is decoded each time: the last released piece gives the context that some tokenizers need
    (leading spaces), and what follows it is new.
    """

    tokenizer: Tokenizer
    ids: list[int] = field(default_factory=list)
    start: int = 0
    read: int = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these ids, perhaps none."""
        self.ids.extend(tokens)
        piece = self.pending()
        if not piece or piece.endswith(BROKEN):
            return ""
        self.start, self.read = self.read, len(self.ids)
        return piece

    def flush(self) -> str:
        """The text still held back, broken characters included."""
        piece = self.pending()
        self.start, self.read = self.read, len(self.ids)
        return piece

    def pending(self) -> str:
        """What the window decodes to beyond the part that was released."""
        known = self.tokenizer.decode(self.ids[self.start : self.read])
        return self.tokenizer.decode(self.ids[self.start :])[len(known) :]
