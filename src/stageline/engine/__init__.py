"""The engine: the one loop (core), and what turns text into requests and updates into text (processors, llm)."""
