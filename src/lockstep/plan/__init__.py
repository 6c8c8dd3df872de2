"""Everything decided before the first step, with reasons. Pure arithmetic: imports no torch."""

from lockstep.plan.batch import BatchPlan
from lockstep.plan.decision import Decision
from lockstep.plan.order import OrderPlan
from lockstep.plan.plan import LoaderPlan, Plan, ResumePoint, TaskFacts
from lockstep.plan.resolve import make_plan
from lockstep.plan.schedule import Schedule

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
