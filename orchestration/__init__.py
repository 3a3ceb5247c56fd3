"""Turnmill's public face: all that the module with a user's agents imports."""

from orchestration.core.agent import Agent
from orchestration.core.agent_tool import AgentTool
from orchestration.core.checkpoint import Checkpoint
from orchestration.core.compaction import Compactor, ElideToolResults
from orchestration.core.gate import Gate
from orchestration.core.hooks import ToolContext
from orchestration.core.limits import Budget, Limits
from orchestration.core.model import Delta, Message, Model, ModelReply, RequestedCall, Usage
from orchestration.core.output import AgentOutput
from orchestration.core.policy import Allow, Ask, Deny, PolicyCall
from orchestration.core.principal import Principal
from orchestration.core.tool import Discover, MeshTool, Tool, discover, tool, tools_from_discovery
from orchestration.core.tool_error import ToolError
from orchestration.core.webhook import (
    BearerWebhooks,
    GitHubWebhooks,
    SlackWebhooks,
    StandardWebhooks,
    StripeWebhooks,
    TwilioWebhooks,
    Webhook,
    WebhookAnswer,
    WebhookRequest,
)
from orchestration.models.anthropic import AnthropicModel
from orchestration.models.chat import OpenAIChatModel
from orchestration.models.failover import Failover
from orchestration.models.limited import Limited

__all__ = [
    "Agent",
    "AgentOutput",
    "AgentTool",
    "Allow",
    "AnthropicModel",
    "Ask",
    "BearerWebhooks",
    "Budget",
    "Checkpoint",
    "Compactor",
    "Delta",
    "Deny",
    "Discover",
    "ElideToolResults",
    "Failover",
    "Gate",
    "GitHubWebhooks",
    "Limited",
    "Limits",
    "MeshTool",
    "Message",
    "Model",
    "ModelReply",
    "OpenAIChatModel",
    "PolicyCall",
    "Principal",
    "RequestedCall",
    "SlackWebhooks",
    "StandardWebhooks",
    "StripeWebhooks",
    "Tool",
    "ToolContext",
    "ToolError",
    "TwilioWebhooks",
    "Usage",
    "Webhook",
    "WebhookAnswer",
    "WebhookRequest",
    "discover",
    "tool",
    "tools_from_discovery",
]
