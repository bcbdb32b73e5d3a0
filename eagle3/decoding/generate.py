"""Decode a batch from prompts to answers, plainly or with a draft, through one loop."""

from collections.abc import Callable, Sequence
from typing import Any

from eagle3.decoding.auto import AutoDrafter
from eagle3.decoding.costs import CostBook
from eagle3.decoding.drafter import Drafter, Eagle3Drafter
from eagle3.decoding.measure import measure_costs
from eagle3.decoding.request import Answer, Chunk, Request
from eagle3.decoding.session import Session
from eagle3.decoding.tree import TreePlan, dynamic_plan
from eagle3.draft import Eagle3Draft
from gdn import HybridLM

METHODS = ("autoregressive", "eagle3")


def generate(
    target: HybridLM,
    requests: Sequence[Request],
    method: str = "autoregressive",
    draft: Eagle3Draft | None = None,
    plan: TreePlan | None = None,
    on_chunk: Callable[[Chunk], None] | None = None,
    **options: Any,
) -> list[Answer]:
    """Answer every request; the text does not depend on `method`, up to ties in float32.

    Args:
      method: "autoregressive", or "eagle3" with a `draft`.
      plan: the trees of "eagle3"; default: dynamic, 8 nodes, 4 levels.
      on_chunk: called with new tokens as they come.
      options: of `Session`.

    Raises:
      ValueError: an unknown method, one without its draft, or a request that cannot be served.
    """
    session = Session(target, make_drafter(method, draft, plan), **options)
    session.start(requests)
    while session.is_running:
        for chunk in session.advance():
            if on_chunk is not None:
                on_chunk(chunk)
    return session.answers


def make_drafter(
    method: str,
    draft: Eagle3Draft | None = None,
    plan: TreePlan | None = None,
    recalibrate: bool = False,
) -> Drafter | None:
    """Return the drafter of a method; None for plain decoding.

    Args:
      recalibrate: of a plan that adapts, measure what rounds cost, whatever is known of it.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, it must be one of: {', '.join(METHODS)}")
    if method == "autoregressive":
        return None
    if draft is None:
        raise ValueError("method eagle3 needs a draft; give one, or use method autoregressive")
    if plan is not None and plan.adapts:
        return AutoDrafter(draft, plan, book=CostBook(measure_costs, recalibrate))
    return Eagle3Drafter(draft, plan or dynamic_plan(top_k=3, depth=4, total_tokens=8))
