"""Parts of `ait_llm` that its document imports from here."""
