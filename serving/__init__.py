"""The engine that people use: ``LLM``, ``AsyncLLM``, ``SamplingParams``, ``Completion``."""

from serving.async_llm import AsyncLLM
from serving.config import EngineConfig
from serving.llm import LLM
from serving.request import Chunk, Completion, FinishReason, SamplingParams

__all__ = ["LLM", "AsyncLLM", "Chunk", "Completion", "EngineConfig", "FinishReason", "SamplingParams"]
