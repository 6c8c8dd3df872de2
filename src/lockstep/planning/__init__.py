"""Everything decided before the first step, with reasons. Pure arithmetic: imports no torch."""

from lockstep.planning.batch import BatchPlan as BatchPlan
from lockstep.planning.batch import OrderPlan as OrderPlan
from lockstep.planning.decision import Decision as Decision
from lockstep.planning.plan import LoaderPlan as LoaderPlan
from lockstep.planning.plan import Plan as Plan
from lockstep.planning.plan import ResumePoint as ResumePoint
from lockstep.planning.plan import TaskFacts as TaskFacts
from lockstep.planning.resolve import make_plan as make_plan
from lockstep.planning.schedule import Schedule as Schedule
