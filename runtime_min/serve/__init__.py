"""OpenAI-compatible HTTP over the engine: requests, answers, streams, metrics. No model code."""
