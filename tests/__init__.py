"""Tests mirror ``src/lockstep``; a regular package, so that spawned ranks can import ``tests.gloo``."""
