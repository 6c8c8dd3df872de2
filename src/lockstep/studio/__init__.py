"""The web page: a local server that starts runs as a person would, and otherwise reads run folders.

Runs outlive it: it starts the same ``lockstep train`` command in a separate session, and reads everything else from
files. Its files are in ``<runs folder>/.studio``.
"""
