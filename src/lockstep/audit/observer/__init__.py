"""Runs inside the processes of the audited script: hooks that write records."""
