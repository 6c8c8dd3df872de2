"""Human activity recognition: which activity is a window of motion signals from?"""

from lockstep.tasks.har.task import HarConfig, HarTask

__all__ = ["HarConfig", "HarTask"]
