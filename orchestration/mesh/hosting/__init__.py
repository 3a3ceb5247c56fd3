"""Serving `@tool` functions on the mesh: `ToolHost` for the tool host's process and for a worker's own tools alike."""

from orchestration.mesh.hosting.host import ToolHost

__all__ = ["ToolHost"]
