"""One experiment in three trainers: Lockstep, Lightning and Accelerate. Started by ``same_result.py``."""
