"""Turnmill's public face: all that the module with a user's agents imports."""

from orchestration.core.agent import Agent, StandardWebhooks, Webhook, WebhookRequest
from orchestration.core.gate import Gate
from orchestration.core.limits import Limits
from orchestration.core.model import Delta, Model, ModelReply, RequestedCall, Usage
from orchestration.core.tool import Discover, MeshTool, Tool, discover, tool, tools_from_discovery

__all__ = [
    "Agent",
    "Delta",
    "Discover",
    "Gate",
    "Limits",
    "MeshTool",
    "Model",
    "ModelReply",
    "RequestedCall",
    "StandardWebhooks",
    "Tool",
    "Usage",
    "Webhook",
    "WebhookRequest",
    "discover",
    "tool",
    "tools_from_discovery",
]
