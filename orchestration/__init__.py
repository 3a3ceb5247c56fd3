"""Turnmill's public face: all that the module with a user's agents imports."""

from orchestration.core.agent import Agent, StandardWebhooks, Webhook, WebhookRequest
from orchestration.core.gate import Gate
from orchestration.core.limits import Limits
from orchestration.core.model import Delta, Model, ModelReply, RequestedCall, Usage
from orchestration.core.tool import Discover, MeshTool, Tool, discover, tool, tools_from_discovery
from orchestration.core.tool_error import ToolError
from orchestration.models.anthropic import AnthropicModel
from orchestration.models.chat import OpenAIChatModel
from orchestration.models.failover import Failover

__all__ = [
    "Agent",
    "AnthropicModel",
    "Delta",
    "Discover",
    "Failover",
    "Gate",
    "Limits",
    "MeshTool",
    "Model",
    "ModelReply",
    "OpenAIChatModel",
    "RequestedCall",
    "StandardWebhooks",
    "Tool",
    "ToolError",
    "Usage",
    "Webhook",
    "WebhookRequest",
    "discover",
    "tool",
    "tools_from_discovery",
]
