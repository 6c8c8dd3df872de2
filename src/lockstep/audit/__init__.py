"""`lockstep audit`: whether a script computes the same on several ranks as on one.

``launcher`` starts the unchanged script; in each of its processes ``bootstrap`` arms ``observer``, which writes
records; ``trace`` reads them, ``checks`` turn them into findings, ``report`` prints these.
"""
