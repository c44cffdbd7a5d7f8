"""Speculative decoding: drafts propose tokens, the target verifies them in one step, and what comes out is the same."""
