"""Every engine against one plain loop: losses, norms, state, resume, average, steps that are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.engine_runs import CLIP, HALF, STEPS, Case, Run, Whole, assemble, one_dies, plain, skip_cases, train_cases
from helpers.ranks import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# float32: only the order of sums differs between engines, ranks and micro-batches
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
# AdamW divides small gradients, with their rounding, by small moments
STATE = {"rtol": 1e-4, "atol": 2e-6}
# bfloat16 has 8 bits: each operation is off by up to 0.4 %
BFLOAT16 = {"rtol": 2e-2, "atol": 1e-3}

FLOAT32_CASES = [
    Case("ddp"),
    Case("ddp", micro=4, checkpointing="full"),
    Case("ddp", micro=2, checkpointing="offload"),
    Case("ddp", micro=4, optimizer="sgd"),
    Case("deepspeed", 0),
    Case("deepspeed", 0, micro=4, checkpointing="full"),
    Case("deepspeed", 0, micro=2, checkpointing="offload"),
    Case("deepspeed", 1),
    Case("deepspeed", 1, micro=4, checkpointing="full"),
    Case("deepspeed", 1, micro=2, checkpointing="offload"),
    Case("deepspeed", 2),
    Case("deepspeed", 2, micro=4, checkpointing="full"),
    Case("deepspeed", 2, micro=2, checkpointing="offload"),
    Case("deepspeed", 2, micro=4, optimizer="sgd"),
]
BFLOAT16_CASES = [
    Case("ddp", micro=4, precision="bfloat16"),
    Case("ddp", micro=4, precision="bfloat16", checkpointing="offload"),
    Case("deepspeed", 0, micro=4, precision="bfloat16"),
    Case("deepspeed", 1, micro=4, precision="bfloat16"),
    Case("deepspeed", 2, micro=4, precision="bfloat16", checkpointing="full"),
]
CASES = FLOAT32_CASES + BFLOAT16_CASES
PLAIN_ENGINES = [Case("ddp"), Case("deepspeed", 0), Case("deepspeed", 1), Case("deepspeed", 2)]
RESUMED = [*PLAIN_ENGINES, Case("deepspeed", 2, optimizer="sgd"), Case("deepspeed", 2, precision="bfloat16")]
WITHOUT_MOMENTS = Case("deepspeed", 2, micro=8)
SKIPPING = PLAIN_ENGINES + [Case(case.kind, case.stage, precision="bfloat16", micro=2) for case in PLAIN_ENGINES]


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[Run, Whole]]:
    return {optimizer: plain(optimizer, STEPS) for optimizer in ("adamw", "sgd")}


@pytest.fixture(scope="module")
def two_ranks(reference: dict[str, tuple[Run, Whole]]) -> list[dict[str, Any]]:
    """All cases on two ranks, and resumes from the plain loop's state."""
    resumes = [(case, reference[case.optimizer][0].half, float(HALF)) for case in RESUMED]
    half = reference["adamw"][0].half
    forgetful = {key: values * (not key[1].startswith("exp_avg")) for key, values in half.items()}
    resumes.append((WITHOUT_MOMENTS, forgetful, float(HALF)))
    return run_ranks(2, train_cases, CASES, resumes)


@pytest.fixture(scope="module")
def one_rank(two_ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All cases on one rank, and resumes of what two ranks saved, each engine by the next one."""
    saved = [two_ranks[0]["runs"][str(case)] for case in [*PLAIN_ENGINES[1:], PLAIN_ENGINES[0]]]
    resumes = [(case, run.half, run.state["updates"]) for case, run in zip(PLAIN_ENGINES, saved, strict=True)]
    return run_ranks(1, train_cases, CASES, resumes)


@pytest.fixture(scope="module", params=["one_rank", "two_ranks"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return result


def assert_same_state(found: Whole, expected: Whole, tolerance: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(found[key], expected[key], **tolerance, err_msg=str(key))


@pytest.mark.parametrize("case", FLOAT32_CASES, ids=str)
def test_losses_norms_and_state_equal_plain_pytorch(
    case: Case, ranks: list[dict[str, Any]], reference: dict[str, tuple[Run, Whole]]
) -> None:
    expected, state = reference[case.optimizer]
    for rank in ranks:
        run = rank["runs"][str(case)]
        np.testing.assert_allclose(run.losses, expected.losses, **FLOAT32)
        np.testing.assert_allclose(run.norms, expected.norms, **FLOAT32)
        assert not any(run.skipped)
    assert min(expected.norms) < CLIP < max(expected.norms), "clipping must act on some steps and not on others"
    fragments = [fragment for rank in ranks for fragment in rank["runs"][str(case)].fragments]
    assert_same_state(assemble(fragments), state, STATE)


@pytest.mark.parametrize("case", BFLOAT16_CASES, ids=str)
def test_bfloat16_stays_near_float32(
    case: Case, ranks: list[dict[str, Any]], reference: dict[str, tuple[Run, Whole]]
) -> None:
    expected, _ = reference[case.optimizer]
    for rank in ranks:
        run = rank["runs"][str(case)]
        np.testing.assert_allclose(run.losses, expected.losses, **BFLOAT16)
        np.testing.assert_allclose(run.norms, expected.norms, **BFLOAT16)
        assert run.losses != expected.losses
    weights = assemble([fragment for rank in ranks for fragment in rank["runs"][str(case)].fragments])
    rounded = weights["head.weight", "param"].view(np.uint32) & 0xFFFF
    assert rounded.any(), "the weights kept are float32, not rounded to bfloat16"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_starts_from_the_first_ranks_weights_unrounded(case: Case, ranks: list[dict[str, Any]]) -> None:
    assert all(rank["runs"][str(case)].notes["exact"] for rank in ranks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_keep_their_names(case: Case, ranks: list[dict[str, Any]]) -> None:
    assert all(rank["runs"][str(case)].notes["names"] for rank in ranks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_layout_resumes_bit_identically(case: Case, ranks: list[dict[str, Any]]) -> None:
    assert all(rank["runs"][str(case)].notes["resumes_bit_identically"] for rank in ranks)


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_two_ranks_go_on_from_the_plain_loop(
    case: Case, two_ranks: list[dict[str, Any]], reference: dict[str, tuple[Run, Whole]]
) -> None:
    expected, state = reference[case.optimizer]
    tolerance = FLOAT32 if case.precision == "float32" else BFLOAT16
    for rank in two_ranks:
        run = rank["resumed"][str(case)]
        np.testing.assert_allclose(run.losses, expected.losses[HALF:], **tolerance)
        assert run.state == {"updates": STEPS}
    if case.precision == "float32":
        fragments = [fragment for rank in two_ranks for fragment in rank["resumed"][str(case)].fragments]
        assert_same_state(assemble(fragments), state, STATE)


@pytest.mark.parametrize("case", PLAIN_ENGINES, ids=str)
def test_one_rank_goes_on_from_two_of_another_engine(
    case: Case, one_rank: list[dict[str, Any]], reference: dict[str, tuple[Run, Whole]]
) -> None:
    expected, state = reference["adamw"]
    run = one_rank[0]["resumed"][str(case)]
    np.testing.assert_allclose(run.losses, expected.losses[HALF:], **FLOAT32)
    assert_same_state(assemble(run.fragments), state, STATE)


def test_lost_moments_would_show(two_ranks: list[dict[str, Any]], reference: dict[str, tuple[Run, Whole]]) -> None:
    found = two_ranks[0]["resumed"][str(WITHOUT_MOMENTS)].losses[1:]
    assert np.abs(np.array(found) / reference["adamw"][0].losses[HALF + 1 :] - 1).min() > 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_average_is_lent_and_given_back(case: Case, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["runs"][str(case)].notes["average"] == {
            "averaged": True, "restored": True, "state": True, "differs": True,
        }  # fmt: skip


def test_ranks_share_the_writing(two_ranks: list[dict[str, Any]]) -> None:
    for case in PLAIN_ENGINES:
        held = [sum(len(values) for _, _, _, values, _ in rank["runs"][str(case)].fragments) for rank in two_ranks]
        assert max(held) < 0.6 * sum(held)


def test_deepspeed_is_quiet_and_imported_only_when_asked(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stdout"] for rank in ranks] == [""] * len(ranks)
    assert not any(rank["imported_early"] for rank in ranks)


@pytest.fixture(scope="module")
def skips() -> list[dict[str, Any]]:
    return run_ranks(2, skip_cases, SKIPPING)


@pytest.mark.parametrize("case", SKIPPING, ids=str)
def test_unsound_step_changes_nothing_on_any_rank(case: Case, skips: list[dict[str, Any]]) -> None:
    expected, state = plain("adamw", STEPS, skip=HALF)
    for rank in skips:
        found = rank[str(case)]
        assert found["skipped"] == [step == HALF for step in range(STEPS)]
        assert not np.isfinite(found["norms"][HALF])
        assert found["empty_skipped"]
        assert found["unchanged"]
        assert found["same_updates"]
        sound = [loss for step, loss in enumerate(found["losses"]) if step != HALF]
        np.testing.assert_allclose(sound, expected.losses, **(FLOAT32 if case.precision == "float32" else BFLOAT16))
    if case.precision == "float32":
        assert_same_state(skips[0][str(case)]["whole"], state, STATE)


def test_error_names_the_rank_that_died() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 ended during a training step"):
        run_ranks(2, one_dies, Case("deepspeed", 2))
