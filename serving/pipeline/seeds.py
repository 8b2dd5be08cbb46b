"""Seeds of choices: choice i of a request has its own, derived from the request's seed and i alone."""

_MASK = (1 << 64) - 1


def choice_seed(seed: int, choice: int) -> int:
    """64 bits from any integer seed (taken modulo 2**64) and the choice's index: SplitMix64's output function."""
    state = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
