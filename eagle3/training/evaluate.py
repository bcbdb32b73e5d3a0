"""What a run has learned, on text it was not trained on.

Two measures of a draft: its accuracy where it is fed the text (simulated tau), and what it is for:
the tokens a round that the decoding engine accepts of it (real tau), which also notices when
training and decoding disagree.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle3.decoding.generate import generate
from eagle3.decoding.request import Answer, Request, total_acceptance
from eagle3.decoding.tree import TreePlan
from eagle3.draft import Eagle3Draft
from eagle3.training.data.dataset import TokenDataset
from eagle3.training.step import TargetSums
from eagle3.training.ttt import StepSums
from gdn import HybridLM


class Evaluation(NamedTuple):
    """What is told and, in one number, how good it is."""

    scalars: dict[str, float]
    score: float  # higher is better
    line: str  # for people
    bars: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    pictures: dict[str, bytes] = {}  # PNG


def target_scalars(sums: TargetSums) -> dict[str, float]:
    """Return loss in nats per token and accuracy."""
    tokens = max(float(sums.tokens), 1.0)
    return {"loss": float(sums.loss) / tokens, "accuracy": float(sums.hit) / tokens}


def draft_scalars(sums: Sequence[StepSums]) -> dict[str, float]:
    """Return losses and accuracies by step of the unrolling, and simulated tau.

    `accuracy_step_k`: the draft's best token at step k is the target's. `joint`: and so were those
    of all steps before; `conditional`: if so were all before. Simulated tau is one (the target's
    own token) plus the joint accuracies.
    """
    found, tau = {}, 1.0
    for number, step in enumerate(sums):
        slots = max(float(step.slots), 1.0)
        found[f"loss_step_{number}"] = float(step.loss) / max(float(step.weight), 1.0)
        found[f"accuracy_step_{number}"] = float(step.hit) / slots
        joint = float(step.run) / max(float(step.chains), 1.0)
        found[f"joint_accuracy_step_{number}"] = joint
        reached = max(float(step.reached), 1.0)
        found[f"conditional_accuracy_step_{number}"] = float(step.run) / reached
        found[f"overlap_step_{number}"] = float(step.overlap) / slots
        tau += joint
    return found | {"tau_simulated": tau}


def heldout_sums(task: Any, params: Any, frozen: Any, batches: Iterable[Any]) -> Any:
    """Add up what the task's loss tells of batches, each with an axis of pieces, one long."""
    total = None
    for batch in batches:
        sums = jax.device_get(_sums(task, params, frozen, batch))
        total = sums if total is None else jax.tree.map(np.add, total, sums)
    return total


@partial(jax.jit, static_argnames="task")
def _sums(task: Any, params: Any, frozen: Any, batch: Any) -> Any:
    piece = jax.tree.map(lambda x: x[0], batch)
    return task.loss(params, frozen, piece, task.counts(piece))[1]


def beginnings(
    datasets: Mapping[str, TokenDataset],
    count: int,
    prompt_tokens: int,
    room: int,
    skip: int = 0,
) -> list[list[int]]:
    """Return prompts from held-out documents, evenly spread over them.

    A text is cut after `prompt_tokens` tokens, a conversation where its first answer begins.

    Args:
      room: most tokens that a prompt may have; longer ones are passed over.
      skip: how many of these prompts come before: another `skip` gives other prompts.
    """
    candidates = []
    for data in datasets.values():
        for start, end in zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True):
            first = int(np.argmax(data.mask[start:end]))
            size = first if first > 1 else prompt_tokens
            if 0 < size < end - start and size <= room:
                candidates.append((data, start, size))
    # The same spread for every count: a permutation that knows nothing of it.
    order = np.random.default_rng(len(candidates)).permutation(len(candidates))
    chosen = [candidates[i] for i in order[skip : skip + count]]
    return [data.tokens[start : start + size].tolist() for data, start, size in chosen]


def decode_prompts(
    target: HybridLM,
    draft: Eagle3Draft | None,
    prompts: Sequence[Sequence[int]],
    plan: TreePlan | None,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> list[Answer]:
    """Continue all prompts at once, greedily."""
    requests = [
        Request(prompt=prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        for prompt in prompts
    ]
    method = "autoregressive" if draft is None else "eagle3"
    return generate(target, requests, method, draft, plan)


def acceptance(answers: Sequence[Answer], depth: int) -> tuple[float, list[float]]:
    """Return tau (tokens a round, the bonus token included) and acceptance at depth 1 to `depth`.

    At a depth that no round has reached it is 0.
    """
    tau, found = total_acceptance(answers)
    return tau, found + [0.0] * (depth - len(found))


def acceptance_picture(by_depth: Sequence[float], tau: float) -> dict[str, bytes]:
    """Draw acceptance by depth, by name, if matplotlib is there."""
    try:
        from eagle3 import plots
    except ModuleNotFoundError:
        return {}
    ax = plots.acceptance_by_depth({"": by_depth})
    ax.set_title(f"tau {tau:.2f} tokens a round")
    return {"acceptance": plots.png(ax)}
