"""`orca-hf serve`: an OpenAI-compatible HTTP server on one wrapped model."""
