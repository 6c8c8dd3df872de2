"""The web page: a local server that starts runs as a person would, and otherwise reads run folders.

Runs outlive it: it starts the very ``lockstep train`` command in a session of its own, and learns everything else
from files. What it keeps itself lies in ``<runs folder>/.studio``.
"""
