"""The command ``lockstep``: :mod:`~lockstep.cli.main` and one module per verb. Imports no torch."""
