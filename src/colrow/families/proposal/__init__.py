"""A model of no known family: its plan is proposed, printed, and refused where anything is in doubt.

proposer    what each part is: names and sizes, and Hugging Face's own plan as a second witness (parts, translate)
reading     whether the code of attention, MLP, block and model is right when split (kinds, values)
"""

from __future__ import annotations

import logging

from torch import nn

from colrow.errors import PlanError
from colrow.families.proposal.proposer import propose
from colrow.rules import Plan

_BY_HAND = 'Pass a plan, Plan({"up": Column(), "down": Row(), ...}), with a rule for every module that has parameters'


def plan_for(model: nn.Module, given: Plan | None, *, talks: bool) -> Plan:
    """The plan of a model of no known family: the caller's, and a proposal for the parts that it does not name.

    Arguments:
        talks: say, through the logger "colrow", what was done.

    Raises:
        PlanError: a doubt is left; the plan that one could write is in its `fix`.
    """
    if given is not None and _is_total(given, model):
        return given
    proposal, kind = propose(model, given), type(model).__name__
    if proposal.doubts:
        first, *others = proposal.doubts
        where = f"{first.name}: " if first.name else ""
        plan = "no plan" if given is None else "a plan for parts of it"
        raise PlanError(
            "colrow.parallelize",
            f"{plan}, and {kind} is of no known family; {where}{first.why}{f' ({len(others)} more)' if others else ''}",
            "without a family a model is split only where nothing is in doubt",
            _BY_HAND
            if not proposal.plan.layers[0]
            else f"Settle the comments in this plan:\n\n{proposal}\n\nThen pass it as plan=, and run colrow verify",
        )
    if talks:
        said = "%s is of no known family: split by this plan, from %s. Keep it as your own, and run colrow verify:\n%s"
        logging.getLogger("colrow").warning(said, kind, proposal.source, proposal)
    return proposal.plan if given is None else given | proposal.plan


def _is_total(plan: Plan, model: nn.Module) -> bool:
    """Whether a plan is the last word: it names an owner of every parameter, or there is no config to go by."""
    params = dict(model.named_parameters(remove_duplicate=False))
    named = plan.match([name for name, _ in model.named_modules(remove_duplicate=False)], params)
    return not hasattr(model, "config") or all(at in named or at.rpartition(".")[0] in named for at in params)
