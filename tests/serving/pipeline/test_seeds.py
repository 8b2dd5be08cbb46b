from serving.pipeline.seeds import choice_seed


def test_choices_have_different_reproducible_64_bit_seeds() -> None:
    seeds = [choice_seed(7, i) for i in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds == [choice_seed(7, i) for i in range(1000)]
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_neighbouring_requests_share_no_seed() -> None:
    assert len({choice_seed(seed, i) for seed in range(-50, 50) for i in range(50)}) == 5000


def test_any_integer_counts_modulo_two_to_the_64() -> None:
    assert choice_seed(-1, 0) == choice_seed(2**64 - 1, 0)
    assert choice_seed(2**63, 3) == choice_seed(-(2**63), 3)


def test_the_mixing_is_splitmix64() -> None:
    # The first outputs of the published generator from state 0.
    assert [choice_seed(0, i) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
