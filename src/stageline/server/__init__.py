"""The HTTP server: OpenAI's API on a pipeline, and the processes that it is made of."""
