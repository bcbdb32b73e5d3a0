"""The one entry to the gated delta rule over a sequence; a name that cannot run raises."""

from jaxtyping import Array, Float, Int

from gdn.ops.chunked import gated_delta_rule_chunked
from gdn.ops.reference import gated_delta_rule_reference

IMPLEMENTATIONS = {"reference": gated_delta_rule_reference, "chunked": gated_delta_rule_chunked}


def gated_delta_rule(
    q: Float[Array, "B T HK DK"],
    k: Float[Array, "B T HK DK"],
    v: Float[Array, "B T HV DV"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV DK DV"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T HV DV"], Float[Array, "B HV DK DV"]]:
    """Run the rule, see `gated_delta_rule_reference`; None chooses the chunked form."""
    name = implementation or "chunked"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {name!r} is not one of {sorted(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](q, k, v, g, beta, state, segment_ids)
