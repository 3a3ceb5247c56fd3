"""Examples, run by the tests: a shop's agent and tools, a model server without a model, the demo."""
