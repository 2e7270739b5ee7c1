"""The engine that people use: ``LLM``, ``SamplingParams``, ``Completion``."""

from serving.config import EngineConfig
from serving.llm import LLM
from serving.request import Chunk, Completion, FinishReason, SamplingParams

__all__ = ["LLM", "Chunk", "Completion", "EngineConfig", "FinishReason", "SamplingParams"]
