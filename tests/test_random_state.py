"""Promises of sampling: native's draws for native's seed, and a call's tokens do not depend on who else draws."""

import torch

from orca_hf.random_state import DefaultGenerator, draw_seed, seeded

CPU = torch.device("cpu")
PROBS = torch.full((3, 50), 1 / 50)


def test_a_call_alone_draws_what_the_default_generator_would():
    torch.manual_seed(1)
    expected = [torch.multinomial(PROBS, 1).squeeze(1) for _ in range(3)]
    after = torch.rand(1)
    torch.manual_seed(1)
    generator = DefaultGenerator(CPU)
    drawn = [generator.draw(PROBS) for _ in range(3)]
    generator.close()
    generator.close()
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    assert torch.equal(torch.rand(1), after)


def test_a_second_call_from_the_same_state_draws_other_numbers():
    torch.manual_seed(1)
    first, second = DefaultGenerator(CPU), DefaultGenerator(CPU)
    draws = [torch.cat([each.draw(PROBS) for _ in range(20)]) for each in (first, second)]
    assert not torch.equal(*draws)
    first.close()
    second.close()


def test_a_call_after_a_new_seed_is_not_disturbed_by_one_that_runs():
    torch.manual_seed(1)
    running = DefaultGenerator(CPU)
    torch.manual_seed(2)
    expected = torch.multinomial(PROBS, 1).squeeze(1)
    torch.manual_seed(2)
    later = DefaultGenerator(CPU)
    running.draw(PROBS)
    assert torch.equal(later.draw(PROBS), expected)
    running.close()
    later.close()


def test_a_generator_that_someone_moved_is_left_where_they_put_it():
    torch.manual_seed(1)
    running = DefaultGenerator(CPU)
    running.draw(PROBS)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    running.close()
    assert torch.equal(torch.rand(1), expected)


def test_a_seeded_call_depends_on_its_seed_alone():
    torch.manual_seed(1)
    seed = draw_seed(CPU)
    state = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded(seed):
            generator = DefaultGenerator(CPU, num_streams=2)
        draws.append(torch.stack([generator.draw(PROBS, stream) for stream in (0, 1)]))
        generator.close()
    assert torch.equal(*draws)
    assert not torch.equal(draws[0][0], draws[0][1])
    assert torch.equal(torch.get_rng_state(), state)
