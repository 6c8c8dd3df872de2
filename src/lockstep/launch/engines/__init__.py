"""Engines: what starts the ranks of a run on several machines; ``--on NAME`` chooses one.

A launcher of Lockstep starts and watches the ranks of one machine. Several machines belong to an engine.

To add an engine:

1. Write a module with ``SPEC``, an :class:`~lockstep.launch.engines.spec.EngineSpec`, and a class with the methods of
   :class:`~lockstep.launch.engines.spec.Engine`. The module imports neither torch nor the engine's library when it is
   imported: the help of the command line reads ``SPEC``.
2. An engine of Lockstep is a module of this package and a name in ``BUILT_IN`` of :mod:`.spec`. Another package names
   ``SPEC`` as an entry point of the group ``lockstep.engines``.
3. ``submit`` gets a :class:`~lockstep.launch.engines.spec.Job`. An engine whose job continues without this process, a
   :class:`~lockstep.launch.engines.spec.JobEngine`, returns a :class:`~lockstep.launch.engines.spec.JobHandle`;
   :mod:`.jobs` records it in the run folder, follows the job, and stops it for ``lockstep stop``. An engine whose job
   ends with this process waits for the end, and returns the exit code; its ranks are found through the run folder.
4. Flags of the engine are ``options`` of its ``SPEC``; ``submit`` finds their values in ``job.options``.
5. Each process that the engine starts has variables that :mod:`lockstep.hardware.world` reads: those of torchrun.

No other module has an engine's name.
"""
