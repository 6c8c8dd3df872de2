"""Everything decided before the first step, with reasons. Pure arithmetic: imports no torch."""

from lockstep.planning.batch import BatchPlan
from lockstep.planning.decision import Decision
from lockstep.planning.order import OrderPlan
from lockstep.planning.plan import LoaderPlan, Plan, ResumePoint, TaskFacts
from lockstep.planning.resolve import make_plan
from lockstep.planning.schedule import Schedule

__all__ = [
    "BatchPlan",
    "Decision",
    "LoaderPlan",
    "OrderPlan",
    "Plan",
    "ResumePoint",
    "Schedule",
    "TaskFacts",
    "make_plan",
]
