"""The interface of `ait llm`: its hooks, its dump tree and its comparison report."""
