"""Models: adapters to providers, and what tests use in their place. Each is a module; this names what users import."""

from orchestration.models.anthropic import AnthropicModel
from orchestration.models.calling import call_model, call_model_async
from orchestration.models.chat import OpenAIChatModel
from orchestration.models.failover import Failover
from orchestration.models.scripted import FunctionModel, ScriptedModel, ScriptEnded, Step

__all__ = [
    "AnthropicModel",
    "Failover",
    "FunctionModel",
    "OpenAIChatModel",
    "ScriptEnded",
    "ScriptedModel",
    "Step",
    "call_model",
    "call_model_async",
]
