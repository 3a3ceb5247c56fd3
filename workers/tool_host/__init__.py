"""The process that serves the `@tool` functions of some modules; how a query is served is `orchestration/mesh/hosting/`."""

from orchestration.mesh.hosting import ToolHost

__all__ = ["ToolHost"]
