"""A bounded share of `make fuzz`: the same targets and seeds, mutations that replay."""

from __future__ import annotations

import random
import subprocess

import pytest

from fuzz.__main__ import _ask_all
from fuzz.targets import TARGETS, mutated, seeds

#: the cheaper a target, the more of it
COUNTS = {"message": 6000, "datagram": 3000, "stream": 800, "document": 1200, "policy": 3000}


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_an_answer_comes_out(target: str) -> None:
    rng = random.Random(f"{target} 1")
    known = seeds(target)
    for seed in known:
        TARGETS[target](seed)
    for _ in range(COUNTS[target]):
        data = mutated(rng.choice(known), rng)
        try:
            TARGETS[target](data)
        except BaseException:
            print(f"this did it: {data!r}")
            raise


def test_the_api_answers_as_its_schema_says_whatever_is_asked(own_cluster) -> None:
    cluster = own_cluster(1)
    try:
        found = _ask_all(cluster.peers()[0]["http"], cluster.token, examples=3, seed=0)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"it took too long: {str(error.stdout)[-2000:]}")
    assert not found["failed"], found["why"]
    assert found["cases"] > 300
