"""Findings from records: pure functions."""
