"""How a KL coefficient follows what was observed. The coefficient is all the state there is."""


def proportional_kl_coef(
    coef: float, observed_kl: float, *, target: float, horizon: float, num_sequences: int
) -> float:
    """coef * (1 + clip(observed_kl / target - 1, -0.2, 0.2) * num_sequences / horizon).

    `observed_kl` and `target` in nats and of the same reduction (a token mean or a sequence sum); `horizon` in
    sequences. Raises ValueError for a target or horizon that isn't positive.
    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2.
    """
    _require_positive(target=target, horizon=horizon)
    error = min(max(observed_kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_sequences / horizon)


def doubling_kl_coef(coef: float, observed_kl: float, *, target: float) -> float:
    """Twice the coefficient above 1.5 * target, half of it below target / 1.5; in nats, of the same reduction.

    Raises ValueError for a target that isn't positive.
    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", section 4.
    """
    _require_positive(target=target)
    return banded_kl_coef(coef, observed_kl, lowest=target / 1.5, highest=target * 1.5)


def banded_kl_coef(coef: float, observed_kl: float, *, lowest: float, highest: float, factor: float = 2.0) -> float:
    """coef * factor above `highest`, coef / factor below `lowest`, else unchanged; KL(old || new) in nats.

    Raises ValueError unless 0 < lowest < highest and factor > 1.
    Source: Heess et al. 2017, "Emergence of Locomotion Behaviours in Rich Environments", algorithm 1.
    """
    _require_positive(lowest=lowest, highest=highest)
    if lowest >= highest or factor <= 1:
        raise ValueError(f"needs lowest < highest and factor > 1, got {lowest}, {highest} and {factor}")
    if observed_kl > highest:
        return coef * factor
    return coef / factor if observed_kl < lowest else coef


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} of the KL controller must be above 0, got {number}")
